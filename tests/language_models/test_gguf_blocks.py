"""The bytes of ggml's blocks, compared with those of the package `gguf`."""

import numpy as np
import pytest
import torch

from fakequant import QuantSpec, presets
from fakequant._export.gguf.blocks import TYPES, blocks_of, grid_of_blocks, pack, type_of, unpack
from fakequant._export.gguf.export_gguf import layers_of
from tiny_gguf_models import KINDS, prepared

gguf = pytest.importorskip("gguf")


def _bytes(name, rows=6):
    """Returns random blocks: any bytes, but finite scales."""
    numbers = np.random.default_rng(0)
    known = TYPES[name]
    data = numbers.integers(0, 256, (rows, 4 * known.size), dtype=np.uint8)
    if name == "MXFP4":
        data.reshape(rows, 4, known.size)[..., 0] %= 200
    else:
        at_end, two = name in ("TQ2_0", "Q6_K"), name in ("Q4_1", "Q4_K")
        places = [known.size - 2] if at_end else [0, 2] if two else [0]
        for place in places:
            half = numbers.normal(size=(rows, 4)).astype(np.float16)
            data.reshape(rows, 4, known.size)[..., place : place + 2] = half[..., None].view(np.uint8)
    if name == "TQ2_0":  # 3 is no code
        codes = data.reshape(rows, 4, known.size)[..., :64]
        codes &= ~((codes & 0xAA) >> 1)
    return data


@pytest.mark.parametrize("name", TYPES)
def test_blocks_are_unpacked_and_packed(name):
    data = _bytes(name)
    again = pack(name, unpack(name, data))
    assert again.dtype == np.uint8
    assert np.array_equal(data, again)


@pytest.mark.parametrize("name", TYPES)
def test_values_are_those_of_gguf(name):
    data = _bytes(name)
    ours = grid_of_blocks(name, unpack(name, data)).values + 0.0
    theirs = torch.from_numpy(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name])) + 0.0
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_have_the_values_that_were_trained(kind):
    for layer in layers_of(prepared(kind=kind)):
        name = type_of(layer.spec)
        data = pack(name, blocks_of(layer))
        theirs = torch.from_numpy(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name])) + 0.0
        assert torch.equal(theirs.view(torch.int32), (layer.values() + 0.0).view(torch.int32))


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q8_0"])
def test_untrained_weights_have_the_bytes_of_gguf(kind):
    for layer in layers_of(prepared(kind=kind)):
        name = type_of(layer.spec)
        theirs = gguf.quants.quantize(layer.weight().numpy(), gguf.GGMLQuantizationType[name])
        assert np.array_equal(pack(name, blocks_of(layer)), theirs)


def test_specs_of_other_grids_have_no_type():

    assert type_of(presets.int4()) is None
    assert type_of(QuantSpec(bits=4, axis=0, group_size=32)) is None
    assert type_of(presets.q8_0(axis=0)) is None
