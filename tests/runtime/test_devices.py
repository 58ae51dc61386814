"""A program runs where its placement says: no value strays to another device.

Without a GPU this is seen on fake tensors of a device that is not the CPU: torch propagates devices op by op and
refuses to mix them, and ``Only`` refuses 0-d tensors of the host too, which torch would let pass.
"""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from graphs import TrainGraph, cross_entropy
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import graphzero as gz
from graphzero import _compat
from graphzero.ir import value
from graphzero.ir.transfer_layout import shape_on
from graphzero.runtime.execute.executor import Executor
from graphzero.runtime.world import launch, shared_gpus
from graphzero.runtime.world.virtual import VirtualWorld
from graphzero.runtime.world.world import device_of

# Builds without CUDA know no guard for its tensors; of the devices that are not the CPU they know "lazy".
DEVICE = torch.device("cuda" if torch.version.cuda else "lazy", 0)


class Only(TorchDispatchMode):
    """Refuses tensors that are not on ``DEVICE``; as a meter, values that are not what the program says."""

    def __init__(self, graph):
        super().__init__()
        self.nodes = {node.name: node for node in graph.nodes}

    def register(self, category, tensors, most=None): ...

    def watches(self, local):
        return local == 0

    def enter(self, node, kind): ...

    def meet(self, node): ...

    def add_result(self, x, names):
        name, index = names[-1] if isinstance(names[-1], tuple) else (names[-1], None)
        type_ = value.type_of(self.nodes[name])
        type_ = type_ if index is None or not isinstance(type_, tuple) else type_[index]
        if isinstance(x, torch.Tensor) and hasattr(type_, "dtype"):
            assert x.dtype == type_.dtype, f"{name} is {x.dtype} on {DEVICE}, not {type_.dtype}"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor):
                assert tensor.device.type == DEVICE.type, f"{func} meets a tensor on {tensor.device}"
        return result


def run(graph):
    """One step of a lowered graph with every tensor on ``DEVICE``."""
    world = VirtualWorld(graph.placement, DEVICE)
    nodes = {node.name: node for node in graph.placeholders()}

    def made(name):
        node = nodes[name]
        if not value.is_tensor(node):
            return [0.1] * len(world.rank_ids)
        type_, nd = value.tensor_type(node), value.sbp_of(node)
        shapes = [shape_on(graph, type_, nd, rank) if nd is not None else type_.shape for rank in world.rank_ids]
        return [torch.empty(shape, dtype=type_.dtype, device=DEVICE) for shape in shapes]

    with FakeTensorMode(), Only(graph) as only:
        executor = Executor(graph, world)
        executor.bind({name: made(name) for name in executor.program.places.persistent})
        return executor.run_step({name: made(name) for name in executor.program.places.inputs}, meter=only)


def language(model, ids):
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def mlp():
    model = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(12), nn.Linear(12, 5))
    return model, cross_entropy, (torch.randn(4, 8), torch.randint(5, (4,)))


def conv():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, groups=2),
        nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5),
    )  # fmt: skip
    return model, cross_entropy, (torch.randn(4, 3, 12, 12), torch.randint(5, (4,)))


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=8)
    return transformers.GPT2LMHeadModel(config), language, (torch.randint(32, (4, 8)),)


def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), language, (torch.randint(32, (4, 8)),)


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-3)


@pytest.mark.parametrize("kind", [mlp, conv, gpt2, pytest.param(llama, marks=pytest.mark.slow)])
def test_a_program_runs_without_mixing_devices_at_every_stage(kind):
    model, loss, batch = kind()
    graph = TrainGraph(model, loss, adamw(model.parameters()), clip=1.0)
    for stage in (0, 1, 2, 3):
        graph.config.enable_zero(stage > 0, stage=stage or 2)
        results = run(graph.compile(*batch).program)
        assert results.outputs[0][0].device == DEVICE


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD"])
def test_every_optimizer_steps_on_one_device(name):
    model, loss, batch = mlp()
    more = {"momentum": 0.9} if name == "SGD" else {}
    graph = TrainGraph(model, loss, getattr(torch.optim, name)(model.parameters(), lr=1e-2, **more))
    graph.config.enable_zero(stage=2)
    run(graph.compile(*batch).program)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.body, self.head = kind(8, 6, batch_first=True), nn.Linear(6, 5)

    def forward(self, x):
        return self.head(self.body(x.unsqueeze(1).expand(-1, 3, -1))[0][:, -1])


