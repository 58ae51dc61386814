"""What two gloo processes check of the ends of a block of ``full_parameters``, and of what is refused in it."""

import copy

import pytest
import torch
import torch.distributed as dist
from block_checks import held
from evaluation_toys import Eager, Evaluate, assert_same, everyone, share, steady_graph, steps
from processes import slow
from torch import nn
from torch.distributed.tensor import DTensor

import graphzero as gz

close = torch.testing.assert_close


def raises(kind, text, call):
    with pytest.raises(kind, match=text):
        call()
    dist.barrier()


def opened(graph, inside):
    def block():
        with graph.full_parameters():
            inside()

    return block


def check_writes_that_differ_are_refused_and_what_differs_must_be_loaded():
    for stage in (0, 3):
        graph, eager = steady_graph(everyone(), stage), Eager()
        steps(graph, 0), eager.steps(0)
        whole = graph.full_state_dict()

        def write(graph=graph):
            with torch.no_grad():
                graph.model.last.weight.add_(dist.get_rank())
                graph.model.last.bias.add_(1)

        raises(gz.CaptureError, r"(?s)model\.last\.weight: rank 0: hash .*rank 1: hash", opened(graph, write))
        raises(gz.GraphZeroError, "do not agree on what was written", lambda graph=graph: steps(graph, 1))
        raises(gz.GraphZeroError, "do not agree on what was written", opened(graph, lambda: None))
        graph.load_state_dict(whole)
        steps(graph, 1), eager.steps(1)
        assert_same(graph, eager)


def check_an_exception_on_one_rank_raises_on_all_and_all_go_on():
    graph, eager = steady_graph(everyone(), 3), Eager()
    steps(graph, 0), eager.steps(0)
    before, error = held(graph), ValueError("a bad prompt")

    def stop(error):
        if dist.get_rank() == 1:
            raise error

    with pytest.raises(ValueError if dist.get_rank() == 1 else gz.GraphZeroError, match="a bad prompt") as caught:
        opened(graph, lambda: stop(error))()
    assert dist.get_rank() != 1 or caught.value is error
    assert held(graph) == before
    with pytest.raises(KeyboardInterrupt if dist.get_rank() == 1 else gz.RankError):
        opened(graph, lambda: stop(KeyboardInterrupt()))()
    assert held(graph) == before
    steps(graph, 1), eager.steps(1)
    assert_same(graph, eager)


