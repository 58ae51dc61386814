"""Checkpoint files in one process: what is saved is what is loaded, and what was not saved is refused."""

import collections
import errno
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path[:0] = [str(Path(__file__).parent)]
import altered_index  # noqa: E402
from file_toys import TrainLora, batch, clipped_graph, losses, virtual  # noqa: E402

import graphzero as gz  # noqa: E402
from graphzero.checkpoint.files import blocks  # noqa: E402
from graphzero.checkpoint.files.blocks import BLOCK  # noqa: E402
from graphzero.checkpoint.files.json_values import from_json, to_json  # noqa: E402


@pytest.fixture(scope="module")
def trained():
    graph = clipped_graph(virtual(2), 2)
    losses(graph, 0)
    return graph


@pytest.fixture
def saved(trained, tmp_path):
    """A checkpoint in a folder of its own."""
    return gz.save(trained, tmp_path / "run", extra={"epoch": 3}).path


@pytest.fixture(scope="module")
def other():
    """Another Graph of that model, which has not stepped."""
    return clipped_graph(virtual(2), 2, seed=5)


def values(graph):
    found = {f"model.{key}": x.clone() for key, x in graph.model.state_dict().items()}
    for i, state in enumerate(graph.optimizer.state.values()):
        found |= {f"{i}.{key}": x.clone() for key, x in state.items()}
    return found


def assert_unchanged(graph, before):
    after = values(graph)
    assert after.keys() == before.keys()
    assert all(torch.equal(x, before[key]) for key, x in after.items())


def refused(graph, path, match, **options):
    """It raises, and nothing has changed."""
    before = values(graph)
    with pytest.raises(gz.CheckpointError, match=match):
        gz.load(graph, path, **options)
    assert_unchanged(graph, before)


# ---- altered files


def altered(checkpoint, change):
    """``change`` what the index holds, and make its hash right again: what somebody would do who means harm."""
    path = checkpoint / "index.json"
    body = json.loads(path.read_text())
    change(body)
    altered_index.write(path, body)


def first(body):
    """Name of a large tensor, and it."""
    return next((name, x) for name, x in body["tensors"].items() if name.endswith("first.weight") and "pieces" in x)


def piece_of(body):
    return first(body)[1]["pieces"][0]


def data(body):
    return body["files"]["rank-00000.safetensors"]


def halves(body, dims):
    """Pieces of a tensor of 2 x 2 x ... in 2 x 2 x ... parts, of which some are left out."""
    file, start = piece_of(body)[:2]
    return [[file, start, [int(dim == i) for i in range(dims)], [1] * dims] for dim in range(dims)]


def group(body):
    return body["state"]["optimizers"][0]["param_groups"][0]


def state_of(body):
    return next(
        x for name, x in body["tensors"].items() if name.startswith("optimizers.") and x.get("shape") == [10, 6]
    )


