"""What four gloo processes check of modules that begin on the meta device."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from big_toys import adamw_graph, in_one_process, init, tokens
from processes import computed_once
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

import graphzero as gz


def shared_folder():
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    return Path(made[0])


def placements():
    yield gz.placement("cpu", range(4)), 4
    yield gz.placement("cpu", [[0, 1], [2, 3]], names=("dp", "tp")), 2


def same(graph, model):
    full, wanted = graph.full_state_dict()["modules"]["model"], model.state_dict()
    assert full.keys() == wanted.keys()
    for name, x in wanted.items():
        assert torch.equal(full[name], x), name


def share(step, rows):
    place = dist.get_rank() * rows // 4
    return tokens(step).chunk(rows)[place]


def virtual_losses():
    graph = adamw_graph(gz.placement("cpu", range(4), virtual=True), 0, in_one_process(init, 3))
    return [graph(tokens(step)) for step in range(2)]


def check_each_rank_comes_to_life_with_its_piece_of_what_one_process_makes():
    (losses,) = computed_once([virtual_losses])
    for how in (None, init):
        for placement, rows in placements():
            for stage in (1, 3):
                graph = adamw_graph(placement, stage)
                torch.manual_seed(3 + dist.get_rank())
                drawn = torch.get_rng_state()
                gz.materialize(graph, how)
                assert dist.get_rank() == 0 or torch.equal(torch.get_rng_state(), drawn)
                same(graph, in_one_process(how or default_of, 3))
                assert graph.model.head.weight is graph.model.embed.weight
                assert isinstance(graph.model.embed.weight, DTensor) == (stage == 3 or "tp" in placement.names)
                held = {id(p) for p in graph.model.parameters()}
                assert {id(p) for group in graph.optimizer.param_groups for p in group["params"]} == held
                if how is init and stage == 3:
                    for step, loss in enumerate(losses):
                        torch.testing.assert_close(graph(share(step, rows)), loss)


def default_of(module):
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is not None and (module._parameters or module._buffers):
        reset()


def check_pretrained_files_are_read_piece_by_piece():
    folder = shared_folder()
    model = in_one_process(init, 3)
    held = {f"base.{name}": x.half() if x.is_floating_point() else x for name, x in model.state_dict().items()}
    del held["base.head.weight"]  # tied
    if dist.get_rank() == 0:
        save_file(held, folder / "model.safetensors")
    dist.barrier()
    wanted = {name: x.half().float() if x.is_floating_point() else x for name, x in model.state_dict().items()}
    for placement, _ in placements():
        for stage in (1, 3):
            graph = adamw_graph(placement, stage)
            gz.load_pretrained(graph, folder, rename={"base.": ""})
            full = graph.full_state_dict()["modules"]["model"]
            assert full.keys() == wanted.keys() and all(torch.equal(full[name], x) for name, x in wanted.items())


def check_a_checkpoint_wakes_a_model_on_the_meta_device():
    folder = shared_folder()
    for (placement, rows), stage in zip(placements(), (0, 3), strict=True):
        old = adamw_graph(placement, 2, in_one_process(init, 5))
        old(share(0, rows))
        gz.save(old, folder / str(rows))
        wanted = old(share(1, rows))
        new = adamw_graph(placement, stage)
        gz.load(new, folder / str(rows))
        torch.testing.assert_close(new(share(1, rows)), wanted)


def check_a_stage_3_model_of_the_meta_device_is_whole_again_at_stage_1():
    graph = adamw_graph(gz.placement("cpu", range(4)), 3)
    gz.materialize(graph, init)
    graph.config.enable_zero(stage=1)
    graph(share(0, 4))
    assert not any(isinstance(p, DTensor) for p in graph.model.parameters())
