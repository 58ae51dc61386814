"""Results take the storage of what dies: less memory, the same values."""

from __future__ import annotations

import pytest
import torch
from toys import STAGES, inputs_of, lower, on_ranks, options, random_step, run, step

from graphzero.errors import VerifyError
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage import inplace, kernel_forms
from graphzero.ir.storage.liveness import liveness
from graphzero.ir.text.parser import parse
from graphzero.ir.verifier import storage
from graphzero.ir.verifier.verify import verify
from graphzero.passes import Bucket, InPlace, Pipeline, Zero, default_passes
from graphzero.runtime.execute.executor import Executor
from graphzero.runtime.world.virtual import VirtualWorld
from graphzero.testing import assert_graph

aten = torch.ops.aten
MOMENTUM = """
graph step(dp=2)
  x = batch()     : f32[8, 16]  S(0)!
  w = param()     : f32[16, 4]  B!
  m = state(w, m) : f32[16, 4]  B!
forward:
  f = use(w)      : f32[16, 4]
  y = mm(x, f)    : f32[8, 4]
  e = relu(y)     : f32[8, 4]
backward:
  t = t(x)        : f32[16, 8]
  g = mm(t, e)    : f32[16, 4]  ; gradient(w)
update:
  u = use(w)      : f32[16, 4]
  a = mul(m, 0.9) : f32[16, 4]
  n = add(a, g)   : f32[16, 4]
  d = mul(n, 0.1) : f32[16, 4]
  v = sub(u, d)   : f32[16, 4]
  return update(w=v, m=n)
"""


def without(text: str, zero: Zero | None = None, bucket: Bucket | None = None) -> StepGraph:
    passes = default_passes(options(zero, bucket))
    return Pipeline(one for one in passes if not isinstance(one, InPlace))(parse(text))


def rooms(graph: StepGraph) -> dict[str, str]:
    """Value -> the value whose storage it takes."""
    found = {node.name: inplace.out_of(node) for node in graph.nodes}
    return {name: room.name for name, room in found.items() if room is not None}


def test_an_update_is_computed_in_the_states_own_storage() -> None:
    assert_graph(lower(MOMENTUM, Zero(3)), """
        graph step(dp=2) local
          x        = batch()                                               : f32[8, 16]        S(0)!
          w        = param()                                               : f32[16, 4]        S(0)!
          m        = state(w, m)                                           : f32[16, 4]        S(0)!
        forward:
          launch   = launch('bucket_all_gather', None, [w], [0], 'dp')     : (f32[16, 4]  B)
          wait     = wait(launch)                                          : (f32[16, 4]  B)
          w_b      = wait[0]                                               : f32[16, 4]        B  ; param(w)
          y        = mm(x, w_b)                                            : f32[8, 4]         S(0)
          e        = relu(y, out=y)                                        : f32[8, 4]         S(0)
        backward:
          t        = t(x)                                                  : f32[16, 8]        S(1)
          g        = mm(t, e)                                              : f32[16, 4]        P  ; gradient(w)
          launch_1 = launch('bucket_reduce_scatter', None, [g], [0], 'dp') : (f32[16, 4]  S(0))
          wait_1   = wait(launch_1)                                        : (f32[16, 4]  S(0))
          g_s      = wait_1[0]                                             : f32[16, 4]        S(0)  ; gradient(w)
        update:
          a        = mul(m, 0.9, out=m)                                    : f32[16, 4]        S(0)
          n        = add(a, g_s, out=a)                                    : f32[16, 4]        S(0)
          d        = mul(n, 0.1)                                           : f32[16, 4]        S(0)
          v        = sub(w, d, out=w)                                      : f32[16, 4]        S(0)
          return update(w=v, m=n)
        """)  # fmt: skip


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 12))])
def test_values_are_the_same_to_the_bit_and_the_peak_is_no_higher(seed: int, zero: Zero | None) -> None:
    text, layouts = random_step(seed), ((1, None), (3, None), (2, Bucket(1)), (3, Bucket(1)))
    for ranks, bucket in layouts[(seed + STAGES.index(zero)) % 2 :: 2]:  # each at each stage, for half of the seeds
        before, after = without(on_ranks(text, ranks), zero, bucket), lower(on_ranks(text, ranks), zero, bucket)
        assert str(parse(str(after))) == str(after)
        wanted, found = run(before, seed), run(after, seed)
        assert wanted.keys() == found.keys()
        for name, pieces in wanted.items():
            assert all(torch.equal(a, b) for a, b in zip(pieces, found[name], strict=True)), name
        assert peak(after) <= peak(before)


