"""Functions that run regions: Inductor compiles one when its region first runs; else the ops run as they are.

A region is compiled for the layouts that its operands have when it runs; regions of one text and one set of layouts,
a transformer's blocks, share a function.  Compiled code is kept on disk by Inductor (``TORCHINDUCTOR_CACHE_DIR``, a
folder for each kind of CPU), so that a new process only reads it.

The functions are boxed: they take a list of operands and empty it, so that each dies after its last use.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from graphzero import _compat
from graphzero.errors import ConfigError
from graphzero.ir import value
from graphzero.ir.aliases import is_name, is_reshape, is_view, unnamed
from graphzero.ir.graph import StepGraph
from graphzero.logs import working
from graphzero.plugins.inductor.region_ops import InductorRegion, join
from graphzero.plugins.inductor.regions import COMPOSED, Region
from graphzero.runtime import kernels
from graphzero.runtime.world.world import World
from graphzero.sbp.shards import piece_shape

aten = torch.ops.aten
Boxed = Callable[[list[Tensor]], list[Tensor]]

# a CompiledRegion looks at layouts, a program has fixed sizes
SETTINGS = {"size_asserts": False, "alignment_asserts": False}
_functions: dict[Any, Boxed] = {}  # of this process, by text, layouts and threads
MOST_FUNCTIONS = 2**9  # of them; programs hold their own


class CompiledRegions:
    """The functions of one program's regions, one for all that compute the same.

    Raises ConfigError where nothing can be compiled.
    """

    def __init__(self, world: World):
        missing = _compat.inductor_lacks(world.device.type)
        if missing:
            raise ConfigError(
                f'set_executor("inductor"): {missing}. Install it, or leave the call out: "eager" runs the same program'
            )
        self.world = world
        self._known: dict[Any, CompiledRegion] = {}

    def join(self, graph: StepGraph) -> StepGraph:
        """The program with regions for ops."""
        return join(graph)

    def region_function(self, op: InductorRegion, local: int) -> CompiledRegion:
        """The function that a local rank calls for a region."""
        module, groups = written(op.region, self.world, local)
        key = str(module.graph), self._forms(op.region, local), groups
        if key not in self._known:
            self._known[key] = CompiledRegion(module, str(op), key[0], groups)
        return self._known[key]

    def _forms(self, region: Region, local: int) -> tuple[Any, ...]:
        """Dtypes and shapes of what a region reads: its text does not say them."""
        hierarchy, at = self.world.placement.hierarchy, self.world.coordinate(local)
        typed = ((value.tensor_type(node), value.nd_of(node)) for node in region.inputs)
        return tuple((type_.dtype, piece_shape(type_.shape, nd, hierarchy, at)) for type_, nd in typed)


class CompiledRegion:
    """One region on one rank, or several that are equal.

    text: what it computes.  groups: a number for each result; results of one number may share storage.
    """

    def __init__(self, module: fx.GraphModule, about: str, text: str, groups: tuple[int, ...]):
        self.module, self.about, self.text, self.groups = module, about, text, groups
        self._by_layout: dict[Any, Boxed] = {}

    def __call__(self, operands: list[Tensor]) -> list[Tensor]:
        run = self._by_layout.get(tuple([x.stride() for x in operands]))
        return run(operands) if run is not None else self._first(operands)

    def _first(self, operands: list[Tensor]) -> list[Tensor]:
        """Compile, run, and look at what the results share: what they must not, a copy parts from now on."""
        inputs, layout = list(operands), tuple([x.stride() for x in operands])
        run = self._function(inputs)
        results = run(operands)
        shared = _shared(inputs, results, self.groups)
        self._by_layout[layout] = _copying(run, shared) if shared else run
        return [x.clone() if i in shared else x for i, x in enumerate(results)]

    def _function(self, operands: list[Tensor]) -> Boxed:
        described = tuple((x.dtype, x.device, tuple(x.shape), x.stride()) for x in operands)
        key = self.text, described, torch.get_num_threads()
        if key not in _functions:
            if len(_functions) >= MOST_FUNCTIONS:
                _functions.clear()
            try:
                with warnings.catch_warnings(), working(f"Inductor compiles a {self.about}"):
                    warnings.simplefilter("ignore")  # torch's, of its own past
                    _functions[key] = _compat.inductor_compile(self.module, operands, SETTINGS)
            except Exception as error:  # whatever a compiler may fail with
                warnings.warn(
                    f"Inductor could not compile a {self.about}; it runs op by op: {_first_line(error)}", stacklevel=2
                )
                _functions[key] = op_by_op(self.module)
        return _functions[key]


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}"


def _shared(operands: list[Tensor], results: list[Tensor], groups: tuple[int, ...]) -> set[int]:
    """Numbers of results that share storage with an operand, or with an earlier result of another group."""
    known: dict[int, int] = {_compat.storage_id(x): -1 for x in operands}
    return {
        i
        for i, (x, group) in enumerate(zip(results, groups, strict=True))
        if known.setdefault(_compat.storage_id(x), group) != group
    }


def _copying(run: Boxed, numbers: set[int]) -> Boxed:
    return lambda operands: [x.clone() if i in numbers else x for i, x in enumerate(run(operands))]


def written(region: Region, world: World, local: int) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """The region as one rank computes it, a module of plain ATen ops, and the groups of its results.

    Names depend on nothing but what is computed.
    """
    graph, copies = fx.Graph(), {}
    for i, node in enumerate(region.inputs):
        copies[node] = graph.placeholder(f"x{i}")
    for node in region.nodes:
        if is_name(node.target):
            copies[node] = copies[value.operand(node)]
            continue
        args, kwargs = node.args, kernels.keywords(node, world.device)
        kwargs.pop(value.OUT, None)
        args, kwargs = fx.node.map_aggregate((args, kwargs), lambda x: world.resolve(x, local))
        args, kwargs = fx.node.map_arg((args, kwargs), copies.__getitem__)
        if node.target in COMPOSED:
            copies[node] = _compose(graph, node, args)
            continue
        target: Any = aten.reshape.default if is_reshape(node.target) else node.target  # a shard need not be dense
        copies[node] = graph.call_function(target, args, kwargs)
    graph.output([copies[node] for node in region.results])
    bases = [_base(node, region) for node in region.results]
    return _compat.LazyGraphModule(torch.nn.Module(), graph), tuple(bases.index(base) for base in bases)


def _compose(graph: fx.Graph, node: fx.Node, args: tuple[Any, ...]) -> fx.Node:
    """The backward of a cross entropy as ATen has it, which Inductor fuses."""
    dtype, logs = value.tensor_type(node).dtype, args[1]
    images = len(value.tensor_type(node).shape) == 4
    scattered = aten.nll_loss2d_backward.default if images else aten.nll_loss_backward.default
    loss = graph.call_function(scattered, args)
    return graph.call_function(aten._log_softmax_backward_data.default, (loss, logs, 1, dtype))


def _base(node: fx.Node, region: Region) -> Any:
    """The value whose storage a result may lie in."""
    node = unnamed(node)
    while node not in region.inputs and node.args and is_view(node.target):
        node = unnamed(value.operand(node))
    return node if not value.is_multi(node) else (node,)


def op_by_op(module: fx.GraphModule) -> Boxed:
    """The same region without a compiler, run by the kernels that the eager executor calls."""
    return lambda operands: _OpByOp(module).boxed_run(operands)


class _OpByOp(fx.Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return kernels.kernel(target)(*args, **kwargs)
