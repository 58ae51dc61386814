"""Graph on virtual ranks: one call is one step of the user's program, and the user's objects stay true."""

import warnings

import pytest
import torch
from graphs import TrainGraph
from torch import nn

import graphzero as gz

N = 4


def virtual(n: int = N) -> gz.Placement:
    return gz.placement("cpu", range(n), virtual=True)


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).double()


def batch(seed: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, 6, generator=generator, dtype=torch.float64),
        torch.randn(rows, 3, generator=generator, dtype=torch.float64),
    )


def output_and_loss(model, x, y):
    out = model(x)
    loss = nn.functional.mse_loss(out, y)
    return {"out": out, "loss": loss}


def mse_graph(model, optimizer=None, stage=0, placement=None, **options) -> TrainGraph:
    return TrainGraph(model, output_and_loss, optimizer, placement=placement or virtual(), stage=stage, **options)


def eager_step(model, optimizer, x, y, clip=None):
    optimizer.zero_grad()
    out = model(x)
    loss = nn.functional.mse_loss(out, y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip) if clip else None
    optimizer.step()
    return out.detach(), loss.detach(), norm


def sgd(model, **kwargs):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **kwargs})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_steps_are_those_of_eager_pytorch(stage):
    model, twin = mlp(), mlp()
    optimizer, twin_optimizer = sgd(model), sgd(twin)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda i: 1 / (1 + i)) for o in (optimizer, twin_optimizer)]
    graph = mse_graph(model, optimizer, stage, scheduler=schedulers[0], clip=0.5)
    for step in range(3):
        found = graph(*batch(step))
        out, loss, norm = eager_step(twin, twin_optimizer, *batch(step), clip=0.5)
        schedulers[1].step()
        torch.testing.assert_close(found["out"], out)
        torch.testing.assert_close(found["loss"], loss)
        torch.testing.assert_close(graph.grad_norm, norm)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.grad is None
        torch.testing.assert_close(
            optimizer.state[ours]["momentum_buffer"], twin_optimizer.state[theirs]["momentum_buffer"]
        )
    assert optimizer.param_groups[0]["lr"] == twin_optimizer.param_groups[0]["lr"]
    assert len(graph.history) >= 7 and graph.training and graph.is_compiled


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_keep_identity_on_virtual_ranks_and_say_how_they_lie(stage):
    model = mlp()
    before = list(model.parameters())
    graph = mse_graph(model, sgd(model), stage)
    graph(*batch(0))
    assert all(p is q for p, q in zip(model.parameters(), before, strict=True))
    assert gz.sbp.of(model[0].weight) == ((gz.sbp.S(0),) if stage == 3 else (gz.sbp.B,))


def test_eager_steps_may_stand_between_calls():
    model, twin = mlp(), mlp()
    optimizer, other = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, twin))
    graph = mse_graph(model, optimizer, 2)
    for step in range(4):
        (graph if step % 2 else lambda x, y: eager_step(model, optimizer, x, y))(*batch(step))
        eager_step(twin, other, *batch(step))
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        assert float(optimizer.state[ours]["step"]) == 4
    assert len(graph._selection.programs.all) == 1


def test_one_program_serves_equal_calls_and_other_shapes_make_another():
    model = mlp()
    graph = mse_graph(model, sgd(model), 3)
    graph(*batch(0))
    first = graph.program
    graph(*batch(1))
    assert graph.program is first
    graph(*batch(2, rows=4))
    assert graph.program is not first
    graph(*batch(3))
    assert graph.program is first


def test_modes_and_requires_grad_are_part_of_the_key():
    model = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5)).double()
    graph = mse_graph(model, sgd(model))
    graph(*batch(0))
    with_dropout = str(graph.program)
    model.eval()
    graph(*batch(0))
    assert "uniform" in with_dropout and "uniform" not in str(graph.program)
    kept = model[0].bias.detach().clone()
    model[0].bias.requires_grad_(False)
    graph(*batch(0))
    assert torch.equal(model[0].bias, kept)


def test_a_change_of_the_configuration_compiles_anew_from_the_same_capture():
    model, twin = mlp(), mlp()
    optimizer, other = sgd(model), sgd(twin)
    graph = mse_graph(model, optimizer)
    for step, stage in enumerate((0, 1, 3, 2)):
        if stage:
            graph.config.enable_zero(stage=stage)
        graph(*batch(step))
        eager_step(twin, other, *batch(step))
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert len(graph._selection.programs.captures) == 1


def test_add_param_group_compiles_once_more():
    model, twin = mlp(), mlp()
    optimizers = [torch.optim.Adam(m[0].parameters(), lr=0.01) for m in (model, twin)]
    graph = mse_graph(model, optimizers[0], 2)
    for step in range(4):
        if step == 2:
            for optimizer, m in zip(optimizers, (model, twin), strict=True):
                optimizer.add_param_group({"params": list(m[2].parameters()), "lr": 0.05})
        graph(*batch(step))
        eager_step(twin, optimizers[1], *batch(step))
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert len(graph._selection.programs.all) == 2


