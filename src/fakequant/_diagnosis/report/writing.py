"""`report`: writes an HTML page about a prepared model."""

import dataclasses
import os
from collections.abc import Iterator
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fakequant._diagnosis.history import History
from fakequant._diagnosis.report.advice import Judged, judge
from fakequant._diagnosis.report.folder import filling
from fakequant._diagnosis.report.tensors import counting
from fakequant._info import info
from fakequant._prepare.summary import Summary, summary
from fakequant._train.health import QuantizerHealth, health, memory_as_before, qparams_for
from fakequant._train.model_snapshot import unchanged
from fakequant._train.running import Bar, Data, check_steps
from fakequant._util.optional_packages import require
from fakequant.nn._model_quantizers import quantizers

if TYPE_CHECKING:
    from fakequant._diagnosis.compare import Comparison
    from fakequant._diagnosis.sensitivity_table import Sensitivity
    from fakequant._verify.verdict import Verification


def report(
    model: nn.Module,
    folder: str | os.PathLike[str],
    data: Data | None = None,
    *,
    float_model: nn.Module | None = None,
    sensitivity: "Sensitivity | None" = None,
    history: History | None = None,
    verification: "Verification | None" = None,
    title: str | None = None,
    steps: int | None = None,
    max_tensors: int | None = 40,
    progress: bool = True,
) -> Path:
    """Writes `report.html`, a page that works offline, and its figures as PNGs in `folder/figures`.

    The page shows what is quantized, which quantizers have problems, and what helps. For each tensor it shows the
    histogram of its values and how often each code occurs.

    Args:
        model: A prepared model. It is not changed.
        folder: The folder to write. It is created if necessary.
        data: Batches for the activations, on which the model runs in evaluation mode. None for weights only.
        float_model: The float model to compare each layer with, on `data`.
        sensitivity: The result of `fakequant.sensitivity`.
        history: The health of the model over its training.
        verification: The result of `fakequant.verify`.
        title: The title of the page.
        steps: The number of batches to use. None for all.
        max_tensors: The number of tensors with figures, those with problems first. None for all.
        progress: Whether to show a progress bar.

    Returns:
        The path of the page.

    Needs `pip install "fakequant[report]"`.

    >>> import tempfile, fakequant as fq
    >>> model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), fq.recipes.int8())
    >>> model = fq.calibrate(model, [torch.ones(3, 4)], progress=False)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = fq.report(model, folder, [torch.randn(8, 4)], progress=False)
    ...     page.name, sorted(p.name for p in page.parent.glob("figures/*"))[0]
    ('report.html', '0.input_quantizer-codes.png')
    """
    require("matplotlib", "matplotlib", "report")
    require("jinja2", "Jinja2", "report")
    _check(data, float_model, sensitivity, history, verification, title, max_tensors)
    made = summary(model)
    check_steps(steps)
    if isinstance(data, Iterator):  # the data is read more than once
        data = list(islice(data, steps))
    with filling(folder) as unfinished:
        judged = _judged(model, data, steps, history)
        comparison = None
        if float_model is not None:
            from fakequant._diagnosis.compare import compare

            assert data is not None
            comparison = compare(float_model, model, data, steps=steps, progress=progress)
        text, pngs = _page(made, judged, comparison, sensitivity, history, verification, title, max_tensors, progress)
        (unfinished / "figures").mkdir()
        for name, png in pngs.items():
            (unfinished / "figures" / f"{name}.png").write_bytes(png)
        (unfinished / "report.html").write_text(text, encoding="utf-8", newline="\n")
    return Path(folder) / "report.html"


def _check(
    data: object,
    float_model: object,
    sensitivity: object,
    history: object,
    verification: object,
    title: object,
    max_tensors: object,
) -> None:
    if float_model is not None and not isinstance(float_model, nn.Module):
        raise TypeError(f"`float_model` must be a torch.nn.Module, got {type(float_model).__name__}.")
    if float_model is not None and data is None:
        raise ValueError(
            "`float_model` needs `data` to be compared on, got None.\nPass `data`: batches for both models."
        )
    if history is not None and not isinstance(history, History):
        raise TypeError(f"`history` must be a fakequant.History, got {type(history).__name__}.")
    if sensitivity is not None and not hasattr(sensitivity, "quantized_score"):
        raise TypeError(
            f"`sensitivity` must be what fakequant.sensitivity(...) returns, got {type(sensitivity).__name__}."
        )
    if verification is not None and not hasattr(verification, "first_difference"):
        raise TypeError(
            f"`verification` must be what fakequant.verify(...) returns, got {type(verification).__name__}."
        )
    if title is not None and not isinstance(title, str):
        raise TypeError(f"`title` must be a string, got {title!r}.")
    if max_tensors is not None and (type(max_tensors) is not int or max_tensors < 0):
        raise ValueError(f"`max_tensors` must be a number of tensors or None, got {max_tensors!r}.")


