"""The classes of what functions return, for annotations and `isinstance`.

>>> import fakequant as fq
>>> def summarize(found: fq.results.Verification) -> str:
...     return "ok" if found.ok else found.verdict()
"""

from fakequant._backends.types import (
    EncodedScales as EncodedScales,
    LearnedGradients as LearnedGradients,
    ObservedFakeQuantize as ObservedFakeQuantize,
    OutputAndMask as OutputAndMask,
    QParams as QParams,
    Range as Range,
)
from fakequant._diagnosis.audit import Audit as Audit, LayerAudit as LayerAudit
from fakequant._diagnosis.bit_allocation import Pareto as Pareto, ParetoPoint as ParetoPoint
from fakequant._diagnosis.card import Card as Card, CardRow as CardRow
from fakequant._diagnosis.check import Check as Check, Stage as Stage
from fakequant._diagnosis.compare import (
    Comparison as Comparison,
    Errors as Errors,
    LayerComparison as LayerComparison,
)
from fakequant._diagnosis.health import Health as Health, QuantizerHealth as QuantizerHealth
from fakequant._diagnosis.sensitivity_table import LayerSensitivity as LayerSensitivity, Sensitivity as Sensitivity
from fakequant._export.compressed_tensors.export_compressed_tensors import (
    CompressedTensorsExport as CompressedTensorsExport,
)
from fakequant._export.executorch.delegation import Delegation as Delegation
from fakequant._export.gguf.export_gguf import GgufExport as GgufExport, GgufTensor as GgufTensor
from fakequant._export.litert.report import LitertExport as LitertExport, LitertOperator as LitertOperator
from fakequant._export.onnx.report import OnnxExport as OnnxExport
from fakequant._info import Info as Info
from fakequant._prepare.summary import LayerSummary as LayerSummary, Summary as Summary
from fakequant._train.distill import Distillation as Distillation
from fakequant._verify.latency import Latency as Latency
from fakequant._verify.verdict import (
    OutputReport as OutputReport,
    TensorReport as TensorReport,
    Verification as Verification,
)
from fakequant.ptq import Changes as Changes, LayerChange as LayerChange
