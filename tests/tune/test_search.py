"""The layouts that are priced, ranked and left out; what is said where none fits; the command."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tuned_steps import LOATH, WILLING, adamw_graph, example

import graphzero as gz
from graphzero.cli import main
from graphzero.plan.device import Device
from graphzero.plugins.tune.captured_step import captured_step, with_rows
from graphzero.plugins.tune.layout import Layout, axes_of, counts, hybrid_axes, layouts
from graphzero.plugins.tune.price import Bound, price
from graphzero.plugins.tune.proposal import propose
from graphzero.plugins.tune.report import does_not_fit, report, why
from graphzero.plugins.tune.search import Search
from graphzero.testing import fake_world

DATA, GRID = (("dp", 4),), (("dp", 2), ("tp", 2))
HYBRID = (("dp_replicate", 2), ("dp_shard", 2))
HERE = Path(__file__).parent
FACTORY = """
import sys
sys.path.insert(0, {here!r})
import graphzero as gz
from tuned_steps import adamw_graph, example

def make(placement, stage):
    return adamw_graph(placement, "mlp"), example("mlp", 2)

def sized(placement, stage, batch=8):
    return adamw_graph(placement, "mlp"), example("mlp", batch // placement.size)

def unsized(placement, stage, batch=8):
    return adamw_graph(placement, "mlp"), example("mlp", 2)

def split(placement, stage):
    graph = adamw_graph(placement, "mlp")
    gz.to_global(graph.model, placement, {{"layers.0.*": (gz.sbp.B, gz.sbp.S(0))}})
    return graph, example("mlp", 2)

def raises(placement, stage):
    raise RuntimeError("no data")
"""


@cache
def captured(name, rows=4):
    with fake_world(4):
        return captured_step(adamw_graph(gz.placement("cpu", range(4)), name), example(name, rows))


def searched(room, grids=(DATA,), device=WILLING, **options):
    return Search(captured("mlp"), device, room, **options).rank_layouts(grids)


@cache
def everything():
    return searched(10**9, (DATA, GRID, HYBRID), top=100)


def test_a_grid_needs_a_batch_that_its_data_ranks_divide():
    assert axes_of(8, 4, (1, 2, 4, 3)) == [(("dp", 4), ("tp", 2)), (("dp", 2), ("tp", 4))]
    assert counts(12) == [1, 2, 4]
    assert {(one.stage, one.keep_gathered) for one in layouts(DATA)} == {(0, 0), (1, 0), (2, 0), (3, 0), (3, 1)}
    assert layouts((("dp", 1), ("tp", 4))) == [Layout((("dp", 1), ("tp", 4)))]


def test_a_data_axis_over_several_hosts_is_cut_where_a_host_ends():
    both = (("dp_replicate", 4), ("dp_shard", 4))
    assert hybrid_axes((("dp", 16),), 4) == both
    assert hybrid_axes((("dp", 8), ("tp", 2)), 4) == (("dp_replicate", 4), ("dp_shard", 2), ("tp", 2))
    for axes, host in (((("dp", 4),), 4), ((("dp", 6),), 4), ((("dp", 8), ("tp", 4)), 4), ((("dp", 4),), 1), (both, 8)):
        assert hybrid_axes(axes, host) is None
    found = layouts(both)
    assert {one.stage for one in found if one.hybrid} == {1, 2, 3}
    assert {one.shard_axes for one in found} == {(), ("dp_replicate", "dp_shard"), ("dp_shard",)}
    assert {one.shard_ranks for one in found} == {1, 4, 16}


def test_layouts_are_ranked_by_their_seconds_and_each_says_why_it_is_behind():
    found = everything().fitting
    assert {one.layout.axes for one in found} == {DATA, GRID, HYBRID}
    assert {one.layout.stage for one in found} == {0, 1, 2, 3}
    for better, worse in pairwise(found):
        assert better.seconds <= worse.seconds
        assert why(worse, better)


def test_no_layout_takes_less_than_its_bound():
    found = everything()
    plain = {one.layout.axes: one for one in found.fitting if one.layout == Layout(one.layout.axes)}
    assert all(Bound(plain[one.layout.axes], WILLING).seconds(one.layout) <= one.seconds for one in found.fitting)


BETWEEN = Device("between", "cuda", {"f32": 1e12, "f64": 1e11}, 1e11, 10**9, 1e-8,
                 {"inside": gz.Link(1e-8, 1e9), "between": gz.Link(1e-7, 1e8)}, host=2, runs_ahead=True)  # fmt: skip
DEVICES = {"willing": WILLING, "loath": LOATH, "between": BETWEEN}


def every_layout(axes):
    """All that may be priced on a grid, and more: with recomputation and an optimizer in backward, fit or not."""
    for layout in layouts(axes):
        for parts in (1, 4):
            yield replace(layout, micro_batches=parts)
        yield replace(layout, recompute=True)
        yield replace(layout, early=True, recompute=True, micro_batches=2)


def broken_bounds(name, device, axes, rows=16):
    step = captured(name, rows // 4)
    splits = propose(step, Layout(axes), device).splits if Layout(axes).tensor_axis else {}
    bound, found = Bound(price(step, Layout(axes), splits, device), device), []
    for layout in every_layout(axes):
        with contextlib.suppress(gz.ConfigError):  # which cannot be had
            found.append((price(step, layout, splits, device).seconds, bound.seconds(layout), str(layout)))
    assert len(found) > 10
    return [one for one in found if one[0] < one[1]]


# Of step, grid and device every two values meet once.
BOUNDED = (
    ("mlp", "data", "loath"), ("mlp", "grid", "willing"), ("mlp", "hybrid", "between"),
    ("llama", "data", "willing"), ("llama", "grid", "between"), ("llama", "hybrid", "loath"),
    ("convolutions", "data", "between"), ("convolutions", "grid", "loath"), ("convolutions", "hybrid", "willing"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "axes", "device"),
    [pytest.param(*one, id="-".join(one), marks=[] if one[0] == "mlp" else [pytest.mark.slow]) for one in BOUNDED],
)
def test_no_layout_of_a_grid_takes_less_than_its_bound(name, axes, device):
    assert not broken_bounds(name, DEVICES[device], {"data": DATA, "grid": GRID, "hybrid": HYBRID}[axes])


def test_what_a_price_says_of_memory_holds_at_every_stage():
    found = {one.layout: one for one in everything().fitting}
    for axes, hybrid in ((DATA, False), (GRID, False), (HYBRID, False), (HYBRID, True)):
        for stage in (1, 2, 3):
            layout = Layout(axes, stage, hybrid=hybrid)
            held = found[layout].plan.memory.resident
            assert Bound(found[Layout(axes)], WILLING).states(layout) <= held["parameters"] + held["optimizer_states"]


def test_a_gather_that_is_made_once_more_is_the_reason():
    step = captured("mlp")
    kept, again = (price(step, Layout(DATA, 3, keep_gathered=keep), {}, LOATH) for keep in (True, False))
    assert "parameters sent over dp by all_gather" in why(again, kept)


def test_recomputation_is_tried_only_where_the_step_does_not_fit_without_it():
    step = captured("three heads")
    plain, less = (price(step, Layout(DATA, recompute=recompute), {}, WILLING) for recompute in (False, True))
    room = (plain.peak + less.peak) // 2
    assert "computes forward again" in why(less, plain)
    found = Search(step, WILLING, room, top=1, seconds=1e-9)
    found._bounds[DATA] = Bound(plain, WILLING)
    found._note(plain)
    assert Layout(DATA, recompute=True) in [layout for *_, layout in found._waiting]
    found = Search(step, WILLING, plain.peak, top=1, seconds=1e-9)
    found._bounds[DATA] = Bound(plain, WILLING)
    found._note(plain)
    assert not any(layout.recompute for *_, layout in found._waiting)


def test_where_nothing_fits_it_says_by_how_much_and_what_it_says_would_do_does():
    found = searched(1000)
    assert not found.fitting
    assert "states alone are" in does_not_fit(found, captured("mlp"), WILLING)
    found = searched(7000)
    text = does_not_fit(found, captured("mlp"), WILLING)
    least = int(re.search(r"--memory (\d+)", text)[1])
    assert least == found.too_large[0].peak > 7000
    assert "too much" in text
    assert searched(least, top=1).fitting


def test_a_batch_of_other_rows_is_the_example_over_and_over():
    x, y = torch.arange(6.0).reshape(3, 2), torch.arange(4)
    (longer,), other = with_rows((x,), 5), with_rows((x, y, 2), 2)
    assert longer.tolist() == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3]]
    assert (other[0].shape, other[1] is y, other[2]) == ((2, 2), True, 2)
    with pytest.raises(gz.ConfigError, match="a tensor with rows"):
        with_rows((2.0,), 4)


@pytest.fixture
def command(tmp_path, capsys):
    (tmp_path / "steps_to_tune.py").write_text(FACTORY.format(here=str(HERE)))
    device = WILLING.to_json()
    (tmp_path / "willing.json").write_text(json.dumps(device))

    def run(name, *options, device="willing.json"):
        status = main(["tune", f"{tmp_path}/steps_to_tune.py:{name}", "--device", str(tmp_path / device), *options])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def test_the_command_prints_a_table_and_lines_to_paste(command):
    status, out, _ = command("make", "--ranks", "2", "--batch", "8", "--top", "3", "--quiet")
    assert status == 0
    assert "2 x willing, 8 rows a step" in out
    assert "column model.layers.0.weight S(0), along model.layers.0.bias S(0), row model.layers.2.weight S(1)" in out
    assert re.search(r"^1  dp=", out, re.MULTILINE)
    assert 'placement = gz.placement("cpu"' in out
    assert "pipeline stages; --pipeline 1,2,4 tries them" in out


def test_splits_that_the_user_has_made_are_kept_on_the_grid_that_is_said(command):
    _, out, _ = command("split", "--axes", "dp=2,tp=2", "--quiet", "--top", "1")
    assert "dp=2 x tp=2" in out
    assert "to_global" not in out


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("sized", "--axes", "dp=2", "--batch", "8", "--quiet", "--top", "1"), 0, ""),
        (("unsized", "--ranks", "4", "--batch", "16"), 2, "made an example of which 4 data ranks have 8 rows"),
        (("make", "--axes", "dp=4", "--batch", "6"), 2, "give a multiple of 4"),
        (("make", "--ranks", "2", "--seconds", "nan"), 2, "--seconds 0 or more"),
        (("make", "--axes", "dp=2,tp=2", "--batch", "8", "--quiet", "--top", "1"), 0, ""),
        (("split", "--ranks", "4"), 2, "one SBP per axis"),
        (("make", "--axes", "tp=2,dp=2"), 2, "for one such axis"),
        (("make",), 2, "tune needs to know how many ranks"),
        (("make", "--ranks", "2", "--tensor", "x"), 2, "write numbers of ranks"),
        (("raises", "--ranks", "2"), 2, "RuntimeError: no data"),
        (("nowhere", "--ranks", "2"), 2, "no callable 'nowhere'"),
        (("make", "--ranks", "2", "--memory", "2KB", "--quiet"), 1, "NothingFits"),
    ],
)
def test_the_exit_status_tells_a_wrong_question_from_the_answer_no(command, arguments, status, words):
    found, _, error = command(*arguments)
    assert (found, words in error) == (status, True)


def test_data_ranks_that_do_not_divide_the_batch_are_named(command):
    _, out, error = command("make", "--ranks", "4", "--batch", "7", "--quiet", "--top", "1")
    assert "4 data ranks: they do not divide the 7 rows of the batch: 4 x 1 leaves 3 over; 4 or 8 rows" in out + error
    assert "2 data ranks: they do not divide the 7 rows of the batch: 2 x 3 leaves 1 over; 6 or 8 rows" in out + error


def test_an_unknown_device_is_refused_with_those_that_are_known(command):
    status, _, error = command("make", "--ranks", "2", device="b9000")
    assert status == 2
    assert "h100" in error


def test_a_report_says_that_nothing_is_worth_splitting():
    step = captured("scaled")
    found = Search(step, WILLING, 10**9, top=2).rank_layouts([DATA, GRID])
    assert "no weights are worth splitting" in report(found, step, WILLING, "train.py:make", 2)


def test_where_no_grid_is_left_it_says_why():
    found = Search(captured("scaled"), WILLING, 10**9).rank_layouts([GRID])
    assert "no weight is worth splitting" in does_not_fit(found, captured("scaled"), WILLING)
