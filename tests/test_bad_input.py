"""Every wrong use of a Graph gets an error of ours that says what, where, the facts and the next step.

Mistakes that only several processes can make are in ``runtime/process_checks``.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphzero as gz

X, Y = torch.randn(8, 4), torch.randint(0, 3, (8,))


def train(self, x, y):
    loss = self.loss_fn(self.model(x), y)
    loss.backward()
    return loss


def make(build=train, optimizer=torch.optim.SGD, ranks=2, stage=2, **options):
    """A Graph over a linear layer whose build is ``build``."""

    class Step(gz.Graph):
        def __init__(self):
            super().__init__(gz.placement("cpu", range(ranks), virtual=True))
            self.model = nn.Linear(4, 3)
            self.loss_fn = nn.CrossEntropyLoss()
            if optimizer is not None:
                self.add_optimizer(optimizer(self.model.parameters(), **({"lr": 0.1} | options)))
            self.config.enable_zero(True, stage=stage)

    Step.build = build
    return Step()


def refused(graph, kind, *words, args=(X, Y)):
    """The message of the error that calling ``graph`` raises; each of ``words`` stands in it."""
    with pytest.raises(kind) as raised:
        graph(*args)
    message = str(raised.value)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in:\n{message}"
    assert len(message.splitlines()) < 40
    return message


def test_a_build_without_backward_is_refused_when_an_optimizer_is_set():
    def build(self, x, y):
        return self.loss_fn(self.model(x), y)

    refused(
        make(build),
        gz.CaptureError,
        "no backward()",
        "in build",
        "test_bad_input.py:",
        "loss.backward()",
        "without add_optimizer",
    )


def test_backward_without_an_optimizer_is_refused():
    refused(make(optimizer=None), gz.CaptureError, "no optimizer", "test_bad_input.py:", "add_optimizer")


def test_a_loss_that_is_no_scalar_is_refused_with_its_shape():
    def build(self, x, y):
        F.cross_entropy(self.model(x), y, reduction="none").backward()

    refused(make(build), gz.CaptureError, "[8]", "test_bad_input.py:", "loss.mean()")


def test_an_optimizer_of_other_parameters_is_refused_with_their_shape():
    stranger = nn.Linear(2, 5)

    def optimizer(parameters, lr):
        return torch.optim.SGD(stranger.parameters(), lr=lr)

    refused(make(optimizer=optimizer), gz.ConfigError, "[5, 2]", "self.model = model")


def item(self, x, y):
    loss = self.loss_fn(self.model(x), y)
    loss.backward()
    return loss.item()


def as_float(self, x, y):
    loss = self.loss_fn(self.model(x), y)
    loss.backward()
    return float(loss)


def branch(self, x, y):
    loss = self.loss_fn(self.model(x), y)
    if loss > 1:
        loss = loss * 2
    loss.backward()


def printed(self, x, y):
    loss = self.loss_fn(self.model(x), y)
    print(loss)
    loss.backward()


def masked(self, x, y):
    out = self.model(x)
    out[out > 0].sum().backward()


@pytest.mark.parametrize("build", [item, as_float, branch, printed])
def test_a_build_that_looks_at_a_value_is_refused_at_its_line(build):
    refused(make(build), gz.CaptureError, "reads a value", "test_bad_input.py:", "torch.where")


def test_a_shape_that_depends_on_data_is_refused():
    refused(make(masked), gz.CaptureError, "boolean mask", "test_bad_input.py:", "torch.where")


def test_a_batch_that_does_not_divide_is_refused_with_sizes():
    refused(make(ranks=3), gz.CaptureError, "[8, 4]", "3 ranks", "drop_last")


def test_optimizers_that_are_no_graph_are_refused_with_the_reason():
    refused(make(optimizer=torch.optim.LBFGS), gz.CaptureError, "LBFGS", "several times", "AdamW")
    refused(make(optimizer=torch.optim.Adafactor), gz.CaptureError, "Adafactor", "branches", "AdamW")


def test_a_first_step_that_differs_from_all_others_is_refused():
    graph = make(momentum=0.9, dampening=0.1)
    refused(graph, gz.CaptureError, "dampening", "momentum_buffer", "dampening=0")


@pytest.mark.parametrize("stage", [0, 4, "3", True, None])
def test_a_stage_that_does_not_exist_is_refused(stage):
    with pytest.raises(gz.ConfigError, match="stage"):
        make(stage=stage)


def test_more_ranks_than_the_world_has_are_refused():
    with pytest.raises(gz.PlacementError, match="torchrun"):
        gz.Graph(gz.placement("cpu", range(4)))
    with gz.testing.fake_world(2), pytest.raises(gz.PlacementError, match="rank 3"):
        gz.Graph(gz.placement("cpu", range(4))).compile(X)


def test_a_parameter_of_no_module_of_the_graph_is_refused_where_it_is_used():
    stranger = nn.Linear(4, 4)

    def build(self, x, y):
        self.loss_fn(self.model(stranger(x)), y).backward()

    refused(make(build), gz.CaptureError, "[4, 4]", "test_bad_input.py:", "self.model = model")


def test_a_refused_capture_leaves_model_and_optimizer_as_they_were():
    graph = make(item, optimizer=torch.optim.AdamW)
    before = {name: tensor.clone() for name, tensor in graph.model.state_dict().items()}
    refused(graph, gz.CaptureError)
    assert all(torch.equal(before[name], tensor) for name, tensor in graph.model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in graph.model.parameters())
    assert not graph._optimizers[0].optimizer.state


def test_what_comes_in_a_later_version_says_so():
    with pytest.raises(gz.ConfigError, match="later"):
        gz.Graph(gz.placement("cpu", [[0, 1], [2, 3]], virtual=True))
    with pytest.raises(gz.ConfigError, match="later"):
        gz.save(make(), "file")
    for setting in (
        lambda config: config.enable_amp(),
        lambda config: config.set_gradient_accumulation_steps(2),
        lambda config: config.set_executor("inductor"),
    ):
        with pytest.raises(gz.ConfigError, match="later"):
            setting(make().config)


def test_an_unused_parameter_is_named_in_a_warning_and_left_alone():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return self.used(x)

    graph = make()
    graph.model = Model()
    graph._optimizers.clear(), graph._schedulers.clear()
    graph.add_optimizer(torch.optim.AdamW(graph.model.parameters(), weight_decay=0.5))
    before = graph.model.idle.weight.detach().clone()
    with pytest.warns(UserWarning, match=r"model\.idle\.weight"):
        graph(X, Y)
    assert torch.equal(graph.model.idle.weight, before)
    assert graph.model.idle.weight.grad is None


def test_a_hook_on_a_parameter_is_part_of_the_step():
    torch.manual_seed(0)
    graph, plain = make(), nn.Linear(4, 3)
    plain.load_state_dict(graph.model.state_dict())
    for model in (graph.model, plain):
        model.weight.register_hook(lambda grad: grad * 0.5)
    graph(X, Y)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    F.cross_entropy(plain(X), Y).backward()
    optimizer.step()
    torch.testing.assert_close(graph.model.weight, plain.weight)


def test_a_hook_behind_the_accumulation_of_a_gradient_is_refused():
    graph = make()
    graph.model.weight.register_post_accumulate_grad_hook(lambda p: None)
    refused(graph, gz.CaptureError, "model.weight", "register_hook")


def test_a_build_that_keeps_values_in_attributes_is_warned_that_they_are_lost():
    def build(self, x, y):
        self.calls = getattr(self, "calls", 0) + 1
        self.last = self.loss_fn(self.model(x), y)
        self.last.backward()

    with pytest.warns(UserWarning, match=r"Step\.calls, Step\.last.*no effect"):
        make(build)(X, Y)
