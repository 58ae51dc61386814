"""State dicts of a Graph on virtual ranks: what they hold, where they load, what they refuse."""

import copy

import pytest
import torch
from torch import nn

import graphzero as gz
from graphzero.testing import fake_world


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 3)).double()


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(8, n, generator=generator, dtype=torch.float64) for n in (6, 3))


class DropoutGraph(gz.Graph):
    def __init__(self, seed=0, stage=0, ranks=4, placement=None):
        super().__init__(placement or gz.placement("cpu", range(ranks), virtual=True))
        self.model = mlp(seed)
        self.dropout = nn.Dropout(0.1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.add_optimizer(self.optimizer, lr_sch=torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5))
        if stage:
            self.config.enable_zero(stage=stage)

    def build(self, x, y):
        loss = nn.functional.mse_loss(self.dropout(self.model(x)), y)
        loss.backward()
        return loss


def trained(stage=0, ranks=4, steps=2):
    graph = DropoutGraph(0, stage, ranks)
    for step in range(steps):
        graph(*batch(step))
    return graph


def test_the_outline_has_the_modules_keys_and_names_for_optimizers():
    graph = trained(2)
    sd = graph.state_dict()
    assert list(sd) == ["modules", "optimizers", "schedulers", "random"]
    assert list(sd["modules"]) == ["model", "dropout"]
    assert list(sd["modules"]["model"]) == list(graph.model.state_dict())
    names = [f"model.{name}" for name, _ in graph.model.named_parameters()]
    assert sd["optimizers"][0]["param_groups"][0]["params"] == names == list(sd["optimizers"][0]["state"])
    assert sd["optimizers"][0]["state"]["model.0.weight"]["exp_avg"].shape == (10, 6)
    assert sd["random"]["step"] == 2 and isinstance(sd["random"]["seed"], int)
    assert sd["schedulers"][0]["last_epoch"] == 2


NO_STATE_DICT = {
    "None": None,
    "a list": [],
    "of a module": nn.Linear(2, 2).state_dict(),
    "a tensor for a module": {"modules": {"model": torch.ones(2)}},
    "an optimizer's without groups": {"optimizers": [{"state": {}}]},
    "an optimizer's without state": {"optimizers": [{"param_groups": []}]},
    "optimizers by name": {"optimizers": {"adam": {}}},
    "no seed": {"random": {"step": 3}},
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("what", NO_STATE_DICT)
def test_what_is_no_state_dict_of_a_graph_is_refused(what, strict):
    graph = DropoutGraph()
    before = copy.deepcopy(graph.state_dict())
    if what != "of a module" or strict:
        with pytest.raises(gz.CheckpointError, match="nothing was loaded"):
            graph.load_state_dict(NO_STATE_DICT[what], strict=strict)
    assert all(torch.equal(x, graph.model.state_dict()[name]) for name, x in before["modules"]["model"].items())


def test_a_plain_modules_state_dict_may_be_loaded_alone():
    graph, model = trained(3), mlp(7)
    graph.load_state_dict({"modules": {"model": model.state_dict()}}, strict=False)
    for name, x in model.state_dict().items():
        assert torch.equal(graph.model.state_dict()[name], x)
    assert float(graph.optimizer.state[graph.model[0].weight]["step"]) == 2


def test_names_of_other_parameters_are_named_not_stumbled_over():
    graph = trained(2)
    wrong = copy.deepcopy(graph.state_dict())
    entry = wrong["optimizers"][0]
    entry["state"]["model.9.weight"] = entry["state"].pop("model.0.weight")
    entry["param_groups"][0]["params"][0] = "model.9.weight"
    with pytest.raises(gz.CheckpointError, match="missing: .*model.0.weight[\\s\\S]*unexpected: .*model.9.weight"):
        graph.load_state_dict(wrong)
    graph.load_state_dict(wrong, strict=False)
    graph.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 7))]})
    for call in (graph.state_dict, lambda: graph.load_state_dict(wrong)):
        with pytest.raises(gz.ConfigError, match=r"group 1 a parameter float32\[2, 7\] that is in no module"):
            call()


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_training_goes_on_from_a_state_dict_at_another_stage_and_world_size(stage, called):
    other = DropoutGraph(7, stage, ranks=2)
    if called:
        other(*batch(5))
    graph = trained(1)
    saved = copy.deepcopy(graph.state_dict())
    other.load_state_dict(saved)
    for step in range(2, 4):
        torch.testing.assert_close(other(*batch(step)), graph(*batch(step)))
    for name, theirs in graph.model.state_dict().items():
        torch.testing.assert_close(other.model.state_dict()[name], theirs)
    assert other.optimizer.param_groups[0]["lr"] == 0.01 * 0.5**4
    assert float(other.optimizer.state[other.model[0].weight]["step"]) == 4


