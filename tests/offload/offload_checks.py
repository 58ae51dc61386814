"""What two gloo processes check of states in host memory."""

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from offload_toys import OffloadGraph, differences, results_of

import graphzero as gz
from graphzero.runtime.world.mapped_file import MappedFile
from graphzero.testing import strict_transfers


def graph_of(stage, offload, **options):
    graph = OffloadGraph(stage=stage, where=gz.placement("cpu", range(2)), steps=2, clip=0.1, **options)
    if offload is not None:
        graph.config.enable_offload(**offload)
    return graph


@contextmanager
def one_folder():
    """A folder that both ranks know."""
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        yield folders[0]
        dist.barrier()


def own_share():
    return slice(6 * dist.get_rank(), 6 * dist.get_rank() + 6)


def check_steps_have_the_same_bits_at_every_stage():
    for stage in range(4):
        expected = results_of(graph_of(stage, None), share=own_share())
        with strict_transfers():
            assert differences(results_of(graph_of(stage, {}), share=own_share()), expected) == []


def check_states_of_each_rank_are_in_a_file_of_its_own():
    with one_folder() as folder:
        expected = results_of(graph_of(2, None), share=own_share())
        graph = graph_of(2, {"path": folder})
        with strict_transfers():
            assert differences(results_of(graph, share=own_share()), expected) == []
        mapped = [line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if folder in line]
        everyone = [None, None]
        dist.all_gather_object(everyone, set(mapped))
        assert len(everyone[0]) == len(everyone[1]) == 1 and everyone[0] != everyone[1]  # inodes
        assert os.listdir(folder) == []


def check_a_folder_that_one_rank_cannot_write_is_an_error_on_both():
    with one_folder() as folder:
        if dist.get_rank() == 1:
            (Path(folder) / "1").write_text("")
        graph = graph_of(1, {"path": f"{folder}/one"})
        create = MappedFile.create
        if dist.get_rank() == 1:
            MappedFile.create = lambda _, nbytes, what: create(f"{folder}/1", nbytes, what)
        try:
            results_of(graph, share=own_share())
        except gz.ConfigError as error:
            message = str(error)
        finally:
            MappedFile.create = create
        assert "do not go there: File exists" in message
        expected = results_of(graph_of(1, None), share=own_share())
        assert differences(results_of(graph, share=own_share()), expected) == []


def check_files_of_one_are_read_by_the_other():
    with one_folder() as folder:
        with_offload, plain = graph_of(2, {"path": f"{folder}/states"}), graph_of(3, None)
        results_of(with_offload, share=own_share())
        gz.save(with_offload, f"{folder}/checkpoint")
        gz.load(plain, f"{folder}/checkpoint")
        found, expected = (results_of(graph, share=own_share()) for graph in (plain, with_offload))
        assert differences(found, expected) == []


def check_activations_on_the_host_have_the_same_bits():
    plain, moved = (graph_of(3, None, deeper=6) for _ in range(2))
    moved.config.bucket_bytes = 1
    expected = results_of(plain, share=own_share())
    moved.config.enable_offload(activations=plain.plan.memory.activations - 1)
    with strict_transfers():
        assert differences(results_of(moved, share=own_share()), expected) == []
    assert moved.plan.memory.activations < plain.plan.memory.activations