class Images(nn.Module):
    """Layers that shapes and interpolation are about."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.head = nn.ConvTranspose2d(2, 4, 2, stride=2), nn.InstanceNorm2d(4), nn.Linear(4, 5)

    def forward(self, x):
        h = F.pad(x.view(-1, 2, 2, 2), (1, 1, 1, 1), mode="reflect")
        h = F.interpolate(self.norm(self.up(h)), scale_factor=2.0, mode="bilinear")
        return self.head(F.avg_pool2d(F.prelu(h, self.up.bias), 2).amax((2, 3)))


LAYERS = {
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "transformer": lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16), nn.Linear(8, 5)),
    "images": Images,
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_run_on_one_device(name):
    model = LAYERS[name]()
    graph = TrainGraph(model, cross_entropy, adamw(model.parameters()))
    graph.config.enable_zero(stage=3)
    run(graph.compile(torch.randn(4, 8), torch.randint(5, (4,))).program)


def has_kernel(op):
    keys = ("CUDA", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key) for key in keys)


@pytest.mark.skipif(
    not torch.version.cuda, reason="this build of torch has no kernels for CUDA; a build that has needs no GPU"
)
@pytest.mark.parametrize("kind", [mlp, conv, gpt2, llama, *LAYERS])
def test_every_op_of_a_program_has_a_kernel_for_cuda(kind):
    if kind in LAYERS:
        kind = partial(lambda name: (LAYERS[name](), *mlp()[1:]), kind)
    model, loss, batch = kind()
    graph = TrainGraph(model, loss, adamw(model.parameters()), clip=1.0).compile(*batch).program
    ops = {node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    assert not {op for op in ops if not has_kernel(op)}


def test_a_tensor_of_another_device_is_refused():
    model, loss, batch = mlp()
    graph = TrainGraph(model, loss, adamw(model.parameters())).compile(*batch).program
    node = next(node for node in graph.nodes if node.op == "call_function" and "gelu" in str(node.target))
    with graph.fx.graph.inserting_before(node):
        strayed = graph.fx.graph.call_function(torch.ops.aten.full.default, ([], 1.0), {"device": "cpu"})
    strayed.meta = dict(node.meta)
    with pytest.raises(Exception, match="meets a tensor on cpu"):
        run(graph)


def test_a_program_for_gpus_is_compiled_and_planned_where_there_are_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model, loss, batch = mlp()
    place = gz.placement("cuda", range(2), virtual=True)
    graph = TrainGraph(model, loss, adamw(model.parameters()), placement=place)
    graph.config.enable_zero(stage=2)
    assert graph.compile(*batch).plan.memory.peak > 0
    with pytest.raises(gz.PlacementError, match=r"finds none; compile\(\) works without"):
        graph(*batch)
    assert all(p.device.type == "cpu" for p in model.parameters())


# ---- which GPU a rank takes, without any


@pytest.fixture
def taken(monkeypatch):
    """The devices that this process makes its current one, where it sees four of them and has used none."""
    taken = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: taken[-1])
    return taken


def test_each_rank_takes_the_gpu_of_its_number_on_the_machine_and_fewer_in_turn(monkeypatch, taken):
    for number, gpus in ((3, 4), (2, 1), (3, 2)):
        monkeypatch.setenv("LOCAL_RANK", str(number))
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert device_of(gz.placement("cuda", range(8))) == torch.device("cuda", number % gpus)
    assert taken == [3, 0, 1]


SWITCH, LISTED = "NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=1"


@pytest.mark.parametrize(
    ("names", "switch", "nccl", "refused"),
    [
        ("abcd", "", (2, 28, 9), ""),  # each process may see one GPU alone, its own
        ("aaaa", "1", (2, 30, 7), ""),
        (
            "abcb",
            "",
            (2, 30, 7),
            rf"ranks 1, 3 are on one GPU(.|\n)*{LISTED} in the environment of all; this is 2.30.7",
        ),
        ("aaaa", "0", (2, 30, 7), f"ranks 0, 1, 2, 3 are on one GPU(.|\n)*{LISTED}"),
        ("aaaa", "1", (2, 28, 9), rf"2.30 and newer lets ranks share a GPU, slowly, with {LISTED} .*; this is 2.28.9"),
        ("aaaa", "1", (), "this torch has none"),
    ],
)
def test_ranks_on_one_gpu_are_named_before_nccl_meets_them(monkeypatch, taken, names, switch, nccl, refused):
    """As rank 3 of torchrun on a machine with one GPU for each process, or for all."""
    environment = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", SWITCH: switch}
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    backends, own = [], SimpleNamespace(uuid=names[3])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: own)
    monkeypatch.setattr(_compat, "nccl_version", lambda: nccl)
    monkeypatch.setattr(dist, "init_process_group", backends.append)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "all_gather_object", lambda all_names, name: all_names.__setitem__(slice(None), names))
    monkeypatch.setattr(launch, "tear_down_at_exit", lambda *_: None)
    with pytest.raises(gz.PlacementError, match=refused) if refused else nullcontext():
        launch.ensure_world("cuda")
    assert taken == [0] and backends == ["cpu:gloo,cuda:nccl"]


@pytest.mark.parametrize(
    ("seen", "count", "switch", "chosen"),
    [
        ("abcd", 1, "", "cuda"),  # a launcher shows each process its own
        ("abcb", 1, "", "cpu"),
        ("aaaa", 1, "1", "cuda"),
        ("aaaa", 4, "", "cuda"),  # all on the first one still, in a process group of the user's
        ("ab-d", 1, "", "cpu"),
        ("----", 0, "", "cpu"),
    ],
)
def test_a_graph_without_a_placement_is_on_gpus_where_each_rank_has_its_own(
    monkeypatch, caplog, taken, seen, count, switch, chosen
):
    def gather(own, purpose):
        name = f"one of {count}, for rank 0" if count >= 4 else "a"
        assert own == (("cuda", name) if count else ("cpu", ""))
        others = [("cpu", "") if x == "-" else ("cuda", x if count < 4 else f"of rank {i}") for i, x in enumerate(seen)]
        return [own, *others[1:]]

    connections = SimpleNamespace(device_type=None, rank=0, all_gather=gather)
    monkeypatch.setenv(SWITCH, switch)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a"))
    monkeypatch.setattr(_compat, "nccl_version", lambda: (2, 30, 7))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(shared_gpus, "communicator", lambda ranks: connections)
    assert shared_gpus.device_type_of(4) == chosen == connections.device_type
    warned = [record.getMessage() for record in caplog.records]
    assert bool(warned) == (chosen == "cpu" and count > 0), warned
    assert not warned or "not every rank has its own GPU" in warned[0] and 'gz.placement("cpu", ranks)' in warned[0]


@pytest.mark.filterwarnings("ignore:.*CUDA is not available:UserWarning")
@pytest.mark.parametrize("around", [True, False])
@pytest.mark.parametrize(("device", "expected"), [("cuda", torch.bfloat16), ("cpu", torch.float32)])
def test_autocast_of_cuda_counts_on_a_placement_of_cuda(device, expected, around):
    region = partial(torch.autocast, "cuda", dtype=torch.bfloat16)

    def loss_of(model, x, y):
        with nullcontext() if around else region():
            return cross_entropy(model, x, y)

    model, _, batch = mlp()
    place = gz.placement(device, range(2), virtual=True)
    graph = TrainGraph(model, loss_of, adamw(model.parameters()), placement=place)
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    try:
        torch.set_autocast_enabled("cuda", around)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        program = graph.compile(*batch).program
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
    products = [node for node in program.nodes if node.target is torch.ops.aten.addmm.default]
    assert {value.tensor_type(node).dtype for node in products} == {expected}
