"""The page in a real browser, headless: what a reader sees, and what keys do."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from page_toy import FACTORY

import graphzero as gz
from graphzero.cli import factory, main
from graphzero.testing import fake_world

api = pytest.importorskip("playwright.sync_api", reason="no playwright here: pip install playwright")
CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
EVENTS = [  # measured, of two stages of a pipeline: half of what is sent is awaited
    {"name": name, "stream": stream, "kind": kind, "phase": "forward", "begin": at, "end": at + took, "stage": stage}
    for name, stream, kind, at, took, stage in (
        ("addmm", "compute", "addmm", 0.0, 2e-5, 0),
        ("relu", "compute", "relu", 3e-5, 2e-5, 1),
        ("mm", "compute", "mm", 6e-5, 2e-5, 1),
        ("launch_1", "communication dp", "all_gather", 6e-5, 4e-5, 1),
        ("wait_1", "compute", "await", 8e-5, 2e-5, 1),
    )
]
if not Path(CHROMIUM).exists():
    assert not os.environ.get("NEEDS_CHROMIUM"), f"there is no {CHROMIUM}, and NEEDS_CHROMIUM is set"
    pytest.skip(f"there is no {CHROMIUM}: apt-get install chromium", allow_module_level=True)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One page of two plans, open in one browser: the page, the graph of its first plan, and what it complained of."""
    folder = tmp_path_factory.mktemp("page")
    file, out = folder / "train.py", folder / "report.html"
    file.write_text(FACTORY)
    measured = folder / "measured.json"
    measured.write_text(json.dumps({"measured": EVENTS}))
    made = ["show", f"{file}:make", "--ranks", "4", "--stage", "3", "--html", str(out), "--beside", "stage=1"]
    assert main([*made, "--measured", str(measured)]) == 0
    with fake_world(4):
        graph, example = factory.make(f"{file}:make", gz.placement("cuda", range(4)), 3)
        graph.compile(*example)
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
        page.set_default_timeout(8000)
        problems: list[str] = []
        page.on("console", lambda said: problems.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "request", lambda asked: problems.append(asked.url) if asked.url[:5] not in ("file:", "data:") else None
        )
        page.goto(out.as_uri())
        yield SimpleNamespace(page=page, graph=graph, problems=problems, folder=folder, address=out.as_uri())
        browser.close()
    assert not problems


@pytest.fixture
def page(seen: Any) -> Iterator[Any]:
    """The page as it opens."""
    seen.page.set_viewport_size({"width": 1280, "height": 900})
    seen.page.goto("about:blank")
    seen.page.goto(seen.address)
    yield seen.page
    assert not seen.problems


def texts(page: Any, what: str) -> list[str]:
    return page.locator(what).all_inner_texts()  # type: ignore[no-any-return]


def changed(diff: str) -> list[str]:
    """The lines of a diff that a pass took out and put in."""
    return [line for line in diff.splitlines()[2:] if line[0] in "+-"]


def test_it_opens_at_the_peak_and_names_what_runs_there_and_what_is_alive(page: Any, seen: Any) -> None:
    plan = seen.graph.plan
    name = re.match(r"'(\w+)'", plan.memory.peak_at)[1]  # type: ignore[index]
    peak = gz.plan.mega(plan.memory.peak)
    tip = page.locator("#memory-plot .tip")
    assert tip.inner_text().splitlines()[:2] == [f"peak: {name}", f"{peak} in backward"]
    assert peak in page.locator("#figures").inner_text() and f"at {name} in" in page.locator("#figures").inner_text()
    assert page.locator("#alive h3").inner_text().startswith(peak)
    alive = texts(page, "#alive li")
    assert len(alive) == 13 and any("model_layers_0_weight_exp_avg" in line for line in alive)

    over = page.locator("#memory-plot .u-over").bounding_box()
    page.mouse.move(over["x"] + 2, over["y"] + 50)  # the first op
    first = next(node.name for node in seen.graph.program.nodes if node.op != "placeholder")
    assert tip.inner_text().startswith(f"{first}\n") and first in page.locator("#alive").inner_text()
    page.mouse.move(5, 5)
    assert tip.inner_text().startswith(f"peak: {name}\n")


def test_search_finds_a_parameter_and_a_value_is_linked_to_all_that_belongs_to_it(page: Any) -> None:
    page.keyboard.press("/")
    page.keyboard.type("model.layers.1.weight")
    rows = texts(page, "#program-list .value-line")
    assert rows and all("model.layers.1.weight" in row for row in rows)
    assert re.fullmatch(r"\d+ of \d+", page.locator("#found").inner_text())
    page.keyboard.press("Enter")
    assert page.locator("#value h3").inner_text() == "model_layers_1_weight"
    assert page.locator("#program-list [aria-selected=true]").inner_text().strip() == rows[0].strip()

    page.locator("#search").fill("addmm_1")
    page.locator("#program-list .value-line", has_text="addmm_1 = addmm(").click()
    about = page.locator("#value").inner_text()
    assert "train.py:" in about and "model.layers.1" in about and "the capture" in about
    page.locator("#value .links .name", has_text="relu_1").click()  # a reader
    assert page.locator("#value h3").inner_text() == "relu_1" and page.url.endswith("#value=relu_1")
    page.keyboard.press("Escape")

    page.locator("#search").fill("adam(")
    page.locator("#search").press("Enter")
    page.locator("#value dd button", has_text="fuse_adam").click()
    assert "fuse_adam" in page.locator("#pass-name").inner_text()
    assert "adam = adam(" in page.locator("#pass-list .diff-line.chosen").inner_text()


