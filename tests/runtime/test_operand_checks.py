"""Programs that were read from a text: what an operand says is looked at before a kernel that trusts it runs."""

import pytest
import torch
from torch import nn

import graphzero as gz
from graphzero.errors import VerifyError
from graphzero.runtime.execute.conditions import CONDITIONS, KernelGuard
from graphzero.runtime.execute.executor import Executor
from graphzero.runtime.world.virtual import VirtualWorld
from graphzero.testing import assert_same_step

aten = torch.ops.aten
WILD = 2**40
POOL = "[2, 2], [2, 2], [0, 0]"
IMAGE = {"g": (1, 2, 2, 2), "x": (1, 2, 4, 4)}
POOLED = f"max_pool2d_with_indices_backward(g, x, {POOL}, [1, 1], False, i)"
CLASSES = {"g": (4,), "x": (4, 3), "t": (1,)}
CASES = {  # inputs, indices, the call, the size of its result, what is wrong
    "an index of a pooling": (IMAGE, (1, 2, 2, 2), POOLED, "1, 2, 4, 4", "an index"),
    "an adaptive pooling": (IMAGE, (1, 2, 2, 2), "adaptive_max_pool2d_backward(g, x, i)", "1, 2, 4, 4", "an index"),
    "a class": (CLASSES, (4,), "nll_loss_backward(g, x, i, None, 0, -100, s)", "4, 3", "a class"),
    "a fused loss": (CLASSES, (4,), "cross_entropy_backward(g, x, i, None, 0, -100, s)", "4, 3", "a class"),
    "a count": ({"g": (2, 3)}, (2,), "embedding_dense_backward(g, i, 4, -1, True)", "4, 3", "an index"),
    "segments": ({"x": (4,)}, (2,), "segment_reduce(x, 'sum', lengths=i, unsafe=True)", "2", "lengths"),
}


def text(floats, indices, call, size):
    lines = [f"  {name} = batch() : f32{list(shape)}  B!" for name, shape in floats.items()]
    body = ["  s = sum(t) : f32[]"] * ("t" in floats)
    head = ["graph g(dp=1)", *lines, f"  i = batch() : i64{list(indices)}  B!", "forward:"]
    return "\n".join([*head, *body, f"  y = {call} : f32[{size}]", "  return y"])


@pytest.mark.parametrize("case", CASES)
def test_an_index_that_a_kernel_would_follow_anywhere_is_refused(case):
    floats, indices, call, size, said = CASES[case]
    passes = gz.passes.parse_passes("propagate,insert_boxing,lower_boxing,localize")
    graph = gz.Pipeline(passes)(gz.parse(text(floats, indices, call, size)))
    inputs = {name: [torch.ones(shape)] for name, shape in floats.items()}
    executor = Executor(graph, VirtualWorld(graph.placement))
    with pytest.raises(VerifyError, match=f"is given {said}.*its kernel does not check that"):
        executor.run_step({**inputs, "i": [torch.full(indices, WILD)]})


def ones(*shape):
    return torch.ones(shape)


@pytest.mark.parametrize("call", [
    lambda: aten.avg_pool2d_backward(ones(1, 1, 1, 1), ones(1, 2, 64, 64), [2, 2], [2, 2], [0, 0], False, True, None),
    lambda: aten._log_softmax_backward_data(ones(64, 64), ones(1), 1, torch.float32),
    lambda: aten.native_layer_norm_backward(
        ones(9, 8), ones(9, 8), [8], ones(1, 1), ones(9, 1), ones(8), ones(8), [True] * 3),
    lambda: aten.native_batch_norm(ones(3, 900), ones(1), ones(1), None, None, True, 0.1, 1e-5),
    lambda: aten._reshape_alias(ones(4), [4000], [1]),
    lambda: aten.lu_unpack(ones(3, 3), torch.full((3,), 2**30, dtype=torch.int32)),
    lambda: aten._ctc_loss(ones(5, 2, 4), torch.full((2, 2), WILD), [5, 5], [2, 2]),
    lambda: torch.ops.graphzero.attention_backward(*[ones(1, 2, 8, 4)] * 5, ones(1, 2, 1), None, False, 0.5),
])  # fmt: skip
def test_operands_of_sizes_that_a_kernel_would_believe_are_refused(call):
    with KernelGuard(), pytest.raises(VerifyError, match="its kernel does not check that"):
        call()


class Pools(gz.Graph):
    def __init__(self):
        super().__init__(gz.placement("cpu", range(2), virtual=True))
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.AdaptiveMaxPool2d(3), nn.AvgPool2d(2),
            nn.Flatten(), nn.Linear(4, 5), nn.LayerNorm(5), nn.LogSoftmax(-1),
        )  # fmt: skip
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def build(self, x, y):
        loss = nn.functional.nll_loss(self.model(x), y)
        loss.backward()
        return loss


def test_a_step_that_was_captured_runs_without_looking_and_the_same_after_it_was_read():
    captured = Pools().compile(torch.randn(4, 1, 16, 16), torch.randint(5, (4,))).history[0].after
    read = gz.parse(str(captured))
    assert read.is_read and not captured.is_read and read.clone().is_read
    names = {node.target._schema.name for node in read.nodes if isinstance(node.target, torch._ops.OpOverload)}
    assert len(names & CONDITIONS.keys()) >= 5
    assert_same_step(captured, read)


@pytest.mark.parametrize(
    "op", ["_convert_indices_from_csr_to_coo", "_nested_view_from_buffer", "_sparse_coo_tensor_unsafe.default"]
)
def test_ops_of_sparse_and_nested_tensors_cannot_be_named(op):
    with pytest.raises(gz.GraphZeroError, match="rely on their operands"):
        gz.parse(f"graph g(dp=1)\n  x = batch() : i64[2]\nforward:\n  y = {op}(x, 2) : i64[2]\n  return y")
