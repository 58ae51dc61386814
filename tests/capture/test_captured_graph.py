"""The form of a captured graph: names, roles, phases, sources, uses, and nothing superfluous."""

import operator

import torch
import torch.nn.functional as F
from capture_reference import PLACE, Owner, Program, assert_same, inputs_of
from torch import nn

from graphzero.capture import OptimizerSpec, Step, capture, is_capturing, pin_value
from graphzero.ir import ops, value
from graphzero.ir.value import Role
from graphzero.ops import PIN
from graphzero.sbp.types import S

D = torch.float64
aten = torch.ops.aten


def train(self, x):
    loss = self.model(x).pow(2).mean()
    loss.backward()
    return loss


def sgd(owner):
    return [torch.optim.SGD(owner.model.parameters(), lr=0.1)]


def program_of(build, model, *args, optimizers=sgd, **kwargs):
    owner = Owner(build, model=model)
    return Program(owner, optimizers(owner), args, kwargs)


def test_the_whole_step_prints_as_a_person_would_write_it():
    owner = Owner(train, model=nn.Linear(3, 2))
    inputs, _ = inputs_of((torch.zeros(4, 3),), {})
    step = Step("Train", PLACE, owner.build, {"model": owner.model}, [OptimizerSpec(sgd(owner)[0])])
    lines = [" ".join(line.split()) for line in str(capture(step, inputs).graph).splitlines()]
    assert lines[1:8] == [
        "in_0__0 = batch() : f32[4, 3]",
        "model_weight = param(model.weight) : f32[2, 3]",
        "model_bias = param(model.bias) : f32[2]",
        "lr_0 = hyper(optimizer0.group0, lr) : float",
        "forward:",
        "use = use(model_weight) : f32[2, 3]",
        "t = t(use) : f32[3, 2]",
    ]
    assert "neg = operator.neg(lr_0) : float" in lines
    assert [line for line in lines if "gradient(" in line] != []
    assert sum("; loss()" in line for line in lines) == 1


def test_phases_come_in_order_and_sources_name_the_users_line():
    program = program_of(train, nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)), torch.zeros(4, 3))
    body = [n for n in program.graph.nodes if n.op == "call_function"]
    phases = [value.PHASES.index(value.phase_of(n)) for n in body]
    assert phases == sorted(phases)
    assert set(phases) == {1, 2, 3}
    for node in body:
        if value.phase_of(node) != "update":
            assert "test_captured_graph.py:" in value.source_of(node), node
    (relu,) = (n for n in body if n.target is aten.relu.default)
    (threshold,) = (n for n in body if n.target is aten.threshold_backward.default)
    assert value.source_of(threshold) == value.source_of(relu)


def test_each_phase_reads_a_parameter_through_its_own_use():
    def tied(self, x):
        hidden = self.model(x)
        loss = F.linear(hidden, self.model.weight.t().half().float()).pow(2).mean()
        loss.backward()
        return loss

    program = program_of(tied, nn.Linear(4, 4), torch.zeros(4, 4))
    derived = {}
    for node in program.graph.nodes:
        for operand in node.all_input_nodes:
            role = value.role_of(operand)
            if role is not None and role.kind == "param":
                assert node.target is ops.use
            if operand.target is ops.use or operand in derived:
                assert value.phase_of(operand) == value.phase_of(node), (node, operand)
        if len(node.all_input_nodes) == 1 and node.target in (aten.t.default, aten._to_copy.default):
            source = node.all_input_nodes[0]
            if source.target is ops.use or source in derived:
                derived[node] = True
    uses = [(n.args[0].name, value.phase_of(n)) for n in program.graph.nodes if n.target is ops.use]
    assert len(uses) == len(set(uses))
    assert {("model_weight", phase) for phase in ("forward", "backward", "update")} <= set(uses)


def test_nothing_superfluous_is_left():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    program = program_of(train, model, torch.zeros(4, 4))
    for node in program.graph.nodes:
        assert node.target not in (aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default)
        assert not (node.target is aten.t.default and node.args[0].target is aten.t.default)
        assert not (node.target is aten.view.default and node.args[0].target is aten.view.default)
        assert not {"device", "layout", "pin_memory"} & set(node.kwargs)
        assert node.users or node.op in ("placeholder", "output")
        if node.target in (aten.view.default, aten.expand.default):
            assert all(isinstance(n, int) and n >= 0 for n in node.args[1])
        if isinstance(node.target, torch._ops.OpOverload):
            assert not node.target._schema.is_mutable


def test_a_copy_that_makes_contiguous_stays():
    def swapped(self, x):
        loss = self.model(x).transpose(1, 2).reshape(2, -1).pow(2).mean()
        loss.backward()
        return loss

    batches = [((torch.randn(2, 3, 4, dtype=D),), {})]
    program, _ = assert_same(Owner(swapped, model=nn.Linear(4, 4).to(D)), sgd, batches)
    assert any(node.target is aten.clone.default for node in program.graph.nodes)


def test_a_new_tensor_depends_on_no_value_of_the_one_that_gives_its_dtype():
    def build(self, x):
        h = self.model(x)
        mask = h.new_full((4, 4), 2).triu(1) + h.new_ones(4, dtype=torch.float32)
        loss = (torch.cat([h, h.new_zeros(3, 4), h.new_empty(1, 4).fill_(2.0)]) @ mask).square().sum()
        loss.backward()
        return loss

    program, _ = assert_same(Owner(build, model=nn.Linear(4, 4).to(D)), sgd, [((torch.randn(3, 4, dtype=D),), {})])
    created = [node for node in program.graph.nodes if node.name.startswith("new_")]
    assert len(created) == 4 and not any(node.all_input_nodes for node in created)


