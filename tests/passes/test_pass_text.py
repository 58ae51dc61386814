"""A list of passes is a text: every option reads and prints back, and what is wrong is said with its place."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

import pytest
from toys import step

from graphzero.errors import GraphZeroError
from graphzero.ir.text.parser import ParseError, parse
from graphzero.ir.value import Role
from graphzero.passes import NAMES, KeepGathered, Options, Pin, Pipeline, Propagate, Zero, default_passes
from graphzero.passes.option_text import form_of, forms_of, write_options
from graphzero.passes.pass_list import GROUPS, PassEntry, pass_entries
from graphzero.passes.pass_list_text import parse_passes, print_passes
from graphzero.plugins.opt.command import listing
from graphzero.sbp.link_costs import Link
from graphzero.sbp.types import B, P, S, partial

SAMPLES: dict[str, list[Any]] = {
    "placed": [
        {Role("batch", "x"): (S(1),)},
        {Role("param", "a.b"): (B, S(0, 3)), Role("state", "a b", "m'"): (P, partial("max")), Role("seed"): (B,)},
    ],
    "stage": [1, 3],
    "shard_min_size": [0, 4096],
    "axis": [(), ("dp",), ("dp_replicate", "dp_shard")],
    "masters": [True],
    "optimizer_in_backward": [True],
    "offload_states": [True],
    "offload_activations": [(), ("gelu*", "h")],
    "links": [(Link(1e-05, 1e9),), (Link(0.0, 3.5), Link(2.5, 1e20))],
    "micro_batches": [1, 4],
    "whole_accumulators": [False, True],
    "whole_on": [(), (0, 3)],
    "tiles": [2, 16],
    "recompute": [(), ("gelu*", "h")],
    "split_attention": ["exchange", "gather"],
    "split_experts": ["exchange", "tokens"],
    "expert_capacity": [0.1, 4.0],
    "cuda_graph": [True],
    "pipeline_stages": [(), ("model.a@0", "model.layers.*@1", "it's")],
    "keep_gathered": [(), ("model.head.*", "w", "none", "a,b", "(", "it's")],
    "delay_gradients": [True],
    "bucket_bytes": [1, 2**40],
    "optimise": [False],
}  # fmt: skip
LEVEL = {entry.name: entry.level for entry in pass_entries()}


@pytest.mark.parametrize("entry", pass_entries(), ids=[entry.name for entry in pass_entries()])
def test_every_option_of_every_pass_reads_from_text_and_prints_back(entry: PassEntry) -> None:
    everything: dict[str, Any] = {}
    for one in fields(entry.kind):  # type: ignore[arg-type]
        for sample in SAMPLES[one.name]:
            pass_ = entry.kind(**{one.name: sample})
            assert parse_passes(str(pass_), entry.level) == [pass_]
            assert getattr(pass_, one.name) == sample
        everything[one.name] = SAMPLES[one.name][-1]
    pass_ = entry.kind(**everything)
    assert parse_passes(str(pass_), entry.level) == [pass_]
    assert parse_passes(entry.name, entry.level) == [entry.kind()]


def test_every_option_of_the_whole_list_reads_from_text() -> None:
    for one in fields(Options):
        if one.name == "plugins":
            continue  # values of plug-ins' settings, which a Graph has and a text has not
        for sample in SAMPLES[one.name]:
            options = Options(**{one.name: sample})
            assert parse_passes(f"default{write_options(options)}") == default_passes(options)


def test_a_list_prints_as_it_reads() -> None:
    for text in (
        "pin,zero{stage=1 shard_min_size=1 axis=(dp)},propagate,insert_boxing",
        "pin{placed={batch(x)=S(1) param(w)=(B, S(0, 2))}},propagate{links=({latency=1e-05 bandwidth=2.0})}",
        "",
    ):
        assert print_passes(parse_passes(text)) == text
    assert (
        print_passes(parse_passes(" zero { stage = 3  axis=( a,b ) } ,\n propagate "))
        == "zero{stage=3 shard_min_size=1 axis=(a, b)},propagate"
    )
    assert print_passes([Pin(), print, Zero(2)]) == "pin,print,zero{stage=2 shard_min_size=1}"  # type: ignore[list-item]


def test_the_whole_list_goes_on_from_the_level_of_the_graph() -> None:
    text = "default{stage=2}"
    for entry in pass_entries():
        passes = parse_passes(text, entry.level)
        assert passes == [
            one for one in default_passes(Options(stage=2)) if LEVEL[one.name] in LEVELS_FROM[entry.level]
        ]  # type: ignore[attr-defined]


LEVELS_FROM = {level: list(dict.fromkeys(LEVEL.values()))[i:] for i, level in enumerate(dict.fromkeys(LEVEL.values()))}

WRONG = [
    ("zro", 1, "no pass is called 'zro'; the passes are pin, zero, cast_before_gather, count_targets"),
    ("pin,", 5, "expected the name of a pass"),
    ("pin,,zero", 5, "expected the name of a pass"),
    ("pin zero", 5, "expected ',' and a pass"),
    ("pin}", 4, "expected ',' and a pass"),
    ("zero{stge=2}", 6, "zero has no option 'stge'; it has stage, shard_min_size, axis, masters, optimizer_in"),
    ("pin{x=1}", 5, "pin has no option 'x'; it has placed"),
    ("zero{stage}", 6, "expected `name=value`"),
    ("zero{stage=1, axis=(dp)}", 13, "expected `name=value`, with a space to the next"),
    ("zero{stage=1", 13, "expected `name=value`"),
    ("zero{", 6, "expected `name=value`"),
    ("zero{stage=1 stage=2}", 14, "stage occurs twice"),
    ("zero{stage=two}", 12, "expected a whole number"),
    ("zero{stage=1.5}", 12, "expected a whole number"),
    ("zero{stage=true}", 12, "expected a whole number"),
    ("zero{stage=none}", 12, "expected a whole number"),
    ("zero{stage=}", 12, "expected a whole number"),
    ("zero{stage=4}", 6, "the stages are 1"),
    ("zero{stage=99999999999999999999999999}", None, "beyond what 64 bits hold"),
    ("zero{optimizer_in_backward=True}", 28, "expected true or false"),
    ("zero{axis=dp}", 11, r"expected \(a name, ...\)"),
    ("zero{axis=(dp dp)}", 15, r"expected ',' or '\)'"),
    ("zero{axis=(dp", 14, r"expected ',' or '\)'"),
    ("zero{axis=('dp)}", None, "expected a name"),
    ("pin{placed={batch(x)}}", 13, "expected `role=value`"),
    ("pin{placed={batch(x)=B batch(x)=B}}", 24, r"batch\(x\) occurs twice"),
    ("pin{placed={what(x)=B}}", None, "no role is called what"),
    ("pin{placed={batch(x)=Q}}", 22, "'Q' is not an SBP"),
    ("pin{placed={batch(x)=S(-1)}}", 22, "not an SBP"),
    ("pin{placed={batch(x)=S(9999999)}}", 22, "not an SBP of up to 64 dims"),
    ("pin{placed={batch(x)=(B, )", None, "expected"),
    ("propagate{links=({latency=1})}", 19, "Link needs bandwidth"),
    ("propagate{links=({latency=1 bandwidth=fast})}", 39, "expected a number"),
    ("propagate{links=({latency=1 bandwidth=0})}", 19, "nothing would ever arrive"),
    ("bucket", 1, "bucket takes a local graph, and here it is captured; it can go on with pin, zero, cast_before"),
    ("pin,propagate,zero", 15, "zero takes a captured graph, and here it is propagated"),
    ("default,pin", 9, "pin takes a captured graph, and here it is local"),
    ("zero{stage=__import__('os')}", 12, "expected a whole number"),
    ("zero{axis=(__import__('os'))}", None, "expected ','"),
    ("__import__('os')", 1, "no pass is called '__import__'"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "place", "problem"), WRONG)
def test_what_is_wrong_is_said_with_its_place(text: str, place: int | None, problem: str) -> None:
    with pytest.raises(ParseError, match=problem) as caught:
        parse_passes(text)
    first, shown, mark = str(caught.value).split("\n")
    if place is not None:
        assert first.startswith(f"passes, character {place}: ")
        assert shown.strip() == text and mark.index("^") == 2 + place - 1


def test_a_long_text_is_shown_around_what_is_wrong() -> None:
    text = ",".join(["pin"] * 500) + ",nip," + ",".join(["pin"] * 500)
    with pytest.raises(ParseError, match="passes, character 2001: no pass is called 'nip'") as caught:
        parse_passes(text)
    _, shown, mark = str(caught.value).split("\n")
    assert len(shown) < 140 and shown[mark.index("^") :].startswith("nip,")


def test_any_text_is_a_list_of_passes_or_is_refused() -> None:
    rng = random.Random(0)
    seeds = [str(Pin(SAMPLES["placed"][1])), str(Zero(3, 5, ("a", "b"))),
             str(KeepGathered(SAMPLES["keep_gathered"][1])),
             str(Propagate(SAMPLES["links"][1])), "default{stage=3 delay_gradients=true}"]  # fmt: skip
    for _ in range(4000):
        text = list(rng.choice(seeds))
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(text))
            text[at : at + rng.randint(0, 2)] = rng.choice(
                ["", "{", "}", "(", ")", "=", ",", "'", "\\", " ", "1", "-", "é", "\0"]
            )
        try:
            found = parse_passes("".join(text), rng.choice(["captured", "local"]))
        except GraphZeroError:
            continue
        for one in found:
            assert parse_passes(str(one), LEVEL[one.name]) == [one]  # type: ignore[attr-defined]


def test_a_type_that_has_no_text_form_is_not_passed_over() -> None:
    for type_ in (set, dict[str, int], int | str, tuple[int, int], object):
        with pytest.raises(TypeError, match="has no text form yet"):
            form_of(type_)


def test_the_listing_has_every_pass_and_every_option() -> None:
    lines = listing().splitlines()
    for entry in pass_entries():
        (row,) = (line for line in lines if line.startswith(f"{entry.name} "))
        assert entry.level in row and row.endswith(".")
    for name in forms_of(Options):
        assert any(line.startswith(f"    {name}=") for line in lines)
    assert [line.split()[0] for line in lines[2:] if line[:1].isalpha()] == [*NAMES, *GROUPS, "default"]


# ---- a pin from a text


def test_a_pin_places_what_the_text_says_and_the_rest_as_by_default() -> None:
    graph = Pipeline(parse_passes("pin{placed={batch(x)=S(1)}}"))(parse(step()))
    placed = {node.name: node.meta["sbp"] for node in graph.placeholders()}
    assert placed["x"] == (S(1),)
    assert all(nd == (B,) for name, nd in placed.items() if name.startswith("w"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("pin{placed={batch(z)=B}}", r"nothing in toy has the role batch\(z\); there is batch\(x\)"),
        ("pin{placed={seed()=B}}", r"nothing in toy has the role seed\(\); there is none of that kind"),
        ("pin{placed={batch(x)=(B, B)}}", r"batch\(x\) = \(B, B\) is not an SBP on each axis of toy: dp"),
        ("pin{placed={batch(x)=S(7)}}", "it has 2 dims"),
    ],
)
def test_a_pin_that_does_not_fit_the_program_is_refused(text: str, problem: str) -> None:
    with pytest.raises(GraphZeroError, match=problem):
        Pipeline(parse_passes(text))(parse(step()))