HARM = {
    "other file": lambda b: piece_of(b).__setitem__(0, "../../secret"),
    "file by path": lambda b: (b["files"].update({"../x": data(b)}), piece_of(b).__setitem__(0, "../x")),
    "file with a null": lambda b: b["files"].update({"a\0b": data(b)}),
    "negative start": lambda b: piece_of(b).__setitem__(1, -8),
    "huge start": lambda b: piece_of(b).__setitem__(1, 10**30),
    "start that is a float": lambda b: piece_of(b).__setitem__(1, 8.0),
    "negative sizes": lambda b: (piece_of(b).__setitem__(3, [-10, -6]), first(b)[1].__setitem__("shape", [-10, -6])),
    "huge shape": lambda b: first(b)[1].__setitem__("shape", [10**20, 10**20]),
    "huge shape without elements": lambda b: first(b)[1].update(shape=[0, 10**30], pieces=[]),
    "half of it": lambda b: piece_of(b).__setitem__(3, [5, 6]),
    "one half twice": lambda b: first(b)[1].__setitem__("pieces", [[*piece_of(b)[:3], [5, 6]]] * 2),
    "no pieces": lambda b: first(b)[1].__setitem__("pieces", []),
    "a dtype that is none": lambda b: first(b)[1].__setitem__("dtype", "load"),
    "a dtype that is no text": lambda b: first(b)[1].__setitem__("dtype", ["float64"]),
    "tied to nothing": lambda b: b["tensors"].__setitem__(first(b)[0], {"same as": "nobody"}),
    "tied to itself": lambda b: b["tensors"].__setitem__(first(b)[0], {"same as": first(b)[0]}),
    "tensor is missing": lambda b: b["tensors"].pop(first(b)[0]),
    "fewer sums": lambda b: data(b).__setitem__("sums", []),
    "state is a list": lambda b: b.__setitem__("state", [1]),
    "state is nothing": lambda b: b.__setitem__("state", None),
    "modules are numbers": lambda b: b["state"].__setitem__("modules", 3),
    "optimizers are text": lambda b: b["state"].__setitem__("optimizers", "adam"),
    "a device that is none": lambda b: b["state"].__setitem__("extra", {"": "device", "value": "no such"}),
    "code": lambda b: b["state"].__setitem__("extra", {"": "os.system", "value": "true"}),
    "step is text": lambda b: b.__setitem__("step", "7"),
    "no tensors": lambda b: b.pop("tensors"),
    "a tensor of 60 dims": lambda b: first(b)[1].update(
        shape=[1] * 60, pieces=[[*piece_of(b)[:2], [0] * 60, [1] * 60]]
    ),
    "60 dims in halves": lambda b: first(b)[1].update(shape=[2] * 60, pieces=halves(b, 60)),
    "a dtype of bits": lambda b: first(b)[1].update(dtype="bits8", pieces=[piece_of(b)]),
    "a dtype that is quantized": lambda b: first(b)[1].__setitem__("dtype", "quint8"),
    "a rate of 400 digits": lambda b: group(b).__setitem__("lr", 10**400),
    "one of two rates of 400 digits": lambda b: group(b)["betas"]["items"].__setitem__(0, 10**400),
    "a first rate that is text": lambda b: group(b).__setitem__("initial_lr", "0.1"),
    "a count that is not finite": lambda b: b["state"]["schedulers"][0].update(
        last_epoch={"": "float", "value": "inf"}
    ),
    "a method of a scheduler": lambda b: b["state"]["schedulers"][0].update(_initial_step=1),
    "a seed of 70 bits": lambda b: b["state"]["random"].__setitem__("seed", 2**70),
    "a version that is text": lambda b: b["state"]["metadata"].__setitem__("model", {"norm": {"version": "2"}}),
    "metadata that is a number": lambda b: b["state"]["metadata"].__setitem__("model", {"norm": 2}),
    "a tensor named twice": lambda b: b["state"].__setitem__("extra", {"": "tensor", "name": first(b)[0]}),
    "a tensor in extra": lambda b: b.__setitem__("extra", {"": "tensor", "name": first(b)[0]}),
    "a hash for a state": lambda b: state_of(b).update(sha256=[["0" * 64, *state_of(b).pop("pieces")[0][2:]]]),
    "a later version": lambda b: b.__setitem__("version", 3),
}


@pytest.mark.parametrize("harm", HARM)
def test_an_index_that_was_not_written_here_is_refused(saved, other, harm):
    altered(saved, HARM[harm])
    refused(other, saved, r"index.json|does not fit|not a state dict")


def test_an_index_altered_anywhere_is_refused_or_loaded_and_steps_go_on(tmp_path):
    graph, draw = clipped_graph(virtual(2), 2), random.Random(0)
    losses(graph, 0)
    where = gz.save(graph, tmp_path, extra={"epoch": (3, [b"x"])}).path
    body, right, refused = json.loads((where / "index.json").read_text()), graph.full_state_dict(), 0
    for _ in range(150):
        _, made = altered_index.altered(body, draw)
        altered_index.write(where / "index.json", made)
        try:
            gz.load(graph, where, strict=draw.random() < 0.7)
            losses(graph, 0, 1)
        except gz.CheckpointError:
            refused += 1
        graph.load_state_dict(right)
    assert 75 < refused < 150