def peak(graph: StepGraph) -> int:
    """Most bytes alive at once."""
    spans = liveness(graph).spans()
    return max(sum(x.nbytes for x in spans if x.begin <= at <= x.end) for at in range(len(list(graph.nodes))))


def test_a_step_in_place_has_a_lower_peak() -> None:
    text = step(("linear 64", "relu", "linear 64", "relu", "linear 64"), width=64)
    assert peak(lower(text)) < peak(without(text))


@pytest.mark.parametrize(
    ("lines", "kept"),
    [
        ("b = mul(a, 2.0) : f32[4, 4]\n  c = add(a, b) : f32[4, 4]", "b"),  # a is read again
        ("t = t(a) : f32[4, 4]\n  b = add(a, t) : f32[4, 4]\n  c = neg(b) : f32[4, 4]", "b"),  # read twice
        ("b = _softmax(a, 1, False) : f32[4, 4]\n  t = t(b) : f32[4, 4]\n  c = mul(t, 2.0) : f32[4, 4]", "c"),  # a view
        ("b = mul(x, 2.0) : f32[4, 4]\n  c = neg(b) : f32[4, 4]", "b"),  # the user's tensor
        ("b = sum.dim_IntList(a, [1], True) : f32[4, 1]\n  c = add(a, b) : f32[4, 4]", "b"),  # another shape
        ("b = gt.Scalar(a, 0.5) : bool[4, 4]\n  c = where.self(b, a, a) : f32[4, 4]", "b"),  # another dtype
        ("b = mm(a, a) : f32[4, 4]\n  c = neg(b) : f32[4, 4]", "b"),  # not element by element
        ("b = cat([a]) : f32[4, 4]\n  c = neg(b) : f32[4, 4]", "b"),  # that neither, over one of a list
    ],
)  # fmt: skip
def test_what_is_still_needed_or_of_another_form_is_not_written_over(lines: str, kept: str) -> None:
    text = f"""
graph g(dp=1)
  x = batch() : f32[4, 4]
forward:
  a = exp(x) : f32[4, 4]
  {lines}
  return c
"""
    program = lower(text)
    assert kept not in rooms(program)
    wanted, found = run(without(text)), run(program)
    assert torch.equal(wanted["output 0"][0], found["output 0"][0])


@pytest.mark.parametrize(
    ("ops", "kept"),
    [
        (("m = mm(x, x)", "a = mul(m, 2.0)"), False),  # known to lie row by row
        (("m = mm(x, x)", "t = t(m)", "a = mul(t, 2.0)"), True),  # known to lie otherwise
        (("a = mul(x, 2.0)",), True),  # as the user's tensor lies, which nobody knows
        (("m = mm(x, x)", "a = add(m, x)"), False),  # as the first operand lies
    ],
)
@pytest.mark.parametrize("op", ["_softmax(a, 0, False)", "_log_softmax(a, 1, False)"])
def test_an_op_that_writes_row_by_row_only_moves_in_where_rows_are_known_to_lie(
    op: str, ops: tuple[str, ...], kept: bool
) -> None:
    lines = "\n  ".join(f"{line} : f32[6, 6]" for line in ops)
    text = f"graph g(dp=1)\n  x = batch() : f32[6, 6]  B!\nforward:\n  {lines}\n  b = {op} : f32[6, 6]\n  return b\n"
    program = lower(text)
    assert ("b" not in rooms(program)) == kept
    given = inputs_of(program)
    turned = {"x": [x.t() for x in given["x"]]}  # type: ignore[union-attr]
    for inputs in (given, turned):
        found, wanted = (on(graph, inputs) for graph in (program, without(text)))
        assert torch.equal(found, wanted)


