"""Layers as products of matrices. Weights and inputs are small integers, so that all sums are exact."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fakequant._backends.torch.grouped_linear import Groups
from fakequant._paired_models.products import _seen
from fakequant.nn._layers import transposed_linear
from ptq_models import randn

TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}

LAYERS = {
    "linear": (nn.Linear(5, 3), (2, 4, 5)),
    "conv1d": (nn.Conv1d(4, 6, 3, padding=2, stride=2), (2, 4, 9)),
    "circular": (nn.Conv1d(4, 6, 3, padding=1, padding_mode="circular"), (2, 4, 9)),
    "groups": (nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2, dilation=2), (2, 4, 9, 11)),
    "same": (nn.Conv2d(4, 4, (5, 3), padding="same", groups=4), (2, 4, 9, 10)),
    "valid": (nn.Conv2d(4, 2, (2, 3), padding="valid"), (2, 4, 5, 6)),
    "one image": (nn.Conv2d(4, 2, (2, 3)), (4, 5, 6)),
    "conv3d": (nn.Conv3d(4, 6, (1, 2, 3), padding=(0, 1, 2), stride=(1, 2, 1)), (2, 4, 5, 6, 7)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), (2, 4, 5, 6)),
    "cropped": (nn.ConvTranspose1d(4, 6, 3, stride=3, padding=4, output_padding=2), (2, 4, 5)),
    "transposed 3d": (nn.ConvTranspose3d(4, 6, (1, 2, 3), (2, 1, 2), padding=(0, 1, 0), groups=2), (2, 4, 3, 4, 5)),
    "dilated": (nn.ConvTranspose1d(2, 3, 3, dilation=2), (1, 2, 6)),
}  # fmt: skip


def integers(*shape, seed=1):
    return randn(*shape, seed=seed).mul(4).round()


def operator_of(layer):
    if isinstance(layer, nn.Linear):
        return F.linear
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):
        function = TRANSPOSED[len(layer.kernel_size)]
        rest = (layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation)
        return lambda x, weight, bias: function(x, weight, bias, *rest)
    return layer._conv_forward


def product_of(operator, x, weight):
    return _seen(operator, x, x, weight, None)


@pytest.mark.parametrize("name", LAYERS)
def test_rows_times_matrix_is_the_result_of_the_layer(name):
    layer, shape = LAYERS[name]
    x, weight = integers(*shape), integers(*layer.weight.shape, seed=2)
    product = product_of(operator_of(layer), x, weight)
    matrix, rows = product.form.matrix(weight), product.rows(10**6)
    y = torch.einsum("gnk,gok->ngo", rows, matrix).flatten(1)
    assert torch.equal(y, product.channels_last(product.y))
    assert torch.equal(product.form.weight(matrix, weight), weight)


def test_transposed_linear_layers_and_experts():
    x, weight = integers(3, 4), integers(4, 2, seed=2)
    product = product_of(transposed_linear, x, weight)
    matrix = product.form.matrix(weight)
    assert torch.equal(product.rows(99)[0] @ matrix[0].t(), product.y)
    assert torch.equal(product.form.weight(matrix, weight), weight)

    groups = Groups(torch.tensor([0, 2, 2]), 3)
    weight = integers(6, 4, seed=2)
    product = product_of(groups.linear, x, weight)
    assert product.rows(99).shape == (3, 2, 4)  # the second expert has no rows, the first has one
    y = product.rows(99) @ product.form.matrix(weight).transpose(1, 2)
    assert torch.equal(torch.stack([y[0, 0], y[2, 0], y[2, 1]]), product.y)
    assert not y[1].any()


def test_few_rows_are_spread_over_all():
    x = torch.arange(1000.0)[:, None]
    rows = product_of(F.linear, x, torch.ones(1, 1)).rows(10).flatten()
    assert rows.tolist() == sorted(set(rows.tolist()))
    assert all(100 * i <= row < 100 * (i + 1) for i, row in enumerate(rows.tolist()))


def test_operators_without_one_product_have_no_form():
    assert product_of(lambda x, w, b: x * w, torch.ones(2), torch.ones(2)).form is None
    twice = product_of(lambda x, w, b: F.linear(x, w) + F.linear(x, w), torch.ones(1, 2), torch.ones(2, 2))
    assert twice.form is None
