"""The demo in a real browser, without a network."""

from __future__ import annotations

import itertools
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
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
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

    def __init__(self, browser, url: str) -> None:
        self.context = browser.new_context(viewport=DESKTOP)
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

    def make() -> Tab:
        made.append(Tab(browser, url))
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


def test_a_second_click_leaves_the_first_run_alone_and_a_second_question_reads_nothing_again(tab):
    tab.number("new-tokens", 96)
    tab.race()
    tab.wait_status("Decoding")
    assert tab.page.locator("#race").is_disabled()
    tab.page.locator("#question textarea").press("Enter")  # another way to start a race
    tab.page.wait_for_selector("text=running already")
    assert "was read before" in tab.wait_status("Done")
    assert tab.points() == (95, 95)
    assert FOUND in tab.text("pane-dense") and FOUND in tab.text("pane-sparse")
    assert tab.text("pane-sparse").count("ask ") >= 2, "it follows the first in the same pane"


def test_stop_ends_at_once_and_the_next_race_is_right(tab):
    tab.number("new-tokens", 1024)
    tab.race()
    tab.wait_status("Decoding")
    while min(tab.points()) < 3:
        time.sleep(0.1)
    began = time.monotonic()
    tab.page.click("#stop")
    tab.wait_status("Stopped", seconds=10)
    assert time.monotonic() - began < 5
    time.sleep(1)  # what was on its way is drawn
    drawn = tab.points()
    time.sleep(1)
    assert tab.points() == drawn, "nothing goes on behind the page"
    tab.number("new-tokens", 16)
    tab.race()
    assert "took" in tab.wait_status("Done"), "the document's memory was given back, so it is read again"
    assert FOUND in tab.text("pane-sparse")


def test_two_tabs_at_once(tab, tabs):
    two = tabs()
    for each, depth in ((tab, 20), (two, 80)):  # both read a document that is new to them
        each.number("depth", depth)
        each.number("new-tokens", 96)
    time.sleep(1)  # questions follow the depth
    assert tab.page.input_value("#question textarea") != two.page.input_value("#question textarea")
    tab.race()
    two.race()
    for each in (tab, two):
        each.wait_status("Reading", "Decoding")
    seen: list[tuple[int, int]] = []  # tokens drawn in both panes of each tab, while neither is done
    while not any(each.status().startswith("Done") for each in (tab, two)):
        seen.append((sum(tab.points()), sum(two.points())))
        time.sleep(0.1)
    grew = [b[0] > a[0] > 0 and b[1] > a[1] > 0 for a, b in itertools.combinations(seen, 2)]
    assert any(grew), "both went on at the same time"
    for each in (tab, two):
        each.wait_status("Done")
        assert each.points() == (95, 95)
        assert FOUND in each.text("pane-dense") and FOUND in each.text("pane-sparse")


def test_a_recording_plays_at_once_and_says_that_it_is_one(tabs):
    tab = tabs()
    began = time.monotonic()
    tab.page.locator("#recorded button", has_text="CPU").click()  # those of a GPU are over in two seconds
    tab.wait_status("Playing a recording")
    assert time.monotonic() - began < 10
    tab.page.wait_for_selector("#verdict .verdict")
    for word in ("Recorded", "commit", "torch"):
        assert word in tab.text("verdict")
    assert tab.text("pane-dense").count("recorded") == 1
    tab.page.click("#stop")
    tab.wait_status("The recording was stopped")


def test_the_chat_reads_the_document_once(tabs):
    tab = tabs()
    tab.number("length", 1024)
    time.sleep(1)  # the question follows the length
    tab.page.locator("button[role=tab]", has_text="Chat").click()
    for count in (1, 2):
        tab.page.click("#ask")
        tab.page.wait_for_selector(f"#asked tbody tr:nth-child({count}) td:nth-child(4):has-text('ms')")
        tab.page.wait_for_selector("#heard:has-text('Ask again')")
    rows = [tab.page.locator("#asked tbody tr").nth(i).locator("td").all_inner_texts() for i in range(2)]
    assert re.fullmatch(r"read in [\d.]+ s", rows[0][1]) and rows[1][1] == "not read again"
    first, second = (float(row[0].split()[0]) for row in rows)
    assert second < first, "time to the first token of both questions"
    assert len(tab.page.locator("#talk .bot").all_inner_texts()) >= 2