def on(graph: StepGraph, inputs: dict[str, object]) -> torch.Tensor:
    executor = Executor(graph, VirtualWorld(graph.placement))
    return executor.run_step(inputs).outputs[0][0]  # type: ignore[arg-type,no-any-return]


def test_a_new_state_that_build_returns_is_no_view_of_the_state() -> None:
    text = MOMENTUM.replace("return update", "return n; update")
    program = lower(text)
    assert "m" not in rooms(program).values() or "n" not in rooms(program)
    wanted, found = run(without(text)), run(program)
    for name, pieces in wanted.items():
        assert all(torch.equal(a, b) for a, b in zip(pieces, found[name], strict=True)), name


def test_one_new_value_for_two_states_is_copied_into_both() -> None:
    text = MOMENTUM.replace("update(w=v, m=n)", "update(w=v, m=v)")
    wanted, found = run(without(text)), run(lower(text))
    for name, pieces in wanted.items():
        assert all(torch.equal(a, b) for a, b in zip(pieces, found[name], strict=True)), name


def test_a_gathered_parameter_arrives_where_it_was() -> None:
    odd = MOMENTUM.replace(", 4]", ", 3]").replace("16", "15")  # 15 rows on two ranks are padded on the wire
    for text, out in ((MOMENTUM, ", out=w"), (odd, "")):
        program = lower(text, Zero(2), Bucket(1))
        assert f"launch('bucket_all_gather', None, [v], [0], 'dp'{out})" in str(program)
        wanted, found = run(without(text, Zero(2))), run(program)
        for name, pieces in wanted.items():
            assert all(torch.equal(a, b) for a, b in zip(pieces, found[name], strict=True)), name


def test_a_parameter_that_does_not_lie_in_one_piece_is_gathered_all_the_same() -> None:
    program = lower(on_ranks(MOMENTUM, 1), Zero(2), Bucket(1))
    whole = lower(MOMENTUM, Zero(2), Bucket(1))
    given = inputs_of(whole)
    executor = Executor(whole, VirtualWorld(whole.placement))
    ranks = [x.t().contiguous().t() for x in given["w"]]  # type: ignore[union-attr]
    executor.bind({"w": ranks, "m": given["m"]})  # type: ignore[dict-item]
    executor.run_step({"x": given["x"]})
    wanted = run(program)["w"][0]
    assert not ranks[0].is_contiguous()
    assert all(torch.allclose(x, wanted, atol=1e-5) for x in ranks)


# ---- the law of out=

LOCAL = """
graph g(dp=1) local
  x = batch()     : f32[4]  B
  m = state(w, m) : f32[4]  B
forward:
  a = exp(x)      : f32[4]  B
  b = mul(a, 2.0{}) : f32[4]  B
  {}
  return c{}
"""


@pytest.mark.parametrize(
    ("out", "line", "update", "problem"),
    [
        (", out=a", "c = add(a, b) : f32[4]  B", "", "'c' reads 'a', in whose storage 'b' writes"),
        (", out=x", "c = neg(b) : f32[4]  B", "", "'b' writes over 'x', which the step does not change"),
        (", out=m", "c = neg(b) : f32[4]  B", "", "'b' writes over 'm', which the step does not change"),
        (", out=a", "c = cumsum(b, 0, out=b) : f32[4]  B", "", "'c' writes over 'b' while it reads it"),
        (", out=a", "c = cat([b], out=b) : f32[4]  B", "", "'c' writes over 'b' while it reads it"),
        (", out=a", "c = sum.dim_IntList(b, [0], out=b) : f32[]  B", "", "'c' cannot be put in the storage of 'b'"),
        (
            ", out=a",
            "v = view(b, [4]) : f32[4]  B\n  c = add(b, v, out=b) : f32[4]  B",
            "",
            "'c' writes over 'v' while it",
        ),
        (", out=a", "d = neg(b, out=m) : f32[4]  B\n  c = add(d, m) : f32[4]  B", "; update(m=d)", "'c' reads 'm'"),
    ],
)
def test_a_write_that_would_change_what_is_read_is_refused(out: str, line: str, update: str, problem: str) -> None:
    with pytest.raises(VerifyError) as caught:
        verify(parse(LOCAL.format(out, line, update)))
    assert problem in str(caught.value)


