"""Pictures of the demo as it looks after a race, at desktop and phone width, in one file.

    python tools/demo_screenshot.py [--model small] [--length 2048] [--out docs/demo.png]

Needs a Chromium (`make browser`).
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/demo")]

import browsers  # noqa: E402 (of the tests)
from PIL import Image  # noqa: E402

from demo import app  # noqa: E402
from demo.models import Models, pick_device  # noqa: E402

DESKTOP, PHONE = 1280, 390
WIDTH = 1300  # of the picture


def shots(url: str, args: argparse.Namespace) -> list[Image.Image]:
    """Desktop, then phone: the results and the controls below them, side by side."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-proxy-server"]
        browser = playwright.chromium.launch(executable_path=browsers.find(), args=options)
        found = []
        for width in (DESKTOP, PHONE):
            page = browser.new_page(viewport={"width": width, "height": 900})
            page.goto(url)
            for name, value in (("length", args.length), ("new-tokens", args.new_tokens)):
                field = page.locator(f"#{name} input[type=number]")
                field.fill(str(value))
                field.press("Tab")
            page.wait_for_timeout(1500)  # the question follows the length
            page.click("#race")
            page.wait_for_selector("text=/^Done/", timeout=1_800_000)
            page.mouse.move(0, 0)
            page.wait_for_timeout(500)
            found.append(Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB"))
            if width == PHONE:  # the results, then the controls
                at = int(page.evaluate("document.getElementById('settings').getBoundingClientRect().top + scrollY")) - 8
                phone = found.pop()
                found += [phone.crop((0, 0, width, at)), phone.crop((0, at, width, phone.height))]
            page.close()
        browser.close()
    return found


def beside(pictures: list[Image.Image], gap: int = 24) -> Image.Image:
    """One picture of all, on white."""
    size = (sum(p.width for p in pictures) + gap * (len(pictures) + 1), max(p.height for p in pictures) + 2 * gap)
    whole, x = Image.new("RGB", size, "white"), gap
    for picture in pictures:
        whole.paste(picture, (x, gap))
        x += picture.width + gap
    return whole


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="small")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "demo.png")
    args = parser.parse_args()
    if reason := browsers.missing():
        print(reason, file=sys.stderr)
        return 1
    torch.set_num_threads(max(1, (os.cpu_count() or 2) - 1))
    page, url = app.launch(Models(pick_device(args.device)), args.model, block=False)
    try:
        whole = beside(shots(url, args))
        whole = whole.resize((WIDTH, whole.height * WIDTH // whole.width), Image.Resampling.LANCZOS)
        whole = whole.quantize(64, dither=Image.Dither.NONE)
    finally:
        page.close()
    whole.save(args.out, optimize=True)
    print(f"{args.out}: {whole.width} x {whole.height}, {args.out.stat().st_size >> 10} KiB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
