"""Autocast of captures for CUDA is that of CUDA: compared with torch's own kernels, on fakes, without a GPU."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

import graphzero as gz
from graphzero import _compat
from graphzero.capture.trace import cuda_autocast as lists

LOSSES = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div, F.binary_cross_entropy_with_logits,
    F.poisson_nll_loss, F.soft_margin_loss,
)  # fmt: skip
SAME = (torch.acos, torch.asin, torch.cosh, torch.erfinv, torch.exp, torch.expm1, torch.log, torch.log10, torch.log2,
        torch.log1p, torch.reciprocal, torch.rsqrt, torch.sinh, torch.tan, F.softplus, torch.sum, torch.prod, F.gelu,
        F.relu, torch.tanh, torch.mean, torch.var, torch.sqrt, torch.norm, torch.sigmoid)  # fmt: skip
CALLS = {
    **{f.__name__: lambda x, w, f=f: f(x) for f in SAME},
    **{f.__name__: lambda x, w, f=f: f(x, w) for f in LOSSES},
    "linear": lambda x, w: F.linear(x, w),
    "matmul": lambda x, w: x @ w,
    "einsum": lambda x, w: torch.einsum("ij,jk->ik", x, w),
    "addmm": lambda x, w: torch.addmm(x, x, w),
    "baddbmm": lambda x, w: torch.baddbmm(x[None], x[None], w[None]),
    "multi_dot": lambda x, w: torch.linalg.multi_dot([x, w, x]),
    "prelu": lambda x, w: F.prelu(x, w[0]),
    "mv": lambda x, w: x @ w[0],
    "dot": lambda x, w: x[0] @ w[0],
    "softmax": lambda x, w: F.softmax(x, -1),
    "softmax to a dtype": lambda x, w: F.softmax(x, -1, dtype=torch.bfloat16),
    "log_softmax": lambda x, w: F.log_softmax(x, -1),
    "cross_entropy": lambda x, w: F.cross_entropy(x, torch.zeros(8, dtype=torch.long, device=x.device)),
    "layer_norm": lambda x, w: F.layer_norm(x, (8,), w[0], w[1]),
    "rms_norm": lambda x, w: F.rms_norm(x, (8,), w[0]),
    "group_norm": lambda x, w: F.group_norm(x, 2, w[0], w[1]),
    "batch_norm": lambda x, w: F.batch_norm(x, None, None, training=True),
    "pow of a number": lambda x, w: x**2,
    "number to a power": lambda x, w: 2**x,
    "pow": lambda x, w: x**w,
    "cumsum": lambda x, w: x.cumsum(0),
    "cumprod": lambda x, w: x.cumprod(0),
    "sum along a dim": lambda x, w: x.sum(0),
    "sum to a dtype": lambda x, w: x.sum(dtype=torch.bfloat16),
    "norm along a dim": lambda x, w: x.norm(dim=0),
    "vector_norm": lambda x, w: torch.linalg.vector_norm(x, dim=0),
    "logsumexp": lambda x, w: x.logsumexp(0),
    "cosine_similarity": lambda x, w: F.cosine_similarity(x, w),
    "cdist": lambda x, w: torch.cdist(x, w),
    "addcmul": lambda x, w: torch.addcmul(x, x, w),
    "addcdiv": lambda x, w: torch.addcdiv(x, x, w),
    "atan2": lambda x, w: torch.atan2(x, w),
    "tensordot": lambda x, w: torch.tensordot(x, w, 1),
    "scatter_add": lambda x, w: torch.scatter_add(x, 0, torch.zeros(8, 8, dtype=torch.long, device=x.device), w),
    "index_put": lambda x, w: torch.index_put(x, [torch.zeros(8, dtype=torch.long, device=x.device)], w),
    "avg_pool3d": lambda x, w: F.avg_pool3d(x[None, None, None].expand(1, 1, 2, 8, 8), 2),
    "stack": lambda x, w: torch.stack([x, w]),
    "trace": lambda x, w: x.trace(),
    "pad": lambda x, w: F.pad(x[None], (1, 1), mode="reflect"),
    "cat": lambda x, w: torch.cat([x, w]),
    "add": lambda x, w: x + w,
    "interpolate": lambda x, w: F.interpolate(x[None], scale_factor=2.0),
    "of integers": lambda x, w: x.int().sum() + x.int().cumsum(0).sum(),
    "of float64": lambda x, w: x.double().exp() + F.softmax(x.double(), 0) + x.double() @ w.double(),
    "max_pool2d": lambda x, w: F.max_pool2d(x[None, None], 2),
}


def on_fakes(call, device, x_dtype, w_dtype):
    """The dtype, or the kind of error."""
    x, w = (torch.empty(8, 8, dtype=dtype, device=device) for dtype in (x_dtype, w_dtype))
    try:
        return call(x, w).dtype
    except RuntimeError as error:
        if "not linked with support for cuda" in str(error):
            pytest.skip("torch's kernel for fakes on CUDA wants a build for it")
        return type(error)


def by_torch(*args):
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        return on_fakes(args[0], "cuda", *args[1:])
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
        torch.clear_autocast_cache()


def by_ours(*args):
    with lists.cuda_autocast(), torch.autocast("cpu", torch.bfloat16):
        return on_fakes(args[0], "cpu", *args[1:])


@pytest.mark.parametrize("name", CALLS)
def test_an_op_computes_in_the_dtype_that_it_has_on_cuda(name):
    with FakeTensorMode():
        for x in (torch.float32, torch.bfloat16):
            for w in (torch.float32, torch.bfloat16):
                assert by_ours(CALLS[name], x, w) == by_torch(CALLS[name], x, w), (x, w)


def test_every_op_that_torch_has_on_its_lists_is_on_one_of_ours():
    ours = [lists.LOWER, lists.FLOAT32, lists.FLOAT32_RESULT, lists.WIDEST, lists.REFUSED]
    names = {name.partition(".")[0] for name in _compat.ops_with_autocast("AutocastCUDA")}
    names.discard("_cudnn_rnn")  # only builds for CUDA have it, and fakes, which are on the CPU, never call it
    assert names - set().union(*ours) == set() and sum(map(len, ours)) == len(set().union(*ours))


def test_nothing_is_cast_where_autocast_is_off_and_all_is_as_before_behind_it():
    x = torch.ones(8, 8, dtype=torch.bfloat16)
    with lists.cuda_autocast():
        assert x.exp().dtype is torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            assert x.exp().dtype is torch.float32
            with torch.autocast("cpu", enabled=False):
                assert x.exp().dtype is torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert x.exp().dtype is torch.bfloat16 and (x.float() @ x.float()).dtype is torch.bfloat16


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)

    def forward(self, x):
        return F.softmax(self.norm(self.up(x)), -1)


@pytest.mark.parametrize("device, dtype", [("cpu", "bf16"), ("cuda", "f32")])
def test_a_graph_on_cuda_computes_norms_and_softmax_in_float32(device, dtype):
    class AutocastGraph(gz.Graph):
        def __init__(self):
            super().__init__(gz.placement(device, range(2)))
            with torch.device("meta"):
                self.net = Net()
            self.add_optimizer(torch.optim.SGD(self.net.parameters(), lr=0.1))
            self.config.enable_amp()

        def build(self, x):
            y = self.net(x)
            y.square().mean().backward()
            return y

    with gz.testing.fake_world(2):
        graph = AutocastGraph().compile(torch.empty(4, 8, device="meta"))
    lines = str(graph.program).splitlines()
    for op in ("native_layer_norm", "_softmax"):
        (line,) = (line for line in lines if f" = {op}(" in line)
        assert f"{dtype}[8, 8]" in line.rsplit(" : ")[1], line