def test_gradients_are_nodes_of_their_own():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(4, dtype=D)), nn.Parameter(torch.ones(4, dtype=D))

        def forward(self, x):
            return x.sum(0) + self.a + self.b

    def build(self, x):
        loss = self.model(x).sum()
        loss.backward()
        return loss

    program, _ = assert_same(Owner(build, model=Sum()), sgd, [((torch.randn(3, 4, dtype=D),), {})] * 2)
    found = program.graph.gradients()
    assert set(found) == {"model.a", "model.b"}
    assert found["model.a"] is not found["model.b"]


def test_a_gradient_is_what_backward_left_not_what_clipping_made_of_it():
    def clipping(self, x):
        loss = self.model(x).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3)
        return loss

    program = program_of(clipping, nn.Linear(4, 4), torch.ones(3, 4))
    program(torch.ones(3, 4))
    norm = torch.cat([program.env[n].flatten() for n in program.graph.gradients().values()]).norm()
    assert norm > 1e-2


def test_parameters_reached_around_the_modules_are_found():
    model = nn.Linear(4, 4)
    held = list(model.parameters())

    def build(self, x):
        loss = self.model(x).pow(2).mean() + held[0].pow(2).sum()
        loss.backward()
        return loss, nn.utils.clip_grad_norm_(held, 1e-3)

    program = program_of(build, model, torch.ones(3, 4))
    assert not program.captured.constants
    assert program(torch.ones(3, 4))[1] > 1e-2


def test_nested_inputs_keywords_floats_and_outputs():
    def build(self, x, scale, more=None, *, pair):
        loss = self.model(x).pow(2).mean() * scale * (more["a"] + 1) + pair[0].mean() * pair[1]
        loss.backward()
        return {"loss": loss, "rest": [None, "text", 3, (loss * 2,)], "scale": scale}

    x = torch.randn(3, 4, dtype=D)
    batches = [((x, 2.0 * i, {"a": 0.1 * i, "b": None}), {"pair": (x, 3)}) for i in range(1, 4)]
    program, _ = assert_same(Owner(build, model=nn.Linear(4, 4).to(D)), sgd, batches)
    assert len(list(program.graph.placeholders("scalar"))) == 2


def test_a_branch_on_a_float_input_becomes_a_guard():
    def build(self, x, scale):
        return self.model(x) if scale > 1 else x

    program = program_of(build, nn.Linear(4, 4), torch.ones(3, 4), 2.0, optimizers=lambda owner: [])
    role = next(program.graph.placeholders("scalar"), None)
    name = Role("scalar", "in_0__1") if role is None else value.role_of(role)
    assert program.captured.guards.numbers.check({name: 3.0})
    assert not program.captured.guards.numbers.check({name: 0.5})


def test_an_evaluation_returns_copies_of_what_the_graph_holds():
    def build(self, x):
        return self.model(x), x, self.model.weight, self.model.weight.t()

    x = torch.randn(3, 4)
    program = program_of(build, nn.Linear(4, 4), x, optimizers=lambda owner: [])
    assert not program.captured.training
    assert not program.graph.updates
    for node in program.graph.outputs[1:]:
        assert node.target is aten.clone.default


def test_tensors_that_build_closes_over_are_constants():
    table, batches = torch.randn(4, dtype=D), [((torch.randn(3, 4, dtype=D),), {})] * 2

    def build(self, x):
        loss = (self.model(x) * table + table + torch.tensor(2.0) + torch.ones(4)).pow(2).mean()
        loss.backward()
        return loss

    program, _ = assert_same(Owner(build, model=nn.Linear(4, 4).to(D)), sgd, batches)
    assert [t is table for t in program.captured.constants.values()] == [True]
    assert [n.name for n in program.graph.placeholders("constant")] == list(program.captured.constants)


def test_buffers_that_are_replaced_or_written_are_updated():
    class Running(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
            self.calls += 1
            return self.linear(x) - self.mean

    program, _ = assert_same(Owner(train, model=Running().to(D)), sgd, [((torch.randn(3, 4, dtype=D),), {})] * 3)
    assert program.buffers()["model.calls"] == 3


def test_tied_weights_are_one_parameter_by_its_first_name():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 8, padding_idx=0), nn.Linear(8, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids)).flatten(0, 1)

    def build(self, ids):
        loss = F.cross_entropy(self.model(ids), ids.flatten())
        loss.backward()
        return loss

    program, _ = assert_same(Owner(build, model=Tied().to(D)), sgd, [((torch.randint(10, (4, 3)),), {})] * 3)
    assert list(program.parameters()) == ["model.embed.weight"]


def test_meta_parameters_are_captured():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    owner = Owner(train, model=model)
    inputs, _ = inputs_of((torch.zeros(3, 4),), {})
    optimizer = torch.optim.AdamW(model.parameters())
    captured = capture(Step("s", PLACE, owner.build, {"model": model}, [OptimizerSpec(optimizer)]), inputs)
    assert captured.training
    assert len(captured.graph.gradients()) == 4


def test_values_are_pinned_inside_build_only():
    def build(self, x):
        assert is_capturing()
        loss = pin_value(self.model(x), (S(0),)).pow(2).mean()
        loss.backward()
        return loss

    program = program_of(build, nn.Linear(4, 4), torch.ones(3, 4))
    (pin,) = program.graph.graph.find_nodes(op="call_function", target=PIN)
    assert pin.meta["sbp"] == (S(0),)
    assert pin.meta["pins"] == (True,)
    assert not is_capturing()
    x = torch.ones(3)
    assert pin_value(x, (S(0),)) is x


def test_results_of_one_op_are_read_by_number():
    program = program_of(train, nn.LayerNorm(4), torch.ones(3, 4))
    for node in program.graph.nodes:
        if value.is_multi(node):
            assert all(user.target is operator.getitem for user in node.users)
