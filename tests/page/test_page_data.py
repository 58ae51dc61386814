"""What the page is given says what the plan, the program and its history say; nothing in it ends the page's script."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from page_toy import FACTORY

import graphzero as gz
from graphzero.cli import factory
from graphzero.ir.text.printer import print_graph
from graphzero.plan.device import Device
from graphzero.plan.timeline import timeline
from graphzero.plugins.page import plan_data, render
from graphzero.plugins.page.lines import Pool
from graphzero.plugins.page.render import SCRIPTS, STYLES, embedded
from graphzero.plugins.page.snapshots import snapshots
from graphzero.plugins.page.timeline import read_measured
from graphzero.step.program import StepProgram

Json = dict[str, Any]


@contextmanager
def program_of(tmp_path: Path, name: str, stage: int = 3, ranks: int = 4) -> Iterator[StepProgram]:
    file = tmp_path / "train.py"
    file.write_text(FACTORY)
    graph, example = factory.make(f"{file}:{name}", gz.placement("cpu", range(ranks), virtual=True), stage)
    with graph.prepared_call("a test", example, {}) as prepared:
        yield prepared.program


def given(program: StepProgram, **more: Any) -> tuple[Json, list[str]]:
    """What the page reads: through JSON and back."""
    pool = Pool()
    found = plan_data(program, "toy", pool, **more)
    return json.loads(embedded(found)), pool.texts


def held(series: list[int], position: int) -> int:
    """Of changes [position, bytes, ...]."""
    return next((b for at, b in reversed([*zip(series[::2], series[1::2], strict=True)]) if at <= position), 0)


@pytest.mark.parametrize("name", ["make", "narrow"])
def test_what_is_alive_at_each_moment_sums_to_the_plans_bytes_and_the_peak_is_the_plans(
    tmp_path: Path, name: str
) -> None:
    with program_of(tmp_path, name) as program:
        (data, _), plan = given(program), program.plan
        assert (program.arena is not None) == (name == "make")
    memory = data["memory"]
    totals = []
    for position in range(len(data["values"])):
        spans = [span for span in memory["lives"] if span[1] <= position <= span[2]]
        buffers = sum(nbytes for at, nbytes in memory["buffers"] if at == position)
        free = memory["arena"] - sum(span[3] for span in spans if span[5])
        totals.append(sum(span[3] for span in spans) + sum(memory["slots"]) + buffers + free)
        assert totals[-1] == sum(held(series, position) for series in memory["series"].values())
    assert max(totals) == plan.memory.peak == totals[memory["peak"]]
    name_of, phase = re.fullmatch(r"'(\w+)' in (\w+)", plan.memory.peak_at).groups()  # type: ignore[union-attr]
    assert data["values"][memory["peak"]][0] == name_of and phase in ("forward", "backward", "update")


def test_edits_make_the_text_after_each_pass_and_values_know_the_pass_that_made_them(tmp_path: Path) -> None:
    with program_of(tmp_path, "make") as program:
        (data, texts), found = given(program), snapshots(program.history)
        wanted = [print_graph(one.graph, align=False).splitlines() for one in found]
    lines = data["text"]["captured"]
    assert [texts[i] for i in lines] == wanted[0]
    for pass_, text in zip(data["text"]["passes"], wanted[1:], strict=True):
        for at, removed, added in reversed(pass_["edits"]):
            lines = [*lines[:at], *added, *lines[at + removed :]]
        assert [texts[i] for i in lines] == text
    names = [pass_["name"] for pass_ in data["text"]["passes"]]
    values = {row[0]: row for row in data["values"]}
    since = {name: (row[6], row[7]) for name, row in values.items()}
    assert names[since["launch"][0] - 1] == "launch" and names[since["adam"][0] - 1] == "fuse_adam"
    assert since["addmm"][0] == 0 and all(0 <= made <= changed <= len(names) for made, changed in since.values())
    assert texts[values["addmm"][5]] == "model.layers.0" and "train.py:" in texts[values["addmm"][4]]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_parameters_are_counted_on_the_ranks_that_hold_them(tmp_path: Path, stage: int) -> None:
    with program_of(tmp_path, "make", stage, ranks=3) as program:  # 256 rows on three ranks: 86, 86, 84
        (data, _), plan = given(program), program.plan
    rows = {row[0]: row for row in data["parameters"]["rows"]}
    whole = 256 * 256 * 4
    split = [[2, 86 * 1024], [1, 84 * 1024]]
    weight = rows["model.layers.0.weight"]
    assert weight[4] == whole
    assert weight[5] == (split if stage == 3 else [[3, whole]])
    assert weight[6] == ([[2, 2 * 86 * 1024], [1, 2 * 84 * 1024]] if stage else [[3, 2 * whole]])
    ranks = data["parameters"]["ranks"]
    assert ranks["parameter"][0][1] == plan.memory["parameters"]
    assert ranks["states"][0][1] == plan.memory["optimizer_states"]


def test_timelines_are_rows_of_the_events_they_are_given(tmp_path: Path) -> None:
    measured = [{"name": "addmm", "stream": "compute", "kind": "addmm", "phase": "forward", "begin": 0, "end": 0.5}]
    with program_of(tmp_path, "make") as program:
        device = replace(Device.named("h100"), step=0.25)
        planned = timeline(program.graph, device)
        data, texts = given(program, device=device, measured=measured)
    *rows, around = data["timeline"]["planned"]["rows"]
    assert [texts[row[0]] for row in rows] == [event.name for event in planned.events]
    assert [row[5] for row in rows] == pytest.approx([event.end for event in planned.events], abs=1e-9)
    assert (texts[around[2]], around[5]) == ("around the program", pytest.approx(planned.seconds, abs=1e-9))
    assert data["timeline"]["planned"]["exposed"] == planned.exposed
    assert "assumed" in data["timeline"]["planned"]["sources"]["links"]
    assert [texts[i] for i in data["timeline"]["measured"]["rows"][0][:4]] == ["addmm", "compute", "addmm", "forward"]


EVENT = '[{"name": "a", "stream": "s", "kind": "k", "phase": "forward", "begin": 0, "end": 1, %s}]'


@pytest.mark.parametrize(
    "text", ["no json", "[]", '{"measured": 3}', '[{"name": "a"}]', '[{"name": "a", "stream": "s", "kind": "k", '
             '"phase": "forward", "begin": 2, "end": 1}]',
             *(EVENT % more for more in ('"nbytes": "x"', '"nbytes": 1e999', '"flops": NaN', '"stage": {}'))],
)  # fmt: skip
def test_a_file_that_holds_no_events_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "measured.json"
    file.write_text(text)
    with pytest.raises(gz.ConfigError, match="to_timeline"):
        read_measured(str(file))


def test_the_page_holds_all_it_needs_and_no_text_of_a_user_is_markup(tmp_path: Path) -> None:
    pool = Pool()
    with program_of(tmp_path, "badly_named") as program:
        data = plan_data(program, "</title><script>", pool)
    page = render([data], pool)
    assert "<img" not in page and page.count("</script>") == 1 + len(SCRIPTS) and page.count("</title>") == 1
    assert page.count("<style>") == len(STYLES) and "default-src 'none'" in page
    assert not re.search(r"""(src|href)\s*=\s*["']?\s*(https?:)?//|@import|url\(|fetch\(|XMLHttpRequest""", page)
    assert "The MIT License" in page and "Leon Sorokin" in page  # uPlot's, which asks for it


def test_a_compiled_graph_is_written_as_a_page_from_python(tmp_path: Path) -> None:
    with program_of(tmp_path, "make", ranks=2):
        pass
    graph, example = factory.make(f"{tmp_path}/train.py:make", gz.placement("cpu", range(2), virtual=True), 3)
    with pytest.raises(gz.ConfigError, match="has no page yet: call it"):
        gz.save_page(graph, tmp_path / "page.html")
    assert "not compiled yet" in graph._repr_html_()
    graph.compile(*example)
    gz.save_page(graph, tmp_path / "page.html", device="h100")
    page = (tmp_path / "page.html").read_text()
    assert "stage 3" in page and '"planned":' in page
    for wrong, problem in ((tmp_path, "it is a folder"), (tmp_path / "no" / "page.html", "there is no folder")):
        with pytest.raises(gz.ConfigError, match=f"save_page .*: {problem}"):
            gz.save_page(graph, wrong)
    with pytest.raises(gz.ConfigError, match="there is no device 'h900'"):
        gz.save_page(graph, tmp_path / "page.html", device="h900")
    assert "<summary>plan</summary>" in graph._repr_html_()