def test_a_full_state_dict_loads_into_eager_objects_and_theirs_into_a_graph():
    eager, other = DropoutGraph(5), DropoutGraph(6)
    graph = trained(3)
    full = copy.deepcopy(graph.full_state_dict())
    eager.model.load_state_dict(full["modules"]["model"])
    eager.optimizer.load_state_dict(full["optimizers"][0])
    moment = eager.optimizer.state[eager.model[2].bias]["exp_avg"]
    assert torch.equal(moment, graph.optimizer.state[graph.model[2].bias]["exp_avg"])
    assert isinstance(eager.optimizer.state_dict()["param_groups"][0]["params"][0], int)
    theirs = {**full, "optimizers": [eager.optimizer.state_dict()]}
    other.load_state_dict(theirs)
    torch.testing.assert_close(other(*batch(9)), graph(*batch(9)))


def test_a_checkpoint_of_a_fresh_graph_forgets_the_states_that_are():
    fresh = copy.deepcopy(DropoutGraph(0).state_dict())
    assert fresh["optimizers"][0]["state"] == {}
    graph = trained(2)
    graph.load_state_dict(fresh)
    other = DropoutGraph(0)
    for seed in (3, 3):
        torch.manual_seed(seed)
        found = graph(*batch(0))
        torch.manual_seed(seed)
        torch.testing.assert_close(found, other(*batch(0)))


def test_after_compile_the_states_to_come_are_there_but_not_in_the_optimizer():
    graph = DropoutGraph(0, 2).compile(*batch(0))
    state = graph.state_dict()["optimizers"][0]["state"]["model.0.weight"]
    assert set(state) == {"step", "exp_avg", "exp_avg_sq"} and state["exp_avg"].shape == (10, 6)
    assert not graph.optimizer.state


def test_what_does_not_fit_is_named_and_nothing_is_written():
    graph = trained(2)
    before = copy.deepcopy(graph.full_state_dict())
    wrong = copy.deepcopy(graph.state_dict())
    del wrong["modules"]["model"]["0.weight"]
    wrong["modules"]["model"]["9.weight"] = torch.ones(3)
    del wrong["optimizers"][0]["state"]["model.2.bias"]["exp_avg"]
    for value in wrong["modules"]["model"].values():
        value.zero_()
    with pytest.raises(gz.CheckpointError) as error:
        graph.load_state_dict(wrong)
    assert "missing: modules.model.0.weight, optimizers.0.state.model.2.bias.exp_avg" in str(error.value)
    assert "unexpected: modules.model.9.weight" in str(error.value) and "strict=False" in str(error.value)
    after = graph.full_state_dict()
    for name, value in before["modules"]["model"].items():
        assert torch.equal(after["modules"]["model"][name], value)
    graph.load_state_dict(wrong, strict=False)
    assert not graph.model[2].bias.any() and graph.model[0].weight.any()


def test_a_wrong_shape_is_refused_even_when_not_strict():
    graph = trained()
    wrong = copy.deepcopy(graph.state_dict())
    wrong["modules"]["model"]["2.bias"] = torch.ones(4)
    wrong["optimizers"][0]["state"]["model.2.bias"]["exp_avg"] = torch.ones(5)
    with pytest.raises(gz.CheckpointError, match=r"2.bias is \[3\] here, \[4\].*exp_avg is \[3\] here, \[5\]"):
        graph.load_state_dict(wrong, strict=False)
    with pytest.raises(gz.CheckpointError, match="optimizers: 1 here, 2"):
        graph.load_state_dict({**graph.state_dict(), "optimizers": [graph.state_dict()["optimizers"][0]] * 2})


def test_random_draws_go_on_where_the_checkpoint_was():
    graph = trained()
    saved = copy.deepcopy(graph.state_dict())
    expected = graph(*batch(3))
    torch.manual_seed(99)
    other = DropoutGraph(4)
    other.load_state_dict(saved)
    torch.testing.assert_close(other(*batch(3)), expected)


def test_in_a_fake_world_a_stage_3_call_makes_dtensors_of_this_ranks_size():
    from torch.distributed.tensor import DTensor

    with fake_world(8, rank=3):
        graph = DropoutGraph(0, 3, placement=gz.placement("cpu", range(8)))
        graph(*batch(0))
        weight = graph.model[0].weight
        assert isinstance(weight, DTensor) and weight.shape == (10, 6) and weight.to_local().shape != (10, 6)
        moment = graph.optimizer.state[weight]["exp_avg"]
        assert moment.to_local().shape == weight.to_local().shape
        assert graph.full_state_dict()["modules"]["model"]["0.weight"].shape == (10, 6)
        graph(*batch(1))
