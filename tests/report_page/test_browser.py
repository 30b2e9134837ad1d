"""The page in a browser: it draws without an error, loads nothing, fits a phone and a desk, and is dark where asked."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from job_harness import SAMPLES, cbgen
from report_page.report_harness import busy, failure, life, many_lives, run, write_finished

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTHS = (400, 1400)
HOSTILE = [
    "</script><script>window.harmed = 1</script>",
    '<img src="http://127.0.0.1/x" onerror="window.harmed = 1">',
    "\"double\" 'single' `back` {{ 7 * 7 }} {% raw %}",
    "مرحبا بالعالم שלום 👩‍👩‍👧 \u202e\u2028",
    "<!-- <svg/onload=window.harmed=1>",
]
# Elements that stick out, and texts of one drawing that lie on each other.
MEASURE = """() => {
  const width = document.documentElement.clientWidth, outside = [], overlaps = [];
  for (const element of document.querySelectorAll("body *:not(#tip)")) {
    const box = element.getBoundingClientRect();
    if (box.width && (box.right > width + 0.5 || box.left < -0.5)) outside.push(element.outerHTML.slice(0, 80));
  }
  for (const svg of document.querySelectorAll(".plot svg")) {
    const texts = [...svg.querySelectorAll("text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
    texts.forEach(([name, a], i) => texts.slice(0, i).forEach(([other, b]) => {
      const apart = a.left >= b.right - 1 || b.left >= a.right - 1 || a.top >= b.bottom - 3 || b.top >= a.bottom - 3;
      if (!apart) overlaps.push(`${svg.parentElement.dataset.chart}: ${name} / ${other}`);
    }));
  }
  return { outside, overlaps, scroll: document.documentElement.scrollWidth - width };
}"""

UNTIL_DRAWN = """() => new Promise((done) => {
  const fits = (plot) => plot.firstElementChild.clientWidth === plot.clientWidth;
  const look = () => [...document.querySelectorAll(".plot")].every(fits) ? done() : requestAnimationFrame(look);
  look();
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Opened:
    """A page that was opened, with all that went wrong."""

    def __init__(self, browser: Any, path: Path, width: int = 1400, scheme: str = "light"):
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.problems: list[str] = []
        self.page.on("console", lambda message: self.problems.append(message.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self._requested(request.url, path))
        self.page.goto(path.as_uri())

    def _requested(self, url: str, path: Path) -> None:
        if url != path.as_uri():
            self.problems.append(f"asks for {url}")

    def background(self) -> tuple[int, ...]:
        text = self.page.evaluate("getComputedStyle(document.body).backgroundColor")
        return tuple(int(part) for part in text.removeprefix("rgb(").rstrip(")").split(","))


def report_of(out: Path) -> Path:
    result = cbgen("report", out)
    assert result.exit_code == 0, result.output
    return Path(result.stdout.strip())


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A real small job; a long one with a pause, failures and runs; hostile rows; failures alone."""
    folder = tmp_path_factory.mktemp("reports")
    cbgen("run", SAMPLES / "mixed.jsonl", "--model", "tiny-random", "--max-tokens", 8, "--out", folder / "real.parquet")
    pause = [*many_lives(900), *many_lives(400, seed=1, start_s=90_000.0), failure("has 3 tokens"), failure("empty")]
    runs = [run(0.0, 400, **busy(offloads=1.0)), run(90_000.0, 200, **busy())]
    hostile = [life(n, prompt=text, completion=text) for n, text in enumerate(HOSTILE)]
    hostile += [failure(text + "e" * 10_000, text) for text in HOSTILE]
    write_finished(folder / "long.parquet", pause, runs)
    write_finished(folder / "hostile.parquet", hostile, [run(0.0, 20, **busy())])
    write_finished(folder / "failed.parquet", [failure("prompt is empty")] * 3)
    return {name: report_of(folder / f"{name}.parquet") for name in ("real", "long", "hostile", "failed")}


@pytest.mark.parametrize("name", ["real", "long", "hostile", "failed"])
def test_it_draws_and_fits(browser: Any, reports: dict[str, Path], name: str) -> None:
    """At the width of a phone and of a desk: no error, no request, nothing outside, no label on another."""
    opened = Opened(browser, reports[name])
    for width in WIDTHS:
        opened.page.set_viewport_size({"width": width, "height": 900})
        opened.page.evaluate(UNTIL_DRAWN)
        assert opened.page.evaluate(MEASURE) == {"outside": [], "overlaps": [], "scroll": 0}, width
    for plot in opened.page.query_selector_all(".plot"):
        assert plot.get_attribute("role") == "img"
        assert len(plot.get_attribute("aria-label")) > 10
        assert plot.query_selector("text") is not None
    assert opened.problems == []
    opened.page.close()


def test_light_and_dark(browser: Any, reports: dict[str, Path]) -> None:
    """By what the reader's system prefers, and by the button; printed it is light."""
    light, dark = (Opened(browser, reports["long"], scheme=scheme) for scheme in ("light", "dark"))
    assert min(light.background()) > 200
    assert max(dark.background()) < 60
    light.page.click("#theme")
    assert light.background() == dark.background()
    assert light.page.inner_text("#theme") == "Light"
    dark.page.emulate_media(media="print")
    assert min(dark.background()) > 200
    assert light.problems == dark.problems == []
    light.page.close()
    dark.page.close()


def test_values_under_the_pointer(browser: Any, reports: dict[str, Path]) -> None:
    """Each chart tells what is there; one over time shows the same moment in the others."""
    opened = Opened(browser, reports["long"])
    for plot in opened.page.query_selector_all(".plot"):
        plot.hover()
        assert len(opened.page.inner_text("#tip").splitlines()) >= 2
    opened.page.hover("[data-chart=batch]")
    shown = opened.page.locator(".cursor[visibility=visible]")
    assert "active: 7" in opened.page.inner_text("#tip")
    assert shown.count() >= 5
    opened.page.mouse.move(2, 2)
    assert opened.page.is_hidden("#tip")
    assert shown.count() == 0
    assert opened.problems == []
    opened.page.close()


def test_hostile_texts_are_shown_as_text(browser: Any, reports: dict[str, Path]) -> None:
    """Every one can be read, and none did anything."""
    opened = Opened(browser, reports["hostile"])
    shown = opened.page.evaluate("document.body.textContent")
    for text in HOSTILE:
        assert text in shown
    assert opened.page.evaluate("window.harmed === undefined && !document.querySelector('img')")
    assert opened.problems == []
    opened.page.close()
