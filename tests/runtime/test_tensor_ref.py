"""What refers to a tensor's memory without keeping it."""

import copy
import pickle

import pytest
import torch

from graphzero.runtime.state.tensor_ref import TensorRef


def test_it_knows_its_tensor_as_long_as_it_lives():
    x = torch.zeros(3)
    ref = TensorRef(x)
    assert ref.is_alive and ref.is_of(x) and not ref.is_of(x.clone())
    del x
    assert not ref.is_alive


def test_a_copy_is_itself_so_that_memory_is_given_up_once():
    """A second one would give up what torch counts once; who gets the memory next is written to then."""
    ref = TensorRef(torch.zeros(3))
    assert copy.copy(ref) is ref and copy.deepcopy([ref])[0] is ref


def test_it_stays_in_its_process():
    with pytest.raises(TypeError, match="memory of this process"):
        pickle.dumps(TensorRef(torch.zeros(3)))
