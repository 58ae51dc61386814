"""The sum of a block: what it is, and which alterations it tells."""

import hashlib
import random
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent)]
from graphzero.checkpoint.files.blocks import BLOCK, FileChecksums, has_checksum_per_block, memory_of, write_blocks  # noqa: E402
from graphzero.checkpoint.files.checksum import ROW, RUN, Checksum  # noqa: E402
from graphzero.checkpoint.files.chunks import Chunk, whole_chunk  # noqa: E402
from graphzero.checkpoint.files.read_chunks import chunk_ranges  # noqa: E402
from graphzero.checkpoint.files.verified_read import ByteRange, read_ranges  # noqa: E402
from graphzero.errors import CheckpointError  # noqa: E402

WORDS = ROW // 8


def summed(*parts):
    made = Checksum()
    for part in parts:
        made.add_bytes(memoryview(part))
    return made.end_block()


def by_hand(data):
    """The sum as docs/checkpoints.md has it, in Python's integers."""
    drawn = struct.unpack(f"<{2 * WORDS}Q", hashlib.shake_256(b"graphzero checkpoint").digest(2 * ROW))
    of_words, of_halves = drawn[:WORDS], drawn[WORDS:]
    data += bytes(-len(data) % ROW)
    rows = b""
    for at in range(0, len(data), ROW):
        words = struct.unpack(f"<{WORDS}Q", data[at : at + ROW])
        first = sum(word * (weight | 1) for word, weight in zip(words, of_words, strict=True))
        second = sum((word >> 32) * (weight | 1) for word, weight in zip(words, of_halves, strict=True))
        rows += struct.pack("<2Q", first % 2**64, second % 2**64)
    return hashlib.sha256(rows).hexdigest()[:32]


@pytest.mark.parametrize("length", [0, 1, 7, 8, ROW - 1, ROW, ROW + 1, 3 * ROW + 13])
def test_it_is_what_the_format_says(length):
    data = random.Random(length).randbytes(length)
    assert summed(data) == by_hand(data)


def test_it_is_the_same_however_the_bytes_come():
    draw = random.Random(0)
    data = draw.randbytes(2 * RUN + 3 * ROW + 5)
    wanted = summed(data)
    for _ in range(5):
        cuts = sorted(draw.randrange(len(data)) for _ in range(draw.randrange(40)))
        assert summed(*(data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True))) == wanted
    odd = memoryview(bytearray(len(data) + 3))[3:]  # where words are not aligned
    odd[:] = data
    assert summed(odd) == wanted
    made = Checksum()
    for _ in range(2):
        made.add_bytes(memoryview(data))
        assert made.end_block() == wanted, "the next one begins again"


def words(kind):
    """A block of which most words are alike, or none."""
    made = np.random.default_rng(0).standard_normal(40 * WORDS)
    alike = {"zeros": 0.0, "ones": 1.0, "twos": 2.0}
    if kind in alike:
        made[:] = alike[kind]
    if kind == "floats":
        return np.float32(made).repeat(2)
    if kind == "small floats":
        return torch.from_numpy(made).bfloat16().view(torch.int16).numpy().repeat(4)
    return np.arange(40 * WORDS) if kind == "numbers" else made


