"""Every public name is on a reference page and has an example that runs."""

import doctest
import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import fakequant as fq

ROOT = Path(__file__).parents[2]


def public_names():
    """Returns the names listed in test_public_api.py, and those without an example."""
    spec = importlib.util.spec_from_file_location("public_names", ROOT / "tests" / "test_public_api.py")
    listed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(listed)
    names = [f"{place}.{name}" for place, names in listed.PLACES.items() for name in names]
    return names + [f"fakequant.{name}" for name in listed.WHOLE_MODELS], listed.WITHOUT_EXAMPLE


NAMES, WITHOUT_EXAMPLE = public_names()
PAGES = {page.name: page.read_text() for page in sorted((ROOT / "docs" / "reference").glob("*.md"))}


@pytest.mark.parametrize("name", NAMES)
def test_public_name_is_on_one_reference_page(name):
    pages = [page for page, text in PAGES.items() if re.search(rf"^::: {re.escape(name)}$", text, re.MULTILINE)]
    assert len(pages) == 1


@pytest.mark.parametrize("name", [n for n in NAMES if n.rpartition(".")[2] not in WITHOUT_EXAMPLE])
def test_public_name_has_an_example_in_src(name):
    place, _, short = name.rpartition(".")
    found = getattr(importlib.import_module(place), short)
    text = inspect.getdoc(found) or ""
    assert doctest.DocTestParser().get_examples(text)
    # Doctest runs every docstring in src.
    assert Path(inspect.getfile(inspect.unwrap(found))).is_relative_to(ROOT / "src")


def test_reference_pages_list_public_names_only():
    listed = {name for text in PAGES.values() for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE)}
    results = {f"fakequant.results.{name}" for name in vars(fq.results)}
    assert listed - set(NAMES) - results == set()
