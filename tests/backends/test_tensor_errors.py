"""Errors of the functions on tensors name the argument, what was received and the fix; nothing is modified."""

import dataclasses

import numpy as np
import pytest

import fakequant as fq

torch = pytest.importorskip("torch")
nodes = pytest.importorskip("fakequant._backends.torch.compiled_nodes")

X = torch.arange(12, dtype=torch.float32).view(2, 6) - 3
SPEC = fq.QuantSpec()
AFFINE = fq.QuantSpec(symmetric=False)
PER_CHANNEL = fq.QuantSpec(symmetric=False, axis=0)
by_numerics = pytest.mark.parametrize("numerics", ["torch", "onnx", "half_away"])


@pytest.fixture(params=["compiled nodes", "Python nodes"], autouse=True)
def each_nodes(request, monkeypatch):
    if request.param == "Python nodes":
        monkeypatch.setattr(nodes, "compiled", None)
    elif nodes.compiled is None:
        pytest.skip("this build has no compiled nodes for this torch")


@pytest.fixture(autouse=True)
def nothing_is_modified():
    before = X.clone()
    yield
    assert torch.equal(X, before)


GRID_USERS = {
    "fake_quantize": fq.fake_quantize,
    "with a mask": lambda x, s, z, spec: fq.fake_quantize(x, s, z, spec, mask="packed"),
    "passed through": lambda x, s, z, spec: fq.fake_quantize(x, s, z, spec, gradient="pass"),
    "quantize": fq.quantize,
    "learned": fq.fake_quantize_learned,
    "learned backward": lambda x, s, z, spec: fq.fake_quantize_learned_backward(x, x, s, z, spec),
    "dequantize": lambda x, s, z, spec: fq.dequantize(x.to(torch.int8), s, z, spec),
}
by_function = pytest.mark.parametrize("call", GRID_USERS.values(), ids=GRID_USERS)
TAKES_DATA = {name: call for name, call in GRID_USERS.items() if name != "dequantize"} | {
    "min_max": lambda x, s, z, spec: fq.min_max(x, spec),
    "observe": lambda x, s, z, spec: fq.observe_fake_quantize(x, spec, torch.zeros(1), torch.zeros(1)),
    "backward": lambda x, s, z, spec: fq.fake_quantize_backward(x, torch.ones(2, 6) > 0, spec),
    "quantizer": lambda x, s, z, spec: fq.FakeQuantizer().forward(x),
}
by_data = pytest.mark.parametrize("call", TAKES_DATA.values(), ids=TAKES_DATA)


@by_data
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_tensor_that_is_not_float_is_refused(call, dtype):
    message = f"must be a tensor of float32, float64, bfloat16 or float16, got {str(dtype)[6:]}.\n.*Convert it first"
    with pytest.raises(TypeError, match=message):
        call(X.to(dtype), 0.1, 0, SPEC)


@by_data
@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "_mkldnn"])
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_and_mkldnn_tensors_are_refused(call, layout):
    data = {"sparse_coo": X.to_sparse, "sparse_csr": X.to_sparse_csr, "_mkldnn": X.to_mkldnn}[layout]()
    message = rf"must be a strided tensor, got torch.{layout}.\nPass `d?[xy].to_dense"
    with pytest.raises(NotImplementedError, match=message):
        call(data, 0.1, 0, SPEC)


@by_data
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_refused(call, layout):
    nested = torch.nested.nested_tensor([X[0], X[1, :3]], layout=layout)
    with pytest.raises(NotImplementedError, match=r"must be one tensor, got a nested one.\nPass its parts one by one"):
        call(nested, 0.1, 0, SPEC)


@by_data
def test_quantized_tensors_are_refused(call):
    quantized = torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)
    with pytest.raises(TypeError, match=r"is a quantized tensor \(torch.qint8\).*\nPass `d?[xy].dequantize"):
        call(quantized, 0.1, 0, SPEC)


