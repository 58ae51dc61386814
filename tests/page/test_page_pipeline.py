"""The page of a step on pipeline stages: each rank's actions and bytes over time, and the programs of the parts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from page_toy import STAGED

import graphzero as gz
from graphzero.cli import factory, main
from graphzero.ir.text.printer import print_graph
from graphzero.plugins.page import plan_data, render
from graphzero.plugins.page.lines import Pool
from graphzero.plugins.page.render import SCRIPTS, embedded

Json = dict[str, Any]
CHROMIUM = "/usr/bin/chromium"
AXES = [[0, 1], [2, 3]]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipeline_page") / "train.py"
    path.write_text(STAGED)
    return path


@pytest.fixture(scope="module")
def seen(file: Path) -> Any:
    """A step on two stages, and what its page reads: through JSON and back."""
    where = gz.placement("cpu", AXES, names=("pp", "dp"), virtual=True)
    graph, example = factory.make(f"{file}:zero_bubble", where, 1)
    graph.compile(*example)
    pool = Pool()
    data = json.loads(embedded(plan_data(graph.compiled_program("test"), "toy", pool)))
    return SimpleNamespace(graph=graph, data=data, texts=pool.texts)


def held(series: list[int], position: int) -> int:
    """Of changes [position, bytes, ...]."""
    return next((b for at, b in reversed([*zip(series[::2], series[1::2], strict=True)]) if at <= position), 0)


def test_each_rank_has_a_row_of_actions_that_is_the_schedules(seen: Any) -> None:
    rows = seen.data["pipeline"]["rows"]
    labels = [[action[0] for action in row] for row in rows]
    pipeline = seen.graph.compiled_program("test").pipeline
    no_input_gradients = {f"0I{i}" for i in range(4)}  # the first stage sends none
    for member, row in enumerate(labels):
        actions = [str(action) for action in pipeline.schedule.rows[member] if action]
        assert [label for label in row if "@" not in label] == [one for one in actions if one not in no_input_gradients]
    assert [label for label in labels[1] if "@" in label] == ["prologue@1", "epilogue@1", "epilogue1@1"]
    for row in rows:
        assert all(one[2] < one[3] <= other[2] for one, other in zip(row, row[1:], strict=False))


def test_the_bytes_of_each_rank_peak_where_the_plan_says(seen: Any) -> None:
    plan, data = seen.graph.plan, seen.data["pipeline"]
    for member, row, one in zip(plan.pipeline.members, data["rows"], data["members"], strict=True):
        assert max(action[4] for action in row) == member.memory.peak == one["peak"] == sum(one["at_peak"].values())
        between = [action[5] for action in row]
        assert max(between) == sum(member.memory.resident.values()) + member.in_flight
    assert seen.data["plan"]["memory"]["peak"] == plan.memory.peak
    shown = seen.data["programs"][seen.data["shown"]]
    assert shown["title"] in plan.memory.peak_at
    series, peak = shown["memory"]["series"], shown["memory"]["peak"]
    assert sum(held(changes, peak) for changes in series.values()) == plan.memory.peak
    assert f"'{shown['values'][peak][0]}'" in plan.memory.peak_at
    assert data["edges"] == [[edge.source, edge.target, edge.bytes, edge.messages] for edge in plan.pipeline.edges]


def test_what_a_part_holds_of_its_own_is_part_of_what_its_rank_holds(seen: Any) -> None:
    for one in seen.data["programs"][:-1]:
        memory, categories = one["memory"], one["memory"]["categories"]
        for position in range(len(one["values"])):
            own = dict.fromkeys(categories, 0)
            for _, first, last, nbytes, category, _ in memory["lives"]:
                own[categories[category]] += nbytes * (first <= position <= last)
            for name, nbytes in own.items():
                assert nbytes <= held(memory["series"].get(name, []), position), (one["title"], position, name)


def test_the_programs_of_the_parts_and_of_the_whole_step_are_there_to_read(seen: Any) -> None:
    programs = {one["title"]: one for one in seen.data["programs"]}
    stage_programs = seen.graph.stage_programs
    assert list(programs) == [*stage_programs, "whole step"]
    for title, graph in {**stage_programs, "whole step": seen.graph.program}.items():
        text = programs[title]["text"]
        lines = text["captured"]
        for pass_ in text["passes"]:
            for at, removed, added in reversed(pass_["edits"]):
                lines = [*lines[:at], *added, *lines[at + removed :]]
        assert [seen.texts[i] for i in lines] == print_graph(graph, align=False).splitlines()


def test_a_parameter_is_on_the_ranks_of_its_stage(seen: Any) -> None:
    rows = {row[0]: row for row in seen.data["programs"][-1]["parameters"]["rows"]}
    nbytes = 16 * 16 * 4
    assert rows["model.layers.0.0.weight"][5] == [[2, nbytes], [2, 0]]
    assert rows["model.layers.3.0.weight"][5:7] == [[[2, 0], [2, nbytes]], [[2, 0], [2, nbytes]]]  # two states, halved
    resident = [member.memory.resident for member in seen.graph.plan.pipeline.members]
    of_ranks = seen.data["programs"][-1]["parameters"]["ranks"]
    assert of_ranks["parameter"] == [[2, memory["parameters"]] for memory in resident]


def test_a_page_without_stages_has_nothing_of_them(file: Path) -> None:
    graph, example = factory.make(f"{file}:make", gz.placement("cpu", range(2), virtual=True), 1)
    graph.compile(*example)
    pool = Pool()
    page = render([plan_data(graph.compiled_program("test"), "toy", pool)], pool)
    assert 'id="pipeline"' not in page and "PartPlan" not in page and "<!-- pipeline" not in page
    assert page.count("</script>") == 1 + len(SCRIPTS)


def test_the_command_prints_a_part_and_its_passes(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show = ["show", f"{file}:make", "--axes", "pp=2,dp=2"]
    assert main([*show, "--part", "forward@0"]) == 0
    assert capsys.readouterr().out.startswith("graph 'Train.forward@0'(dp=2) local")
    assert main([*show, "--part", "backward@1", "--list"]) == 0
    assert "1 bucket" in capsys.readouterr().out
    assert main([*show, "--part", "forward@7"]) == 2
    assert "its parts are prologue@1, forward@0," in capsys.readouterr().err
    assert main(["show", f"{file}:make", "--ranks", "2", "--part", "forward@0"]) == 2
    assert "no pipeline stages" in capsys.readouterr().err


def test_notebooks_show_the_programs_of_the_parts(seen: Any) -> None:
    text = seen.graph._repr_html_()
    assert "<summary>plan</summary>" in text and "rank 1 |" in text
    assert all(f"<summary>{name}</summary>" in text for name in ("program", *seen.graph.stage_programs))


# ---- in a browser


@pytest.fixture(scope="module")
def browser(file: Path) -> Iterator[Any]:
    """A page of a step with stages, beside one without, and what it complained of."""
    api = pytest.importorskip("playwright.sync_api", reason="no playwright here: pip install playwright")
    if not Path(CHROMIUM).exists():
        pytest.skip(f"there is no {CHROMIUM}: apt-get install chromium")
    out = file.parent / "report.html"
    made = ["show", f"{file}:make", "--axes", "pp=2,dp=2", "--html", str(out), "--beside", "axes=dp=2"]
    assert main(made) == 0
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--headless", "--no-sandbox", "--disable-gpu"]
        )
        page = chromium.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(8000)
        problems: list[str] = []
        page.on("console", lambda said: problems.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(out.as_uri())
        yield page
        chromium.close()
    assert not problems


def test_the_timeline_has_a_row_for_each_rank_and_leads_to_programs(browser: Any) -> None:
    page = browser
    lanes = page.evaluate("pipeline.lanes.map((lane) => [lane.name, lane.actions.map((action) => action.label)])")
    assert [name for name, _ in lanes] == ["rank 0, stage 0", "rank 1, stage 1"]
    assert [label for label in lanes[0][1] if "@" not in label] == [
        "0F0",
        "0F1",
        "0B0",
        "0F2",
        "0B1",
        "0F3",
        "0B2",
        "0B3",
    ]
    assert "Schedule 1f1b, simulated: bubble 0.250" in page.locator("#pipeline-hint").inner_text()
    page.locator("#pipeline-plot").focus()
    for key in ("Home", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    label = page.locator("#action b").inner_text()
    assert label in lanes[0][1] + lanes[1][1] and "holds" in page.locator("#action").inner_text()
    page.keyboard.press("Enter")
    assert page.locator("#program-title").inner_text() in {f"Program of {part}" for part in ("forward@0", "forward@1")}
    at = page.evaluate("(() => { const a = pipeline.lanes[1].actions.find((one) => one.label === '1B2'); "
                       "return pipeline.plot.valToPos((a.begin + a.end) / 2, 'x'); })()")  # fmt: skip
    over = page.locator("#pipeline-plot .u-over")
    over.click(position={"x": at, "y": over.bounding_box()["height"] * 3 / 4})
    assert page.locator("#program-title").inner_text() == "Program of backward@1"
    assert page.locator("#memory-title").inner_text() == "Memory while backward@1 runs"
    assert page.locator("#alive").inner_text().count("of other parts and micro-batches")
    page.locator("#part").select_option(label="whole step")
    assert not page.locator("#memory").is_visible()
    assert "move(" in page.evaluate("page.plan.values.map((value) => value.line).join('\\n')")


def test_the_plan_beside_it_has_the_page_of_a_step_without_stages(browser: Any) -> None:
    page = browser
    page.keyboard.press("x")
    assert not page.locator("#pipeline").is_visible() and page.locator("#memory").is_visible()
    assert page.locator("#memory-title").inner_text() == "Memory over the step"
    assert page.locator("#program-title").inner_text() == "Program"
    page.keyboard.press("x")
    assert page.locator("#pipeline").is_visible() and page.locator("#members-table tbody tr").count() == 2


def test_the_page_of_stages_fits_a_phone(browser: Any) -> None:
    page = browser
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_timeout(400)
    assert page.locator("#pipeline-plot canvas").bounding_box()["width"] < 390
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