@pytest.mark.parametrize("text", [
    "", "null", "[]", "{", "[" * 100_000, '{"a": ' * 50_000, "\xff", "NaN", '{"format": "graphzero checkpoint"}',
    "9" * 10_000,
])  # fmt: skip
def test_an_index_that_is_no_index_is_refused(saved, other, text):
    (saved / "index.json").write_bytes(text.encode("latin-1"))
    refused(other, saved, "index.json")


def test_an_index_that_says_something_twice_or_not_a_number_is_refused(saved, other):
    path = saved / "index.json"
    text = path.read_text()
    for spoiled in (text.replace("{", '{"step": 1,', 1), text.replace('"step": 2', '"step": NaN')):
        assert spoiled != text
        path.write_text(spoiled)
        refused(other, saved, "index.json is not a JSON text")
    path.write_text(text.replace('"epoch": 3', '"epoch": 4'))
    refused(other, saved, "index.json has been altered")


def test_every_altered_byte_is_found(saved):
    """In what is read: the values of tensors.  A load that has begun to write leaves the Graph torn, and says so."""
    graph = clipped_graph(virtual(2), 2, seed=5)
    path = saved / "rank-00000.safetensors"
    right = path.read_bytes()
    for at in (0, 9, 500, len(right) // 2, len(right) - 1):
        path.write_bytes(right[:at] + bytes([right[at] ^ 1]) + right[at + 1 :])
        with pytest.raises(gz.CheckpointError, match=r"rank-00000.safetensors has been altered: its bytes 0 to"):
            gz.load(graph, saved)
    with pytest.raises(gz.GraphZeroError, match="ended half way"):
        losses(graph, 0)
    path.write_bytes(right)
    gz.load(graph, saved)
    losses(graph, 2)


@pytest.mark.parametrize("damage", ["short", "long", "gone", "folder", "pipe", "dangling"])
def test_files_that_are_not_what_was_saved_are_refused_at_once(saved, other, damage):
    path = saved / "rank-00000.safetensors"
    right = path.read_bytes()
    path.unlink()
    if damage in ("short", "long"):
        path.write_bytes(right[:-1] if damage == "short" else right + b"0")
    elif damage == "folder":
        path.mkdir()
    elif damage == "pipe":
        os.mkfifo(path)
    elif damage == "dangling":
        path.symlink_to("nowhere")
    refused(other, saved, r"rank-00000.safetensors (has been|cannot be)")


def test_files_beside_it_and_links_to_it_are_no_matter(saved, other, tmp_path):
    (saved / "notes.txt").write_text("mine")
    shutil.move(saved / "rank-00000.safetensors", tmp_path / "elsewhere")
    (saved / "rank-00000.safetensors").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(saved)
    assert gz.load(other, tmp_path / "link") == {"epoch": 3}


# ---- paths


@pytest.mark.parametrize("path", [None, 3, b"x", "", "a\0b", "a\ud800b", "~nobody-of-that-name/x"])
def test_what_is_no_path_is_refused(trained, path):
    for ask in (lambda: gz.save(trained, path), lambda: gz.load(trained, path), lambda: gz.latest(path)):
        with pytest.raises(gz.CheckpointError, match="is not a path"):
            ask()


def test_places_where_nothing_can_be_saved_or_is(saved, trained, other, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "unmounted")
    a_file, a_link = "file is a file; give the path of a folder", "link is a link to .*unmounted, which is not a folder"
    for path, match in [
        (tmp_path / "file", a_file), (tmp_path / "file" / "inside", a_file), (tmp_path / "link" / "run", a_link),
        (saved, "is a checkpoint itself"), (tmp_path / ("x" * 300), "cannot be"), (Path("/proc/nowhere"), "cannot be"),
    ]:  # fmt: skip
        with pytest.raises(gz.CheckpointError, match=match):
            gz.save(trained, path)
    with pytest.raises(gz.CheckpointError, match=a_link):
        gz.save_pretrained(saved, tmp_path / "link")
    with pytest.raises(gz.CheckpointError, match="cannot be read: File name too long"):
        gz.load_pretrained(trained, tmp_path / ("x" * 300))
    for path, match in [
        (tmp_path / "file", "no complete checkpoint"), (tmp_path / "empty", "no complete checkpoint"),
        (tmp_path / "absent", "does not exist"), (tmp_path / ("x" * 300), "cannot be read"),
    ]:  # fmt: skip
        refused(other, path, match)
    assert (tmp_path / "file").read_text() == "mine"
    assert gz.latest(tmp_path / "absent") is gz.latest(tmp_path / "empty") is None and gz.latest(saved) == saved


@pytest.mark.parametrize("keep", [0, -1, True, 1.5, "2"])
def test_how_many_to_keep_is_checked(trained, tmp_path, keep):
    with pytest.raises(gz.ConfigError, match="the number of checkpoints to keep"):
        gz.save(trained, tmp_path, keep=keep)
    assert not [*tmp_path.iterdir()]


def test_only_old_checkpoints_are_removed(trained, tmp_path):
    mine = ["notes.txt", "000001", "step-7", ".hidden", "000002.step-1.bak"]
    for name in mine:
        (tmp_path / name).write_text("mine")
    (tmp_path / "000004.step-9").mkdir()  # without an index
    for name in (".000001.step-1.partial", ".000003.step-2.removed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000.safetensors").write_text("left by a crash")
    made = [gz.save(trained, tmp_path, keep=2).path for _ in range(4)]
    assert [path.name for path in made] == [f"{n:06d}.step-2" for n in range(5, 9)]
    assert sorted(child.name for child in tmp_path.iterdir()) == sorted(
        [*mine, "000004.step-9", "000007.step-2", "000008.step-2"]
    )
    os.utime(made[3], (0, 0))  # clocks are no matter
    assert gz.latest(tmp_path) == made[3]


# ---- what cannot be saved


class Odd:
    pass


def loop():
    made = []
    made.append(made)
    return made


@pytest.mark.parametrize("extra", [Odd(), {1, 2}, loop(), {"f": print}, Path("x"), Odd])
def test_extra_of_what_has_no_words_is_refused_by_its_place(trained, tmp_path, extra):
    with pytest.raises(gz.CheckpointError, match="extra"):
        gz.save(trained, tmp_path, extra=extra)
    assert not [*tmp_path.iterdir()]


VALUES = [
    None, True, 0, -(2**70), 7**9000, 0.1, -0.0, float("inf"), "naïve \ud800 \0 'x'", b"\0\xff", 1 + 2j, (1, (2, [3])),
    {"": 1}, {"": "tensor", "name": "x"}, {1: "a", (2, "b"): None, 1.5: [], None: {}}, torch.float8_e4m3fn,
    torch.device("cuda", 1), collections.OrderedDict(b=1, a=2), collections.Counter({30: 2, 60: 1}), [[], {}, ()],
]  # fmt: skip


def told(x):
    return [told(held) for held in x] if isinstance(x, list) else hex(x) if type(x) is int else repr(x)


def test_values_come_back_as_they_were():
    def tensor(*args):
        raise AssertionError("there is none")

    for x in VALUES:
        found = from_json(json.loads(json.dumps(to_json(x, "", tensor))), tensor)
        assert type(found) is type(x) and told(found) == told(x)


def test_extra_comes_back_through_a_file(trained, other, tmp_path):
    gz.save(trained, tmp_path, extra=VALUES)
    assert told(gz.load(other, tmp_path)) == told(VALUES)


def test_extra_may_hold_tensors_as_random_states_are(trained, other, tmp_path):
    seen = [torch.tensor([True, False]), torch.eye(3)[:, 1]]
    extra = {"rng": torch.get_rng_state(), "seen": seen, "none": torch.ones(0)}
    gz.save(trained, tmp_path, extra=extra)
    found = gz.load(other, tmp_path)
    assert torch.equal(found["rng"], extra["rng"])
    for ours, theirs in zip((*found["seen"], found["none"]), (*extra["seen"], extra["none"]), strict=True):
        assert ours.dtype is theirs.dtype and torch.equal(ours, theirs)


def test_no_space_left(trained, tmp_path, monkeypatch):
    made = gz.save(trained, tmp_path).path

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for place in ("fsync", "write"):
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full) if place == "fsync" else patched.setattr(blocks, "_write_all", full)
            with pytest.raises(gz.CheckpointError, match="No space left on device.*Nothing was saved"):
                gz.save(trained, tmp_path)
        assert [*tmp_path.iterdir()] == [made]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: collections.namedtuple("Usage", "free")(10))
    with pytest.raises(gz.CheckpointError, match="10 are free"):
        gz.save(trained, tmp_path)
    assert [*tmp_path.iterdir()] == [made]