def test_filters_leave_values_of_a_phase_an_sbp_and_a_module(page: Any) -> None:
    page.locator("#phase").select_option("backward")
    page.locator("#sbp").select_option("P")
    page.locator("#module").select_option("model.layers")
    rows = texts(page, "#program-list .value-line")
    assert rows and all(re.search(r"  P(\s|$)", row) for row in rows)
    assert not page.locator("#program-list .heading-line").count()


def test_the_slider_shows_what_each_pass_changed(page: Any, seen: Any) -> None:
    whole = page.evaluate(
        "passes.plan.passes.map((pass, i) => { passes.choose(i); "
        "return passes.diff().filter((item) => item.kind === 'in' || item.kind === 'out')"
        ".map((item) => (item.kind === 'in' ? '+' : '-') + item.text); })"
    )
    for lines, record in zip(whole, seen.graph.history, strict=True):  # beside the line that each takes the place of
        assert sorted(lines) == sorted(changed(record.diff()))
        assert [line for line in lines if line[0] == "+"] == [x for x in changed(record.diff()) if x[0] == "+"]
    name = "  model_layers_0_weight = param(model.layers.0.weight) : f32[256, 256]  "
    assert whole[1][:2] == [f"-{name}B!", f"+{name}S(0)!"]
    slider = page.locator("#pass")
    shown = []
    propagate = [record.name for record in seen.graph.history].index("propagate")
    for number in (1, propagate):
        slider.fill(str(number))
        record = seen.graph.history[number]
        assert page.locator("#pass-name").inner_text().startswith(f"{number + 1}. {record.name} ")
        first = next(line for line in changed(record.diff()) if line[0] == "+")
        assert page.locator("#pass-list .in").first.inner_text() == first
        shown.append(first)
    assert shown[0] != shown[1]
    slider.press("ArrowRight")
    assert page.locator("#pass-name").inner_text().startswith(f"{propagate + 2}. insert_boxing")
    page.locator("#pass-shows [data-shows=after]").click()
    assert not page.locator("#pass-list .in").count()


