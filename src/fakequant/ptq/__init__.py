"""Post-training methods: a prepared and calibrated model becomes more accurate, without labels and without training.

`rotate` changes a float model instead, before `prepare`. All methods change the model in place, leave it unchanged if
they fail, and return a table of the layers.
"""

from fakequant.ptq._adaround import adaround as adaround
from fakequant.ptq._correct_bias import correct_bias as correct_bias
from fakequant.ptq._equalize import equalize as equalize
from fakequant.ptq._gptq import gptq as gptq
from fakequant.ptq._layer_changes import Changes as Changes, LayerChange as LayerChange
from fakequant.ptq._rotate import rotate as rotate
from fakequant.ptq._smooth import smooth as smooth
