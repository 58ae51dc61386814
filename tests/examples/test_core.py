"""The idea in 500 lines computes what plain PyTorch computes, and its rules say what its ops do."""

from functools import partial

import pytest
import torch
from core import core


def all_programs(n: int) -> dict[str, core.Program]:
    zero = {f"zero {i}": core.compile_step(n, core.data_parallel, partial(core.zero, stage=i)) for i in (1, 2, 3)}
    return {
        "data parallel": core.compile_step(n, core.data_parallel),
        "tensor parallel": core.compile_step(n, core.tensor_parallel),
        "kept gathered": core.keep_gathered(zero["zero 3"]),
        **zero,
    }


def run(program: core.Program, n: int) -> dict[str, torch.Tensor]:
    return core.run(program, core.example(), core.World(n, range(n), lambda tensors: tensors))


@pytest.mark.parametrize("n", [1, 2, 4])
def test_every_program_computes_the_step_of_one_device(n: int) -> None:
    for name, program in all_programs(n).items():
        assert core.largest_error(run(program, n)) < 1e-9, name


def test_a_program_without_its_all_reduces_computes_something_else() -> None:
    """So the comparison above can fail."""
    program = all_programs(4)["data parallel"]
    for value in program.values:
        if value.op == "all_reduce":
            value.op, value.args = "pin", value.args[:1]
    assert core.largest_error(run(program, 4)) > 1e-3


@pytest.mark.parametrize("op", [op for op in core.RULES if op != "pin"], ids=core.op_name)
def test_each_way_of_a_rule_computes_what_the_op_does(op: torch._ops.OpOverload) -> None:
    value = next(value for value in core.trace().values if value.op == op)
    operands = {operand: torch.randn(operand.shape, dtype=torch.float64) for operand in value.operands}

    def call(tensor_of: dict[core.Value, torch.Tensor]) -> torch.Tensor:
        return op(*(tensor_of.get(arg, arg) if isinstance(arg, core.Value) else arg for arg in value.args))

    n, ways = 2, list(core.signatures(value))
    assert len(ways) > 1
    for wants, result in ways:
        local = {one: spread(operands[one], want, n) for one, want in zip(operands, wants, strict=True)}
        pieces = [call({one: tensors[rank] for one, tensors in local.items()}) for rank in range(n)]
        torch.testing.assert_close(core.join(pieces, result), call(operands), rtol=1e-9, atol=1e-9)


def spread(whole: torch.Tensor, sbp: str, n: int) -> list[torch.Tensor]:
    """What ranks have of a whole value; terms of a sum at random."""
    if sbp == core.P:
        first = torch.randn_like(whole)
        return [first, *[(whole - first) / (n - 1)] * (n - 1)]
    return [core.piece(whole, sbp, rank, n) for rank in range(n)]


def test_zero_moves_pins_and_changes_no_op() -> None:
    plain, zero = core.trace(), core.trace()
    core.data_parallel(plain)
    core.data_parallel(zero)
    core.zero(zero, stage=3)
    assert [(one.name, one.op) for one in plain.values] == [(one.name, one.op) for one in zero.values]
    moved = {after.role for before, after in zip(plain.values, zero.values, strict=True) if before.sbp != after.sbp}
    assert moved == {"parameter", "state", "read", "gradient", "result"}


def test_the_stages_send_what_the_paper_says() -> None:
    n, size = 4, 8 * (16 * 32 + 32 * 4)  # bytes of the parameters
    sent = {name: core.plan(program, n)[2] for name, program in all_programs(n).items()}
    loss = 2 * (n - 1) / n * 8
    again = (n - 1) / n * 8 * 32 * 4  # w2 is gathered once more in backward
    assert sent["data parallel"] == sent["zero 1"] == sent["zero 2"] == 2 * (n - 1) / n * size + loss
    assert sent["zero 3"] == sent["zero 2"] + again
    assert sent["kept gathered"] == sent["zero 2"]


def test_each_stage_holds_less_than_the_one_before() -> None:
    plans = {name: core.plan(program, 4) for name, program in all_programs(4).items()}
    resident, peak = ([plans[name][i] for name in ("data parallel", "zero 1", "zero 2", "zero 3")] for i in (0, 1))
    assert resident[0] > resident[1] == resident[2] > resident[3]
    assert peak == sorted(peak, reverse=True) and len(set(peak)) == 4