def test_a_learning_rate_set_by_hand_is_read_and_a_guarded_one_compiles_anew():
    model, twin = mlp(), mlp()
    optimizers = [sgd(m, weight_decay=0.1) for m in (model, twin)]
    graph = mse_graph(model, optimizers[0], 1)
    for step in range(3):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            optimizer.param_groups[0]["weight_decay"] = 0.0 if step == 2 else 0.1
        graph(*batch(step))
        eager_step(twin, optimizers[1], *batch(step))
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_many_programs_warn_and_say_what_keeps_changing():
    graph = mse_graph(mlp())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(1, 11):
            graph(*batch(0, rows=4 * i))
    (message,) = [str(w.message) for w in caught if "programs" in str(w.message)]
    assert "input x, input y" in message and "training flags" not in message


def test_compile_runs_nothing_and_takes_meta_tensors():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    graph = mse_graph(model, optimizer, 3)
    x, y = (t.to("meta", torch.float32) for t in batch(0))
    assert graph.compile(x, y) is graph
    assert graph.is_compiled and not optimizer.state and model[0].weight.is_meta
    assert graph.plan.memory.model_state > 0
    with pytest.raises(gz.ConfigError, match="to_empty"):
        graph(*(t.float() for t in batch(0)))


def test_an_evaluation_graph_shares_the_model_and_sees_its_updates():
    model = mlp()
    train, evaluate = mse_graph(model, sgd(model), 3), mse_graph(model)
    for step in range(2):
        train(*batch(step))
        found = evaluate(*batch(9))
        torch.testing.assert_close(found["out"], model(batch(9)[0]).detach())
    assert not evaluate.training and not found["out"].requires_grad


def test_batch_norm_sees_the_global_batch_and_keeps_its_buffers():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).double()

    model, twin = make(), make()
    graph, other = mse_graph(model, sgd(model), 2), sgd(twin)
    for step in range(2):
        graph(*batch(step))
        eager_step(twin, other, *batch(step))
    for (name, ours), theirs in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        if name != "0.bias":  # its exact gradient is zero
            torch.testing.assert_close(ours, theirs, msg=name)


def test_nested_inputs_are_named_by_path_and_outputs_keep_their_structure():
    class Nested(gz.Graph):
        def build(self, batch, *rest, scale=1.0):
            total = batch["a"] + batch["pair"][1] + rest[0]
            return {"sum": total * scale, "none": None, "list": [total.mean(), 3]}

    graph = Nested(virtual(2))
    one = torch.ones(4, 2)
    found = graph({"a": one, "pair": (7, one)}, one, scale=0.5)
    names = [node.meta["role"].of for node in graph.program.placeholders()]
    assert names == ["batch.a", "batch.pair.1", "rest.0", "scale"]
    torch.testing.assert_close(found["sum"], one * 1.5)
    assert found["none"] is None and found["list"][1] == 3 and float(found["list"][0]) == 3.0
    program = graph.program
    torch.testing.assert_close(graph({"a": one, "pair": (7, one)}, one, scale=2.0)["sum"], one * 6)
    assert graph.program is program


def test_inputs_that_cannot_be_split_are_refused_with_sizes():
    graph = mse_graph(mlp())
    with pytest.raises(gz.CaptureError, match=r"dim 0 is 6 = 1 x 4 \+ 2.*drop_last"):
        graph(*batch(0, rows=6))
    x, y = batch(0)
    with pytest.raises(gz.CaptureError, match="x.detach"):
        graph(x.requires_grad_(), y)
    with pytest.raises(gz.CaptureError, match="ndarray.*as_tensor"):
        graph(x.detach().numpy(), y)


def test_a_missing_argument_of_build_is_a_type_error():
    class TwoInputs(gz.Graph):
        def build(self, x, y):
            return x + y

    with pytest.raises(TypeError, match="missing a required argument: 'y'"):
        TwoInputs(virtual())(torch.ones(4))


def test_set_input_says_how_one_input_lies():
    class Weighted(gz.Graph):
        def build(self, x, weights):
            return nn.functional.cross_entropy(x, torch.zeros(x.shape[0], dtype=torch.long), weights)

    graph = Weighted(virtual())
    graph.config.set_input("weights", sbp=gz.sbp.B)
    x, weights = torch.randn(8, 3), torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(
        graph(x, weights), nn.functional.cross_entropy(x, torch.zeros(8, dtype=torch.long), weights)
    )
    graph.config.set_input("wieghts", sbp=gz.sbp.B)
    with pytest.raises(gz.ConfigError, match="x, weights"):
        graph(x, weights)


def test_random_draws_differ_between_steps_and_repeat_from_a_seed():
    def run(n):
        torch.manual_seed(3)
        graph = mse_graph(nn.Dropout(0.5), placement=virtual(n))
        x = torch.ones(8, 3)
        return [graph(x, x)["out"] for _ in range(2)]

    first, second = run(4)
    assert not torch.equal(first, second)
    for ours, theirs in zip(run(2), (first, second), strict=True):
        assert torch.equal(ours, theirs)


