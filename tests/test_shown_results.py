"""Results show themselves: as text at the Python prompt, and as HTML tables in notebooks."""

import dataclasses
import re

import pytest

pytest.importorskip("torch")

import fakequant as fq
from fakequant._util.shown import Shown, html_of
from fakequant._util.text import table

PRINTED = {name: cls for name, cls in vars(fq.results).items() if isinstance(cls, type) and "__str__" in vars(cls)}


@pytest.mark.parametrize("name", PRINTED)
def test_results_that_print_as_tables_do_so_at_the_prompt(name):
    assert issubclass(PRINTED[name], Shown)
    assert PRINTED[name].__repr__ is Shown.__repr__


def test_there_are_such_results():
    assert {"Verification", "Summary", "Health", "Comparison", "Latency", "Check", "Changes"} <= set(PRINTED)
    assert repr(fq.info()) == str(fq.info())


def test_a_config_prints_as_a_table_of_its_rules_and_what_is_set():
    config = fq.recipes.int8(target="openvino").skip("head").rule(type="Conv2d", learned=True, input=None)
    assert repr(config).split("\n") == [
        "layers     | weight                             | input             | output | also",
        "-----------+------------------------------------+-------------------+--------+--------",
        "Conv2d     | int8 narrow, per channel on axis 0 | -                 | -      | learned",
        "head       | -                                  | -                 | -      |",
        "all others | int8 narrow, per channel on axis 0 | uint8, per tensor | -      |",
        "",
        "operands: uint8, per tensor",
        "target: openvino",
    ]
    assert cells(config._repr_html_(), "td")[4::5] == ["learned", "", ""]
    assert cells(fq.QuantConfig()._repr_html_(), "td") == ["all", "-", "-", "-"]


@pytest.mark.parametrize("value", [fq.QuantSpec(), fq.presets.int4(), fq.recipes.w4a8().skip("head").default])
def test_specs_have_short_representations_that_make_them_again(value):
    again = eval(repr(value), {"QuantSpec": fq.QuantSpec, "LayerConfig": fq.LayerConfig})
    assert again == value
    assert len(repr(value)) < 120


def test_specs_and_layers_show_themselves_in_notebooks():
    spec = fq.presets.int4(group_size=32)
    assert cells(spec._repr_html_(), "p") == [repr(spec), str(spec)]
    layer = fq.LayerConfig(weight=spec, learned=True)
    assert cells(layer._repr_html_(), "th") == ["layers", "weight", "input", "output", "also"]
    assert cells(layer._repr_html_(), "td") == ["layer", str(spec), "-", "-", "learned"]


def test_code_and_columns_keep_their_spaces_in_html():
    html = html_of("next:\n\nimport fakequant as fq\n\nx = f(1)      # <one>\ny = 2\n\nthe end")
    assert re.findall("<pre [^>]*>(.*?)</pre>", html, re.DOTALL) == [
        "import fakequant as fq",
        "x = f(1)      # &lt;one&gt;\ny = 2",
    ]
    assert cells(html, "p") == ["next:", "the end"]


def cells(html, tag):
    return re.findall(f"<{tag} [^>]*>(.*?)</{tag}>", html)


def test_tables_have_their_cells_in_html():
    text = "before <b>\n\n" + table(["layer", "why", "n"], [["0", "a | b", 8], ["conv.1 + x", "", 16]]) + "\n\nafter"
    html = html_of(text)
    assert cells(html, "p") == ["before &lt;b&gt;", "after"]
    assert cells(html, "th") == ["layer", "why", "n"]
    assert cells(html, "td") == ["0", "a | b", "8", "conv.1 + x", "", "16"]
    assert re.findall(r"<td style=\"text-align: (\w+)", html) == ["left", "left", "right"] * 2
    assert html.count("<table") == html.count("</table>") == 1


@pytest.mark.parametrize(
    "text", ["", "one line", "a\n---\nb", "a | b\n--+--\nc", table(["name"], []), table(["n"], [[1]])]
)
def test_any_text_has_html(text):
    html = html_of(text)
    assert html.startswith("<div")
    assert html.endswith("</div>")
    words = re.sub(r"<[^>]*>", " ", html).split()
    assert [w for w in words if w.isalnum()] == [w for w in text.split() if w.isalnum()]


def test_html_has_no_scripts_and_no_colors():
    html = fq.info()._repr_html_() + html_of(table(["a", "b"], [["<script>", 1]]))
    assert "<script" not in html
    assert not re.search(r"#[0-9a-f]{3}|rgb|(?<!current)color:", html)


def test_a_shown_dataclass_still_compares_and_has_fields():
    found = fq.info()
    assert found == dataclasses.replace(found)
    assert found != dataclasses.replace(found, num_threads=found.num_threads + 1)
