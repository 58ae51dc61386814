"""Programs whose states are in host memory: what the pass writes, and what ``verify`` refuses."""

import pytest

import graphzero as gz
from graphzero.ir.text.parser import parse
from graphzero.ir.verifier.verify import verify
from graphzero.passes.memory.in_place import InPlace
from graphzero.passes.schedule.offload_states import OffloadStates

STEP = """
graph step(dp=2) local
  w   = param()      : f32[64]  S(0)
  v   = param()      : f32[64]  S(0)
  wm  = state(w, m)  : f32[64]  S(0)
  wn  = state(w, n)  : f32[]    B
  vm  = state(v, m)  : f32[64]  S(0)
  g   = batch()      : f32[64]  S(0)
update:
  a   = add(wm, g)       : f32[64]  S(0)
  n   = add(wn, 1.0)     : f32[]    B
  wm1 = mul(a, 2.0)      : f32[64]  S(0)
  sa  = assign(wm, wm1)  : f32[64]  S(0)
  sn  = assign(wn, n)    : f32[]    B
  vm1 = mul(g, 2.0)      : f32[64]  S(0)
  sv  = assign(vm, vm1)  : f32[64]  S(0)
  return update(wm=sa, wn=sn, vm=sv)
"""
MOVED = """
graph step(dp=2) local
  w                = param()                                    : f32[64]  S(0)
  v                = param()                                    : f32[64]  S(0)
  wm               = state(w, m)                                : f32[64]  S(0)
  wn               = state(w, n)                                : f32[]    B
  vm               = state(v, m)                                : f32[64]  S(0)
  g                = batch()                                    : f32[64]  S(0)
update:
  to_device_launch = to_device_launch(wm)                       : f32[64]  S(0)
  to_device_wait   = to_device_wait(to_device_launch, wm)       : f32[64]  S(0)
  a                = add(to_device_wait, g, out=to_device_wait) : f32[64]  S(0)
  n                = add(wn, 1.0)                               : f32[]    B
  wm1              = mul(a, 2.0, out=a)                         : f32[64]  S(0)
  to_host_launch   = to_host_launch(wm, wm1)                    : f32[64]  S(0)
  sn               = assign(wn, n)                              : f32[]    B
  vm1              = mul(g, 2.0)                                : f32[64]  S(0)
  to_host_wait     = to_host_wait(to_host_launch, wm1)          : f32[64]  S(0)
  to_host_launch_1 = to_host_launch(vm, vm1)                    : f32[64]  S(0)
  to_host_wait_1   = to_host_wait(to_host_launch_1, vm1)        : f32[64]  S(0)
  return update(wm=to_host_wait, wn=sn, vm=to_host_wait_1)
"""


def test_states_come_before_they_are_read_and_go_when_they_are_new():
    """A state of no dims stays; one that is only written is not fetched; results go over the copies on the device."""
    gz.testing.assert_graph(gz.Pipeline([OffloadStates(bucket_bytes=128), InPlace()])(parse(STEP)), MOVED)


def test_small_states_of_several_parameters_travel_together():
    text = str(gz.Pipeline([OffloadStates(bucket_bytes=256)])(parse(STEP)))
    order = [line.split("=")[0].strip() for line in text.splitlines() if "to_host" in line.partition(":")[0]]
    assert order[:4] == ["to_host_launch", "to_host_launch_1", "to_host_wait", "to_host_wait_1"]


def test_a_program_without_states_is_left_alone():
    text = "graph step(dp=2) local\n  x = batch() : f32[4]  S(0)\nforward:\n  y = neg(x) : f32[4]  S(0)\n  return y\n"
    assert str(gz.Pipeline([OffloadStates()])(parse(text))) == str(parse(text))


MUTATIONS = {  # what is replaced, and by what: what verify says
    ("add(to_device_wait, g, out=to_device_wait)", "add(wm, g)"): "'a' = add reads 'wm', which is in host memory",
    ("add(to_device_wait, g, out=to_device_wait)", "add(to_device_launch, g)"): "is not the only reader|under way",
    ("(to_device_launch, wm) ", "(to_device_launch, vm) "): "is not told what 'to_device_launch' copies",
    ("update(wm=to_host_wait,", "update(wm=to_host_launch,"): "'output' reads 'to_host_launch', which is under way",
    ("to_host_launch(vm, vm1) ", "to_host_launch(v, vm1) "): "copies 'v', which is neither a state of an optimizer",
    (
        "to_device_launch(wm)                       : f32[64]  S(0)",
        "to_device_launch(wm) : f32[64]  B",
    ): "takes S.0. to B",
    ("return update", "return to_host_wait; update"): "the step returns 'to_host_wait', which is in host memory",
    (  # the new value is written over while it is copied
        "  to_host_wait_1   = ",
        "  late             = mul(vm1, 2.0, out=vm1)               : f32[64]  S(0)\n  to_host_wait_1   = ",
    ): "'to_host_wait_1' reads 'vm1', in whose storage 'late' writes",
    (  # the old value is written over while it is copied
        "  to_device_wait   = to_device_wait(to_device_launch, wm)       : f32[64]  S(0)\n",
        "  early            = to_host_launch(wm, g) : f32[64]  S(0)\n"
        "  early_wait       = to_host_wait(early, g) : f32[64]  S(0)\n"
        "  to_device_wait   = to_device_wait(to_device_launch, wm) : f32[64]  S(0)\n",
    ): "'to_device_wait' reads 'wm' after 'early' wrote over it",
}


def test_the_program_that_is_changed_below_is_lawful():
    verify(parse(MOVED))


@pytest.mark.parametrize("before, after", MUTATIONS)
def test_a_copy_that_is_read_too_early_or_past_its_wait_is_refused(before, after):
    assert MOVED.count(before) == 1
    with pytest.raises(gz.VerifyError, match=MUTATIONS[before, after]):
        verify(parse(MOVED.replace(before, after)))


def test_a_copy_that_nobody_awaits_is_refused():
    text = MOVED.replace("to_host_wait_1   = to_host_wait(to_host_launch_1, vm1)", "to_host_wait_1   = neg(vm1)")
    with pytest.raises(gz.VerifyError, match="no op waits for 'to_host_launch_1', which is under way"):
        verify(parse(text))
