"""What two gloo processes check of memory that others hold beside a Graph: state dicts, arrays, files, other Graphs."""

import copy
import functools
import importlib.util
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from graphs import TrainGraph
from process_toys import eager, make, mse_graph, raises, same, sgd, share
from processes import slow
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.swa_utils import AveragedModel

import graphzero as gz
from graphzero.errors import ConfigError
from graphzero.runtime.state import bind


def averaged_graph(model, stage, amp=False, average=False):
    """With bf16 copies of parameters, or a running average, which are split from stage 1 on."""
    graph = mse_graph(model, sgd(model), stage)
    if amp:
        graph.config.enable_amp(dtype=torch.bfloat16)
    if average:
        graph.averaged = AveragedModel(model)
        graph.add_average(graph.averaged, model)
    return graph


def count_alive(storages, expected):
    """How many are alive.  gloo's thread lets go of what it has sent a moment after the wait for it has returned."""
    until = time.monotonic() + 1
    while (alive := sum(not storage.expired() for storage in storages)) > expected and time.monotonic() < until:
        time.sleep(1e-3)
    return alive


def check_what_was_taken_from_a_parameter_before_it_is_split_keeps_its_values():
    for stage, amp, average in ((3, False, False), (1, True, False), (1, False, True)):
        graph = averaged_graph(make(0), stage, amp, average)
        module = graph.averaged.module if average else graph.model
        taken = module.state_dict()
        array, view = module.first.bias.detach().numpy(), module.last.weight.data.view(-1)[2:]
        known = copy.deepcopy(taken)
        graph(*share(0))
        assert any(isinstance(p, DTensor) for p in module.parameters())
        same(taken, known)
        assert (array == known["first.bias"].numpy()).all() and torch.equal(view, known["last.weight"].view(-1)[2:])
        with tempfile.TemporaryFile() as file:
            torch.save(taken, file)
            file.seek(0)
            same(torch.load(file), known)


def check_the_memory_of_a_split_parameter_goes_at_once_where_nobody_else_holds_it():
    """Also where another Graph has run with it whole."""
    model = make(0)
    whole = mse_graph(model)
    loss = whole(*share(0))["loss"]
    storages = [StorageWeakRef(p.untyped_storage()) for p in model.parameters()]
    alive, lay_out = [], bind.lay_out

    def counting(*args, **kwargs):
        alive.append(count_alive(storages, len(storages) - len(alive)))
        return lay_out(*args, **kwargs)

    bind.lay_out = counting
    try:
        graph = mse_graph(model, sgd(model), stage=3)
        graph(*share(0))
    finally:
        bind.lay_out = lay_out
    assert alive[: len(storages)] == list(range(len(storages), 0, -1)), alive
    assert all(storage.expired() for storage in storages)
    assert whole(*share(0))["loss"] < loss  # it follows, and computes with what is trained


def check_weights_in_files_arrays_and_shared_memory_train_at_every_stage():
    """None of them can be resized."""
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder, "model.pt")
        torch.save(make(0).state_dict(), saved)
        ways = {
            "a mapped file": lambda: torch.load(saved, mmap=True),
            "arrays": lambda: {name: torch.from_numpy(x.numpy().copy()) for name, x in torch.load(saved).items()},
            "dlpack": lambda: {name: torch.from_dlpack(x.numpy().copy()) for name, x in torch.load(saved).items()},
            "one buffer": lambda: in_one_buffer(torch.load(saved)),
            "shared memory": lambda: {name: x.share_memory_() for name, x in torch.load(saved).items()},
        }
        for way, load in ways.items():
            for stage in (0, 3):
                _check_trains(load(), stage, way)


def check_parameters_that_share_memory_are_refused_at_every_stage_and_expanded_buffers_are_taken_from_rank_0():
    for stage in (0, 1, 3):
        model = make(0)
        model.second.bias.data = model.first.bias.data
        graph = mse_graph(model, sgd(model), stage)
        what = "model.first.bias and the parameter model.second.bias share memory"
        raises(ConfigError, what, functools.partial(graph, *share(0)))
        model.second.bias.data = model.first.bias.data.clone()
        model.last.register_buffer("scale", torch.tensor([float(dist.get_rank())]).expand(3))
        graph(*share(0))
        assert not model.last.scale.any()


