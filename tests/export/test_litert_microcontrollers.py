"""What the guide says about files on microcontrollers."""

import re
from pathlib import Path

import pytest

import fakequant as fq

torch = pytest.importorskip("torch")
pytest.importorskip("ai_edge_litert.interpreter")
recipes = pytest.importorskip("fakequant.recipes")
files = pytest.importorskip("fakequant._export.litert.file")

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "run-elsewhere.md"
# What tensorflow/lite/micro/micro_mutable_op_resolver.h of the repository tflite-micro has, as of August 2026.
MICRO = """
    ABS ADD ADD_N ARG_MAX ARG_MIN ASSIGN_VARIABLE AVERAGE_POOL_2D BATCH_MATMUL BATCH_TO_SPACE_ND BROADCAST_ARGS
    BROADCAST_TO CALL_ONCE CAST CEIL CONCATENATION CONV_2D COS CUMSUM CUSTOM DEPTHWISE_CONV_2D DEPTH_TO_SPACE
    DEQUANTIZE DIV DYNAMIC_UPDATE_SLICE ELU EMBEDDING_LOOKUP EQUAL EXP EXPAND_DIMS FILL FLOOR FLOOR_DIV
    FLOOR_MOD FULLY_CONNECTED GATHER GATHER_ND GREATER GREATER_EQUAL HARD_SWISH IF L2_NORMALIZATION L2_POOL_2D
    LEAKY_RELU LESS LESS_EQUAL LOG LOGICAL_AND LOGICAL_NOT LOGICAL_OR LOGISTIC LOG_SOFTMAX MAXIMUM MAX_POOL_2D
    MEAN MINIMUM MIRROR_PAD MUL NEG NOT_EQUAL PACK PAD PADV2 PRELU QUANTIZE READ_VARIABLE REDUCE_ALL REDUCE_MAX
    REDUCE_MIN RELU RELU6 RESHAPE RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR REVERSE_V2 ROUND RSQRT SELECT_V2 SHAPE
    SIN SLICE SOFTMAX SPACE_TO_BATCH_ND SPACE_TO_DEPTH SPLIT SPLIT_V SQRT SQUARE SQUARED_DIFFERENCE SQUEEZE
    STRIDED_SLICE SUB SUM SVDF TANH TRANSPOSE TRANSPOSE_CONV UNIDIRECTIONAL_SEQUENCE_LSTM UNPACK VAR_HANDLE
    WHILE ZEROS_LIKE
"""
# The files that only have tables of operators.
TABLES = {"file.py", "kernels.py", "report.py"}


def test_operators_that_microcontrollers_lack():
    known = vars(files.schema().BuiltinOperator)
    sources = [path for path in Path(files.__file__).parent.glob("*.py") if path.name not in TABLES]
    names = {name for path in sources for name in re.findall(r'"([A-Z0-9_]+)"', path.read_text())}
    written = {name for name in names if isinstance(known.get(name), int)}
    assert len(written) > 60
    (sentence,) = re.findall(r"that the resolver does not have \(.*?\): (.*?)\.", PAGE.read_text(), re.DOTALL)
    assert re.findall(r"`(\w+)`", sentence) == sorted(written - set(MICRO.split()))


def test_positions_have_32_bits_if_the_example_has(tmp_path):
    model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 2))
    x = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    model = fq.calibrate(fq.prepare(model, recipes.int8(target="litert"), x), [x], progress=False)
    fq.export_litert(model, tmp_path / "m.tflite", x)
    kinds = {tensor.type for tensor in files.LitertFile(tmp_path / "m.tflite").graph.tensors}
    assert files.schema().TensorType.INT32 in kinds
    assert files.schema().TensorType.INT64 not in kinds
