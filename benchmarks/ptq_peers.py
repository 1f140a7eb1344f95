"""Post-training quantization of a CNN by other packages, for `ptq_digits.py`.

`PEERS` has a function for each row. It takes a float model, batches of calibration inputs and a `Bits`, and returns a
`Row`: a function that computes the results, and the CPU seconds that the method took after the calibration of ranges. It
raises `Unsupported` if the package is not installed or does not have what is asked.

All have weights per channel and unsigned 8-bit activations per tensor at the inputs of convolutions and linear layers.
Batch norms are folded. AIMET's default config quantizes more: the results of the pooling and of the last layer, and those
of convolutions before the ReLU, where a folded batch norm stands between them. To install the packages:

    .venv/bin/python -m pip install --no-deps -r requirements-peers.txt

To keep them out of the environment, add `--target DIR` and put DIR into PYTHONPATH. AIMET (aimet-torch 2.42) is not in that
file, because it needs many packages; it imports torchvision, which is in the folder of the zoo.
"""

import copy
import logging
import sys
import tempfile
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.ao import quantization as ao
from torch.ao.quantization.quantize_fx import prepare_qat_fx

Batches = list[Tensor]
# Steps of AdaRound per layer: the default of brevitas's example; AIMET's default of 15,000 takes minutes on a CPU.
LEARNED_ROUND_ITERATIONS, AIMET_ITERATIONS = 1000, 1000


class Unsupported(Exception):
    """Raised if a peer cannot quantize the model; the message says why."""


class Bits(NamedTuple):
    """The bits of weights."""

    inner: int
    first_last: int  # of the first and of the last layer


# Learned rounding of the peers is measured at the fewest bits only.
LONG_AT = (Bits(3, 3),)
TAKES_LONG = "left out, because it takes long"


class Row(NamedTuple):
    """A quantized model and the CPU seconds that it took."""

    model: Callable[[Tensor], Tensor]
    seconds: float


def layer_names(model: nn.Module) -> list[str]:
    kinds = (nn.Conv1d, nn.Conv2d, nn.Linear)
    return [name for name, module in model.named_modules() if isinstance(module, kinds)]


def bits_of(model: nn.Module, bits: Bits) -> dict[str, int]:
    """Returns the bits of the weight of each layer by name."""
    names = layer_names(model)
    return {name: bits.first_last if name in (names[0], names[-1]) else bits.inner for name in names}


