"""An mkdocs hook: cleans up examples, shows the output of `--help`, makes pages of notebooks, and writes llms.txt."""

import contextlib
import io
import json
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_HELP = re.compile(r"^```sh\nfakequant (?P<arguments>[^\n]*--help)\n```$", re.MULTILINE)
# Directives for doctest, which readers do not need.
_FOR_DOCTEST = re.compile(r" *# doctest: .*$|^ *<BLANKLINE>$", re.MULTILINE)


_NOTEBOOK = re.compile(r"(?<=\]\()(?!\w+:)([^)\s]+)\.ipynb(?=\))")  # the target of a link

_PAGES: list[tuple[Any, str]] = []  # every page, and what it answers


def on_files(files: Any, config: Any) -> Any:
    """Adds a page for each notebook, beside the notebook itself."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        page = file.src_uri.replace(".ipynb", ".md")
        files.append(File.generated(config, page, content=page_of(Path(file.abs_src_path))))
    return files


def page_of(notebook: Path) -> str:
    """Returns a notebook as Markdown, with a link to it below the first cell. Results are not committed."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    texts = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    parts = [f"```python\n{text}\n```" if kind == "code" else text for kind, text in texts]
    # An HTML link, which is not translated.
    link = f'<a href="{notebook.name}" download>{notebook.name}</a>'
    parts.insert(1, f"This page has the cells of {link}, without results. Run it in Jupyter to see its tables.")
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Returns the processed Markdown of a page. Called by mkdocs for every page."""
    _PAGES.append((page, about(markdown)))
    markdown = _NOTEBOOK.sub(r"\1.md", markdown)
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
    # Without code, headings, pictures, drawings and tables.
    text = re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(#|!| {4}|\|).*", "", text, flags=re.MULTILINE)
    parts = (" ".join(part.split()) for part in text.split("\n\n"))
    found = next((part for part in parts if part and not part.endswith(":")), "")  # a colon ends what introduces code
    first = re.sub(r"\[([^]]*)\]\([^)]*\)|[*`]", r"\1", found)
    return first.strip('"') if first.startswith('"') else re.split(r"(?<=\.) ", first)[0]


def on_post_build(config: Any, **_: Any) -> None:
    """Writes llms.txt: the list of all pages for language models, with the Markdown of each beside its HTML."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", "", "## Pages", ""]
    for page, answered in _PAGES:
        Path(config.site_dir, page.file.src_uri).write_text(page.file.content_string, encoding="utf-8")
        lines.append(f"- [{page.title}]({page.file.src_uri}): {answered}")
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