def _judged(model: nn.Module, data: Data | None, steps: int | None, history: History | None) -> list[Judged]:
    """Returns the findings for every quantizer, after one pass over the data."""
    calls: list[None] = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(None))
    try:
        with unchanged(model), memory_as_before(model), counting(model) as counts:
            found = health(model, data, steps)
    finally:
        handle.remove()
    if data is not None and not calls:
        raise ValueError(
            "`data` has no batches, so there are no activations to show.\nPass at least one batch, or data=None."
        )
    is_on = {path: q.quantizing for path, q in quantizers(model)}
    has_scale = {path: q.is_dynamic or qparams_for(q, torch.zeros(0)) is not None for path, q in quantizers(model)}
    return [
        judge(_completed(q, history), c, c.total > 0 or has_scale[q.path], is_on[q.path])
        for q, c in zip(found.quantizers, counts, strict=True)
    ]


def _completed(found: QuantizerHealth, history: History | None) -> QuantizerHealth:
    """Returns the health with the last drift and oscillation of the history, as both need several checks."""
    if history is None or found.path not in history.quantizers:
        return found
    drift, oscillating = (history.series(found.path, name)[1] for name in ("scale_drift", "oscillating"))
    return dataclasses.replace(
        found,
        scale_drift=drift[-1] if drift else found.scale_drift,
        oscillating=oscillating[-1] if oscillating else found.oscillating,
    )


def _page(
    made: Summary,
    judged: list[Judged],
    comparison: "Comparison | None",
    sensitivity: "Sensitivity | None",
    history: History | None,
    verification: "Verification | None",
    title: str | None,
    max_tensors: int | None,
    progress: bool,
) -> tuple[str, dict[str, bytes]]:
    """Returns the text of the page, and the figures as PNGs."""
    from fakequant._diagnosis.report import page, pieces

    seen = [j for j in judged if j.counts.total]
    drawn = sorted(seen, key=lambda j: j.order)[:max_tensors]
    total = 2 * len(drawn) + (comparison is not None) + (sensitivity is not None) + 4 * (history is not None)
    total += sensitivity is not None and sensitivity.has_widths
    with Bar(total=total, desc="figures", disable=not progress, leave=False) as bar:
        figures = pieces.Figures(bar.update)
        context = {
            "title": title or "Quantization report",
            "versions": _versions(),
            "tiles": page.overview(made, judged, comparison, sensitivity, verification),
            "summary": made,
            "findings": page.grouped(sorted(judged, key=lambda j: j.order)),
            "quantizers": [page.quantizer_row(j, j in drawn) for j in judged],
            "comparison": comparison and page.comparison_entry(figures, comparison),
            "sensitivity": sensitivity and page.sensitivity_entry(figures, sensitivity),
            "history": page.history_entry(figures, history) if history is not None and history.steps else None,
            "verification": verification and page.verification_entry(verification),
            "tensors": [page.tensor_entry(figures, j) for j in drawn],
            "left_out": len(seen) - len(drawn),
            "unseen": [j.path for j in judged if not j.counts.total],
            "anchor": page.anchor,
        }
    return _rendered(context), figures.pngs


def _rendered(context: dict[str, Any]) -> str:
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    here = files("fakequant._diagnosis.report")
    environment = Environment(
        loader=FunctionLoader(lambda name: here.joinpath(name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["svg"] = Markup
    return environment.get_template("template.html").render(context)


def _versions() -> list[tuple[str, str]]:
    found = info()
    return [
        ("fakequant", found.version),
        ("kernels", found.target),
        ("torch", (found.torch or "").split(",")[0]),
        ("NumPy", found.numpy),
        ("Python", f"{found.python} on {found.machine}"),
    ]