def alterations(data, draw):
    """(what it is, the altered bytes) of whatever befalls files and memory."""
    words, size = data.view(np.uint64), data.nbytes

    def made(what, change):
        found = data.copy()
        change(found)
        return what, found

    def at(count, step=1):
        return np.array(sorted(draw.sample(range(size // step), count))) * step

    def flip(bits, which):
        return lambda x: x.view(np.uint64).__setitem__(which, x.view(np.uint64)[which] ^ np.uint64(bits))

    def move(unit, count):
        def change(x):
            a, b = at(2, unit)
            held = x.view(np.uint8)
            held[a : a + unit], held[b : b + unit] = held[b : b + unit].copy(), held[a : a + unit].copy()

        return made(f"{count} blocks of {unit} bytes swapped", change)

    everywhere = slice(None)
    for bits in (1 << draw.randrange(64), 1 << 63, 1 << 31, (1 << 63) | (1 << 31), 2**64 - 1, 0x8000800080008000):
        yield made(f"{bits:x} flipped in a word", flip(bits, at(1, 8) // 8))
        yield made(f"{bits:x} flipped in two words", flip(bits, at(2, 8) // 8))
        yield made(f"{bits:x} flipped in two words of a row", flip(bits, np.array(draw.sample(range(WORDS), 2))))
        yield made(f"{bits:x} flipped in two rows at one place", flip(bits, np.array([5, 5 + WORDS])))
        corners = np.array([5, 9, 5 + WORDS, 9 + WORDS])
        yield made(f"{bits:x} flipped at four corners", flip(bits, corners))
        yield made(f"{bits:x} flipped in a row", flip(bits, slice(WORDS, 2 * WORDS)))
        yield made(f"{bits:x} flipped everywhere", flip(bits, everywhere))
    for unit in (1, 2, 8, 512, 4096, ROW, 4 * ROW):
        yield move(unit, 2)
        where = draw.randrange(size // unit) * unit
        yield made(f"{unit} bytes zeroed", lambda x, a=where, n=unit: x.view(np.uint8).__setitem__(slice(a, a + n), 0))
        yield made(
            f"{unit} bytes again",
            lambda x, a=where, n=unit: x.view(np.uint8).__setitem__(slice(a, a + n), x.view(np.uint8)[:n].copy()),
        )
    for shift in (1, 4, 8, 512, ROW):
        yield f"shifted by {shift}", np.roll(data.view(np.uint8), shift)
    yield "byte order", words.byteswap()
    yield "turned round", words[::-1].copy()
    yield "columns for rows", words.reshape(-1, WORDS).T.copy()
    yield "sorted", np.sort(words)
    yield "one more everywhere", words + np.uint64(1)
    yield "negated", (~words) + np.uint64(1)
    yield "twice", words * np.uint64(2)


@pytest.mark.parametrize("kind", ["random", "floats", "small floats", "numbers", "zeros", "ones", "twos"])
def test_what_befalls_files_is_told(kind):
    data = words(kind)
    before = summed(data.tobytes())
    count = 0
    for what, altered in alterations(data, random.Random(kind)):
        altered = altered.tobytes()
        if altered != data.tobytes():
            assert summed(altered) != before, what
            count += 1
    assert count > 40


def test_random_alterations_are_told():
    """Of rows of few different words: any number of them, by any rule, to any others."""
    draw = np.random.default_rng(0)
    for _ in range(300):
        few = draw.integers(0, 2**64, 3, np.uint64) & np.uint64(2**64 - 2 ** int(draw.integers(64)))
        data = draw.choice(few, 2 * WORDS)
        altered = data.copy()
        which = draw.integers(0, len(data), int(draw.integers(1, 200)))
        rule = draw.integers(3)
        altered[which] = draw.choice(few) if rule == 0 else data[which] ^ few[0] if rule == 1 else data[which][::-1]
        assert (summed(altered.tobytes()) == summed(data.tobytes())) == np.array_equal(altered, data)


def test_no_word_of_a_row_can_be_altered_alone():
    data = np.zeros(WORDS, np.uint64)
    found = {summed(data.tobytes())}
    for place in range(0, WORDS, 97):
        for bit in (0, 31, 32, 63):
            data[place] = 1 << bit
            found.add(summed(data.tobytes()))
            data[place] = 0
    assert len(found) == 1 + 4 * len(range(0, WORDS, 97))


# ---- one pass over a file


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    content = random.Random(1).randbytes(2 * BLOCK + 3 * RUN + 77)
    path = tmp_path_factory.mktemp("sums") / "file"
    draw, cuts = random.Random(2), [0]
    while cuts[-1] < len(content):
        cuts.append(min(len(content), cuts[-1] + draw.choice([1, 100, 70_000, 3 * RUN])))
    return path, content, write_blocks(path, (memoryview(content)[a:b] for a, b in zip(cuts, cuts[1:], strict=False)))


def wanted(start, size):
    memory = bytearray(size)
    return ByteRange(f"at {start}", start, size, lambda: memoryview(memory)), memory


@pytest.mark.parametrize("is_known", [True, False])
def test_every_target_has_its_bytes_however_they_lie(file, is_known):
    path, content, sums = file
    assert sums.nbytes == len(content) and len(sums.blocks) == 3
    draw = random.Random(3)
    for _ in range(6):
        ranges = []
        for size in draw.choices([1, 5, 1000, 65_536, RUN + 1, BLOCK + 9, len(content)], k=draw.randrange(1, 40)):
            ranges.append((draw.randrange(len(content) - size + 1), size))
        made = [wanted(*one) for one in ranges]
        read_ranges(path, sums if is_known else None, [target for target, _ in made])
        for (start, size), (_, memory) in zip(ranges, made, strict=True):
            assert memory == content[start : start + size]


def test_a_target_is_told_once_when_all_of_it_is_there(file):
    path, content, sums = file
    told = []
    for start, size in [(0, 10), (RUN - 5, 10), (9, BLOCK), (BLOCK - 1, 2)]:
        memory = bytearray(size)
        target = ByteRange("x", start, size, lambda memory=memory: memoryview(memory))
        target.done = lambda memory=memory, at=start: told.append((at, memory == content[at : at + len(memory)]))
        read_ranges(path, sums, [target])
    assert told == [(0, True), (RUN - 5, True), (9, True), (BLOCK - 1, True)]


def test_damage_is_told_with_the_tensors_that_are_in_it_and_only_where_it_is_read(file, tmp_path):
    _, content, sums = file
    path, at = tmp_path / "file", BLOCK + RUN + 3
    path.write_bytes(content[:at] + bytes([content[at] ^ 128]) + content[at + 1 :])
    for start, size in [(0, BLOCK), (2 * BLOCK, 50)]:
        read_ranges(path, sums, [wanted(start, size)[0]])
    for start, size in [(BLOCK, 1), (2 * BLOCK - 1, 1), (BLOCK - 10, BLOCK), (0, len(content))]:
        message = f"its bytes {BLOCK} to {2 * BLOCK} are not those that were saved, of at {start}; load"
        with pytest.raises(CheckpointError, match=message):
            read_ranges(path, sums, [wanted(start, size)[0], wanted(0, 1)[0]])
    path.write_bytes(content[: BLOCK + 5])
    with pytest.raises(CheckpointError, match="is cut short: .* bytes are missing"):
        read_ranges(path, sums, [wanted(BLOCK, 10)[0]])
    with pytest.raises(CheckpointError, match="is cut short"):
        read_ranges(path, None, [wanted(BLOCK, 10)[0]])


@pytest.mark.parametrize("swapped", [ROW, 4096, RUN, BLOCK])
def test_parts_that_change_places_within_a_file_are_told(file, tmp_path, swapped):
    _, content, sums = file
    path = tmp_path / "file"
    path.write_bytes(content[swapped : 2 * swapped] + content[:swapped] + content[2 * swapped :])
    with pytest.raises(CheckpointError, match="has been altered: its bytes 0 to"):
        read_ranges(path, sums, [wanted(0, len(content))[0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape, chunk", [
    ((3, 400_000), Chunk((1, 7), (2, 300_000))),  # rows too large for the buffer
    ((50, 40, 3), Chunk((4, 0, 1), (46, 40, 2))), ((7, 5), whole_chunk((7, 5))), ((), whole_chunk(())),
])  # fmt: skip
def test_chunks_go_to_tensors_that_lie_otherwise(tmp_path, shape, chunk, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    sums = write_blocks(tmp_path / "x", [memoryview(b"12345678"), memory_of(x)])
    into = torch.zeros(chunk.sizes[::-1], dtype=dtype).permute([*range(len(shape))][::-1])
    read_ranges(tmp_path / "x", sums, chunk_ranges("x", 8, torch.float32, shape, chunk, into))
    assert torch.equal(into, chunk.view_in(x).to(dtype))


def test_sums_that_are_too_few_are_no_sums():
    assert has_checksum_per_block(FileChecksums(BLOCK + 1, ("a", "b"))) and has_checksum_per_block(FileChecksums(0, ()))
    assert not has_checksum_per_block(FileChecksums(BLOCK + 1, ("a",))) and not has_checksum_per_block(
        FileChecksums(BLOCK, ("a", "b"))
    )