def test_an_interrupted_save_leaves_nothing(trained, tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    for name in ("_write_all", "iterate_bytes"):
        with monkeypatch.context() as patched:
            patched.setattr(blocks, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                gz.save(trained, tmp_path)
        assert not [*tmp_path.iterdir()]
    assert gz.save(trained, tmp_path).path.exists()


# ---- another model


class Variant(gz.Graph):
    """Of ``Train``, with one thing changed."""

    def __init__(self, change):
        super().__init__(virtual(2))
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        name = "net" if change == "attribute" else "model"
        if change == "shape":
            self.model[2] = nn.Linear(8, 4)
        if change == "more layers":
            self.model.append(nn.Linear(3, 3))
        if change == "fewer layers":
            del self.model[2]
        if change == "dtype":
            self.model[0] = nn.Linear(6, 8, dtype=torch.complex64)
        net = self.model
        if change == "attribute":
            del self.model
            self.net = net
        make = torch.optim.SGD if change == "optimizer" else torch.optim.Adam
        groups = [net.parameters()] if change != "groups" else [net[0].parameters(), net[1:].parameters()]
        self.optimizer = make([{"params": [*group]} for group in groups], lr=0.01)
        decay = None if change == "scheduler" else torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4, 4])
        self.add_optimizer(self.optimizer, lr_sch=decay)
        if change == "loss scale":
            self.config.enable_amp(dtype=torch.float16)
        self.name_of_model = name

    def build(self, x):
        loss = getattr(self, self.name_of_model)(x).square().mean()
        loss.backward()
        return loss