def check_memory_that_ranks_share_or_may_only_read_is_refused_where_a_step_writes_it():
    folder = Path(tempfile.gettempdir())
    if dist.get_rank() == 0:
        np.save(folder / "weight.npy", np.zeros((3, 5)))
        torch.zeros(3, 5, dtype=torch.float64).numpy().tofile(folder / "shared")
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that the array cannot be written
        read_only = torch.from_numpy(np.load(folder / "weight.npy", mmap_mode="r"))
    for stage in (0, 3):
        model = make(0)
        model.last.weight = nn.Parameter(read_only)
        graph = mse_graph(model, sgd(model), stage)
        raises(
            ConfigError,
            "parameter model.last.weight is in read-only memory",
            functools.partial(graph, *share(0)),
        )
        mapped = torch.from_file(str(folder / "shared"), shared=True, size=15, dtype=torch.float64).view(3, 5)
        model.last.weight = nn.Parameter(mapped)
        graph = mse_graph(model, sgd(model), stage)
        if stage == 3:
            graph(*share(0))
        else:
            what = "model.last.weight of rank 0 and the parameter model.last.weight of rank 1 share memory"
            for _ in range(2):
                raises(ConfigError, what, functools.partial(graph, *share(0)))
            model.last.weight.data = mapped.clone()
            graph(*share(0))
        dist.barrier()


def check_initialising_by_the_memory_of_a_parameter_is_refused_and_by_a_copy_it_is_not():
    def by_memory(module):
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
            module.weight.detach().numpy()[...] = 1

    def by_copy(module):
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
            module.weight.copy_(torch.from_numpy(np.ones(module.weight.shape)))

    with torch.device("meta"):
        model = make(0)
    graph = mse_graph(model, sgd(model), 3)
    what = r"init= takes the memory of model.first.weight \(numpy\)"
    raises(ConfigError, what, functools.partial(gz.materialize, graph, by_memory))
    gz.materialize(graph, by_copy)
    graph(*share(0))
    assert isinstance(model.first.weight, DTensor)


def in_one_buffer(tensors):
    """The same tensors, one after the other in one storage."""
    flat = torch.cat([x.reshape(-1) for x in tensors.values()])
    pieces = flat.split([x.numel() for x in tensors.values()])
    return {name: piece.view(x.shape) for (name, x), piece in zip(tensors.items(), pieces, strict=True)}


def _check_trains(weights, stage, way):
    model = make(5)
    model.load_state_dict(weights, assign=True)
    model.second.weight = model.first.weight  # which assign=True makes two
    graph = mse_graph(model, sgd(model), stage)
    graph(*share(0))
    expected, _ = eager(1)
    found = graph.full_state_dict()["modules"]["model"]
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found[name], value, msg=lambda m, name=name: f"{way}, stage {stage}, {name}: {m}")


@slow
def check_a_model_of_from_pretrained_trains_at_every_stage():
    if importlib.util.find_spec("transformers") is None:
        return
    import transformers

    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    folder = Path(tempfile.gettempdir(), "pretrained")
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)  # rank 0 writes
    dist.barrier()
    kind, ids = transformers.AutoModelForCausalLM, torch.arange(32).view(4, 8).remainder(16)
    plain = kind.from_pretrained(folder)
    optimizer = torch.optim.AdamW(plain.parameters(), 0.01)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(plain(ids, labels=ids, use_cache=False).loss)
        losses[-1].backward()
        optimizer.step()
    for stage in (0, 3):
        model = kind.from_pretrained(folder)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        graph = TrainGraph(model, language_loss, optimizer, placement=None, stage=stage)
        found = [graph(ids.chunk(2)[dist.get_rank()]) for _ in losses]
        torch.testing.assert_close(torch.stack(found), torch.stack(losses).detach())


def language_loss(model, ids):
    return model(ids, labels=ids, use_cache=False).loss
