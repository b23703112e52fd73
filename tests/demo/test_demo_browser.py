"""The demo in a real browser, without a network."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import browsers
import pytest

pytestmark = pytest.mark.browser
ROOT = Path(__file__).resolve().parents[2]
DESKTOP = {"width": 1280, "height": 900}
STARTED_WITHIN = 120  # seconds; it takes some eight, but a machine may be busy


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """``(url, log of what went elsewhere)``."""
    with serving(tmp_path_factory.mktemp("demo") / "elsewhere.log", "--model", "probe") as found:
        yield found


@contextmanager
def serving(log: Path, *arguments: str):
    """The demo in a process of its own: ``(url, log)``."""
    log.touch()
    command = [sys.executable, str(ROOT / "tests/demo/demo_server.py"), str(log), *arguments]
    with (log.parent / "server.log").open("w+") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=_environment(), stdout=out, stderr=subprocess.STDOUT)
        try:
            yield _url(process, Path(out.name)), log
        finally:
            process.terminate()
            process.wait(20)


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def _url(process: subprocess.Popen, out: Path) -> str:
    end = time.monotonic() + STARTED_WITHIN
    while time.monotonic() < end:
        found = re.search(r"http://127\.0\.0\.1:\d+", out.read_text())
        if found:
            return found.group()
        assert process.poll() is None, out.read_text()
        time.sleep(0.2)
    raise AssertionError(f"the demo did not start within {STARTED_WITHIN} s: {out.read_text()}")


@pytest.fixture(scope="module")
def browser():
    if reason := browsers.missing():
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Containers give no user namespaces, and little shared memory.
        options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-proxy-server"]
        browser = playwright.chromium.launch(executable_path=browsers.find(), args=options)
        yield browser
        browser.close()


class Tab:
    """A page of the demo, with what it asked for and complained about."""

    def __init__(self, browser, url: str, **context) -> None:
        self.context = browser.new_context(**{"viewport": DESKTOP} | context)
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type == "error" else None)
        self.page.goto(url)
        self.page.wait_for_selector("#race")

    def number(self, name: str, value: int) -> None:
        field = self.page.locator(f"#{name} input[type=number]")
        field.fill(str(value))
        field.press("Tab")

    def text(self, name: str) -> str:
        return self.page.inner_text(f"#{name}")

    def status(self) -> str:
        return self.text("status").strip()

    def wait_status(self, *beginnings: str, seconds: float = 90) -> str:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if (status := self.status()).startswith(beginnings):
                return status
            time.sleep(0.05)
        raise AssertionError(f"status is {self.status()!r}, not {beginnings}, after {seconds} s")

    def points(self) -> tuple[int, int]:
        """Tokens drawn, dense and sparse."""
        plot = self.page.locator("#plot .plot")
        return tuple(int(plot.get_attribute(f"data-{name}") or 0) for name in ("dense", "sparse"))

    def race(self) -> None:
        self.page.click("#race")


@pytest.fixture(scope="module")
def tabs(browser, server):
    """Makes tabs; afterwards none has asked for anything elsewhere, or complained."""
    url, elsewhere = server
    made: list[Tab] = []

    def make(**context) -> Tab:
        made.append(Tab(browser, url, **context))
        return made[-1]

    yield make
    try:
        for tab in made:
            assert all(r.startswith((url, "data:", "blob:")) for r in tab.requests), tab.requests
            assert not tab.complaints
        assert elsewhere.read_text() == "", "the server reached out"
    finally:
        for tab in made:
            tab.context.close()


@pytest.fixture(scope="module")
def tab(tabs):
    """The tab of all races that need one alone: each test leaves it when its race is done."""
    return tabs()


FOUND = "the hidden fact: found"


@pytest.mark.small_model
def test_the_first_press_finds_the_fact(browser, tmp_path):
    """Nothing is touched but the button: the small model, the settings that the page begins with."""
    with serving(tmp_path / "elsewhere.log") as (url, _):
        tab = Tab(browser, url)
        assert "small" in tab.page.input_value("#model input")
        shown = tab.text("verdict")
        assert "Recorded" in shown and "context" in shown, "a recorded race is there before anything is pressed"
        tab.race()
        tab.wait_status("Done", seconds=400)
        dense, sparse = tab.text("pane-dense"), tab.text("pane-sparse")
        verdict = tab.text("verdict")
        tab.context.close()
    assert FOUND in dense and FOUND in sparse
    assert re.match(r"Reads \d+ % of the context, same answer: both find the hidden fact\n", verdict), verdict
    share = int(re.search(r"\d+", verdict).group())
    assert share < 50, "there is something to choose"
    assert not tab.complaints


def test_race_streams_draws_and_finds_the_needle(tab):
    tab.number("new-tokens", 64)
    tab.race()
    tab.wait_status("Reading", "Decoding")
    seen, texts = set(), set()
    tab.wait_status("Decoding")
    while not tab.status().startswith("Done"):
        assert not tab.page.locator("#status .error").count(), tab.status()
        seen.add(tab.points())
        texts.add(tab.text("pane-dense") + tab.text("pane-sparse"))
        time.sleep(0.1)
    assert tab.points() == (63, 63), "a point for every token after the first"
    for lane in range(2):
        assert len({points[lane] for points in seen}) >= 3, "the plot grew on this line"
        assert tab.page.locator("#plot polyline").nth(lane).get_attribute("points")
    assert len(texts) >= 3, "tokens streamed"
    assert tab.page.locator("#heat img").count() == 1, "the blocks of a step after the answer"
    assert FOUND in tab.text("pane-dense") and FOUND in tab.text("pane-sparse")
    table = tab.text("numbers")
    assert re.search(r"time per token, median\s+[\d.]+ ms\s+[\d.]+ ms", table)
    read = [float(x) for x in re.search(r"KV read per token\s+([\d.]+) MB\s+([\d.]+) MB", table).groups()]
    assert read[1] < read[0], "the sparse cache reads less"
    assert re.match(r"Reads \d+ % of the context, same answer: both find the hidden fact\n", tab.text("verdict"))
    assert re.search(r"Time: \d+ ms a token, full attention \d+ ms", tab.text("verdict"))


# Text that is shown, with its contrast by WCAG 2.2 to the first opaque background below it.
CONTRASTS = """() => {
    const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
    const light = ([r, g, b]) => [r, g, b]
        .map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const found = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const text = walker.currentNode.textContent.trim(), own = walker.currentNode.parentElement;
        if (!text || !own.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
        if (own.closest('[disabled], script, style, noscript')) continue;
        let back = own;
        while (back && (parse(getComputedStyle(back).backgroundColor)[3] ?? 1) < 1) back = back.parentElement;
        const page = back ? parse(getComputedStyle(back).backgroundColor) : [255, 255, 255];
        const pair = [light(parse(getComputedStyle(own).color)), light(page)].sort((a, b) => b - a);
        found.push([(pair[0] + 0.05) / (pair[1] + 0.05), text.slice(0, 60)]);
    }
    return found;
}"""


@pytest.mark.parametrize("viewport", [DESKTOP, {"width": 390, "height": 844}], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_both_schemes(tabs, scheme, viewport, tmp_path):
    tab = tabs(color_scheme=scheme, viewport=viewport)
    tab.page.locator("#recorded button").first.click()
    tab.wait_status("The recording has ended")
    found = tab.page.evaluate(CONTRASTS)
    tab.page.screenshot(path=tmp_path / "page.png", full_page=True)
    assert len(found) > 40
    assert not (faint := sorted((round(ratio, 2), text) for ratio, text in found if ratio < 4.5)), faint
    dark = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(int(c) for c in re.findall(r"\d+", dark)[:3]) < 200) is (scheme == "dark"), dark