def test_keys_work(page: Any, seen: Any) -> None:
    page.keyboard.press("]")
    assert page.locator("#pass-name").inner_text().startswith("3. stack_updates")
    page.keyboard.press("[")
    assert page.locator("#pass-name").inner_text().startswith("2. zero")
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#help").is_visible()

    page.keyboard.press("p")
    page.keyboard.press("ArrowRight")
    names = [node.name for node in seen.graph.program.nodes]
    after = names[names.index(re.match(r"'(\w+)'", seen.graph.plan.memory.peak_at)[1]) + 1]  # type: ignore[index]
    assert page.locator("#memory-plot .tip").inner_text().startswith(f"{after}\n")
    page.locator("#program-list").focus()
    for key in ("Home", "ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    assert page.locator("#value h3").inner_text() == names[2]

    page.locator("#timeline-plot").focus()
    page.keyboard.press("Home")
    assert (
        page.locator("#event").inner_text() == "addmm addmm, forward, 20.0 µs from 0.0 µs; measured: stage 0, compute"
    )
    page.keyboard.press("x")
    assert page.locator("#plans [aria-pressed=true]").inner_text() == "B: stage 1, dp=4, h100"


def test_times_are_planned_and_measured_with_a_lane_for_each_stream_of_each_stage(page: Any, seen: Any) -> None:
    lanes = page.evaluate("timeline.lanes.map((lane) => lane.name)")
    measured = [f"measured: stage {lane}" for lane in ("0, compute", "1, compute", "1, communication dp")]
    assert lanes == ["planned: compute", "planned: communication dp", *measured]
    over = page.locator("#timeline-plot .u-over")
    width, height = (over.bounding_box()[side] for side in ("width", "height"))
    at = page.evaluate("timeline.plot.valToPos(7e-5, 'x')")
    over.hover(position={"x": at, "y": height * 7 / 10})
    assert 0 < at < width
    assert page.locator("#event").inner_text() == "mm mm, forward, 20.0 µs from 60.0 µs; measured: stage 1, compute"
    over.click(position={"x": at, "y": height * 7 / 10})
    assert page.locator("#value h3").inner_text() == "mm"
    figures = " ".join(page.locator("#figures").inner_text().split())
    assert "links: assumed, not measured" in figures
    of_measured = ("a step takes 100.0", "compute 60.0", "communication 40.0", "of it exposed 20.0")
    assert " ".join(f"measured: {one} µs" for one in of_measured) in figures

    page.locator("#memory-axis [data-axis=time]").click()
    page.keyboard.press("p")
    assert page.locator("#memory-plot .tip").inner_text().startswith("peak: ")
    page.keyboard.press("Home")
    page.keyboard.press("+")
    assert not page.locator("#memory-plot .tip").inner_text().startswith("peak: ")


def test_a_peak_that_is_narrower_than_a_pixel_is_drawn(page: Any) -> None:
    """And where one zooms in, each moment is."""
    across, totals = list(range(5000)), [1] * 5000
    totals[2503] = 9
    drawn = page.evaluate("([across, totals]) => columns(across, totals, 0, 4999, 400)", [across, totals])
    assert 2503 in drawn and drawn[0] == 0 and drawn[-1] == 4999 and len(drawn) < 420
    close = page.evaluate("([across, totals]) => columns(across, totals, 2500, 2520, 400)", [across, totals])
    assert close == across
    highest = page.evaluate("Math.max(...memory.plot.data[1])")
    assert highest == page.evaluate("page.plan.total[page.plan.memory.peak]")
    before = page.evaluate("memory.plot.scales.x.max - memory.plot.scales.x.min")
    page.locator("#memory-plot").focus()
    page.keyboard.press("+")
    assert page.evaluate("memory.plot.scales.x.max - memory.plot.scales.x.min") < before
    page.keyboard.press("0")


def test_activations_have_a_shade_for_each_layer_in_turn(page: Any) -> None:
    bands = page.evaluate("page.plan.bands.map((band) => band.category)")
    assert bands.count("activations") + bands.count("activations_2") >= 3
    assert "activations, layer by layer" in page.locator("#memory-legend").inner_text()
    assert page.evaluate(
        "page.plan.bands.reduce((sum, band) => sum + band.bytes[page.plan.memory.peak], 0)"
    ) == page.evaluate("page.plan.total[page.plan.memory.peak]")


def test_two_plans_stand_side_by_side(page: Any, seen: Any) -> None:
    rows = dict(line.split("\t", 1) for line in texts(page, "#compare-table tbody tr"))
    peak = gz.plan.mega(seen.graph.plan.memory.peak)
    assert rows["peak of memory"].startswith(peak) and "seconds of a step, planned" in rows
    assert page.locator("#compare-plots canvas").count() == 2


CONTRAST = """() => {
  const channel = (x) => (x /= 255) <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const rgb = (name) => {
    const probe = document.body.appendChild(el("i", { style: `color: var(--${name})` }));
    const found = getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map(Number);
    probe.remove();
    return found;
  };
  const ratio = (a, b) => {
    const [x, y] = [light(rgb(a)), light(rgb(b))].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const names = ["text", "muted", "accent", "sbp-b", "sbp-s", "sbp-s1", "sbp-p", "role", "type"];
  return Math.min(...names.flatMap((name) => ["card", "in", "out", "stripe"].map((under) => ratio(name, under))));
}"""


def test_it_is_legible_in_light_and_in_dark(page: Any) -> None:
    def background() -> str:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")  # type: ignore[no-any-return]

    found = {}
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        found[scheme] = background()
        assert page.evaluate(CONTRAST) >= 4.5, scheme
    assert found["light"] != found["dark"] == background()
    page.keyboard.press("t")  # light, whatever the system says
    assert background() == found["light"]
    page.keyboard.press("t")
    assert background() == found["dark"]
    page.emulate_media(color_scheme="light")
    assert background() == found["dark"]
    page.keyboard.press("t")
    assert background() == found["light"]


def test_it_fits_a_phone(page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_timeout(400)  # it waits a moment before it draws again
    assert page.locator("#memory-plot canvas").bounding_box()["width"] < 390
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.locator("#memory-plot .u-over").click(position={"x": 8, "y": 60})
    assert "peak" not in page.locator("#memory-plot .tip").inner_text()
    table = page.locator("#compare-table").bounding_box()
    for cell in page.locator("#compare-table tbody tr").first.locator("td").all():
        box = cell.bounding_box()
        assert table["x"] < box["x"] and box["x"] + box["width"] <= 390  # numbers are in sight


def test_a_name_is_text_whatever_it_holds(seen: Any) -> None:
    out = seen.folder / "badly_named.html"
    file = seen.folder / "train.py"
    assert main(["show", f"{file}:badly_named", "--ranks", "2", "--device", "cpu", "--html", str(out)]) == 0
    page = seen.page
    page.goto(out.as_uri())
    assert page.locator("#title").inner_text().startswith("</script><img src=x onerror=alert(1)> · stage 2")
    assert not page.locator("img").count() and page.locator("#figures .figure").count() == 4
    assert "give the command a --device" in page.locator("#timeline").inner_text()
    assert not seen.problems
