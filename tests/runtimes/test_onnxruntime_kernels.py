"""The golden model's arithmetic gives the codes of ONNX Runtime's kernels, at ties too."""

import platform

import numpy as np
import pytest

from fakequant import QuantSpec

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
arithmetic = pytest.importorskip("fakequant._runtimes.onnxruntime.arithmetic")
values = pytest.importorskip("fakequant._convert.golden.tracked_codes")

pytestmark = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="the formulas are those of the x86 kernels"
)

SPEC = QuantSpec(bits=8, signed=False, symmetric=False)
OURS = arithmetic.OnnxRuntime()
TENTHS = np.float32(
    [0.1, 0.3, 0.7, 1.1, 1.3]
)  # not exact in binary: quotients that are ties on paper are not ties in float32


def kernel(op, inputs, domain="com.microsoft", **attributes):
    """Returns a function that runs one kernel. `inputs` maps names to type and rank; an empty name is left out."""
    kinds = {"u": onnx.TensorProto.UINT8, "i": onnx.TensorProto.INT8, "f": onnx.TensorProto.FLOAT}
    shapes = {"0": [], "1": [None], "2": [None, None], "4": [None] * 4}
    given = {name: kind for name, kind in inputs.items() if name}
    takes = [onnx.helper.make_tensor_value_info(n, kinds[k[0]], shapes[k[1]]) for n, k in given.items()]
    gives = [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.UINT8, None)]
    node = onnx.helper.make_node(op, list(inputs), ["y"], domain=domain, **attributes)
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    graph = onnx.helper.make_graph([node], "g", takes, gives)
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    types = {"u": np.uint8, "i": np.int8, "f": np.float32}

    def run(*arguments):
        fed = {n: np.asarray(a, types[k[0]]) for (n, k), a in zip(given.items(), arguments, strict=True)}
        return session.run(None, fed)[0].astype(np.int64)

    return run


def grid(scale, zero_point):
    return values.GridOf(torch.tensor(scale), torch.tensor(int(zero_point), dtype=torch.int32), SPEC)


def value(codes, of):
    return (torch.from_numpy(codes) - of.zero_point).float() * of.scale


def same(mine, theirs):
    wrong = int((mine.long().numpy() != theirs).sum())
    assert wrong == 0, f"{wrong} of {theirs.size} codes differ"


def test_golden_additions_have_the_codes_of_onnx_runtime():
    run = kernel(
        "QLinearAdd", {"a": "u1", "as": "f0", "az": "u0", "b": "u1", "bs": "f0", "bz": "u0"} | {"s": "f0", "z": "u0"}
    )
    a, b = (codes.ravel() for codes in np.meshgrid(np.arange(256), np.arange(256)))
    rng = np.random.default_rng(0)
    random = [(2.0 ** rng.uniform(-3, 3, 3)).astype(np.float32) for _ in range(40)]
    ties = [np.float32([p, q, 2 * p]) for p in TENTHS for q in TENTHS]
    for scales in random + ties:
        ga, gb, gy = (grid(s, z) for s, z in zip(scales, rng.integers(0, 256, 3), strict=True))
        theirs = run(a, ga.scale, ga.zero_point, b, gb.scale, gb.zero_point, gy.scale, gy.zero_point)
        same(OURS.from_addition(value(a, ga), ga, value(b, gb), gb, gy), theirs)


def test_golden_products_of_elements_have_the_codes_of_onnx_runtime():
    run = kernel(
        "QLinearMul", {"a": "u1", "as": "f0", "az": "u0", "b": "u1", "bs": "f0", "bz": "u0"} | {"s": "f0", "z": "u0"}
    )
    a, b = (codes.ravel() for codes in np.meshgrid(np.arange(256), np.arange(256)))
    rng = np.random.default_rng(3)
    for scales in [np.float32([p, q, r * p * q]) for p in TENTHS for q in TENTHS for r in (2, 6, 128)]:
        ga, gb, gy = (grid(s, z) for s, z in zip(scales, rng.integers(0, 256, 3), strict=True))
        theirs = run(a, ga.scale, ga.zero_point, b, gb.scale, gb.zero_point, gy.scale, gy.zero_point)
        same(OURS.from_product(value(a, ga), ga, value(b, gb), gb, gy), theirs)


