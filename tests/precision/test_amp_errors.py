"""What mixed precision refuses, and what it says."""

import pytest
import torch
from graphs import TrainGraph
from precision_toys import F16, amp_graph, batch_of, mlp, virtual

import graphzero as gz

WRONG = {
    "dtype": [torch.float32, torch.float8_e4m3fn, "bf16", None],
    "reduce_dtype": [torch.float64, "f32"],
    "init_scale": [0, -1.0, "2", float("inf"), True],
    "growth_factor": [1.0, 0.5, float("nan")],
    "backoff_factor": [0.0, 1.0, 2],
    "growth_interval": [0, 1.5, True],
    "hysteresis": [0, -1, 1.0],
    "min_scale": [-1.0, float("nan")],
}


@pytest.mark.parametrize("name, given", [(name, x) for name, held in WRONG.items() for x in held])
def test_a_wrong_option_is_refused_where_it_is_set(name, given):
    config = amp_graph(mlp(), 0, virtual(2), None).config
    with pytest.raises(gz.ConfigError, match=rf"enable_amp\({name}=.*\): give"):
        config.enable_amp(**{name: given})
    assert config.amp.dtype is None


def test_a_dtype_in_the_place_of_yes_or_no_is_refused():
    config = amp_graph(mlp(), 0, virtual(2), None).config
    with pytest.raises(gz.ConfigError, match=r"write dtype=torch.float16"):
        config.enable_amp(torch.float16)


def test_a_scale_that_would_begin_below_its_least_is_refused():
    config = amp_graph(mlp(), 0, virtual(2), None).config
    with pytest.raises(gz.ConfigError, match="larger init_scale, or a smaller min_scale"):
        config.enable_amp(dtype=F16, init_scale=2.0, min_scale=4.0)


def test_a_model_that_is_16_bit_already_has_no_masters():
    graph = amp_graph(mlp().bfloat16(), 0, virtual(2))
    with pytest.raises(gz.ConfigError) as told:
        graph(*batch_of(graph.model, 0))
    text = str(told.value)
    assert "all 6 trainable parameters of Train are 16-bit already" in text
    assert "graphs.py" in text and "model.body.0.weight: bfloat16[64, 16]" in text
    assert "model.float()" in text


def test_gradients_by_hand_are_refused_where_the_loss_is_scaled():
    class ByHand(TrainGraph):
        def build(self, *batch):
            params = list(self.model.parameters())
            loss = self.model(*batch)
            for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
                p.grad = g
            return loss

    with pytest.raises(gz.CaptureError, match="call loss.backward"):
        amp_graph(mlp(), 0, virtual(2), F16, kind=ByHand)(*batch_of(mlp(), 0))
    graph = amp_graph(mlp(), 2, virtual(2), kind=ByHand)
    losses = [float(graph(*batch_of(graph.model, 0))) for _ in range(3)]
    assert losses[-1] < losses[0]


def test_a_state_that_the_first_step_makes_and_that_no_number_stands_for_is_refused_with_loss_scaling():
    def damped(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)

    graph = amp_graph(mlp(), 2, virtual(2), F16, optimizer=damped)
    with pytest.raises(gz.ConfigError, match="bfloat16"):
        graph(*batch_of(graph.model, 0))


def test_names_of_the_graph_are_not_taken():
    graph = amp_graph(mlp(), 0, virtual(2))
    for name in ("skipped", "loss_scale"):
        with pytest.raises(gz.ConfigError, match="the Graph's own"):
            setattr(graph, name, 1)