MISFITS = {
    "shape": r"wrong: modules.model.2.weight is \[4, 8\] here, \[3, 8\]",
    "more layers": r"missing: modules.model.3.weight, modules.model.3.bias",
    "fewer layers": r"unexpected: modules.model.2.weight, modules.model.2.bias",
    "attribute": r"missing: modules.net.*\n.*unexpected: modules.model",
    "optimizer": r"unexpected: optimizers.0.param_groups.0.betas",
    "groups": r"optimizers.0.param_groups: 2 here, 1",
    "scheduler": r"unexpected: schedulers.0",
}


@pytest.fixture(scope="module")
def variant(tmp_path_factory):
    """A checkpoint of it unchanged, and the Graph."""
    graph = Variant("")
    for _ in range(3):
        graph(batch(0)[0].float())
    return gz.save(graph, tmp_path_factory.mktemp("variant")).path, graph


@pytest.mark.parametrize("change", MISFITS)
def test_a_checkpoint_of_another_model_says_what_differs_and_changes_nothing(variant, change):
    graph = Variant(change)
    held = {name: x.clone() for name, x in graph.state_dict()["modules"][graph.name_of_model].items()}
    with pytest.raises(gz.CheckpointError, match=MISFITS[change]):
        gz.load(graph, variant[0])
    assert all(torch.equal(x, held[name]) for name, x in graph.state_dict()["modules"][graph.name_of_model].items())
    assert not graph.optimizer.state


def test_what_fits_is_loaded_if_not_strict(variant):
    graph = Variant("more layers")
    gz.load(graph, variant[0], strict=False)
    assert torch.equal(graph.model[2].weight, variant[1].model[2].weight)


