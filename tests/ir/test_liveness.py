"""What is computed of a program is what a fresh look at it gives, whatever has been changed since the last one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from toys import STAGES, lower, step

from graphzero.errors import VerifyError
from graphzero.ir import ops
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.liveness import Liveness, bytes_held, liveness
from graphzero.ir.text.parser import parse
from graphzero.ir.value import Role
from graphzero.ir.verifier.verify import verify
from graphzero.sbp.types import B, S

LAYERS = ("linear 8", "bias", "relu", "linear 8", "bias", "relu", "linear 4")


def everything(at: Liveness) -> tuple[Any, ...]:
    return (
        at.nodes,
        at.position,
        at.roots,
        at.readers,
        at.spans(),
        at.slots,
        at.total().tolist(),
        at.phase_end,
    )


def turned(graph: StepGraph, chance: random.Random) -> None:
    """Some change that a pass could make, to what the answers follow from; not one that keeps every law."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    node, other = chance.choice(nodes), chance.choice(nodes)
    kind = chance.randrange(6)
    if kind == 0:
        node.append(other) if node is not other else None
    elif kind == 1 and isinstance(node.meta["sbp"], tuple) and len(node.meta["sbp"]) == 1:
        node.meta["sbp"] = (chance.choice([B, S(0)]),)
    elif kind == 2:
        node.meta["role"] = Role("gradient", "w")
    elif kind == 3:
        node.meta["phase"] = chance.choice(["forward", "backward", "update"])
    elif kind == 4 and node.all_input_nodes:
        operand = node.all_input_nodes[0]
        with graph.graph.inserting_before(node):
            neg, type_ = torch.ops.aten.neg.default, operand.meta["type"]
            made = graph.call(neg, (operand,), type_, sbp=operand.meta["sbp"], like=node)
        node.replace_input_with(operand, made)
    elif not node.users:
        graph.graph.erase_node(node)


@pytest.mark.parametrize("seed", range(6))
def test_a_change_of_whatever_kind_is_noticed(seed: int) -> None:
    chance = random.Random(seed)
    graph = lower(step(LAYERS), STAGES[seed % len(STAGES)])
    for _ in range(60):
        known = liveness(graph)
        turned(graph, chance)
        try:
            fresh = everything(Liveness(graph))
        except (KeyError, IndexError, StopIteration):  # such a program says nothing; the next change is tried
            graph = lower(step(LAYERS), STAGES[seed % len(STAGES)])
            continue
        assert everything(liveness(graph)) == fresh
        if known is liveness(graph):
            assert everything(known) == fresh


def test_nothing_is_computed_twice_of_a_program_that_stays() -> None:
    graph = lower(step(LAYERS), STAGES[2])
    known = liveness(graph)
    assert liveness(graph) is known and known.spans() is known.spans()
    graph.settle()
    assert liveness(graph) is known
    graph.forget()
    assert liveness(graph) is not known


def test_a_clone_has_an_analysis_of_its_own() -> None:
    graph = lower(step(LAYERS), STAGES[1])
    known, clone = liveness(graph), graph.clone()
    assert not set(liveness(clone).nodes) & set(known.nodes)


def test_what_an_op_lives_on_is_held_up_to_its_last_reader_both_ends_included() -> None:
    graph = parse("""
graph toy(dp=1) local
  x = batch()   : f32[4]  B
forward:
  a = neg(x)    : f32[4]  B
  b = view(a, [4]) : f32[4]  B
  c = mul(b, b) : f32[4]  B
  d = neg(c)    : f32[4]  B
  return d
""")
    at = liveness(verify(graph))
    held = {span.storage[0].name: (span.begin, span.end, span.nbytes) for span in at.spans()}
    assert held == {"x": (-1, 5, 16), "a": (1, 3, 16), "c": (3, 4, 16), "d": (4, 5, 16)}
    assert at.over_time(at.spans()).tolist() == [0, 16, 16, 32, 32, 16]


def test_bytes_held_are_the_sum_of_what_overlaps() -> None:
    chance = random.Random(0)
    spans = [(begin := chance.randrange(20), chance.randrange(begin, 20), chance.randrange(100)) for _ in range(50)]
    begins, ends, sizes = np.array(spans).T
    plain = [sum(size for begin, end, size in spans if begin <= at <= end) for at in range(20)]
    assert bytes_held(begins, ends, sizes, 20).tolist() == plain


def test_a_state_is_not_read_by_what_writes_over_it() -> None:
    graph = lower(step(LAYERS), None)
    at = liveness(graph)
    for assign in graph.graph.find_nodes(op="call_function", target=ops.assign):
        assert at.position[assign] not in at.readers[assign.args[0], 0]


def test_verify_looks_again_at_an_op_whose_operand_has_changed() -> None:
    graph = lower(step(LAYERS), None)
    verify(graph)
    node = next(n for n in graph.nodes if n.target is torch.ops.aten.mm.default)
    operand = node.all_input_nodes[0]
    assert graph.lawful[node]
    operand.meta["sbp"] = (S(1),) if operand.meta["sbp"] != (S(1),) else (S(0),)
    with pytest.raises(VerifyError):
        verify(graph)