@slow
def check_one_rank_generates_while_the_others_wait():
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    config = transformers.GPT2Config(
        vocab_size=61, n_positions=24, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(dist.get_rank())  # rank 0's values are everybody's
    model = transformers.GPT2LMHeadModel(config).eval()
    graph = gz.Graph(everyone(), name="Generate")
    graph.model = model
    tokens = torch.arange(1, 9).view(2, 4)
    graph.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    graph.config.enable_zero(stage=3)
    graph.build = lambda tokens: graph.model(tokens, labels=tokens).loss.backward()
    graph(tokens[dist.get_rank(), None])
    assert isinstance(model.lm_head.weight, DTensor)
    eager = transformers.GPT2LMHeadModel(config).eval()
    eager.load_state_dict(graph.full_state_dict()["modules"]["model"])
    wanted = eager.generate(tokens, max_new_tokens=12, do_sample=False)
    with graph.full_parameters():
        assert torch.equal(model.generate(tokens, max_new_tokens=12, do_sample=False), wanted)
        torch.manual_seed(5)
        with torch.inference_mode():
            found = model.generate(tokens, max_new_tokens=12, do_sample=True)
    torch.manual_seed(5)
    assert torch.equal(found, eager.generate(tokens, max_new_tokens=12, do_sample=True))
    with graph.full_parameters():
        if dist.get_rank() == 1:
            assert torch.equal(model.generate(tokens, max_new_tokens=12, do_sample=False), wanted)
    graph(tokens[dist.get_rank(), None])


def check_under_mixed_precision_the_masters_are_seen():
    graph = steady_graph(everyone(), 1, dtype=torch.float32)
    graph.config.enable_amp()
    steps(graph, 0)
    assert isinstance(graph.model.first.weight, DTensor)
    with graph.full_parameters(), torch.no_grad():
        assert graph.model.first.weight.dtype is torch.float32 and graph.model.first.weight.shape == (10, 6)
        graph.model.first.weight.zero_()
    assert not graph.full_state_dict()["modules"]["model"]["first.weight"].any()


def check_before_the_first_call_rank_0_has_the_say():
    graph, eager = steady_graph(everyone(), 3, seed=dist.get_rank()), Eager()
    with graph.full_parameters():
        close(dict(graph.model.state_dict()), dict(eager.model.state_dict()), rtol=0, atol=0)
        graph.model.last.weight.data.add_(1)
    assert not graph.is_compiled
    eager.model.last.weight.data.add_(1)
    steps(graph, 0), eager.steps(0)
    assert_same(graph, eager)
    lifeless = steady_graph(everyone(), 3)
    lifeless.model.to("meta")
    raises(gz.ConfigError, "is on the meta device", opened(lifeless, lambda: None))


def check_modules_that_a_user_has_split_are_whole_in_the_block():
    torch.manual_seed(0)
    lstm = nn.LSTM(4, 6).double()
    twin, x = copy.deepcopy(lstm), torch.randn(5, 2, 4, dtype=torch.float64)
    graph = Evaluate(gz.to_global(lstm, everyone(), {"*": (gz.sbp.S(0),)}), everyone())
    with graph.full_parameters():
        close(graph.model(x)[0], twin(x)[0])
    assert all(isinstance(p, DTensor) for p in [*lstm.parameters(), *lstm._flat_weights])


def check_a_block_keeps_graphs_out_and_refuses_what_it_cannot_take():
    graph = steady_graph(everyone(), 3)
    steps(graph, 0)
    other, (x, y) = Evaluate(graph.model, everyone()), share(graph.placement, 0)
    refused = [
        ("called", lambda: graph(x, y)),
        ("called", lambda: other(x)),
        ("compiled", lambda: other.compile(x)),
        ("saved", graph.state_dict),
        ("saved", lambda: gz.save(graph, "nowhere")),
        ("loaded", lambda: graph.load_state_dict({})),
        ("opened once more", opened(other, lambda: None)),
        ("looked at", lambda: gz.check(graph, x, y)),
        ("copied", lambda: copy.deepcopy(graph)),
    ]
    with graph.full_parameters():
        for what, call in refused:
            with pytest.raises(gz.ConfigError, match=f"is {what} within full_parameters"):
                call()
        assert "parameters:" in repr(graph)
    raises(gz.ConfigError, "is called within", opened(graph, lambda: other(x)))
    other(x)
    before, whole = held(graph), graph.full_state_dict()["modules"]["model"]

    def halve():
        graph.model.frozen.half()

    def remove():
        del graph.model.last.bias

    def widen():
        graph.model.last.weight = nn.Parameter(torch.zeros(3, 11, dtype=torch.float64))

    for change, name in ((halve, "model.frozen.weight"), (remove, "model.last.bias"), (widen, "model.last.weight")):
        raises(gz.ConfigError, f"{name}.*another tensor was put there", opened(graph, change))
        assert held(graph) == before
    close(dict(graph.full_state_dict()["modules"]["model"]), dict(whole), rtol=0, atol=0)
    graph.config.set_memory_budget(2**20)
    steps(graph, 1)
    raises(gz.ConfigError, "memory budget is 1,048,576", opened(graph, lambda: None))

    def grow():
        graph.model.norm.register_buffer("running_var", torch.ones(7).double())

    graph.config.set_memory_budget(None)
    opened(graph, grow)()
    assert graph.model.norm.running_var.shape == (7,)  # as it would be outside, for every rank held all of it
