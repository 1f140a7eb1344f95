"""Post-training methods: a prepared and calibrated model becomes more accurate, without labels and without training.

All methods change the model in place, leave it unchanged if they fail, and return a table of the layers.
"""

from fakequant.ptq._changes import Changes as Changes, LayerChange as LayerChange
from fakequant.ptq._equalize import equalize as equalize
from fakequant.ptq._smooth import smooth as smooth
