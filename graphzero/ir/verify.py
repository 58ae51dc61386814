"""The laws of a StepGraph, checked after every pass.

At every level: operands stand before their readers, every value has a type, an update has the type of what it
replaces.  From "propagated" on: every tensor has an SBP that its op can make.  From "boxed" on: every op reads
what it allows, and a state leaves the step with the SBP it entered with.  From "lowered" on: no box is left.
Once written (``assign``), a placeholder has no later reader; a communication slot holds one collective at a time.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from graphzero.errors import VerifyError
from graphzero.ir import calls, inplace, ops, value
from graphzero.ir.graph import LEVELS, StepGraph
from graphzero.ir.memory import Storage, storage_roots
from graphzero.ir.text import op_name, print_line
from graphzero.ir.value import TensorType
from graphzero.sbp.local import LocalSize, LocalStart
from graphzero.sbp.route import is_possible
from graphzero.sbp.signature import Signature
from graphzero.sbp.types import B, Nd, P, S, Sbp, partial

WRITABLE = ("param", "buffer", "state")


def verify(graph: StepGraph, after: str = "") -> StepGraph:
    """Check every law that holds at the graph's level; returns the graph.

    Args:
        after: the pass that made it, for the message.

    Raises:
        VerifyError: the law, the line with its neighbours and the user's source line, what is allowed, what to do.
    """
    where = f"after pass {after}: " if after else ""
    level = LEVELS.index(graph.level)
    _check_order(graph, where)
    _check_updates(graph, where)
    if level >= LEVELS.index("propagated"):
        _check_known(graph, where)
        _check_ops(graph, where, boxed=level >= LEVELS.index("boxed"))
    if level >= LEVELS.index("boxed"):
        _check_results(graph, where)
    if level >= LEVELS.index("lowered"):
        _check_lowered(graph, where)
        _check_storage(graph, where)
    return graph


def window(graph: StepGraph, node: fx.Node, around: int = 2) -> str:
    """The node's line between its neighbours, marked, with the user's source line."""
    before = after = node
    lines: list[str] = []
    for _ in range(around):
        before, after = before.prev, after.next
        if before.op not in ("root", "placeholder", "output"):
            lines.insert(0, f"    {_clipped(before)}")
        if len(lines) <= around:
            source = value.source_of(node)
            lines.append(f"  > {_clipped(node)}" + (f"    {source}" if source else ""))
        if after.op not in ("root", "output"):
            lines.append(f"    {_clipped(after)}")
    return "\n".join(dict.fromkeys(lines))


def _clipped(node: fx.Node, width: int = 150) -> str:
    text = print_line(node)
    return text if len(text) <= width else f"{text[: width - 4]} ..."


def _fail(graph: StepGraph, node: fx.Node, where: str, problem: str, hint: str) -> VerifyError:
    return VerifyError(f"{where}{problem}\n\n{window(graph, node)}\n\n  {hint}")


def _check_order(graph: StepGraph, where: str) -> None:
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        for operand in node.all_input_nodes:
            if operand not in seen:
                raise VerifyError(
                    f"{where}'{node.name}' reads '{operand.name}', which is not made above it\n  "
                    "Insert new nodes before their first reader: with graph.graph.inserting_before(node): ..."
                )
        seen.add(node)
        if node.op not in ("placeholder", "call_function", "output"):
            raise VerifyError(f"{where}'{node.name}' is a {node.op} node; a graph holds placeholders, calls, an output")
        if node.op != "output" and "type" not in node.meta:
            raise VerifyError(
                f"{where}'{node.name}' = {op_name(node.target)}(...) has no type\n  "
                "Make nodes by graph.call(target, args, type), or set node.meta['type']"
            )


def _check_updates(graph: StepGraph, where: str) -> None:
    placeholders = {node.name: node for node in graph.placeholders()}
    for name, new in graph.updates.items():
        old = placeholders.get(name)
        role = value.role_of(old) if old is not None else None
        if old is None or role is None or role.kind not in WRITABLE:
            raise VerifyError(
                f"{where}the step updates '{name}', which is no parameter, buffer or state of the graph\n  "
                f"It may update: {', '.join(n for n in list(placeholders)[:8])}"
            )
        if value.type_of(old) != value.type_of(new):
            problem = f"'{new.name}' : {value.type_of(new)} is to replace '{name}' : {value.type_of(old)}"
            raise _fail(graph, new, where, problem, "An update keeps shape and dtype; cast or reshape before it")


def _check_known(graph: StepGraph, where: str) -> None:
    axes = graph.placement.names
    for node in graph.nodes:
        if node.op == "output" or value.is_scalar(node):
            continue
        type_, nd = value.type_of(node), value.sbp_of(node)
        pairs = zip(type_, nd or (None,) * len(type_), strict=True) if isinstance(type_, tuple) else [(type_, nd)]
        for one, sbp in pairs:
            if isinstance(one, TensorType):
                _check_sbp(graph, node, one, sbp, axes, where)


def _check_sbp(
    graph: StepGraph, node: fx.Node, type_: TensorType, nd: Nd | None, axes: tuple[str, ...], where: str
) -> None:
    if nd is None or len(nd) != len(axes) or None in nd:
        problem = f"'{node.name}' has no SBP on each of the axes {', '.join(axes)}"
        raise _fail(graph, node, where, problem, "Run `propagate` after passes that add values, or set its SBP")
    for axis, sbp in zip(axes, nd, strict=True):
        if sbp.is_split and sbp.dim >= len(type_.shape):
            problem = f"'{node.name}' is {sbp} on axis {axis}, but it has {len(type_.shape)} dims"
            raise _fail(graph, node, where, problem, "Split one of its dims, or pin it to B")


def _check_ops(graph: StepGraph, where: str, boxed: bool) -> None:
    for node in graph.nodes:
        if node.op == "call_function" and calls.is_op(node) and not _is_beyond_rules(node):
            for axis in range(len(graph.placement.names)):
                _check_op(graph, node, axis, where, boxed)
            if boxed and len(graph.placement.names) > 1 and not calls.nests_evenly(graph, node):
                problem = f"'{node.name}' would cut one dim over several axes at other values than its operand's"
                raise _fail(graph, node, where, problem, "Pin the value to B on one of the axes before this op")
        elif boxed and node.target in calls.IDENTITIES:
            _check_identity(graph, node, where)
        elif node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            source = value.sbp_of(node.args[0])
            if source is not None and source[node.args[1]] != value.sbp_of(node):
                problem = f"'{node.name}' is not in the SBP of the result that it picks"
                raise _fail(graph, node, where, problem, f"'{node.args[0].name}' makes {source[node.args[1]]}")


def _is_beyond_rules(node: fx.Node) -> bool:
    """Whether late passes have made it a call that no rule is written for: sizes that are functions of the rank, a
    place for the result.  What rules say of it was checked before."""
    return "out" in node.kwargs or any(
        isinstance(arg, (LocalSize, LocalStart)) for arg in pytree.arg_tree_leaves(*node.args, **node.kwargs)
    )


def _check_op(graph: StepGraph, node: fx.Node, axis: int, where: str, boxed: bool) -> None:
    allowed = calls.signatures_of(graph, node, axis)
    outputs = calls.output_sbps(node, axis)
    if not boxed:
        if all(signature.outputs != outputs for signature in allowed):
            problem = f"'{node.name}' cannot be {', '.join(map(str, outputs))} on axis {graph.placement.names[axis]}"
            raise _fail(graph, node, where, problem, _allows(node, allowed))
        return
    inputs = calls.input_sbps(node, axis)
    if any(signature.inputs == inputs and signature.outputs == outputs for signature in allowed):
        return
    operands = value.tensor_operands(node)
    summed = next((o for o, sbp in _nonlinear(operands, inputs, allowed) if sbp.is_partial), None)
    if summed is not None:
        problem = f"'{node.name}' reads the partial sum '{summed.name}', but {op_name(node.target)} is not linear"
    else:
        given = _short(Signature(inputs, outputs))
        problem = f"'{node.name}' runs {op_name(node.target)} as {given}, which would not compute the same"
    name = summed.name if summed is not None else operands[0].name if operands else node.name
    hint = (
        f"{_allows(node, allowed)}\n"
        "  Run `propagate` and `insert_boxing` after passes that move pins, or pin it yourself: "
        f'graph.pin("{name}", "{graph.placement.names[axis]}", B)'
    )
    raise _fail(graph, node, where, problem, hint)


def _nonlinear(
    operands: list[fx.Node], inputs: tuple[Sbp, ...], allowed: tuple[Signature, ...]
) -> Iterator[tuple[fx.Node, Sbp]]:
    """Operands that no signature takes in the SBP that they have."""
    for i, (operand, sbp) in enumerate(zip(operands, inputs, strict=True)):
        if all(signature.inputs[i] is not sbp for signature in allowed):
            yield operand, sbp


def _allows(node: fx.Node, allowed: tuple[Signature, ...]) -> str:
    shown = ",  ".join(map(_short, allowed[:8])) + (f",  and {len(allowed) - 8} more" if len(allowed) > 8 else "")
    return f"{op_name(node.target)} allows  {shown}"


def _short(signature: Signature, most: int = 12) -> str:
    """A signature; of an op with very many operands, the first."""
    if len(signature.inputs) <= most:
        return str(signature)
    return f"{', '.join(map(str, signature.inputs[:most]))}, ... -> {', '.join(map(str, signature.outputs))}"


def _check_identity(graph: StepGraph, node: fx.Node, where: str) -> None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if value.sbp_of(source) != value.sbp_of(node):
        problem = f"'{node.name}' reads '{source.name}' in another SBP than its own"
        raise _fail(graph, node, where, problem, "Run `insert_boxing` after passes that move pins")


def _check_results(graph: StepGraph, where: str) -> None:
    placeholders = {node.name: node for node in graph.placeholders()}
    for name, new in graph.updates.items():
        if value.sbp_of(placeholders[name]) != value.sbp_of(new):
            entered, left = value.sbp_of(placeholders[name]), value.sbp_of(new)
            problem = f"'{name}' enters the step as {_text(entered)} and would leave it as {_text(left)}"
            raise _fail(graph, new, where, problem, "A state keeps its SBP: box its new value, or move the pin of both")
    for out in value.flat_nodes(graph.outputs):
        if value.is_tensor(out) and any(sbp.is_partial for sbp in value.nd_of(out)):
            problem = f"build would return the partial sum '{out.name}'"
            raise _fail(graph, out, where, problem, "Run `insert_boxing`, which completes what leaves the step")


def _text(nd: Nd) -> str:
    return str(nd[0]) if len(nd) == 1 else str(nd)


def _check_lowered(graph: StepGraph, where: str) -> None:
    for node in graph.nodes:
        if node.target is ops.box:
            raise _fail(graph, node, where, f"'{node.name}' is still a box", "Run `lower_boxing`")
        if node.target in ops.MOVES:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            _check_move(graph, node, where, value.nd_of(source), value.nd_of(node), node.target, node.args[1:])
        elif node.target in ops.BUCKETS or node.target is ops.launch:
            _check_bucket(graph, node, where)


def _check_bucket(graph: StepGraph, node: fx.Node, where: str) -> None:
    name, args = (str(node.args[0]), node.args[2:]) if node.target is ops.launch else (op_name(node.target), node.args)
    members: Any = args[0]
    for i, (member, nd) in enumerate(zip(members, value.sbp_of(node), strict=True)):
        rest = args[1:] if name == "bucket_all_reduce" else (args[1][i], *args[2:])  # type: ignore[index]
        move = ops.BY_NAME[name.removeprefix("bucket_")]
        _check_move(graph, node, where, value.nd_of(member), nd, move, rest)


def _check_move(
    graph: StepGraph, node: fx.Node, where: str, have: Nd, made: Nd, move: Any, args: tuple[Any, ...]
) -> None:
    """A lowered box makes on its axis what its name says, where axes inside allow it, and changes no other axis."""
    for i, (src, dst) in enumerate(zip(have, made, strict=True)):
        on_axis = move is not ops.relabel and graph.placement.names[i] == _axis(move, args)
        possible = is_possible(have, i, src, dst, graph.placement.hierarchy)
        good = possible and _moves(move, args, src, dst) if on_axis else src is dst
        if move is ops.relabel:
            good = good or graph.placement.hierarchy[i] == 1 or (src is B and dst.is_partial and dst is not P)
        if not good:
            problem = f"'{node.name}' takes {_text(have)} to {_text(made)}, which {move.__name__} does not"
            raise _fail(graph, node, where, problem, "Make boxes, and let `lower_boxing` choose what they become")


def _axis(move: Any, args: tuple[Any, ...]) -> Any:
    return args[0] if move is ops.all_reduce else args[-1]


def _moves(move: Any, args: tuple[Any, ...], src: Sbp, dst: Sbp) -> bool:
    """Whether a move with these arguments (behind the value) takes ``src`` to ``dst``."""
    if move is ops.all_reduce:
        return dst is B and src is partial(args[1] if len(args) > 1 else "sum")
    if move is ops.all_to_all:
        return src is S(args[0]) and dst is S(args[1])
    if move is ops.keep_first:
        return src is B and dst is P
    ends = {ops.all_gather: (S(args[0]), B), ops.slice_shard: (B, S(args[0])), ops.place_shard: (S(args[0]), P)}
    if move in ends:
        return (src, dst) == ends[move]
    return src.is_partial and dst is S(args[0])  # reduce_scatter


def _check_storage(graph: StepGraph, where: str) -> None:
    """No reader of a storage after it is written over; no two collectives in one slot; whatever begins is awaited."""
    roots = storage_roots(graph)
    written: dict[Storage | None, fx.Node] = {}
    held: dict[Storage | None, list[fx.Node]] = {}  # values by storage, so far
    spent: dict[fx.Node, fx.Node] = {}  # values in whose storage another result, or a reduction, is put
    busy: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        for operand, root in _read_roots(node, roots):
            if (
                node.op != "output"
                and root in written
                and operand is not written[root]
                and node.target is not operator.getitem
            ):
                problem = f"'{node.name}' reads '{operand.name}' after '{written[root].name}' wrote over it"
                raise _fail(graph, node, where, problem, f"Move '{written[root].name}' below its last reader")
            if operand in spent and spent[operand] is not node:
                problem = f"'{node.name}' reads '{operand.name}', in whose storage '{spent[operand].name}' writes"
                raise _fail(graph, node, where, problem, f"Put '{spent[operand].name}' elsewhere, or make it later")
        for root in roots.get(node, ()):
            held.setdefault(root, []).append(node)
        for i, room in enumerate(inplace.outs_of(node)):
            if room is not None:
                _check_room(graph, node, i, room, roots, where)
                spent.update((one, node) for one in held[roots[node][i]] if one is not node)
        if node.target is ops.assign:
            written[roots[node.args[0]][0]] = node  # type: ignore[index]
        elif node.target is ops.launch:
            slot = node if ops.is_direct(node) else node.args[1]
            if ops.is_direct(node) and node.args[0] != ops.bucket_all_gather.__name__:
                spent.update((one, node) for one in held[roots[node.args[2][0]][0]] if one is not node)  # type: ignore[index]
            if slot in busy:
                problem = f"'{node.name}' takes slot {slot}, in which '{busy[slot].name}' is still under way"
                raise _fail(graph, node, where, problem, "Wait for the first, or give the second another slot")
            busy[slot] = node
        elif node.target is ops.wait:
            busy = {slot: launch for slot, launch in busy.items() if launch is not node.args[0]}
    for launch in busy.values():
        raise _fail(graph, launch, where, f"nobody waits for '{launch.name}'", "Add the wait, or drop the launch too")


def _check_room(
    graph: StepGraph, node: fx.Node, i: int, room: fx.Node, roots: dict[fx.Node, tuple[Storage | None, ...]], where: str
) -> None:
    """A result may be put where its op can put it: over a value of its form that the step owns, or its old state."""
    if node.target is ops.launch:
        dense = ops.is_direct(node) and node.args[0] == ops.bucket_all_gather.__name__
        good = dense and inplace.arrives_dense(graph, node) and value.type_of(node) == (value.type_of(room),)
    elif node.target in inplace.OVER_OPERANDS:
        same = (value.type_of(node)[i], value.sbp_of(node)[i]) == (value.type_of(room), value.sbp_of(room))
        good = same and node.args[inplace.OVER_OPERANDS[node.target][1][i]] is room
    else:
        kernel = inplace.writing(node.target) or inplace.over_first(node.target)
        good = kernel is not None and inplace.same_form(node, room)
    if not good:
        problem = f"'{node.name}' cannot be put in the storage of '{room.name}'"
        raise _fail(
            graph, node, where, problem, "out= takes a value of the same type and SBP, and an op with an out form"
        )
    storage = roots[room][0]
    sharing = [o for o in value.tensor_operands(node) if roots[o][0] == storage and o is not room]
    reads = room in value.flat_nodes((node.args, inplace.plain_kwargs(node)))
    if node.target is ops.launch and inplace.is_own_piece(node, room):
        sharing = []
    if sharing or (reads and not inplace.may_overwrite(node, room, graph.placement.device_type)):
        problem = f"'{node.name}' writes over '{(sharing or [room])[0].name}' while it reads it"
        raise _fail(graph, node, where, problem, "Only ops that work element by element may write over an operand")
    if storage is not None and storage[0].op == "placeholder" and storage[0].name not in graph.updates:
        problem = f"'{node.name}' writes over '{storage[0].name}', which the step does not change"
        raise _fail(graph, node, where, problem, "Only what has a new value in the graph's updates may be written over")


def _read_roots(
    node: fx.Node, roots: dict[fx.Node, tuple[Storage | None, ...]]
) -> Iterator[tuple[fx.Node, Storage | None]]:
    """What a node reads, each with its storage; what it is only told to write over is not read."""
    args = node.args[1:] if node.target is ops.assign else node.args
    for operand in dict.fromkeys(value.flat_nodes((args, inplace.plain_kwargs(node)))):
        for root in roots.get(operand, ()):
            yield operand, root
