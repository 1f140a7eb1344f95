"""Quantizers as users write them: another gradient, stochastic rounding, ternary, DoReFa-like, and unequal steps."""

import torch

import fakequant as fq


class OtherGradient(fq.nn.FakeQuantize):
    """Rounding with the gradient of tanh-shaped steps, here simply half of the usual one."""

    def forward(self, x):
        return x / 2 + (super().forward(x) - x / 2).detach()


class Stochastic(fq.nn.FakeQuantize):
    """Rounds up with the probability of the distance from the code below, in training only."""

    def forward(self, x):
        y = super().forward(x)
        if not self.training:
            return y
        noise = (torch.rand_like(x) - 0.5) * self.scale.reshape(-1, *[1] * (x.dim() - 1))
        return y + (fq.fake_quantize(x.detach() + noise, self.scale, 0, self.spec) - y).detach()


class Ternary(fq.nn.FakeQuantize):
    """BitNet b1.58: -s, 0 or s, where s is the mean magnitude of the weight."""

    def forward(self, x):
        if self.training:
            self.set_qparams(x.detach().abs().mean().clamp(min=1e-5), torch.tensor(0))
        return x + (fq.fake_quantize(x.detach(), self.scale, 0, self.spec) - x).detach()


class DoReFaLike(fq.nn.FakeQuantize):
    """Weights as in DoReFa-Net, tanh(x) / max |tanh(x)|, on a grid from -1 to 1 that has 0."""

    def forward(self, x):
        if self.training:
            self.set_qparams(torch.tensor(1 / self.spec.qmax), torch.tensor(0))
        squeezed = torch.tanh(x) / torch.tanh(x.detach()).abs().max()
        return squeezed + (fq.fake_quantize(squeezed.detach(), self.scale, 0, self.spec) - squeezed).detach()


class PowersOfTwo(fq.nn.FakeQuantize):
    """Additive powers of two (APoT), here with 4 bits: sums of one of 0, 1, 1/4, 1/16 and one of 0, 1/2."""

    has_equal_steps = False

    def forward(self, x):
        super().forward(x)  # observes
        sums = sorted({a + b for a in (0, 1, 1 / 4, 1 / 16) for b in (0, 1 / 2)})
        levels = torch.tensor([-v for v in sums[:0:-1]] + sums) / sums[-1]
        size = (self.scale * self.spec.qmax).reshape(-1, *[1] * (x.dim() - 1))
        nearest = ((x.detach() / size)[..., None] - levels).abs().argmin(-1)
        return x + (levels[nearest] * size - x).detach()


class Rounder(fq.nn.FakeQuantize):
    """Activations that are rounded down, which runtimes do not."""

    def forward(self, x):
        y = super().forward(x)
        return y + ((x.detach() / self.scale).floor() * self.scale - y).detach()
