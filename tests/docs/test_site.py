"""The documentation site builds without warnings and loads nothing from other hosts."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from fakequant._cli.commands import COMMANDS

pytest.importorskip("mkdocs", reason="the documentation needs pip install -r requirements-docs.txt")
pytest.importorskip("mkdocstrings", reason="the documentation needs pip install -r requirements-docs.txt")
ROOT = Path(__file__).parents[2]
# Tags that load a resource, and the attribute that names it. Plain links load nothing.
LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src"}
LOADED_LINKS = {"stylesheet", "icon", "preload", "modulepreload", "prefetch", "preconnect", "dns-prefetch", "manifest"}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    return folder, subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def pages(folder):
    return sorted(folder.rglob("*.html"))


class Resources(HTMLParser):
    """Collects the resources that a page loads."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        if tag in LOADING and named.get(LOADING[tag]):
            self.found.append(named[LOADING[tag]])
        if tag == "link" and LOADED_LINKS & set((named.get("rel") or "").split()):
            self.found.append(named["href"])


def test_site_builds_without_a_warning(built):
    _, ran = built
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == ""
    lines = ran.stderr.splitlines()
    assert [line for line in lines if not line.startswith("INFO ")] == []


def test_site_loads_nothing_from_other_hosts(built):
    folder, _ = built
    assert len(pages(folder)) > 20
    for page in pages(folder):
        for resource in Resources(page.read_text()).found:
            parts = urlsplit(resource)
            assert (parts.scheme, parts.netloc) in (("", ""), ("data", "")), f"{page}: {resource}"
            if parts.scheme == "" and page.name != "404.html":  # 404.html is served from any path
                assert (page.parent / unquote(parts.path)).is_file(), f"{page}: {resource}"
    for sheet in folder.rglob("*.css"):
        assert re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^)]*", sheet.read_text()) == [], sheet


def test_site_renders_examples_as_code(built):
    folder, _ = built
    for page in (folder / "reference").glob("*.html"):
        text = page.read_text()
        assert "<blockquote>" not in text, page
        if page.name != "cli.html":
            assert '<span class="gp">&gt;&gt;&gt; </span>' in text, page


def test_site_shows_the_help_of_every_command(built):
    folder, _ = built
    text = re.sub(r"<[^>]*>", "", (folder / "reference" / "cli.html").read_text())
    for command in ("", *(f" {add.__name__.removeprefix('add_')}" for add in COMMANDS)):
        assert f"usage: fakequant{command} [-h]" in text, command


@pytest.mark.parametrize("notebook", sorted((ROOT / "docs/notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_site_has_a_page_for_every_notebook(built, notebook):
    folder, _ = built
    page = (folder / "notebooks" / f"{notebook.stem}.html").read_text()
    cells = json.loads(notebook.read_text())["cells"]
    assert page.count('<div class="highlight">') == sum(cell["cell_type"] == "code" for cell in cells)
    assert f'href="{notebook.name}"' in page
    assert (folder / "notebooks" / notebook.name).read_bytes() == notebook.read_bytes()
    # Other pages link to the page. In the repository, they link to the notebook.
    assert f"notebooks/{notebook.stem}.ipynb" in (ROOT / "docs/index.md").read_text()
    index = (folder / "index.html").read_text()
    assert f'href="notebooks/{notebook.stem}.html"' in index
    assert f'href="notebooks/{notebook.name}"' not in index
    links = re.findall(r"\]\(([^)#]+)", notebook.read_text())
    assert all((notebook.parent / link).is_file() for link in links)


def test_site_lists_its_pages_for_language_models(built):
    folder, _ = built
    text = (folder / "llms.txt").read_text()
    listed = re.findall(r"^- \[[^]]+\]\((\S+)\): \S", text, re.MULTILINE)
    assert {"index.md", "guides/runtimes.md", "reference/models.md"} <= set(listed)
    written = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb")]
    assert sorted(listed) == sorted(path.relative_to(ROOT / "docs").with_suffix(".md").as_posix() for path in written)
    assert all((folder / path.relative_to(ROOT / "docs")).read_bytes() == path.read_bytes() for path in written)
    # Of code, the first sentence would be no answer.
    assert [line for line in text.splitlines() if re.search(r">>>|```|:::|:$", line)] == []


def test_reference_has_tables_of_arguments(built):
    folder, _ = built
    text = (folder / "reference" / "models.html").read_text()
    assert "Args:" not in text
    assert text.count(">Parameters:<") > 10
