"""What four gloo processes check of checkpoint files: they write them together, and any reads any."""

import shutil
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from file_toys import TrainLora, clipped_graph, losses

import graphzero as gz
from graphzero.checkpoint.files import blocks


def shared_folder(name):
    """One for all processes."""
    made = [tempfile.mkdtemp(prefix=name) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    return Path(made[0])


def everyone():
    return gz.placement("cpu", range(dist.get_world_size()))


def check_a_new_graph_loads_before_its_first_step():
    folder = shared_folder("new")
    for stage, other in ((0, 3), (3, 0)):
        old = clipped_graph(everyone(), stage)
        losses(old, 0)
        gz.save(old, folder / str(stage))
        wanted = losses(old, 2)
        new = clipped_graph(everyone(), other, seed=7)
        gz.load(new, folder / str(stage))
        held = [x for state in new.optimizer.state.values() for x in state.values() if x.numel() >= 4]
        assert all(isinstance(x, torch.distributed.tensor.DTensor) == bool(other) for x in held)
        found = losses(new, 2)
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), atol=1e-9, rtol=0)


def check_each_rank_writes_its_share_and_no_value_is_written_twice():
    folder = shared_folder("shares")
    graph = clipped_graph(everyone(), 0)
    graph.model.wide = torch.nn.Linear(400, 400, bias=False).double().requires_grad_(False)
    losses(graph, 0)
    made = gz.save(graph, folder).path
    sizes = [file.stat().st_size for file in sorted(made.glob("rank-*.safetensors"))]
    held = sum(x.numel() * 8 for x in graph.model.state_dict().values())
    assert len(sizes) == 4 and max(sizes) < 1.2 * min(sizes), sizes
    assert sum(sizes) < 1.1 * held


def check_what_differs_between_ranks_is_refused_on_all():
    folder = shared_folder("differs")
    graph = clipped_graph(everyone(), 1)
    losses(graph, 0)
    rank = dist.get_rank()
    for extra, path in (({"rank": rank}, folder), ({"x": torch.full((2,), rank)}, folder), (None, folder / str(rank))):
        try:
            gz.save(graph, path, extra=extra)
        except gz.GraphZeroError as error:
            assert "rank 0" in str(error) and "rank 1" in str(error), error
        else:
            raise AssertionError("it was saved")
    assert gz.latest(folder) is None


def check_a_rank_that_cannot_write_fails_all_and_leaves_nothing():
    folder, rank = shared_folder("full"), dist.get_rank()
    graph = clipped_graph(everyone(), 2)
    losses(graph, 0)
    first = gz.save(graph, folder).path
    right = blocks.write_blocks

    def full(path, parts, rest):
        raise OSError(28, "No space left on device", str(path))

    for asynchronous in (False, True):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(blocks, "write_blocks", full if rank == 2 else right)
            if asynchronous:  # what is written while another rank removes it stays: nobody waits for it to be gone
                patched.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
            began = time.monotonic()
            with pytest.raises(gz.CheckpointError, match="No space left|was not completed"):
                gz.save(graph, folder, asynchronous=asynchronous).wait()
            assert time.monotonic() - began < 60
        dist.barrier()
        assert gz.latest(folder) == first
        losses(graph, 2)
    second = gz.save(graph, folder, keep=1).path
    assert [second] == [*folder.iterdir()]


def check_steps_go_on_while_a_checkpoint_is_written():
    folder = shared_folder("meanwhile")
    graph = clipped_graph(everyone(), 3)
    losses(graph, 0)
    saved = gz.save(graph, folder, asynchronous=True)
    wanted = losses(graph, 2)
    saved.wait()
    assert saved.path == gz.latest(folder)
    gz.load(graph, folder)
    assert losses(graph, 2) == wanted


def check_frozen_parameters_are_compared_by_hash_whatever_holds_them():
    folder = shared_folder("frozen")
    old = {stage: TrainLora(everyone(), stage) for stage in (0, 3)}
    for stage, graph in old.items():
        losses(graph, 0)
        gz.save(graph, folder / str(stage), frozen="hash", asynchronous=bool(stage)).wait()
    wanted = losses(old[0], 2)
    for stage in (3, 0):
        for saved in old:
            new = TrainLora(everyone(), stage, seed=1, base=TrainLora(everyone()))
            if saved != stage:
                losses(new, 0)  # its base is split by now, or whole
            gz.load(new, folder / str(saved))
            torch.testing.assert_close(losses(new, 2), wanted)
            with torch.no_grad():
                new.model[0].base.bias.add_(1e-12)
            with pytest.raises(gz.CheckpointError, match="0.base.bias have other values here"):
                gz.load(new, folder / str(saved))
