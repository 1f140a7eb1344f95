"""Functions with torch's names, arguments, results and errors, on NumPy arrays.

They return what torch 2.13's CPU operators return, bit for bit, oddities included; what torch does
on purpose or by accident is written down in docs/numerics.md. For new code use `fake_quantize` and
a `QuantSpec`, which have one rule for all special values.
"""
