"""Weight-only quantization of a language model by other packages, for `ptq_text.py`.

`PEERS` has a function for each row. It takes a float model, batches of calibration inputs and the bits of weights, and
returns a `Row`. It raises `Unsupported` if the package is not installed or does not have what is asked.
"""

import copy
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ptq_peers import Batches, Row, Unsupported

GROUP = 32


# --- torchao --------------------------------------------------------------------------------------


def _torchao(model: nn.Module, bits: int, algorithm: str) -> Row:
    try:
        from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_
        from torchao.quantization.quantize_.workflows import IntxChooseQParamsAlgorithm
    except ImportError as error:
        raise Unsupported(f"not installed: {error}") from error
    made = copy.deepcopy(model)
    config = IntxWeightOnlyConfig(
        weight_dtype=getattr(torch, f"int{bits}"),
        granularity=PerGroup(GROUP),
        intx_choose_qparams_algorithm=IntxChooseQParamsAlgorithm[algorithm],
    )
    start = time.process_time()
    quantize_(made, config)
    return Row(made, time.process_time() - start)


def torchao(model: nn.Module, batches: Batches, bits: int) -> Row:
    return _torchao(model, bits, "AFFINE")


def torchao_hqq(model: nn.Module, batches: Batches, bits: int) -> Row:
    return _torchao(model, bits, "HQQ_SCALE_ONLY")


# --- ONNX Runtime ---------------------------------------------------------------------------------


def _onnx_runtime(model: nn.Module, batches: Batches, bits: int, algorithm: Callable[[Any, Any], Any]) -> Row:
    """Quantizes the exported file.

    Args:
        model: The float model.
        batches: Calibration inputs.
        bits: The bits of weights.
        algorithm: Takes the module of the quantizer and a reader of calibration data, returns the algorithm's config.
    """
    if bits not in (2, 4, 8):
        raise Unsupported("MatMulNBitsQuantizer has 2, 4 and 8 bits")
    try:
        import onnx
        import onnxruntime
        from onnxruntime.quantization import CalibrationDataReader, matmul_nbits_quantizer
    except ImportError as error:
        raise Unsupported(f"not installed: {error}") from error

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.rewind()

        def rewind(self) -> None:
            self.rest: Iterator[Tensor] = iter(batches)

        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(self.rest, None)
            return None if batch is None else {"codes": batch.numpy()}

    folder = Path(tempfile.mkdtemp())
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        torch.onnx.export(
            copy.deepcopy(model), (batches[0],), folder / "float.onnx", input_names=["codes"], dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch")},), external_data=False, verbose=False,
        )  # fmt: skip
    layers = sum(isinstance(module, nn.Linear) for module in model.modules())
    start = time.process_time()
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            quantizer = matmul_nbits_quantizer.MatMulNBitsQuantizer(
                onnx.load(folder / "float.onnx"),
                bits=bits,
                block_size=GROUP,  # GPTQ does not take it from its config
                algo_config=algorithm(matmul_nbits_quantizer, Reader()),
            )
            quantizer.process()
        seconds = time.process_time() - start
        quantizer.model.save_model_to_file(str(folder / "quantized.onnx"))
        found = [node for node in onnx.load(folder / "quantized.onnx").graph.node if node.op_type == "MatMulNBits"]
        for node in found:
            shape = {a.name: a.i for a in node.attribute}
            assert (shape["bits"], shape["block_size"]) == (bits, GROUP), shape
        assert len(found) == layers, f"{len(found)} of {layers} layers are quantized"
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(folder / "quantized.onnx", options, providers=["CPUExecutionProvider"])
    except Exception as error:  # whatever the package raises for what it does not support
        raise Unsupported(f"{type(error).__name__}: {(str(error) or '?').splitlines()[0][:160]}") from error
    return Row(lambda codes: torch.from_numpy(session.run(None, {"codes": codes.numpy()})[0]), seconds)


def onnx_runtime(model: nn.Module, batches: Batches, bits: int) -> Row:
    return _onnx_runtime(
        model,
        batches,
        bits,
        lambda nbits, data: nbits.DefaultWeightOnlyQuantConfig(block_size=GROUP, is_symmetric=True),
    )


def onnx_runtime_asymmetric(model: nn.Module, batches: Batches, bits: int) -> Row:
    return _onnx_runtime(model, batches, bits, lambda nbits, data: nbits.DefaultWeightOnlyQuantConfig(block_size=GROUP))


def onnx_runtime_hqq(model: nn.Module, batches: Batches, bits: int) -> Row:
    return _onnx_runtime(model, batches, bits, lambda nbits, data: nbits.HQQWeightOnlyQuantConfig(block_size=GROUP))


def onnx_runtime_gptq(model: nn.Module, batches: Batches, bits: int) -> Row:
    return _onnx_runtime(
        model, batches, bits, lambda nbits, data: nbits.GPTQWeightOnlyQuantConfig(data, block_size=GROUP)
    )


# --- brevitas -------------------------------------------------------------------------------------


def _brevitas(model: nn.Module, batches: Batches, bits: int) -> nn.Module:
    """Returns a model of brevitas with symmetric weights in groups."""
    try:
        import brevitas.nn as qnn
        from brevitas.core.scaling.standalone import ParameterFromStatsFromParameterScaling
        from brevitas.graph.quantize import layerwise_quantize
        from brevitas_examples.common.generative.quantizers import IntWeightSymmetricGroupQuant
    except ImportError as error:
        raise Unsupported(f"not installed: {error}") from error
    # Scales are kept while GPTQ changes weights, as in its examples.
    weight = IntWeightSymmetricGroupQuant.let(
        bit_width=bits, group_size=GROUP, scaling_impl=ParameterFromStatsFromParameterScaling
    )
    options = {"weight_quant": weight, "input_quant": None, "return_quant_tensor": False}
    made = layerwise_quantize(copy.deepcopy(model), {nn.Linear: (qnn.QuantLinear, options)}).eval()
    made(batches[0])  # initializes the scales of weights
    return made


@torch.no_grad()
def brevitas(model: nn.Module, batches: Batches, bits: int) -> Row:
    start = time.process_time()
    return Row(_brevitas(model, batches, bits), time.process_time() - start)


@torch.no_grad()
def brevitas_gptq(model: nn.Module, batches: Batches, bits: int) -> Row:
    made = _brevitas(model, batches, bits)
    from brevitas.graph.gptq import gptq_mode

    start = time.process_time()
    with gptq_mode(made, act_order=True) as mode:
        for _ in range(mode.num_layers):
            for batch in batches:
                mode.model(batch)
            mode.update()
    return Row(made, time.process_time() - start)


PEERS: dict[str, Callable[[nn.Module, Batches, int], Row]] = {
    "torchao": torchao,
    "torchao, HQQ": torchao_hqq,
    "ONNX Runtime": onnx_runtime,
    "ONNX Runtime, asymmetric": onnx_runtime_asymmetric,
    "ONNX Runtime, HQQ": onnx_runtime_hqq,
    "ONNX Runtime, GPTQ": onnx_runtime_gptq,
    "brevitas": brevitas,
    "brevitas GPTQ": brevitas_gptq,
}
