"""An mkdocs hook: cleans up examples, adds the output of `--help` below commands that print it, and writes llms.txt."""

import contextlib
import io
import os
import re
import shutil
from pathlib import Path
from typing import Any

_HELP = re.compile(r"^```sh\nfakequant (?P<arguments>[^\n]*--help)\n```$", re.MULTILINE)
# Directives for doctest, which readers do not need.
_FOR_DOCTEST = re.compile(r" *# doctest: .*$|^ *<BLANKLINE>$", re.MULTILINE)


_PAGES: list[tuple[Any, str]] = []  # every page, and what it answers


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Returns the processed Markdown of a page. Called by mkdocs for every page."""
    _PAGES.append((page, about(markdown)))
    # In the sources, blocks with prompts are marked as Python. As pycon, prompts are highlighted and not copied.
    markdown = readable(markdown.replace("```python\n>>> ", "```pycon\n>>> "))
    return _HELP.sub(lambda match: f"{match[0]}\n\n```text\n{help_of(match['arguments'].split())}```", markdown)


def readable(text: str) -> str:
    """Returns the text without doctest directives."""
    return _FOR_DOCTEST.sub("", text)


def help_of(arguments: list[str]) -> str:
    """Returns the output of a fakequant command."""
    from fakequant._cli import main

    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            main(arguments)
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    return text.getvalue()


def about(markdown: str) -> str:
    """Returns what a page answers: the question below its title, or its first sentence."""
    # Without headings, pictures, drawings and tables.
    text = re.sub(r"^(#|!| {4}|\|).*", "", markdown, flags=re.MULTILINE)
    found = next((" ".join(part.split()) for part in text.split("\n\n") if part.strip()), "")
    first = re.sub(r"\[([^]]*)\]\([^)]*\)|[*`]", r"\1", found)
    return first.strip('"') if first.startswith('"') else re.split(r"(?<=[.:]) ", first)[0]


def on_post_build(config: Any, **_: Any) -> None:
    """Writes llms.txt: the list of all pages for language models, with the Markdown of each beside its HTML."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", "", "## Pages", ""]
    for page, answered in _PAGES:
        shutil.copyfile(page.file.abs_src_path, Path(config.site_dir, page.file.src_uri))
        lines.append(f"- [{page.title}]({page.file.src_uri}): {answered}")
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
