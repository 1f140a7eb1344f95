"""Codes as bytes, against the helpers of compressed-tensors, at all codes."""

import pytest
import torch
from compressed_tensors.compressors.mxfp6 import helpers as fp6
from compressed_tensors.compressors.nvfp4 import helpers as fp4
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

from fakequant import QuantSpec, presets
from fakequant._export.compressed_tensors.layer_tensors import from_tensors, to_tensors, values_of
from fakequant._export.compressed_tensors.schemes import Scheme
from fakequant._export.prepared_layers import StoredWeight
from fakequant.functional import dequantize
from tiny_language_models import assert_same_bits


def _all_codes(spec):
    """Returns a matrix with every code at every place of a block of 96."""
    codes = torch.arange(spec.qmin, spec.qmax + 1, dtype=getattr(torch, spec.storage))
    return torch.stack([codes.roll(shift).repeat(96 // len(codes) + 1)[:96] for shift in range(len(codes))])


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("grouped", [True, False])
def test_integers_are_packed_as_compressed_tensors_packs_them(bits, symmetric, grouped):
    where = dict(axis=-1, group_size=32) if grouped else dict(axis=0)
    spec = QuantSpec(bits=bits, signed=symmetric, symmetric=symmetric, **where)
    scheme, codes = Scheme(spec, None), _all_codes(spec)
    blocks = (len(codes), 3) if grouped else (len(codes),)
    scale = torch.rand(blocks) + 0.5
    points = None if symmetric else torch.randint(0, 2**bits, blocks, dtype=torch.int32)
    tensors = to_tensors(StoredWeight(codes, scale, points), scheme)
    offset = 0 if symmetric else 2 ** (bits - 1)
    signed = (codes.int() - offset).to(torch.int8)
    assert_same_bits(tensors["weight_packed"], pack_to_int32(signed, bits))
    unpacked = unpack_from_int32(tensors["weight_packed"], bits, torch.Size(tensors["weight_shape"].tolist()))
    assert_same_bits(unpacked, signed)
    if points is not None:
        expected = (points - offset).to(torch.int8).reshape(len(codes), -1)
        assert_same_bits(tensors["weight_zero_point"], pack_to_int32(expected, bits, packed_dim=0))
    # The grid that is read back is signed, and has the same values.
    signed_scheme = Scheme(QuantSpec(bits=bits, symmetric=symmetric, **where), None)
    values = values_of(from_tensors(tensors, signed_scheme), signed_scheme.weight)
    assert_same_bits(values, dequantize(codes, scale, 0 if points is None else points, spec))


def test_zero_points_of_a_few_outputs_in_groups_are_read():
    """They fill less than one word, for which compressed-tensors' own helper fails."""
    spec = QuantSpec(bits=4, symmetric=False, axis=-1, group_size=32)
    codes = _all_codes(spec)[:2]
    points = torch.randint(-8, 8, (2, 3), dtype=torch.int32)
    tensors = to_tensors(StoredWeight(codes, torch.rand(2, 3), points), Scheme(spec, None))
    found = from_tensors(tensors, Scheme(spec, None))
    assert torch.equal(found.zero_point, points)
    assert torch.equal(found.codes.int(), codes.int())


@pytest.mark.parametrize("spec", [presets.mxfp4(), presets.nvfp4(scale_rule="divided")], ids=["mxfp4", "nvfp4"])
def test_e2m1_is_packed_as_compressed_tensors_packs_it(spec):
    codes = _float_codes(16)
    tensors = to_tensors(StoredWeight(codes, torch.ones(16, 96 // spec.group_size), None), Scheme(spec, None))
    unpacked = fp4.unpack_fp4_from_uint8(tensors["weight_packed"], 16, 96, torch.float32)
    assert_same_bits(unpacked, dequantize(codes, torch.ones(16, 96 // spec.group_size), 0, spec))
    assert_same_bits(fp4.pack_fp4_to_uint8(unpacked), tensors["weight_packed"])
    _assert_read_again(tensors, codes, spec)


def test_e2m3_is_packed_as_compressed_tensors_packs_it():
    spec = presets.mxfp6()
    codes = _float_codes(64)
    tensors = to_tensors(StoredWeight(codes, torch.ones(64, 3), None), Scheme(spec, None))
    values = dequantize(codes, torch.ones(64, 3), 0, spec)
    unpacked = fp6.unpack_fp6_from_uint8(tensors["weight_packed"], 64, 96, torch.float32)
    assert_same_bits(unpacked, values)
    assert_same_bits(fp6.pack_fp6_to_uint8(values), tensors["weight_packed"])
    _assert_read_again(tensors, codes, spec)


def _float_codes(number):
    codes = torch.arange(number)
    return torch.stack([codes.roll(shift).repeat(96 // number + 1)[:96] for shift in range(number)]).to(torch.uint8)


def _assert_read_again(tensors, codes, spec):
    found = from_tensors(tensors, Scheme(spec, None))
    assert_same_bits(found.codes, codes)
    assert bool((found.scale == 1).all())