@pytest.mark.parametrize("op", ["_softmax(a, 0, False, out=a)", "_log_softmax(a, 0, False, out=a)"])
def test_an_op_that_writes_row_by_row_is_refused_where_rows_are_not_known_to_lie(op: str) -> None:
    def text(maker: str) -> str:
        lines = f"a = {maker} : f32[4, 4]  B\n  b = {op} : f32[4, 4]  B\n  return b\n"
        return f"graph g(dp=1) local\n  x = batch() : f32[4, 4]  B\nforward:\n  {lines}"

    verify(parse(text("mm(x, x)")))
    with pytest.raises(VerifyError, match="'b' writes row by row, and the layout of 'a' is not known to be that"):
        verify(parse(text("exp(x)")))


def test_an_op_that_is_not_known_to_write_right_is_given_no_room() -> None:
    text = LOCAL.format(", out=a", "c = huber_loss(b, b, 0, 1.0, out=b) : f32[4]  B", "")
    with pytest.raises(VerifyError, match="'c' cannot be put in the storage of 'b'"):
        verify(parse(text))


def test_an_op_without_an_out_form_writes_over_its_first_operand_alone() -> None:
    verify(parse(LOCAL.format("", "c = relu(b, out=b) : f32[4]  B", "")))
    with pytest.raises(VerifyError, match="'c' can only write over its first operand, which 'a' is not"):
        verify(parse(LOCAL.format("", "c = relu(b, out=a) : f32[4]  B", "")))


def test_a_new_state_is_not_written_through_a_view_in_other_sizes() -> None:
    def text(*lines: str) -> str:
        body = "\n  ".join(lines)
        return f"""
graph g(dp=1) local
  x = batch()     : f32[4, 4]  B
  m = state(w, m) : f32[4, 4]  B
forward:
  {body}
  return x; update(m=n)
"""

    verify(parse(text("n = add(m, x, out=m) : f32[4, 4]  B")))
    flat = ("f = view(m, [16]) : f32[16]  B", "g = neg(f, out=f) : f32[16]  B", "v = view(g, [4, 4]) : f32[4, 4]  B")
    with pytest.raises(VerifyError, match="'n', the new 'm', lives in a view of it"):
        verify(parse(text(*flat, "n = neg(v, out=v) : f32[4, 4]  B")))


@pytest.mark.same_kernels
def test_a_write_into_a_state_is_its_new_value() -> None:
    graph = parse(
        LOCAL.format(", out=a", "c = neg(b) : f32[4]  B\n  d = add(b, m, out=m) : f32[4]  B", "; update(m=d)")
    )
    verify(graph)
    given, found = inputs_of(graph), run(graph)
    twice = 2.0 * given["x"][0].exp()  # type: ignore[union-attr]
    assert torch.equal(found["output 0"][0], -twice)
    assert torch.equal(found["m"][0], twice + given["m"][0])


def test_running_reuse_twice_changes_nothing() -> None:
    program = lower(MOMENTUM, Zero(2))
    assert str(Pipeline([InPlace()])(program)) == str(program)


# ---- kernels

SHAPES = [(3,), (7, 5), (64, 33), (2, 3, 130), (1, 4097)]
UNARY = (
    aten.relu, aten.gelu, aten.silu, aten.tanh, aten.sigmoid, aten.exp, aten.sqrt, aten.rsqrt, aten.neg, aten.abs,
    aten.reciprocal, aten.log, aten.sin, aten.cos, aten.erf, aten.floor, aten.sign,
)  # fmt: skip
BINARY = (
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.maximum.default, aten.minimum.default,
    aten.gelu_backward.default, aten.silu_backward.default, aten.tanh_backward.default, aten.sigmoid_backward.default,
    aten.pow.Tensor_Tensor, aten.atan2.default,
)  # fmt: skip


