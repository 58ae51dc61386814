"""Chunks of tensors: what ranks hold, what they write, and whether that is all of a tensor, once."""

import itertools
import random

import pytest
import torch

import graphzero as gz
from graphzero.checkpoint.files.chunks import (
    SMALL_CHUNK,
    Chunk,
    assign_writers,
    cover_exactly_once,
    local_chunks,
    whole_chunk,
)
from graphzero.runtime.tensors.shards import piece

B, S = gz.sbp.B, gz.sbp.S
LAYOUTS = [
    ((4,), (B,)), ((3,), (S(0),)), ((4,), (S(1),)), ((2, 2), (S(0), S(0))), ((2, 2), (S(0), B)), ((2, 2), (B, S(1))),
    ((2, 3), (S(1), S(0))), ((2,), (S(0, 3),)), ((2, 2), (S(0), S(0, 3))),
]  # fmt: skip
SHAPES = [(12, 12), (7, 5), (1, 24), (24, 1, 2), (0, 6)]


@pytest.mark.parametrize("hierarchy, nd", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_held_boxes_are_the_pieces(hierarchy, nd, shape):
    if any(sbp.is_split and sbp.sections > 1 and shape[sbp.dim] % 6 for sbp in nd):
        pytest.skip("sections must divide")
    x = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for position in range(torch.Size(hierarchy).numel()):
        mine = piece(x, nd, hierarchy, position)
        made = torch.full_like(mine, -1)
        for held in local_chunks(shape, nd, hierarchy, position):
            held.local.view_in(made).copy_(held.chunk.view_in(x))
        assert torch.equal(made, mine)


@pytest.mark.parametrize("hierarchy, nd", LAYOUTS)
def test_each_element_is_written_once_and_by_one_who_holds_it(hierarchy, nd):
    shapes = [(shape, nd, False) for shape in [(12, 12), (240, 120), (6 * SMALL_CHUNK, 24), (0, 6)]]
    found = assign_writers(shapes, hierarchy)
    for (shape, _, _), parts in zip(shapes, found, strict=True):
        assert cover_exactly_once(shape, [held.chunk for _, held in parts])
        for position, held in parts:
            mine = [one.chunk for one in local_chunks(shape, nd, hierarchy, position)]
            assert any(chunk.intersect(held.chunk) == held.chunk for chunk in mine)
    assert {position for position, _ in found[2]} == set(range(torch.Size(hierarchy).numel())), "all write"


def test_what_is_no_cover_is_seen():
    shape = (6, 4, 2)
    halves = [Chunk((0, 0, 0), (3, 4, 2)), Chunk((3, 0, 0), (3, 4, 2))]
    assert (
        cover_exactly_once(shape, halves)
        and cover_exactly_once(shape, [whole_chunk(shape)])
        and cover_exactly_once((), [Chunk((), ())])
    )
    assert cover_exactly_once((0, 3), []) and not cover_exactly_once((0, 3), [Chunk((0, 0), (0, 3))])
    for wrong in (
        [], halves[:1], halves * 2, [*halves, Chunk((0, 0, 0), (1, 1, 1))], [Chunk((1, 0, 0), shape)],
        [Chunk((0, 0, 0), (6, 4, 3))], [Chunk((0, 0), (6, 4))], [halves[0], halves[0]],
        [Chunk((0, 0, 0), (4, 4, 2)), Chunk((2, 0, 0), (2, 4, 2))],
    ):  # fmt: skip
        assert not cover_exactly_once(shape, wrong), wrong


def test_covers_is_what_counting_says():
    draw = random.Random(0)
    for _ in range(300):
        shape = tuple(draw.randint(1, 4) for _ in range(draw.randint(1, 3)))
        chunks = split(draw, whole_chunk(shape), draw.randint(1, 6))
        if draw.random() < 0.5:
            spoiled = draw.choice(chunks)
            at = tuple(max(0, a + draw.choice((-1, 0, 1))) for a in spoiled.offsets)
            chunks[chunks.index(spoiled)] = Chunk(at, tuple(max(1, n + draw.choice((-1, 0, 1))) for n in spoiled.sizes))
        counts = {}
        for chunk in chunks:
            for place in itertools.product(*(range(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))):
                counts[place] = counts.get(place, 0) + 1
        everywhere = set(itertools.product(*map(range, shape)))
        assert cover_exactly_once(shape, chunks) == (counts.keys() == everywhere and set(counts.values()) == {1})


def split(draw, chunk, times):
    """In up to so many cuts."""
    chunks = [chunk]
    for _ in range(times):
        one = draw.choice(chunks)
        dim = draw.randrange(len(one.sizes))
        if one.sizes[dim] > 1:
            at = draw.randrange(1, one.sizes[dim])
            chunks.remove(one)
            for start, size in ((0, at), (at, one.sizes[dim] - at)):
                begin = (*one.offsets[:dim], one.offsets[dim] + start, *one.offsets[dim + 1 :])
                chunks.append(Chunk(begin, (*one.sizes[:dim], size, *one.sizes[dim + 1 :])))
    return chunks
