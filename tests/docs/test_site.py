"""The documentation site builds without warnings and loads nothing from other hosts."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

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


@pytest.mark.parametrize("command", ["", " info", " demo", " summary", " verify", " report"])
def test_site_shows_the_help_of_every_command(built, command):
    folder, _ = built
    text = re.sub(r"<[^>]*>", "", (folder / "reference" / "cli.html").read_text())
    assert f"usage: fakequant{command} [-h]" in text


def test_site_lists_its_pages_for_language_models(built):
    folder, _ = built
    listed = re.findall(r"^- \[[^]]+\]\((\S+)\): \S", (folder / "llms.txt").read_text(), re.MULTILINE)
    assert {"index.md", "guides/runtimes.md", "reference/models.md"} <= set(listed)
    assert len(listed) == len(list((ROOT / "docs").rglob("*.md")))
    assert all((folder / name).read_text() == (ROOT / "docs" / name).read_text() for name in listed)


def test_reference_has_tables_of_arguments(built):
    folder, _ = built
    text = (folder / "reference" / "models.html").read_text()
    assert "Args:" not in text
    assert text.count(">Parameters:<") > 10
