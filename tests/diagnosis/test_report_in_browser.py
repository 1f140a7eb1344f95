"""The report in a real browser: no errors, everything visible, no requests."""

import copy
import json
import re
import shutil
import subprocess

import pytest

import fakequant as fq
from fakequant import recipes

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")
nn = torch.nn

from fakequant._diagnosis.health import History  # noqa: E402
from fakequant._diagnosis.report.writing import report  # noqa: E402

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for path in map(shutil.which, NAMES) if path), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"needs one of {', '.join(NAMES)}")

# Runs in the page: does what a reader can do and writes what it finds into the page.
LOOK = """
<script>
const problems = [];
addEventListener("securitypolicyviolation", (e) => problems.push("blocked: " + e.blockedURI));
addEventListener("error", (e) => problems.push("error: " + e.message), true);
const seen = (el) => { const r = el.getBoundingClientRect(); return r.width > 0 && r.height > 0; };
function look() {
  document.querySelectorAll("details").forEach((d) => { d.open = true; });
  const figures = Array.from(document.querySelectorAll("figure svg"));
  const cut = [];
  for (const svg of figures) {
    const box = svg.getBoundingClientRect();
    for (const text of svg.querySelectorAll("text")) {
      const r = text.getBoundingClientRect();
      if (r.left < box.left - 1 || r.right > box.right + 1 || r.top < box.top - 1 || r.bottom > box.bottom + 1)
        cut.push(text.textContent);
    }
  }
  const style = getComputedStyle(document.documentElement);
  const light = (name) => {
    const hex = style.getPropertyValue(name).trim().slice(1);
    const [r, g, b] = [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255)
      .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = {};
  for (const ink of ["--ink", "--muted", "--accent", "--warn", "--good", "--third"])
    for (const paper of ["--paper", "--panel"]) {
      const [a, b] = [light(ink), light(paper)].sort((x, y) => y - x);
      contrast[ink + " on " + paper] = (a + 0.05) / (b + 0.05);
    }
  const fills = figures.map((svg) => getComputedStyle(svg.querySelector("text")).fill);
  return {
    figures: figures.length, visible: figures.filter(seen).length, unnamed: figures.filter(
      (svg) => !svg.getAttribute("aria-label") || svg.getAttribute("role") !== "img").length,
    cut, contrast, fills: Array.from(new Set(fills)), paper: getComputedStyle(document.body).backgroundColor,
    wide: document.documentElement.scrollWidth > innerWidth,
  };
}
function sorted(column) {
  const table = document.querySelector("#quantizers table");
  table.tHead.rows[0].cells[column].querySelector("button").click();
  return Array.from(table.tBodies[0].rows, (row) => row.cells[column].dataset.value ?? row.cells[column].textContent);
}
const found = { dark: matchMedia("(prefers-color-scheme: dark)").matches, first: look() };
found.ascending = sorted(4);
found.descending = sorted(4);
found.names = sorted(0);
document.getElementById("theme").click();
found.other = look();
found.requests = performance.getEntriesByType("resource").map((entry) => entry.name);
setTimeout(() => {
  found.problems = problems;
  const place = document.createElement("pre");
  place.id = "found";
  place.textContent = JSON.stringify(found);
  document.body.append(place);
}, 0);
</script>
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    model.add_module("a_name_that_is_long_enough_to_be_cut", nn.Linear(4, 4))
    data = [torch.rand(32, 8)]
    float_model = copy.deepcopy(model)
    prepared = fq.calibrate(fq.prepare(model, recipes.w4a8(), data[0]), data, progress=False)
    history = History()
    for step in range(3):
        history.measure(1000 * step, prepared, [data[0] * (1 + step)])
    sensitivity = fq.sensitivity(
        float_model, recipes.w4a8(), lambda m: -float(m(data[0]).square().sum()), data=data, progress=False
    )
    return report(
        prepared,
        tmp_path_factory.mktemp("report"),
        [data[0] * 2],
        float_model=float_model,
        sensitivity=sensitivity,
        history=history,
        max_tensors=3,
        progress=False,
    )


def browse(text, folder, *, dark, width):
    """Returns what the script in the page found, and the lines of the console."""
    copy_path = folder / "copy.html"
    copy_path.write_text(text.replace("</body>", LOOK + "</body>"), encoding="utf-8")
    command = [
        *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
        *(
            "--host-resolver-rules=MAP * ~NOTFOUND",
            "--enable-logging=stderr",
            "--v=0",
            f"--user-data-dir={folder}/user",
        ),
        *(f"--window-size={width},900", f"--blink-settings=preferredColorScheme={0 if dark else 1}"),
        *("--virtual-time-budget=2000", "--dump-dom", copy_path.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    written = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert written, done.stderr
    found = json.loads(written[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    return found, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.parametrize(("dark", "width"), [(False, 1280), (True, 500)], ids=["light", "dark and narrow"])
def test_the_report_is_fully_visible_and_free_of_errors_in_a_browser(page, tmp_path, dark, width):
    text = page.read_text(encoding="utf-8")
    found, console = browse(text, tmp_path, dark=dark, width=width)
    assert console == []
    assert found["problems"] == []
    assert found["requests"] == []
    assert found["dark"] == dark
    for look in (found["first"], found["other"]):  # with the system's theme, and after the theme button
        assert look["figures"] == look["visible"] == text.count("<svg ") == len(list(page.parent.glob("figures/*.png")))
        assert look["unnamed"] == 0
        assert look["cut"] == []
        assert not look["wide"]
        assert len(look["contrast"]) == 12
        assert min(look["contrast"].values()) >= 4.5, look["contrast"]
    assert found["first"]["paper"] != found["other"]["paper"]
    assert not set(found["first"]["fills"]) & set(found["other"]["fills"])
    # Tables are sorted by number and by name.
    values = [float(value) for value in found["ascending"] if value]
    assert len(values) > 2
    assert values == sorted(values)
    assert [float(value) for value in found["descending"] if value] == values[::-1]
    assert found["names"] == sorted(found["names"])


def test_the_browser_check_detects_a_broken_page(page, tmp_path):
    text = page.read_text(encoding="utf-8")
    wrong = (
        '<img src="http://example.com/a.png"><script>undefined_function()</script><script>console.error("no")</script>'
    )
    text = text.replace("figure svg {", "figure:first-of-type svg { display: none !important } figure svg {")
    found, console = browse(text.replace("<main>", "<main>" + wrong), tmp_path, dark=False, width=1280)
    assert any("example.com" in line and "Content Security Policy" in line for line in console)
    assert any("undefined_function" in line for line in console)
    assert found["first"]["visible"] < found["first"]["figures"]
