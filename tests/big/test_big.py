"""Models on the meta device in one process, and pretrained files: what they become, and what is refused."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path[:0] = [str(Path(__file__).parent)]
from big_toys import Model, adamw_graph, in_one_process, init, on_meta, tokens  # noqa: E402

import graphzero as gz  # noqa: E402

VIRTUAL = gz.placement("cpu", range(2), virtual=True)


def test_a_virtual_graph_comes_to_life_as_one_process_does():
    graph = adamw_graph(VIRTUAL, 3)
    torch.manual_seed(4)
    gz.materialize(graph, init)
    after = torch.get_rng_state()
    wanted = in_one_process(init, 4)
    assert torch.equal(after, torch.get_rng_state()), "the generator goes on from the same place"
    for name, x in wanted.state_dict().items():
        assert torch.equal(graph.model.state_dict()[name], x), name
    assert graph.model.head.weight is graph.model.embed.weight
    graph(tokens(0))


def test_modules_that_have_values_are_no_concern_of_the_default():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    before = model[0].weight.detach().clone()

    class Both(gz.Graph):
        def __init__(self):
            super().__init__(VIRTUAL)
            self.model = model

        def build(self, x):
            return self.model(x)

    gz.materialize(Both())
    assert torch.equal(model[0].weight, before) and not model[1].weight.is_meta


def test_what_nobody_initialises_is_named_and_nothing_has_changed():
    graph = adamw_graph(VIRTUAL, 0)
    before = list(graph.model.parameters())
    with pytest.raises(gz.ConfigError, match=r"nothing was written to model.embed.weight, model.attend.in_proj_weight"):
        gz.materialize(graph, lambda module: None)
    assert all(p is q and p.is_meta for p, q in zip(before, graph.model.parameters(), strict=True))


def test_a_module_without_reset_parameters_is_named():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.empty(3, device="meta"))

    graph = adamw_graph(VIRTUAL, 0, nn.Sequential(nn.Linear(2, 2), Scale()))
    with pytest.raises(gz.ConfigError, match=r"a Scale holds scale and has no reset_parameters; .* init\(module\)"):
        gz.materialize(graph)


def test_an_init_that_raises_leaves_all_on_the_meta_device():
    graph = adamw_graph(VIRTUAL, 0)

    def fail(module):
        if isinstance(module, nn.MultiheadAttention):
            raise RuntimeError("my own")

    with pytest.raises(RuntimeError, match="my own"):
        gz.materialize(graph, fail)
    assert all(p.is_meta for p in graph.model.parameters())


def test_a_call_before_says_what_to_do():
    graph = adamw_graph(VIRTUAL, 0)
    with pytest.raises(gz.ConfigError, match="meta device"):
        graph(tokens(0))


# ---- pretrained files


@pytest.fixture
def saved(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model = in_one_process(init, 3)
    held = {name: x.clone() for name, x in model.state_dict().items() if name != "head.weight"}
    safetensors.save_file(held, tmp_path / "model.safetensors")
    return tmp_path, model


def test_one_of_several_tied_names_is_enough(saved):
    path, model = saved
    graph = adamw_graph(VIRTUAL, 3)
    gz.load_pretrained(graph, path)
    for name, x in model.state_dict().items():
        assert torch.equal(graph.model.state_dict()[name], x), name
    assert graph.model.head.weight is graph.model.embed.weight


def test_a_file_of_another_model_names_what_is_missing_unexpected_and_of_another_shape(saved):
    path, _ = saved
    other = Model()
    other.narrow = nn.Linear(24, 9)
    other.more = nn.Linear(2, 2)
    del other.wide
    graph = adamw_graph(VIRTUAL, 0, other)
    before = {name: x.clone() for name, x in other.state_dict().items()}
    with pytest.raises(gz.CheckpointError) as error:
        gz.load_pretrained(graph, path / "model.safetensors")
    text = str(error.value)
    assert "missing: more.weight, more.bias" in text and "unexpected: wide.bias, wide.weight" in text
    assert "narrow.weight is [9, 24] here, [8, 24] in the files" in text
    assert all(torch.equal(x, before[name]) for name, x in other.state_dict().items())


def test_names_are_mapped_and_left_out(saved):
    path, model = saved
    graph = adamw_graph(VIRTUAL, 0, nn.Sequential(Model()))
    gz.load_pretrained(graph, path, rename={"": "0."})
    assert torch.equal(graph.model[0].wide.weight, model.wide.weight)
    with pytest.raises(gz.CheckpointError, match=r"missing: 0.wide.weight\n"):
        gz.load_pretrained(graph, path, rename=lambda name: None if name == "wide.weight" else f"0.{name}")


@pytest.mark.parametrize("damage", ["short", "no file", "text", "folder"])
def test_files_that_are_none_are_refused(saved, damage):
    path, _ = saved
    file = path / "model.safetensors"
    if damage == "short":
        file.write_bytes(file.read_bytes()[:-5])
    elif damage == "text":
        file.write_text("not a model at all")
    elif damage == "folder":
        file.rename(path / "pytorch_model.bin")
    graph = adamw_graph(VIRTUAL, 0)
    wanted = {
        "short": "cut short",
        "no file": "cannot be read",
        "text": "not a safetensors file",
        "folder": "may hold code",
    }
    with pytest.raises(gz.CheckpointError, match=wanted[damage]):
        gz.load_pretrained(graph, path if damage != "no file" else path / "other.safetensors")
    assert all(p.is_meta for p in graph.model.parameters())


def head_of(content, change):
    """A safetensors file with another head."""
    size = int.from_bytes(content[:8], "little")
    text = change(content[8 : 8 + size].decode())
    return len(text.encode()).to_bytes(8, "little") + text.encode() + content[8 + size :]


def with_entry(change):
    """``change`` what the head says of the tensor that stands first."""

    def changed(text):
        held = json.loads(text)
        change(min((x for name, x in held.items() if name != "__metadata__"), key=lambda x: x["data_offsets"]))
        return json.dumps(held)

    return changed


HEADS = {
    "negative start": with_entry(lambda x: x.__setitem__("data_offsets", [-8, x["data_offsets"][1] - 8])),
    "huge": with_entry(lambda x: x.update(shape=[10**30], data_offsets=[0, 4 * 10**30])),
    "negative shape": with_entry(lambda x: x.__setitem__("shape", [-1, -1, *x["shape"]])),
    "floats": with_entry(lambda x: x.__setitem__("data_offsets", [0.0, 1.0 * x["data_offsets"][1]])),
    "overlap": with_entry(lambda x: x.__setitem__("data_offsets", [n + 4 for n in x["data_offsets"]])),
    "dtype": with_entry(lambda x: x.__setitem__("dtype", "load")),
    "no list": with_entry(lambda x: x.__setitem__("shape", 7)),
    "twice": lambda text: text.replace("{", '{"wide.bias": {}, ', 1),
    "not a number": lambda text: text.replace("[0", "[NaN", 1),
    "deep": lambda text: "[" * 100_000,
    "a list": lambda text: "[]",
}


@pytest.mark.parametrize("kind", HEADS)
def test_heads_that_no_writer_makes_are_refused(saved, kind):
    path, _ = saved
    file = path / "model.safetensors"
    file.write_bytes(head_of(file.read_bytes(), HEADS[kind]))
    graph = adamw_graph(VIRTUAL, 0)
    with pytest.raises(gz.CheckpointError, match=r"model.safetensors is (not a safetensors file|cut short)"):
        gz.load_pretrained(graph, path)
    assert all(p.is_meta for p in graph.model.parameters())


def test_an_index_of_shards_says_which_file_holds_what(saved, tmp_path):
    from safetensors.torch import save_file

    path, model = saved
    names = {name: "b.safetensors" for name in model.state_dict() if name != "head.weight"}
    (path / "model.safetensors").rename(path / "b.safetensors")
    save_file({"wide.bias": torch.zeros(24)}, path / "a.safetensors")  # one that another file holds too
    index = path / "model.safetensors.index.json"
    for bias, match in [
        ("b.safetensors", ""), ("../b.safetensors", "are not in its folder"), ("c.safetensors", "cannot be read"),
        (7, "are not in its folder"),
    ]:  # fmt: skip
        index.write_text(json.dumps({"weight_map": {**names, "norm.bias": "b.safetensors", "wide.bias": bias}}))
        graph = adamw_graph(VIRTUAL, 0)
        if match:
            with pytest.raises(gz.CheckpointError, match=match):
                gz.load_pretrained(graph, path)
        else:
            gz.load_pretrained(graph, path)
            assert torch.equal(graph.model.wide.bias, model.wide.bias)
    index.write_text(json.dumps({"weight_map": {**names, "norm.bias": "a.safetensors", "wide.bias": "a.safetensors"}}))
    with pytest.raises(gz.CheckpointError, match="names tensors that are not there: 'norm.bias' in a.safetensors"):
        gz.load_pretrained(adamw_graph(VIRTUAL, 0), path)


def test_what_would_lose_values_is_refused(saved):
    path, _ = saved
    graph = adamw_graph(VIRTUAL, 0, Model())
    graph.model.norm.register_buffer("running_mean", torch.zeros(8, dtype=torch.int64))
    with pytest.raises(gz.CheckpointError, match=r"norm.running_mean is torch.int64 here, torch.float32 in the files"):
        gz.load_pretrained(graph, path)
    with pytest.raises(gz.CheckpointError, match=r"makes 'x' of two names"):
        gz.load_pretrained(graph, path, rename=lambda name: "x")


# ---- and written


@pytest.mark.parametrize("shard_bytes", [10**9, 1000])
def test_a_checkpoint_becomes_files_that_load_elsewhere(tmp_path, shard_bytes):
    graph = adamw_graph(VIRTUAL, 3, in_one_process(init, 3))
    graph(tokens(0))
    gz.save(graph, tmp_path / "run")
    files = gz.save_pretrained(tmp_path / "run", tmp_path / "out", shard_bytes=shard_bytes)
    assert len(files) == (1 if shard_bytes > 1000 else 5)
    other = adamw_graph(VIRTUAL, 0, on_meta())
    gz.load_pretrained(other, tmp_path / "out")
    for name, x in graph.model.state_dict().items():
        assert torch.equal(other.model.state_dict()[name], x), name


def test_transformers_loads_what_was_trained_here(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)

    graph = adamw_graph(VIRTUAL, 3, model, lambda model, x: model(input_ids=x, labels=x).loss)
    gz.materialize(graph, model._init_weights)
    graph(tokens(0))
    gz.save(graph, tmp_path / "run")
    gz.save_pretrained(tmp_path / "run", tmp_path / "out", config=model.config, shard_bytes=2000)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    for name, x in graph.full_state_dict()["modules"]["model"].items():
        assert torch.equal(loaded.state_dict()[name], x), name