def _told(op: torch._ops.OpOverload, args: tuple[object, ...], at: int) -> list[torch.Tensor]:
    """The op's results by each form that writes over operand ``at``, each on copies."""
    made = []
    copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    form = kernel_forms.writing(op)
    if form is not None:
        made.append(form[0](*copies, **{form[1]: copies[at]}))
    over = kernel_forms.over_first(op)
    if over is not None and at == 0:
        copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        over(*copies)
        made.append(copies[0])
    return made


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_op_over_its_operand_gives_the_bits_of_the_op_beside_it(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.rand(shape, generator=generator).add(0.1).to(dtype) for _ in range(2))
    checked = 0
    calls = [(packet.default, (x,), 0) for packet in UNARY]
    calls += [(op, (x, y), at) for op in BINARY for at in (0, 1)]
    calls += [(aten.lerp.Scalar, (x, y, 0.3), at) for at in (0, 1)]
    calls += [(op, (x, y, x * 2), at) for op in (aten.addcmul.default, aten.addcdiv.default) for at in (0, 1, 2)]
    calls += [(aten.threshold_backward.default, (x, y, 0.5), at) for at in (0, 1)]
    calls += [(aten.where.self, (x > 0.5, x, y), at) for at in (1, 2)]
    for op, args, at in calls:
        assert kernel_forms.is_pointwise(op)
        wanted = op(*args)
        for found in _told(op, args, at):
            assert torch.equal(found, wanted), op
            checked += 1
    assert checked > 50


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_op_on_rows_over_the_rows_it_reads_gives_the_bits_of_the_op_beside_it(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    for dim in range(len(shape)):
        forward = {op: op(x, dim, False) for op in (aten._log_softmax.default, aten._softmax.default)}
        calls = [(op, (x, dim, False)) for op in forward]
        calls += [(aten._log_softmax_backward_data.default, (grad, forward[aten._log_softmax.default], dim, dtype))]
        calls += [(aten._softmax_backward_data.default, (grad, forward[aten._softmax.default], dim, dtype))]
        for op, args in calls:
            wanted = op(*args)
            made = _told(op, args, inplace.ROW_BY_ROW[op])
            assert made
            assert all(torch.equal(found, wanted) for found in made), (op, dim)


def test_a_form_that_torch_makes_up_from_a_copy_is_not_taken() -> None:
    assert kernel_forms.writing(aten.native_dropout.default) is None
    assert kernel_forms.writing(aten.relu.default) is None and kernel_forms.over_first(aten.relu.default) is not None


def test_laws_of_storage_look_at_a_result_of_several_once(monkeypatch: pytest.MonkeyPatch) -> None:
    count, looked = 60, []
    picks = "".join(f"  r{i} = a[{i}] : f32[1, 4]  B\n" for i in range(count))
    graph = parse(
        f"graph step(dp=2) local\n  x = batch() : f32[{count}, 4]  B!\n  w = param() : f32[4]  B!\nforward:\n"
        "  n = neg(w) : f32[4]  B\n  v = assign(w, n) : f32[4]  B\n"  # else nobody looks
        f"  a = split.Tensor(x, 1) : ({', '.join(['f32[1, 4]  B'] * count)})\n{picks}"
        f"  return {', '.join(f'r{i}' for i in range(count))}; update(w=v)\n"
    )
    check = storage._StorageWalk._check_read
    monkeypatch.setattr(storage._StorageWalk, "_check_read", lambda *args: (looked.append(args), check(*args)))
    storage.check_storage(graph, "")
    # the op's operand, its results as they are picked and returned, and the new w
    assert len(looked) == 1 + 2 * count + 1