@pytest.mark.parametrize("name", ["scale", "zero_point"])
@pytest.mark.parametrize("function", [fq.fake_quantize, fq.quantize, fq.dequantize], ids=lambda f: f.__name__)
def test_scale_or_zero_point_that_requires_grad_is_refused(function, name):
    data = X.to(torch.int8) if function is fq.dequantize else X
    parameters = {"scale": torch.tensor(0.1), "zero_point": torch.tensor(0.0)}
    parameters[name].requires_grad_()
    message = (
        f"`{name}` requires a gradient, but `{function.__name__}` does not differentiate it.\n"
        rf"Use `fake_quantize_learned`, or pass `{name}.detach\(\)`"
    )
    with pytest.raises(RuntimeError, match=message):
        function(data, *parameters.values(), AFFINE)
    if name == "scale":
        with torch.no_grad():
            function(data, parameters["scale"], 0, AFFINE)


@by_numerics
@by_function
@pytest.mark.parametrize("scale", [0.0, -0.1, np.nan, np.inf, 1e-50, 1e39])
def test_invalid_scale_tensors_are_refused(call, scale, numerics):
    for form in (scale, torch.tensor(scale), torch.tensor([scale]), torch.tensor(scale, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"`scale` must be finite and greater than 0 in float32, got .*\nObserve"):
            call(X, form, 0, fq.QuantSpec(numerics=numerics))
    with pytest.raises(ValueError, match="`scale` must be finite and greater than 0"):
        call(X, torch.tensor([0.1, scale]), 0, fq.QuantSpec(numerics=numerics, axis=0))


@by_function
@pytest.mark.parametrize("shape", [(3,), (2, 1), (1,), ()], ids=str)
def test_scale_tensors_of_the_wrong_shape_are_refused(call, shape):
    with pytest.raises(
        ValueError, match=r"`scale` must have shape \(2,\) for a tensor of shape \(2, 6\) .*axis 0, got"
    ):
        call(X, torch.ones(shape), 0, PER_CHANNEL)
    if shape != ():
        with pytest.raises(ValueError, match=r"`zero_point` must be an int or have shape \(2,\) .*got shape"):
            call(X, torch.ones(2), torch.zeros(shape, dtype=torch.int32), PER_CHANNEL)


@by_function
def test_scalar_scale_per_channel_is_refused(call):
    with pytest.raises(ValueError, match=r"`scale` must have shape \(1,\) for a tensor of shape \(1, 6\)"):
        call(X[:1], torch.tensor(0.1), 0, fq.QuantSpec(axis=0))


@by_function
@pytest.mark.parametrize("scale", ["0.1", None, True, 1j, torch.tensor(1j), torch.tensor(True)], ids=str)
def test_scales_of_the_wrong_type_are_refused(call, scale):
    with pytest.raises(TypeError, match=r"`scale` must .* got (str|NoneType|bool|complex)"):
        call(X, scale, 0, SPEC)


@by_numerics
@by_function
@pytest.mark.parametrize("zero_point", [128, -129, 2**40])
def test_zero_point_tensors_out_of_range_are_refused(call, zero_point, numerics):
    spec = fq.QuantSpec(symmetric=False, numerics=numerics)
    # An int64 tensor may be saturated before it is checked.
    received = zero_point if zero_point < 2**31 else "[0-9]+"
    with pytest.raises(ValueError, match=f"`zero_point` must be between -128 and 127 .*, got {zero_point}"):
        call(X, 0.1, zero_point, spec)
    for form in (torch.tensor(zero_point), torch.tensor([zero_point])):
        with pytest.raises(ValueError, match=f"`zero_point` must be between -128 and 127 .*, got {received}"):
            call(X, 0.1, form, spec)
    with pytest.raises(ValueError, match=f"`zero_point` must be between -128 and 127 .*, got {received}"):
        call(X, torch.ones(2), torch.tensor([0, zero_point]), dataclasses.replace(spec, axis=0))


@by_function
def test_nonzero_zero_point_tensors_of_a_symmetric_spec_are_refused(call):
    for form in (5, torch.tensor(5), torch.tensor([5], dtype=torch.int32)):
        with pytest.raises(
            ValueError, match=r"must be 0 for a symmetric spec, got 5.\nUse QuantSpec\(symmetric=False\)"
        ):
            call(X, 0.1, form, SPEC)


@by_numerics
@by_function
def test_float_zero_points_are_refused_unless_learned(call, numerics, request):
    axis = fq.QuantSpec(symmetric=False, numerics=numerics, axis=0)
    name = request.node.callspec.id
    if "learned" in name:
        with pytest.raises(ValueError, match=r"A symmetric spec has no zero point to learn: pass 0"):
            call(X, 0.1, torch.tensor(1.0), fq.QuantSpec(numerics=numerics))
        return
    for s, z, spec in ((0.1, torch.tensor(0.5), AFFINE), (torch.ones(2), torch.ones(2), axis)):
        with pytest.raises(TypeError, match=r"`zero_point` must hold integers, got float32.\nRound a learned"):
            call(X, s, z, spec)


@by_numerics
@pytest.mark.parametrize("call", [GRID_USERS["learned"], GRID_USERS["learned backward"]], ids=["forward", "backward"])
def test_nan_learned_zero_points_are_refused(call, numerics):
    for z in (torch.tensor(np.nan), torch.tensor([0, np.nan])):
        spec = fq.QuantSpec(symmetric=False, numerics=numerics, axis=0 if z.dim() else None)
        with pytest.raises(ValueError, match="`zero_point` must not be NaN"):
            call(X, torch.ones_like(z), z, spec)


@by_function
@pytest.mark.parametrize("spec", [None, "int8", 8], ids=str)
def test_spec_of_the_wrong_type_is_refused(call, spec):
    with pytest.raises(TypeError, match=r"`spec` must be a QuantSpec, got .*\nThe order of arguments"):
        call(X, 0.1, 0, spec)


def test_tensor_arguments_in_the_wrong_order_are_refused():
    with pytest.raises(TypeError, match="`spec` must be a QuantSpec, got 0"):
        fq.fake_quantize(X, SPEC, 0.1, 0)
    with pytest.raises(TypeError, match="`spec` must be a QuantSpec"):
        fq.fake_quantize_backward(X, SPEC, X > 0)


@by_function
def test_tensors_on_different_devices_are_refused(call):
    message = (
        r"Expected all tensors to be on the same device, but `x` is on {} and `{}` on {}.\nMove it: `{}.to\(x.device\)`"
    )
    for here, there in (("cpu", "meta"), ("meta", "cpu")):
        scale, zero_point = (
            {d: torch.zeros((), dtype=t, device=d) + 1 for d in (here, there)} for t in (torch.float32, torch.int32)
        )
        with pytest.raises(RuntimeError, match=message.format(here, "scale", there, "scale")):
            call(X.to(here), scale[there], zero_point[here], AFFINE)
        with pytest.raises(RuntimeError, match=message.format(here, "zero_point", there, "zero_point")):
            call(X.to(here), scale[here], zero_point[there], AFFINE)
    with pytest.raises(RuntimeError, match="same device"):
        fq.fake_quantize_learned_backward(X.to("meta"), X, 0.1, 0, SPEC)


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(6, 2) > 0,
        torch.ones(12, dtype=torch.uint8),
        torch.ones(1, dtype=torch.uint8),
        torch.ones(4, dtype=torch.uint8)[::2],
        torch.ones(2, 6, dtype=torch.int8),
        torch.ones(2, 6),
        np.ones((2, 6), bool),
        None,
    ],
    ids=lambda m: f"{getattr(m, 'dtype', m)}{tuple(getattr(m, 'shape', ()))}",
)
def test_mask_tensor_of_another_call_is_refused(mask):
    message = r"`mask` must be the one `fake_quantize` returned for a tensor of shape \(2, 6\): .* shape \(2,\); got"
    with pytest.raises(ValueError, match=message):
        fq.fake_quantize_backward(X, mask, SPEC)


def test_mask_on_another_device_is_refused():
    with pytest.raises(RuntimeError, match=r"same device, but .* on cpu and `mask` on meta"):
        fq.fake_quantize_backward(X, (X > 0).to("meta"), SPEC)


def test_unknown_mask_and_gradient_names_are_refused():
    with pytest.raises(ValueError, match='`mask` must be None, "packed" or "bool", got \'bits\''):
        fq.fake_quantize(X, 0.1, 0, SPEC, mask="bits")
    with pytest.raises(ValueError, match='`gradient` must be "clipped" or "pass", got \'none\''):
        fq.fake_quantize(X, 0.1, 0, SPEC, gradient="none")
    with pytest.raises(ValueError, match='`mask` says which gradients are clipped, so it needs gradient="clipped"'):
        fq.fake_quantize(X, 0.1, 0, SPEC, gradient="pass", mask="packed")
