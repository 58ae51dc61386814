"""Which tensors share memory."""

import torch

from graphzero.ir.storage.overlap import Regions, shares_elements, without_copies


def test_tensors_overlap_where_they_have_a_byte_in_common_whatever_their_storages_are():
    flat = torch.zeros(8, 6)
    array = flat.numpy()
    tensors = {
        "left": flat[:, :3],
        "right": flat[:, 3:],
        "middle": torch.from_numpy(array)[:, 2:4],
        "row": flat[1].view(torch.uint8)[:4],
        "another": torch.zeros(8, 6),
        "empty": flat[:0],
        "expanded": torch.zeros(()).expand(8, 6),
    }
    pairs = {frozenset(pair) for pair in Regions(tensors).overlapping()}
    assert pairs == {frozenset(pair) for pair in (("left", "middle"), ("middle", "right"), ("left", "row"))}
    regions = Regions({name: tensors[name] for name in ("left", "another")})
    assert regions.meeting(flat[7, 2:]) == "left" and regions.meeting(flat[:, 3:]) is None
    assert regions.meeting(tensors["empty"]) is None


def test_tensors_on_the_meta_device_overlap_in_their_storage():
    flat = torch.empty(8, device="meta")
    tensors = {"a": flat[:4], "b": flat[4:], "c": flat[3:5], "other": torch.empty(8, device="meta")}
    assert set(Regions(tensors).overlapping()) == {("a", "c"), ("c", "b")}


def test_elements_are_shared_after_expand_and_not_after_a_turn():
    turned, expanded = torch.zeros(2, 3).t(), torch.zeros(3, 1).expand(3, 4)
    assert not shares_elements(turned) and shares_elements(expanded)
    assert without_copies(turned).shape == (3, 2) and without_copies(expanded).shape == (3, 1)