def quiet_peers() -> None:
    """Silences what peers say when they are imported, and that torch.ao moves to torchao."""
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    for name in ("torchao", "aimet_torch", "Quant", "onnx_ir", "onnxruntime", "onnxscript"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for message in ("fast_hadamard_transform package not found", "torch.ao.quantization is deprecated"):
        warnings.filterwarnings("ignore", f".*{message}")
    for kind in (UserWarning, FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=kind, module=r"torch\.ao|brevitas|torchao|onnxruntime|aimet")


# --- torch.ao -------------------------------------------------------------------------------------


def torch_ao(model: nn.Module, batches: Batches, bits: Bits) -> Row:
    """FX mode with histogram observers, evaluated with fake quantizers."""
    start = time.process_time()

    def qconfig(width: int) -> ao.QConfig:
        weight = ao.FakeQuantize.with_args(
            observer=ao.PerChannelMinMaxObserver,
            quant_min=-(2 ** (width - 1)),
            quant_max=2 ** (width - 1) - 1,
            dtype=torch.qint8,
            qscheme=torch.per_channel_symmetric,
        )
        activation = ao.FakeQuantize.with_args(
            observer=ao.HistogramObserver, quant_min=0, quant_max=255, dtype=torch.quint8
        )
        return ao.QConfig(activation=activation, weight=weight)

    mapping = ao.QConfigMapping().set_global(qconfig(bits.inner))
    for name, width in bits_of(model, bits).items():
        mapping.set_module_name(name, qconfig(width))
    # The modules of QAT quantize weights with folded batch norms, also in evaluation mode. Here nothing is trained.
    prepared = prepare_qat_fx(copy.deepcopy(model).train(), mapping, (batches[0],)).eval()
    prepared.apply(ao.disable_fake_quant)
    with torch.no_grad():
        for batch in batches:
            prepared(batch)
    prepared.apply(ao.disable_observer)
    prepared.apply(ao.enable_fake_quant)
    return Row(prepared, time.process_time() - start)


# --- ONNX Runtime ---------------------------------------------------------------------------------


def onnx_runtime(model: nn.Module, batches: Batches, bits: Bits) -> Row:
    """`quantize_static`: QDQ format, weights per channel."""
    import onnxruntime
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    types = {4: quantization.QuantType.QInt4, 8: quantization.QuantType.QInt8}
    if bits.inner not in types:
        raise Unsupported("quantize_static has weights of 4, 8 and 16 bits")
    if bits.first_last != bits.inner:
        raise Unsupported("left out: other bits for some layers need overrides for each of their tensors")

    class Reader(quantization.CalibrationDataReader):
        def __init__(self) -> None:
            self.rest: Iterator[Tensor] = iter(batches)

        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(self.rest, None)
            return None if batch is None else {"x": batch.numpy()}

    folder = Path(tempfile.mkdtemp())
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        torch.onnx.export(
            copy.deepcopy(model).eval(), (batches[0],), folder / "float.onnx", input_names=["x"], dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch")},), external_data=False, verbose=False, opset_version=21,
        )  # fmt: skip
        quant_pre_process(folder / "float.onnx", folder / "ready.onnx", skip_symbolic_shape=True)
    start = time.process_time()
    try:
        quantization.quantize_static(
            folder / "ready.onnx",
            folder / "quantized.onnx",
            Reader(),
            quant_format=quantization.QuantFormat.QDQ,
            per_channel=True,
            weight_type=types[bits.inner],
            activation_type=quantization.QuantType.QUInt8,
        )
        seconds = time.process_time() - start
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(folder / "quantized.onnx", options, providers=["CPUExecutionProvider"])
    except Exception as error:  # whatever the package raises for what it does not support
        raise Unsupported(f"{type(error).__name__}: {str(error).splitlines()[0][:160]}") from error
    return Row(lambda x: torch.from_numpy(session.run(None, {"x": x.numpy()})[0]), seconds)


# --- brevitas -------------------------------------------------------------------------------------


def _brevitas(model: nn.Module, batches: Batches, bits: Bits, mse: bool = False) -> nn.Module:
    """Returns a model of brevitas with calibrated ranges."""
    try:
        import brevitas.nn as qnn
        from brevitas import quant
        from brevitas.core.scaling.standalone import ParameterFromStatsFromParameterScaling
        from brevitas.graph.calibrate import calibration_mode
        from brevitas.graph.quantize import layerwise_quantize, preprocess_for_quantize
    except ImportError as error:
        raise Unsupported(f"not installed: {error}") from error
    widths = bits_of(model, bits)
    # Batch norms are folded by `preprocess_for_quantize`, which keeps the names of layers.
    made = preprocess_for_quantize(torch.fx.symbolic_trace(copy.deepcopy(model).eval()), equalize_iters=0)
    kinds = {nn.Conv1d: qnn.QuantConv1d, nn.Conv2d: qnn.QuantConv2d, nn.Linear: qnn.QuantLinear}
    weight = quant.Int8WeightPerChannelFloatMSE if mse else quant.Int8WeightPerChannelFloat
    # Scales are kept while GPTQ changes weights, as in its examples.
    weight = weight.let(scaling_impl=ParameterFromStatsFromParameterScaling)

    options = {
        "input_quant": quant.Uint8ActPerTensorFloat,
        "weight_quant": weight,
        "weight_bit_width": lambda module, name: widths[name],
        "return_quant_tensor": False,
    }
    made = layerwise_quantize(made, {kind: (other, options) for kind, other in kinds.items()}).eval()
    with torch.no_grad():
        with calibration_mode(made):
            for batch in batches:
                made(batch)
        made(batches[0])  # initializes the scales of weights
    return made


@torch.no_grad()
def brevitas_nearest(model: nn.Module, batches: Batches, bits: Bits) -> Row:
    start = time.process_time()
    return Row(_brevitas(model, batches, bits), time.process_time() - start)


@torch.no_grad()
def brevitas_mse(model: nn.Module, batches: Batches, bits: Bits) -> Row:
    start = time.process_time()
    return Row(_brevitas(model, batches, bits, mse=True), time.process_time() - start)


@torch.no_grad()
def brevitas_bias(model: nn.Module, batches: Batches, bits: Bits) -> Row:
    made = _brevitas(model, batches, bits)
    start = time.process_time()
    _correct_bias(made, batches)
    return Row(made, time.process_time() - start)


def _correct_bias(made: nn.Module, batches: Batches) -> None:
    from brevitas.graph.calibrate import bias_correction_mode

    with bias_correction_mode(made):
        for batch in batches:
            made(batch)


@torch.no_grad()
def brevitas_gptq(model: nn.Module, batches: Batches, bits: Bits) -> Row:
    """Its GPTQ with the defaults of the class, except for `act_order`."""
    made = _brevitas(model, batches, bits)
    from brevitas.graph.gptq import gptq_mode

    start = time.process_time()
    with gptq_mode(made, act_order=True) as mode:
        for _ in range(mode.num_layers):
            for batch in batches:
                mode.model(batch)
            mode.update()
    return Row(made, time.process_time() - start)


@torch.no_grad()
def brevitas_gptq_bias(model: nn.Module, batches: Batches, bits: Bits) -> Row:
    made, seconds = brevitas_gptq(model, batches, bits)
    start = time.process_time()
    _correct_bias(made, batches)
    return Row(made, seconds + time.process_time() - start)


def brevitas_learned_round(model: nn.Module, batches: Batches, bits: Bits) -> Row:
    """AdaRound as in its example of ImageNet (the package brevitas_examples), but with batches of 32 instead of 1."""
    if bits not in LONG_AT:
        raise Unsupported(TAKES_LONG)
    made = _brevitas(model, batches, bits)
    try:
        from brevitas_examples.imagenet_classification.ptq import learned_round_utils
    except ImportError as error:
        raise Unsupported(f"not installed: {error}") from error
    options = Namespace(
        learned_round="hard_sigmoid",
        learned_round_mode="layerwise",
        learned_round_loss="regularised_mse",
        learned_round_lr=1e-3,
        learned_round_lr_scheduler=None,
        learned_round_batch_size=32,
        learned_round_iters=LEARNED_ROUND_ITERATIONS,
    )
    start = time.process_time()
    with redirect_stderr(StringIO()), redirect_stdout(StringIO()):
        learned_round_utils.apply_learned_round(made, [(batch, None) for batch in batches], options)
    return Row(made.eval(), time.process_time() - start)


# --- AIMET ----------------------------------------------------------------------------------------


def aimet_adaround(model: nn.Module, batches: Batches, bits: Bits) -> Row:
    """Its AdaRound with the default scheme of ranges ("tf_enhanced"), 1000 steps per layer."""
    if bits not in LONG_AT:
        raise Unsupported(TAKES_LONG)
    if any(isinstance(module, nn.Conv1d) for module in model.modules()):
        raise Unsupported("its AdaRound does not round Conv1d")
    sys.path.append(str(Path(__file__).parent.parent / "tests" / "zoo"))
    from vision_packages import find_vision_packages

    find_vision_packages()
    try:
        from aimet_torch.adaround.adaround_weight import Adaround, AdaroundParameters
        from aimet_torch.batch_norm_fold import fold_all_batch_norms
        from aimet_torch.common import quantsim_config
        from aimet_torch.common.defs import QuantScheme
        from aimet_torch.quantsim import QuantizationSimModel
    except ImportError as error:
        raise Unsupported(f"not installed: {error}") from error
    logging.disable(logging.WARNING)
    folder, example = tempfile.mkdtemp(), batches[0][:1]
    options = {
        "default_param_bw": bits.inner,
        "config_file": str(Path(quantsim_config.__file__).parent / "default_config_per_channel.json"),
    }
    made = copy.deepcopy(model).eval()
    fold_all_batch_norms(made, tuple(example.shape), dummy_input=example)
    start = time.process_time()
    parameters = AdaroundParameters(
        batches, len(batches), default_num_iterations=AIMET_ITERATIONS, forward_fn=lambda model, x: model(x)
    )
    with redirect_stderr(StringIO()), redirect_stdout(StringIO()):
        made = Adaround.apply_adaround(
            made,
            example,
            parameters,
            folder,
            "rounded",
            default_param_bw=bits.inner,
            default_config_file=options["config_file"],
        )
    seconds = time.process_time() - start
    scheme = QuantScheme.post_training_tf_enhanced
    simulated = QuantizationSimModel(made, example, scheme, default_output_bw=8, **options)
    simulated.set_and_freeze_param_encodings(f"{folder}/rounded.encodings")
    with torch.no_grad():
        simulated.compute_encodings(lambda model: [model(batch) for batch in batches])
    return Row(simulated.model, seconds)


PEERS: dict[str, Callable[[nn.Module, Batches, Bits], Row]] = {
    "torch.ao FX": torch_ao,
    "ONNX Runtime": onnx_runtime,
    "brevitas": brevitas_nearest,
    "brevitas, MSE": brevitas_mse,
    "brevitas bias": brevitas_bias,
    "brevitas GPTQ": brevitas_gptq,
    "brevitas GPTQ+bias": brevitas_gptq_bias,
    "brevitas learned": brevitas_learned_round,
    "AIMET AdaRound": aimet_adaround,
}
