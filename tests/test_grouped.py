"""Products of groups: one op whatever the dtype and the size of a piece, the same as torch's kernel where that is."""

import pytest
import torch
from graphs import TrainGraph, mean_square

import graphzero as gz
from graphzero.ops import grouped_mm
from graphzero.plugins.check.float64_step import Float64Mode
from graphzero.sbp import B, S
from graphzero.sbp.rule_checks import check_rule

pytestmark = pytest.mark.filterwarnings("error")
ENDS = torch.tensor([3, 3, 8], dtype=torch.int32)
FORMS = {"rows": ((8, 4), (3, 4, 8)), "inner": ((4, 8), (8, 4))}


def operands(form, dtype):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in FORMS[form]]


@pytest.mark.parametrize("form", FORMS)
def test_float64_and_the_kernel_of_float32_agree(form):
    exact = grouped_mm.product(*operands(form, torch.float64), ENDS)
    torch.testing.assert_close(
        grouped_mm.product(*operands(form, torch.float32), ENDS).double(), exact, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("shapes", [((16, 4), (2, 4, 8)), ((4, 16), (16, 8)), ((2, 4, 8), (8, 16))])
@pytest.mark.parametrize("turned", [False, True])
def test_groups_that_begin_later_are_the_same_by_the_kernel_and_one_by_one(shapes, turned):
    a, b = (torch.randn(shape) for shape in shapes)
    a, b = (x.transpose(-2, -1).contiguous().transpose(-2, -1) if turned else x for x in (a, b))
    first, ends = torch.tensor(3), torch.tensor([3, 9], dtype=torch.int32)
    whole = grouped_mm.product(a, b, torch.tensor([3, 9], dtype=torch.int32))
    own, rolled = (form(a, b, ends, first) for form in (grouped_mm.product, grouped_mm._by_kernel_from))
    rows = (slice(3, 9),) if len(shapes[1]) == 3 else (..., slice(3, 9)) if len(shapes[0]) == 3 else (slice(1, 2),)
    torch.testing.assert_close(own[rows], whole[rows])
    torch.testing.assert_close(rolled[rows], whole[rows])
    if own.dim() == 3:
        assert not own[0].any() and not rolled[0].any()  # an empty group, not what lies before the first


def test_a_piece_that_the_kernel_refuses_is_computed_all_the_same():
    a, b = operands("rows", torch.float32)
    piece = b[..., :3].contiguous()  # rows 12 bytes apart
    with pytest.raises(RuntimeError, match="16 bytes"):
        torch.ops.aten._grouped_mm(a, piece, ENDS)
    torch.testing.assert_close(grouped_mm.product(a, piece, ENDS), grouped_mm.product(a, b, ENDS)[:, :3])


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = (torch.nn.Parameter(torch.randn(3, *shape)) for shape in ((4, 8), (8, 4)))

    def forward(self, x):
        groups = torch.tensor([2, 2, 8], dtype=torch.int32, device=x.device)
        hidden = torch.nn.functional.grouped_mm(x, self.up, offs=groups)
        return torch.nn.functional.grouped_mm(hidden.relu(), self.down, offs=groups)


def sgd_graph(model, placement) -> TrainGraph:
    return TrainGraph(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.1), placement=placement)


def test_experts_whose_weights_are_split_train_as_plain_pytorch_does():
    torch.manual_seed(0)
    model, twin = Experts(), Experts()
    twin.load_state_dict(model.state_dict())
    place = gz.placement("cpu", range(2), names=("tp",), virtual=True)
    gz.to_global(model.up, place, S(2))
    gz.to_global(model.down, place, S(1))
    with pytest.warns(UserWarning, match="no axis of"):
        graph = sgd_graph(model, place)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(2):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = twin(x).square().mean()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(graph(x), loss.detach())
    assert [c.kind for c in graph.plan.collectives if c.phase == "forward"] == ["all_reduce"]


def test_a_rule_splits_the_inner_dim_and_the_columns_but_no_group():
    found = check_rule(torch.ops.graphzero.grouped_mm.default, (*operands("rows", torch.float64), ENDS))
    splits = {tuple(s.inputs[:2]) for s in found if any(x.is_split for x in s.inputs)}
    assert splits == {(S(1), S(1)), (B, S(2))}


def test_products_of_groups_are_computed_in_float64_where_a_step_is_checked():
    a, b = torch.randn(8, 4, dtype=torch.float64), torch.randn(2, 4, 6, dtype=torch.float64)
    a.requires_grad_(), b.requires_grad_()
    ends = torch.tensor([3, 8], dtype=torch.int32)
    expected = torch.cat([a[:3] @ b[0], a[3:] @ b[1]])
    wanted = torch.autograd.grad(expected.square().sum(), (a, b))
    with Float64Mode():
        found = torch.nn.functional.grouped_mm(a, b, offs=ends)
        gradients = torch.autograd.grad(found.square().sum(), (a, b))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients, wanted)
