"""Memory that holds each value: that of the rank's device, or, for results of some ops, that of the host.

Like the storage of a value it follows from the op that makes it, so it is not printed.  A state is in host memory if
the step copies it to the device, or writes it back, by ``to_device_launch`` and ``to_host_launch``; so is what is
copied into a ``host_room``.  Plan and measurement count host memory apart from the device's.  Only the ops that copy it
back read it (``verifier.memory_spaces``).  On a CPU both are the same memory, and still counted apart, so that a
program for an accelerator can be planned, tested and measured without one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from graphzero.errors import ConfigError
from graphzero.ir import ops
from graphzero.sbp.op_call import Op, op_name, overload_of
from graphzero.sbp.registry import has_rule

HOST = "host"  # what such bytes are called besides the categories of the device's

_OFFLOADS: set[Op] = set()
_RELOADS: set[Op] = set()


def host_memory(offload: Op, reload: Op) -> None:
    """Say that ``offload`` makes its results in host memory, and that ``reload`` brings such values back.

    Both are ops registered with ``torch.library``, with an SBP rule each: a rank's piece goes and comes back as it is.
    A plan counts what ``offload`` makes as ``memory.host``, not as memory of the device, from there until ``reload``
    has read it, and a program in which anything else reads it is refused.  Say it next to the ops' rules.

    Raises ConfigError for an op without a rule, and where one op is said to do both.
    """
    ops = overload_of(offload), overload_of(reload)
    for op in ops:
        if not has_rule(op):
            raise ConfigError(
                f"host_memory: {op_name(op)} has no SBP rule, so every rank would gather what it moves; give it one "
                f'first: gz.sbp.rule({op_name(op)}, "sum max min: ...->...")'
            )
    if ops[0] is ops[1] or ops[0] in _RELOADS or ops[1] in _OFFLOADS:
        raise ConfigError(f"host_memory: {op_name(ops[0])} cannot both put values into host memory and bring them back")
    _OFFLOADS.add(ops[0])
    _RELOADS.add(ops[1])


def is_offload(target: Any) -> bool:
    """Return whether an op's results lie in host memory."""
    return target in _OFFLOADS


def makes_on_host(target: Any) -> bool:
    """Return whether the storage that an op makes lies in host memory."""
    return target is ops.host_room or is_offload(target)


def is_reload(target: Any) -> bool:
    """Return whether an op may read what lies in host memory."""
    return target in _RELOADS


def is_host_state(node: fx.Node) -> bool:
    """Return whether a value is a state that lies in host memory between steps."""
    return node.op == "placeholder" and any(
        user.target in ops.HOST_LAUNCHES and user.args[0] is node for user in node.users
    )


def lies_on_host(node: fx.Node) -> bool:
    """Return whether the storage that a node makes, or that a placeholder stands for, is in host memory."""
    return makes_on_host(node.target) or is_host_state(node)


def uses_host(nodes: Iterable[fx.Node]) -> bool:
    """Return whether anything in a program lies in host memory."""
    return any(node.target in _OFFLOADS or node.target in ops.HOST_LAUNCHES for node in nodes)