def test_schedules_go_on(variant):
    path, old = variant
    graph = Variant("")
    gz.load(graph, path)
    x = batch(1)[0].float()
    assert graph.optimizer.param_groups[0]["lr"] == pytest.approx(0.001)
    for _ in range(2):
        assert graph(x).item() == old(x).item()
        assert graph.optimizer.param_groups[0]["lr"] == old.optimizer.param_groups[0]["lr"]
    assert graph.optimizer.param_groups[0]["lr"] == pytest.approx(0.00001)


def test_a_loss_scale_comes_and_goes(variant, tmp_path):
    scaled, bare = Variant("loss scale"), Variant("")
    for graph in (scaled, bare):
        gz.load(graph, variant[0])
    assert torch.equal(scaled.model[0].weight, bare.model[0].weight)
    scaled.state_dict()["loss_scale"]["scale"].fill_(128.0)
    gz.save(scaled, tmp_path)
    again, plain = Variant("loss scale"), Variant("")
    gz.load(again, tmp_path)
    assert again.state_dict()["loss_scale"]["scale"] == 128
    gz.load(plain, tmp_path)


# ---- kinds of tensors


class Kinds(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        made = {
            "bool": torch.tensor([True, False]), "zero_d": torch.tensor(3.5), "empty": torch.zeros(0, 4),
            "complex": torch.randn(3, dtype=torch.complex64), "double_complex": torch.randn(2, dtype=torch.complex128),
            "conj": torch.randn(3, 2, dtype=torch.complex64).conj(), "bf16": torch.randn(5).bfloat16(),
            "of_half": torch.randn(5).half(), "fp8": torch.randn(8).to(torch.float8_e4m3fn),
            "fp8_fnuz": torch.randn(8).to(torch.float8_e4m3fnuz), "u16": torch.tensor([1, 65535]).to(torch.uint16),
            "long": torch.tensor([2**62]), "turned": torch.randn(6, 5).t(), "strided": torch.randn(10)[::2],
            "nan": torch.tensor([float("nan"), -0.0, float("inf")]), "spread": torch.randn(1).expand(4).clone(),
            "large": torch.arange(3 * BLOCK // 4 + 17).int(), "bits": torch.randn(64, 3, 2).transpose(0, 2),
        }  # fmt: skip
        for name, x in made.items():
            self.register_buffer(name, x)
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.twin = nn.Linear(3, 4, bias=False)
        self.twin.weight = self.weight
        self._buffers["w[0:2]"] = torch.full((2,), 7.0)
        self._buffers["sla/sh ü\n\"'"] = torch.full((2,), 8.0)


class Evaluate(gz.Graph):
    def __init__(self, model=None):
        super().__init__(virtual(2))
        self.model = model or Kinds()

    def build(self, x):
        return self.model.twin(x) + self.model.zero_d


def bits(x):
    x = x.resolve_conj().contiguous()
    return x.flatten().view(torch.uint8) if x.numel() else x.shape


def test_tensors_of_all_kinds_come_back_to_the_bit(tmp_path):
    torch.manual_seed(0)
    graph = Evaluate()
    gz.save(graph, tmp_path)
    torch.manual_seed(1)
    new = Evaluate()
    new.model.passing.fill_(3)
    new(torch.ones(4, 3))
    gz.load(new, tmp_path)
    found = new.model.state_dict()
    for name, x in graph.model.state_dict().items():
        assert found[name].dtype == x.dtype and found[name].shape == x.shape, name
        same = bits(found[name]) == bits(x)
        assert same if isinstance(same, bool) else bool(same.all()), name
    assert new.model.passing.tolist() == [3, 3] and new.model.twin.weight is new.model.weight
    with pytest.importorskip("safetensors").safe_open(gz.latest(tmp_path) / "rank-00000.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("modules.model.weight"), graph.model.weight)


def test_no_tensor_takes_the_place_of_another_by_its_name(tmp_path):
    """Names with dots come to the same as names in names; names with places to those of pieces."""

    class Nested(nn.Module):
        def __init__(self, by):
            super().__init__()
            self.by = by
            self.weight = nn.Parameter(torch.ones(2))

        def get_extra_state(self):
            return {"a": {"b": torch.full((2,), 1.0 * self.by)}, "a.b": torch.full((2,), 2.0 * self.by)}

        def set_extra_state(self, state):
            self.got = state

    class Graph(gz.Graph):
        def __init__(self, by):
            super().__init__(virtual(2))
            self.model = Nested(by)

        def build(self, x):
            return x * self.model.weight

    gz.save(Graph(3), tmp_path)
    new = Graph(1)
    gz.load(new, tmp_path)
    assert new.model.got["a"]["b"].tolist() == [3, 3] and new.model.got["a.b"].tolist() == [6, 6]


def test_what_has_no_values_cannot_be_saved(tmp_path):
    with torch.device("meta"):
        graph = Evaluate(nn.ModuleDict({"twin": nn.Linear(3, 4)}))
    with pytest.raises(gz.CheckpointError, match="modules.model.twin.weight is on the meta device"):
        gz.save(graph, tmp_path)


def test_an_expanded_tensor_is_saved_and_not_written_to(tmp_path):
    def model(value):
        made = nn.ModuleDict({"twin": nn.Linear(3, 4)})
        made.register_buffer("mask", torch.full((1,), value).expand(5))
        return made

    old, new = Evaluate(model(2.0)), Evaluate(model(1.0))
    gz.save(old, tmp_path)
    for load in (lambda: gz.load(new, tmp_path), lambda: new.load_state_dict(old.state_dict())):
        with pytest.raises(gz.CheckpointError, match="modules.model.mask is expanded here, .* clone"):
            load()
    new.model.mask = new.model.mask.clone()
    gz.load(new, tmp_path)
    assert new.model.mask.tolist() == [2.0] * 5


# ---- where it is asked for


def test_in_build_it_is_refused_and_no_grad_is_no_matter(trained, tmp_path):
    class Inside(Evaluate):
        def build(self, x):
            gz.save(self, tmp_path)
            return x

    with pytest.raises(gz.GraphZeroError, match="build"):
        Inside(nn.Linear(3, 3))(torch.ones(2, 3))
    with torch.no_grad():
        made = gz.save(trained, tmp_path).path
    with torch.no_grad():
        assert gz.load(trained, made) is None
    with pytest.raises(gz.ConfigError, match="takes a Graph first"):
        gz.save(trained.model, tmp_path)


# ---- frozen parameters


def test_frozen_parameters_are_kept_as_hashes_and_compared(tmp_path):
    graph = TrainLora(virtual(2), 3)
    losses(graph, 0)
    whole, small = (gz.save(graph, tmp_path / how, frozen=how) for how in ("values", "hash"))
    frozen = sum(p.numel() * 8 for p in graph.model.parameters() if not p.requires_grad)
    assert whole.nbytes - small.nbytes == frozen
    wanted = losses(graph, 2)
    new = TrainLora(virtual(3), 2, seed=1, base=graph)
    gz.load(new, tmp_path / "hash")
    torch.testing.assert_close(losses(new, 2), wanted)
    with torch.no_grad():
        new.model[2].base.bias[1] += 1e-12
    before = {name: x.clone() for name, x in new.model.state_dict().items()}
    with pytest.raises(gz.CheckpointError, match=r"modules.model.2.base.bias have other values here; nothing was load"):
        gz.load(new, tmp_path / "hash")
    assert all(torch.equal(x, before[name]) for name, x in new.model.state_dict().items())
    gz.load(new, tmp_path / "values")
    assert torch.equal(new.model[2].base.bias, graph.model[2].base.bias)
    with pytest.raises(gz.CheckpointError, match="frozen='hash'"):
        gz.save_pretrained(tmp_path / "hash", tmp_path / "out")
    with pytest.raises(gz.ConfigError, match="'values' or 'hash'"):
        gz.save(graph, tmp_path, frozen=True)


def test_a_base_on_the_meta_device_or_of_another_dtype_is_not_taken_for_the_saved_one(tmp_path):
    graph = TrainLora(virtual(2))
    gz.save(graph, tmp_path, frozen="hash")
    new = TrainLora(virtual(2))
    new.model[0].base.to("meta")
    with pytest.raises(gz.CheckpointError, match="model.0.base.weight is on the meta device here"):
        gz.load(new, tmp_path)
    new = TrainLora(virtual(2))
    new.model[0].base.float()
    with pytest.raises(gz.CheckpointError, match="is frozen, and torch.float32 here, torch.float64 in"):
        gz.load(new, tmp_path)


# ---- meanwhile


@pytest.fixture
def slow(monkeypatch):
    """Files are written when they are released."""
    release, right = threading.Event(), blocks.write_blocks

    def write(path, parts, rest):
        assert release.wait(20)
        return right(path, parts, rest)

    monkeypatch.setattr(blocks, "write_blocks", write)
    yield release
    release.set()


def test_values_are_those_of_the_call_and_the_next_save_waits(slow, tmp_path):
    graph = clipped_graph(virtual(2), 2)
    losses(graph, 0)
    wanted = values(graph)
    made = gz.save(graph, tmp_path, asynchronous=True)
    wanted_losses = losses(graph, 2)
    assert not made.is_done and gz.latest(tmp_path) is None and repr(made).startswith("saving step 2 to")
    threading.Timer(0.2, slow.set).start()
    second = gz.save(graph, tmp_path)
    assert made.is_done and [child.name for child in sorted(tmp_path.iterdir())] == [made.path.name, second.path.name]
    gz.load(graph, made.path)
    assert_unchanged(graph, wanted)
    assert losses(graph, 2) == wanted_losses


def test_two_graphs_save_to_one_folder_at_once(slow, tmp_path):
    graphs = [Evaluate(nn.ModuleDict({"twin": nn.Linear(3, 4)})) for _ in range(2)]
    made = [gz.save(graph, tmp_path, asynchronous=True) for graph in graphs]
    slow.set()
    for one in made:
        one.wait()
    assert [one.path.name for one in made] == ["000001.step-0", "000002.step-0"]
    for graph, one in zip(graphs, made, strict=True):
        gz.load(graph, one.path)


def test_a_failure_meanwhile_is_told_once_to_whoever_waits_or_saves_next(tmp_path, monkeypatch, caplog):
    graph = Evaluate(nn.ModuleDict({"twin": nn.Linear(3, 4)}))

    def full(path, parts, rest):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def fail():
        with monkeypatch.context() as patched:
            patched.setattr(blocks, "write_blocks", full)
            made = gz.save(graph, tmp_path, asynchronous=True)
            made.join()
        assert not [*tmp_path.iterdir()] and repr(made).startswith("not saved")
        return made

    with caplog.at_level(logging.ERROR, "graphzero"):
        made = fail()
    assert "No space left" in caplog.text
    with pytest.raises(gz.CheckpointError, match="No space left"):
        made.wait()
    good = gz.save(graph, tmp_path).path
    shutil.rmtree(good)
    fail()
    with pytest.raises(gz.CheckpointError, match="No space left"):
        gz.save(graph, tmp_path)
    good = gz.save(graph, tmp_path).path
    shutil.move(good, tmp_path.parent / "good")
    fail()
    gz.load(graph, tmp_path.parent / "good")  # whoever loads has other concerns


def test_a_process_that_ends_has_written_first(tmp_path):
    text = f"""
import torch, graphzero as gz
class G(gz.Graph):
    def __init__(self):
        super().__init__(gz.placement("cpu", range(2), virtual=True))
        self.model = torch.nn.Linear(2000, 2000)
    def build(self, x):
        return self.model(x)
gz.save(G(), {str(tmp_path)!r}, asynchronous=True)
"""
    subprocess.run([sys.executable, "-c", text], check=True, timeout=120)
    made = gz.latest(tmp_path)
    assert made is not None
    graph = Evaluate(nn.Linear(2000, 2000))
    gz.load(graph, made)
