"""A cast before a gather is done where the gather lays a rank's piece down: the same bits, and fewer transfers."""

from __future__ import annotations

import pytest
import torch
from graphs import TrainGraph
from toys import lines

from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.liveness import liveness
from graphzero.ir.text.parser import parse
from graphzero.passes import Bucket, DeadCode, InPlace, Launch, Overlap, Pipeline, Slots
from graphzero.passes.schedule.gather_casts import GatherCasts
from graphzero.testing import assert_same_step

BEHIND = (Bucket(), Launch(), Overlap(), Slots(), DeadCode(), InPlace())
# Pieces that are not even, of no elements on some ranks, in long runs and along dim 1; a member that is 16-bit already.
STEP = """
graph step(dp={ranks}) local
  a = param()                           : f32[5, 3]      S(0)
  b = param()                           : f32[2]         S(0)
  c = param()                           : bf16[7]        S(0)
  d = param()                           : f32[1536, 96]  S(0)
  e = param()                           : f32[4, 6]      S(1)
forward:
  an = _to_copy(a, dtype=torch.{dtype}) : {short}[5, 3]      S(0)
  ab = all_gather(an, 0, 'dp')          : {short}[5, 3]      B
  bn = _to_copy(b, dtype=torch.{dtype}) : {short}[2]         S(0)
  bb = all_gather(bn, 0, 'dp')          : {short}[2]         B
  cb = all_gather(c, 0, 'dp')           : bf16[7]        B
  dn = _to_copy(d, dtype=torch.{dtype}) : {short}[1536, 96]  S(0)
  db = all_gather(dn, 0, 'dp')          : {short}[1536, 96]  B
  en = _to_copy(e, dtype=torch.{dtype}) : {short}[4, 6]      S(1)
  eb = all_gather(en, 1, 'dp')          : {short}[4, 6]      B
  return ab, bb, cb, db, eb
"""


def graph(ranks: int = 2, dtype: str = "bfloat16") -> StepGraph:
    return parse(STEP.format(ranks=ranks, dtype=dtype, short={"bfloat16": "bf16", "float16": "f16"}[dtype]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_is_gathered_is_the_cast_to_the_bit(ranks: int, dtype: str) -> None:
    plain, cast = Pipeline(BEHIND)(graph(ranks, dtype)), Pipeline((GatherCasts(), *BEHIND))(graph(ranks, dtype))
    assert lines(plain, "_to_copy(") and not lines(cast, "_to_copy(")
    assert_same_step(plain, cast, rtol=0, atol=0)
    assert str(parse(str(cast))) == str(cast)


def test_values_of_several_dtypes_share_a_bucket_that_casts_them() -> None:
    program = Pipeline((GatherCasts(), *BEHIND))(graph())
    (line,) = lines(program, "launch('bucket_all_gather', 0, ")
    assert "[a, b, c, e]" in line and "dtype=torch.bfloat16" in line
    (alone,) = lines(program, "launch('bucket_all_gather', None, ")
    assert "[d]" in alone


def test_a_gather_that_casts_holds_and_sends_16_bit() -> None:
    program = Pipeline((GatherCasts(), *BEHIND))(graph())
    layouts = list(liveness(program).layouts.values())
    assert {layout.itemsize for layout in layouts} == {2}
    assert max(layout.arrived_elements for layout in layouts) == 1536 * 96


OTHERS = {
    "another reader": "  y = neg(n) : bf16[8]  S(0)\n  return g, y",
    "computed": "  return g",
}


@pytest.mark.parametrize("name", OTHERS)
def test_casts_that_others_read_and_of_what_the_step_computes_stay(name: str) -> None:
    read = "z" if name == "computed" else "w"
    text = (
        "graph step(dp=2) local\n  w = param() : f32[8]  S(0)\nforward:\n  z = neg(w) : f32[8]  S(0)\n"
        f"  n = _to_copy({read}, dtype=torch.bfloat16) : bf16[8]  S(0)\n  g = all_gather(n, 0, 'dp') : bf16[8]  B\n"
        f"{OTHERS[name]}\n"
    )
    assert lines(Pipeline([GatherCasts()])(parse(text)), "_to_copy(")


def float_mean_square(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def mixed_precision_graph(stage: int, micro_batches: int = 1) -> TrainGraph:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    layout = {"stage": stage, "micro_batches": micro_batches, "dtype": torch.bfloat16}
    return TrainGraph(model, float_mean_square, optimizer, **layout)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_in_mixed_precision_casts_in_its_gathers(stage: int, micro_batches: int) -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    step, whole = mixed_precision_graph(stage, micro_batches), mixed_precision_graph(0, micro_batches)
    compiled = step.compile(x)
    record = next(record for record in compiled.history if record.name == "gather_casts")
    assert_same_step(record.before, record.after, rtol=0, atol=0)
    assert not [line for line in lines(compiled.program, "_to_copy(") if "param(" in line]
    for _ in range(3 if micro_batches == 1 else 0):  # of several, gradients are added up in another order at stage 2
        assert torch.equal(step(x), whole(x))