def test_a_world_of_one_needs_no_process_group():
    model, twin = mlp(), mlp()
    optimizer, other = sgd(model), sgd(twin)

    graph = TrainGraph(model, output_and_loss, optimizer, placement=None, stage=3, name="one")
    graph(*batch(0))
    eager_step(twin, other, *batch(0))
    assert graph.placement.size == 1 and graph.name == "one" and not torch.distributed.is_initialized()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)


def test_placements_that_cannot_be_are_refused():
    with pytest.raises(gz.PlacementError, match="torchrun"):
        gz.Graph(gz.placement("cpu", range(2)))


def test_what_add_optimizer_refuses():
    model = mlp()
    optimizer = sgd(model)
    graph = gz.Graph(virtual())
    with pytest.raises(gz.ConfigError, match="metric"):
        graph.add_optimizer(optimizer, lr_sch=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    with pytest.raises(gz.ConfigError, match="positive"):
        graph.add_optimizer(optimizer, clip_grad_norm=0.0)
    with pytest.raises(gz.ConfigError, match="Optimizer"):
        graph.add_optimizer(model)
    with pytest.raises(gz.ConfigError, match="another optimizer"):
        graph.add_optimizer(optimizer, lr_sch=torch.optim.lr_scheduler.StepLR(sgd(mlp()), 1))
    graph.add_optimizer(optimizer)
    with pytest.raises(gz.ConfigError, match="4 of its parameters"):
        graph.add_optimizer(sgd(model))


def test_mistakes_in_the_class_are_named():
    class NoBuild(gz.Graph):
        pass

    class NoInit(gz.Graph):
        def __init__(self):
            self.model = mlp()

    with pytest.raises(gz.ConfigError, match="NoBuild has no build"):
        NoBuild(virtual())(1)
    with pytest.raises(gz.ConfigError, match=r"super\(\).__init__"):
        NoInit()
    with pytest.raises(gz.ConfigError, match="no program yet"):
        NoBuild(virtual()).program  # noqa: B018
    graph = mse_graph(nn.Linear(2, 2), sgd(mlp()))
    with pytest.raises(gz.ConfigError, match="self.model = model"):
        graph(*batch(0))


def test_attributes_that_a_graph_cannot_use_are_refused():
    graph = mse_graph(nn.Linear(2, 2), None)
    with pytest.raises(gz.ConfigError, match="another name"):
        graph.config = {"width": 3}
    with pytest.raises(gz.ConfigError, match="ModuleList"):
        graph.blocks = [nn.Linear(2, 2)]
    with pytest.raises(gz.ConfigError, match="compiled by torch.compile"):
        graph.model = torch.compile(nn.Linear(2, 2))


def test_another_module_in_the_place_of_one_makes_another_program():
    torch.manual_seed(0)
    graph = mse_graph(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1)).double(), None)
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.zeros(4, 1, dtype=torch.float64)
    graph(x, y)
    graph.model[1] = nn.Tanh()
    torch.testing.assert_close(graph(x, y)["out"], graph.model(x))


def test_a_users_pass_runs_after_the_one_it_names():
    seen = []

    def look(graph):
        seen.append(graph.level)
        return graph

    graph = mse_graph(mlp())
    graph.config.add_pass(look)
    graph.config.add_pass(look, after="dead_code")
    graph.compile(*batch(0))
    assert seen == ["captured", "local"]
    assert [record.name for record in graph.history][:2] == ["pin", "look"]


def test_repr_shows_configuration_parameters_and_program():
    model = mlp()
    graph = mse_graph(model, sgd(model), 3)
    assert "not compiled" in repr(graph)
    graph(*batch(0))
    text = repr(graph)
    assert "zero=stage 3" in text and "model.0.weight: float64[10, 6] S(" in text and str(graph.program).strip() in text
    assert gz.nn.Graph is gz.Graph


def test_notebooks_show_what_print_shows():
    pretty = pytest.importorskip("IPython.lib.pretty").pretty
    model = mlp()
    graph = mse_graph(model, sgd(model), 3)
    graph(*batch(0))
    for shown in (graph.program, graph.plan, gz.explain(graph, "model_0_weight")):
        assert pretty(shown) == str(shown)


class TwoOptimizers(gz.Graph):
    def __init__(self) -> None:
        super().__init__(gz.placement("cpu", range(1), virtual=True))
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        groups = [{"params": [self.a.weight], "lr": 0.5}, {"params": [self.a.bias], "lr": 0.25}]
        self.add_optimizer(torch.optim.SGD(groups), clip_grad_norm=1.0)
        self.add_optimizer(torch.optim.SGD(self.b.parameters(), lr=0.125))

    def build(self, x):
        loss = self.b(self.a(x)).square().mean()
        loss.backward()
        return loss


def test_learning_rates_are_those_of_all_groups_in_the_order_of_add_optimizer():
    graph = TwoOptimizers()
    graph(torch.randn(2, 4))
    assert graph.learning_rates == [0.5, 0.25, 0.125]
    assert float(graph.grad_norm) > 0  # of the one optimizer that clips
