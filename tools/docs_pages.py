"""For the pages: examples as a reader wants them, and what `--help` prints below the command that prints it."""

import contextlib
import io
import os
import re
from typing import Any

_HELP = re.compile(r"^```sh\nfakequant (?P<arguments>[^\n]*--help)\n```$", re.MULTILINE)
# What is said to doctest only.
_FOR_DOCTEST = re.compile(r" *# doctest: .*$|^ *<BLANKLINE>$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for every page."""
    # To others a block with prompts is Python; here prompts are told from results, and not copied.
    markdown = readable(markdown.replace("```python\n>>> ", "```pycon\n>>> "))
    return _HELP.sub(lambda match: f"{match[0]}\n\n```text\n{help_of(match['arguments'].split())}```", markdown)


def readable(text: str) -> str:
    """Without what is there for doctest."""
    return _FOR_DOCTEST.sub("", text)


def help_of(arguments: list[str]) -> str:
    """What the command prints."""
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
