"""An mkdocs hook: cleans up examples, and adds the output of `--help` below commands that print it."""

import contextlib
import io
import os
import re
from typing import Any

_HELP = re.compile(r"^```sh\nfakequant (?P<arguments>[^\n]*--help)\n```$", re.MULTILINE)
# Directives for doctest, which readers do not need.
_FOR_DOCTEST = re.compile(r" *# doctest: .*$|^ *<BLANKLINE>$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Returns the processed Markdown of a page. Called by mkdocs for every page."""
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
