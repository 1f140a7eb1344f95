"""`report`: writes an HTML page about a prepared model."""

import dataclasses
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from importlib.resources import files
from itertools import islice
from pathlib import Path, PosixPath, WindowsPath
from typing import Any

from torch import nn

from fakequant._diagnosis.compare import Comparison, compare
from fakequant._diagnosis.health import History, QuantizerHealth, health
from fakequant._diagnosis.report.advice import Judged, judge
from fakequant._diagnosis.report.tensor_counts import counting
from fakequant._diagnosis.sensitivity_table import Sensitivity
from fakequant._info import info
from fakequant._model.running import Bar, Data, check_steps
from fakequant._model.snapshot import unchanged
from fakequant._prepare.summary import Summary, summary
from fakequant._util.files import unfinished_name
from fakequant._util.packages import require
from fakequant._verify.verdict import Verification
from fakequant.nn._model_quantizers import has_scale, named_quantizers


class ReportPath(WindowsPath if os.name == "nt" else PosixPath):  # type: ignore[misc]  # which is not known when types are checked
    """The path of a page. A notebook shows the page."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        if self.suffix != ".html":  # a parent of the path
            return None
        page = escape(self.read_text(encoding="utf-8"))
        style = "width: 100%; height: 40em; border: 1px solid currentColor"
        return f'<p>{escape(str(self))}</p><iframe srcdoc="{page}" sandbox="allow-scripts" style="{style}"></iframe>'


def report(
    model: nn.Module,
    folder: str | os.PathLike[str],
    data: Data | None = None,
    *,
    float_model: nn.Module | None = None,
    sensitivity: Sensitivity | None = None,
    history: History | None = None,
    verification: Verification | None = None,
    title: str | None = None,
    steps: int | None = None,
    max_tensors: int | None = 40,
    progress: bool = True,
) -> ReportPath:
    """Writes `report.html`, a page that works offline, and its figures as PNGs in `folder/figures`.

    The page shows what is quantized, which quantizers have problems, and what helps. For each tensor it shows the
    histogram of its values and how often each code occurs.

    Args:
        model: A prepared model. It is not changed.
        folder: The folder to write. It is created if necessary.
        data: Batches for the activations, on which the model runs in evaluation mode. If None, only weights are shown.
        float_model: The float model to compare each layer with, on `data`.
        sensitivity: The result of `fakequant.sensitivity`.
        history: The health of the model over its training.
        verification: The result of `fakequant.verify`.
        title: The title of the page.
        steps: The maximum number of batches. If None, all are used.
        max_tensors: The number of tensors with figures, tensors with problems first. If None, all have figures.
        progress: Whether to show a progress bar.

    Returns:
        The path of the page. A notebook shows the page itself.

    Needs `pip install "fakequant[report]"`.

    >>> import tempfile, torch, fakequant as fq
    >>> model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), fq.recipes.int8(), example=torch.ones(1, 4))
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
            assert data is not None
            comparison = compare(float_model, model, data, steps=steps, progress=progress)
        text, pngs = _page(made, judged, comparison, sensitivity, history, verification, title, max_tensors, progress)
        (unfinished / "figures").mkdir()
        for name, png in pngs.items():
            (unfinished / "figures" / f"{name}.png").write_bytes(png)
        (unfinished / "report.html").write_text(text, encoding="utf-8", newline="\n")
    return ReportPath(folder, "report.html")


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
    if sensitivity is not None and not isinstance(sensitivity, Sensitivity):
        raise TypeError(
            f"`sensitivity` must be what fakequant.sensitivity(...) returns, got {type(sensitivity).__name__}."
        )
    if verification is not None and not isinstance(verification, Verification):
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
        with unchanged(model), counting(model) as counts:
            found = health(model, data, steps)
    finally:
        handle.remove()
    if data is not None and not calls:
        raise ValueError(
            "`data` has no batches, so there are no activations to show.\nPass at least one batch, or data=None."
        )
    quantizers = [quantizer for _, quantizer in named_quantizers(model)]
    return [
        judge(_completed(seen, history), c, c.total > 0 or has_scale(q), q.quantizing)
        for q, seen, c in zip(quantizers, found.quantizers, counts, strict=True)
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
    comparison: Comparison | None,
    sensitivity: Sensitivity | None,
    history: History | None,
    verification: Verification | None,
    title: str | None,
    max_tensors: int | None,
    progress: bool,
) -> tuple[str, dict[str, bytes]]:
    """Returns the text of the page, and the figures as PNGs."""
    from fakequant._diagnosis.report import drawing, page

    seen = [j for j in judged if j.counts.total]
    drawn = sorted(seen, key=lambda j: j.order)[:max_tensors]
    total = 2 * len(drawn) + (comparison is not None) + (sensitivity is not None) + 5 * (history is not None)
    total += sensitivity is not None and sensitivity.has_widths
    with Bar(total=total, desc="figures", disable=not progress, leave=False) as bar:
        figures = drawing.Figures(bar.update)
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


@contextmanager
def filling(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary folder whose files are moved to `folder` on success and deleted on failure.

    The temporary folder is created first, on the same file system, so a folder that cannot be written raises OSError
    before any work is done. Figures of an earlier report in `folder` are deleted, as they may be of another model.
    """
    goal = Path(folder)
    for path in (goal, goal / "figures"):
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(f"{str(path)!r} is a file, not a folder.\nUse another folder.")
    there = goal
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise NotADirectoryError(f"{str(there)!r} is a file, not a folder.\nUse another folder.")
    had_report = (goal / "report.html").is_file()
    unfinished = there / unfinished_name(f".{goal.name}")
    try:
        unfinished.mkdir()
    except OSError as error:
        raise OSError(
            error.errno,
            f"{str(goal)!r} cannot be written: {error.strerror}.\nUse a writable folder",
        ) from error
    try:
        yield unfinished
        # Deeper folders first, so that the figures are complete when the page appears.
        files = sorted((f for f in unfinished.rglob("*") if f.is_file()), key=lambda f: (-len(f.parts), f))
        for file in files:
            place = goal / file.relative_to(unfinished)
            place.parent.mkdir(parents=True, exist_ok=True)
            file.replace(place)
        if had_report:
            new = {file.name for file in files}
            for old in goal.glob("figures/*.png"):
                if old.name not in new:
                    old.unlink()
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
