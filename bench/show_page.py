"""The page of ``graphzero show`` for GPT-2 124M: seconds to write it, its size, and pictures of it.

    PYTHONPATH=. python bench/show_page.py                   # writes /tmp/graphzero_page.html, and says what it took
    PYTHONPATH=. python bench/show_page.py --pictures docs   # and docs/page_light.png, page_dark.png and page_phone.png

Pictures want playwright and /usr/bin/chromium.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path

import torch
from models import gpt2

import graphzero as gz
from graphzero.cli import main

PICTURES = {"page_light": ("light", 1280, 1180), "page_dark": ("dark", 1280, 1180), "page_phone": ("dark", 390, 1500)}
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]


class GPT2(gz.Graph):
    """GPT-2 124M under AdamW, float32."""

    def __init__(self, placement: gz.Placement | None, stage: int) -> None:
        super().__init__(placement)
        with torch.device("meta"):
            self.model = gpt2(12, width=768, heads=12, vocabulary=50257, context=1024)
        self.add_optimizer(torch.optim.AdamW(self.model.parameters(), lr=3e-4), clip_grad_norm=1.0)
        self.config.enable_zero(stage > 0, stage=stage or 1)

    def build(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = self.model(ids, targets)
        loss.backward()
        return loss


def make(placement: gz.Placement | None, stage: int) -> tuple[GPT2, tuple[torch.Tensor, torch.Tensor]]:
    """The FACTORY: one rank's batch of four sequences."""
    ids = torch.zeros(4, 1024, dtype=torch.long, device="meta")
    return GPT2(placement, stage), (ids, ids)


def take_pictures(page: Path, folder: Path) -> None:
    """Of the page as it opens, in light, in dark, and at the width of a phone."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=ARGUMENTS)
        for name, (scheme, width, height) in PICTURES.items():
            shown = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            shown.goto(page.as_uri())
            shown.wait_for_timeout(500)
            shown.screenshot(path=folder / f"{name}.png")
        browser.close()


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="where pictures of the page are put")
    parser.add_argument("--output", type=Path, default=Path("/tmp/graphzero_page.html"))
    options = parser.parse_args()
    page, factory = options.output.resolve(), f"{__file__}:make"
    for more in ([], ["--beside", "stage=1"]):
        began = time.process_time()
        assert main(["show", factory, "--ranks", "8", "--stage", "3", "--html", str(page), *more]) == 0
        seconds, size = time.process_time() - began, page.stat().st_size
        print(f"  {1 + bool(more)} plan(s): {seconds:.1f} s of one core, {size / 1e6:.2f} MB")
        assert size < 5e6, "a page of a model of this size should be one that can be mailed"
    print(f"  {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB of memory at most")
    if options.pictures:
        take_pictures(page, options.pictures)


if __name__ == "__main__":
    run()