@pytest.mark.parametrize("counts_padding", [True, False])
def test_golden_pools_have_the_codes_of_onnx_runtime(counts_padding):
    windows = values.Windows((2, 3), (1, 2), (1, 1), counts_padding)
    attributes = {"kernel_shape": windows.size, "strides": windows.stride, "pads": windows.padding * 2}
    inputs = {"x": "u4", "xs": "f0", "xz": "u0", "s": "f0", "z": "u0"}
    run = kernel("QLinearAveragePool", inputs, count_include_pad=int(counts_padding), channels_last=0, **attributes)
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 256, (16, 3, 9, 11))
    for scale in TENTHS:
        for factor in (1 / 6, 1 / 3, 1, 2):
            gx, gy = grid(scale, rng.integers(0, 256)), grid(np.float32(scale * factor), rng.integers(0, 256))
            theirs = run(codes, gx.scale, gx.zero_point, gy.scale, gy.zero_point)
            same(OURS.from_pool(value(codes, gx), gx, windows, gy), theirs)


@pytest.mark.parametrize("size", [(8, 8), (7, 7), (3, 5), (1, 1)], ids=str)
def test_golden_averages_have_the_codes_of_onnx_runtime(size):
    run = kernel("QLinearGlobalAveragePool", {"x": "u4", "xs": "f0", "xz": "u0", "s": "f0", "z": "u0"}, channels_last=0)
    number = size[0] * size[1]
    sums = np.arange(0, 255 * number, max(1, number // 8))
    codes = sums[:, None] // number + (np.arange(number) < sums[:, None] % number)
    codes = codes.reshape(-1, 1, *size)
    rng = np.random.default_rng(1)
    for scale in TENTHS:
        for factor in (1, 3, 9, 10):
            for steps in (0.5, 1, 2, 3):  # sums of this many steps lie between two codes
                gx = grid(scale, rng.integers(0, 256))
                gy = grid(np.float32(scale * 2 * steps * factor / number), rng.integers(0, 256))
                theirs = run(codes, gx.scale, gx.zero_point, gy.scale, gy.zero_point)
                same(OURS.from_average(value(codes, gx), gx, (2, 3), gy), theirs)


@pytest.mark.parametrize(("op", "rank"), [("QGemm", 2), ("QLinearMatMul", 2), ("QLinearConv", 4)])
def test_golden_layers_have_the_codes_of_onnx_runtime(op, rank):
    """The layers have one input, so that the sums are all products of a code and a 7-bit weight."""
    inputs = {"x": f"u{rank}", "xs": "f0", "xz": "u0", "w": f"i{rank}", "ws": "f0", "wz": "i0", "": "-"}
    if op != "QGemm":
        del inputs[""]  # the bias
    inputs |= {"s": "f0", "z": "u0"}
    run = kernel(
        op, inputs, domain="com.microsoft" if op == "QGemm" else "", **({"transB": 1} if op == "QGemm" else {})
    )
    codes, weights = np.arange(256).reshape(-1, *[1] * (rank - 1)), np.arange(-64, 65).reshape(-1, *[1] * (rank - 1))
    rng = np.random.default_rng(2)
    for x_scale in TENTHS:
        for w_scale in TENTHS:
            for factor in (1, 2, 6, 14):
                gx = grid(x_scale, rng.integers(0, 256))
                gy = grid(np.float32(x_scale * w_scale * factor), rng.integers(0, 256))
                sums = torch.from_numpy(np.outer(codes - int(gx.zero_point), weights))
                w = weights.T if op == "QLinearMatMul" else weights
                theirs = run(codes, gx.scale, gx.zero_point, w, w_scale, 0, gy.scale, gy.zero_point)
                same(OURS.from_sums(sums, gx.scale * torch.tensor(w_scale), gy), theirs.reshape(sums.shape))
