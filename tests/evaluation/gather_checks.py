"""What four gloo processes check of many tensors that are gathered together."""

import torch
import torch.distributed as dist
from evaluation_toys import everyone, grid

import graphzero as gz
from graphzero.runtime.tensors.gather import take_piece, wholes
from graphzero.runtime.tensors.shards import as_dtensor

B, S = gz.sbp.B, gz.sbp.S


def check_many_tensors_are_gathered_at_once_in_buffers_of_the_size_that_is_said():
    generator = torch.Generator().manual_seed(0)
    pairs = ((S(0), S(0)), (S(0), S(1)), (B, S(1)), (S(1), S(1, 2)), (S(0), B), (S(0), S(0, 2)))
    cases = [(everyone(), (sbp,)) for sbp in (S(0), S(1), S(1, 3), B)] + [(grid(), nd) for nd in pairs]
    shapes = [(12, 12), (37, 30, 5), (9, 6, 2), (1, 42000), (3, 24, 1)]
    dtypes = [torch.float32, torch.bfloat16, torch.bool, torch.complex64]
    for placement in (everyone(), grid()):
        full, split = [], []
        for nd in (nd for where, nd in cases if where == placement):
            for i, shape in enumerate(shapes):
                x = torch.randn(shape, generator=generator).mul(8).to(dtypes[i % 4])
                if all(s.is_broadcast or shape[s.dim] % s.sections == 0 for s in nd):
                    full.append(x)
                    split.append(as_dtensor(x, placement, nd))
        assert len(full) > 12
        for nbytes in (0, 2**19, 2**26):
            for found, wanted in zip(wholes(split, placement, nbytes), full, strict=True):
                assert found.dtype is wanted.dtype and torch.equal(found, wanted)
        for x, wanted in zip(split, full, strict=True):
            local, wanted = x.to_local().clone(), wanted.clone()
            x.to_local().zero_()
            take_piece(x, wanted)
            assert torch.equal(x.to_local(), local)
    assert dist.get_world_size() == 4
