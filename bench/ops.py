"""Rules on real calls of ops: of PyTorch's own operator samples, and of whole training steps.

    python bench/ops.py                # PyTorch's samples
    python bench/ops.py --models       # the steps of eleven models; names choose some

docs/ops.md says what is tried, and what the counts are.  With ``--models`` the steps are those of models, forward,
backward and AdamW in float64, each distinct call once.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from _run import command_parser, format_table, parse_options
from layouts import BATCH, CASES, LAYOUTS, MODELS, build_graph
from torch import Tensor, fx, nn
from torch.testing._internal import common_utils
from torch.testing._internal.common_utils import set_rng_seed
from torch.utils import _pytree as pytree

from graphzero.capture import Captured, Input, Inputs, Step, capture
from graphzero.errors import CaptureError
from graphzero.ir import calls as ir_calls
from graphzero.ir.graph import StepGraph
from graphzero.ir.value import role_of
from graphzero.ops import UNIFORM_LIKE
from graphzero.plugins.check.initial_state import start_of
from graphzero.plugins.check.stage_values import walk
from graphzero.runtime import kernels
from graphzero.sbp.op_call import op_name
from graphzero.sbp.placement import placement
from graphzero.sbp.registry import has_rule, signatures
from graphzero.sbp.rule_checks import meta_of, violations

# In the last two a partial sum rounds more than small results are large: of signatures only shapes and types compare.
DTYPES = (torch.float64, torch.complex128, torch.int64, torch.bool, torch.float32, torch.bfloat16)
COARSE = (torch.float32, torch.bfloat16, torch.float16, torch.complex64)
UNSPECIFIED = ("aten.empty", "aten.new_empty", "aten.resize")  # memory as it is
SAVED_WIDER = ("native_batch_norm", "_native_batch_norm_legit")  # their saved statistics stay float32 under bfloat16
NAN_IN_16_BITS = ("matrix_exp", "linalg.matrix_exp")  # of torch's kernels; tests/capture compares ours with float32
DRAWS = (UNIFORM_LIKE,)  # where a piece of it begins is localize's to say
RANKS = (2, 3)
PLACE, CPU = placement("cpu", range(1)), torch.device("cpu")


@dataclass(frozen=True)
class AtenCall:
    """One call of an op in a step, with its values."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(x, Tensor)]

    def key(self) -> Any:
        return self.op, str(_metas((self.args, self.kwargs)))

    def signatures(self) -> Sequence[Any]:
        """Signatures that the rule allows, taking sizes to divide by the ranks."""
        args, kwargs = _metas((self.args, self.kwargs))
        return signatures(self.op, args, kwargs, _metas(self.results()))

    def results(self) -> list[Tensor | None]:
        with torch.no_grad():
            result = self.op(*self.args, **self.kwargs)
        return [
            x if isinstance(x, Tensor) else None for x in (result if isinstance(result, list | tuple) else [result])
        ]


def _metas(values: Any) -> Any:
    return pytree.tree_map_only(Tensor, meta_of, values)


@dataclass
class Tally:
    """Counts of the samples of one dtype."""

    operators: set[str] = field(default_factory=set)
    samples: int = 0
    refused: int = 0
    calls: int = 0
    split: int = 0  # calls that may be split or partial
    tiny: int = 0  # calls on single elements
    whole: Counter[str] = field(default_factory=Counter)  # ops with a rule that here allows nothing but all-B
    bare: Counter[str] = field(default_factory=Counter)  # ops without a rule
    untried: int = 0  # calls too large, or with values so large that they drown the others
    wrong: list[str] = field(default_factory=list)


class SampledStep:
    """One sample of an operator as a step: operands with a gradient are parameters, other tensors are inputs."""

    def __init__(self, info: Any, sample: Any) -> None:
        self.info, self.name = info, str(info.full_name)
        leaves, self.outline = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
        trained = {i: x for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad}
        self.module = nn.ParameterDict({f"p{i}": nn.Parameter(x.detach().clone()) for i, x in trained.items()})
        self.leaves = [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]
        self.places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and i not in trained]
        self.inputs = [self.leaves[i] for i in self.places]
        self.weights = [torch.rand_like(x) for x in _differentiable(self._forward(self.inputs))]
        self.expected = [x.detach() for x in self.build(*self.inputs, *self.weights)]

    def _forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        values = dict(enumerate(self.leaves)) | dict(zip(self.places, inputs, strict=True))
        values |= {int(name[1:]): p for name, p in self.module.named_parameters()}
        args, kwargs = pytree.tree_unflatten(values.values(), self.outline)
        return [x for x in pytree.tree_leaves(self.info(*args, **kwargs)) if isinstance(x, Tensor)]

    def build(self, *given: Tensor) -> list[Tensor]:
        inputs, weights = given[: len(self.inputs)], given[len(self.inputs) :]
        out = self._forward(inputs)
        results = _differentiable(out)
        if not results:
            return out
        grads = torch.autograd.grad(results, list(self.module.parameters()), weights, allow_unused=True)
        return [*out, *(x for x in grads if x is not None)]

    def capture(self) -> Captured:
        given = (*self.inputs, *self.weights)
        leaves = tuple(Input(f"x{i}", x, tuple(x.shape)) for i, x in enumerate(given))
        step = Step("Sampled", PLACE, self.build, {"module": self.module})
        return capture(step, Inputs(leaves, pytree.tree_structure((given, {}))))

    def compute_values(self, captured: Captured, graph: StepGraph) -> dict[fx.Node, Any]:
        """The value of each node of the graph that was captured."""
        given = {f"x{i}": x for i, x in enumerate((*self.inputs, *self.weights))}
        given |= {f"module.{name}": p.detach() for name, p in self.module.named_parameters()}
        values = dict(captured.constants)
        for node in graph.nodes:
            if node.op == "placeholder" and node.name not in values:
                role = role_of(node)
                values[node.name] = torch.tensor(0) if role.kind == "seed" else given[role.of]
        return walk(graph, values, CPU)


def aten_calls(graph: StepGraph, values: dict[fx.Node, Any]) -> Iterator[AtenCall]:
    """Every call of an op in a step that was run, with its values."""
    for node in graph.nodes:
        if ir_calls.is_op(node):
            args, kwargs = fx.node.map_arg((node.args, kernels.keywords(node, CPU)), values.__getitem__)
            yield AtenCall(node.target, tuple(args), dict(kwargs))


def _differentiable(out: list[Tensor]) -> list[Tensor]:
    return [x for x in out if x.requires_grad]


@cache
def operators() -> list[Any]:
    """PyTorch's own operators with their samples, which take seconds to import."""
    from torch.testing._internal import common_methods_invocations as invocations
    from torch.testing._internal.opinfo import core

    invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)  # a step sets no seed
    common_utils.extract_test_fn = core.extract_test_fn = lambda: None  # it looks for a unittest in the stack: slow
    return invocations.op_db


def sample_steps(dtype: torch.dtype, every: int, most: int) -> Iterator[SampledStep]:
    """Of every ``every``-th operator that takes ``dtype``, up to ``most`` samples that PyTorch itself runs."""
    for info in [info for info in operators() if dtype in info.supported_dtypes("cpu")][::every]:
        differs = info.supports_autograd and dtype in info.supported_backward_dtypes("cpu") and not dtype.is_complex
        set_rng_seed(0)  # once: PyTorch would do it before each sample, on devices that are not there too
        samples = list(info.sample_inputs("cpu", dtype, requires_grad=differs, set_seed=False))
        for sample in samples[:: max(len(samples) // most, 1)][:most]:
            with suppress(RuntimeError, TypeError, NotImplementedError, AssertionError):
                yield SampledStep(info, sample)


def tally_samples(dtype: torch.dtype, seen: set[Any], every: int = 1, most: int = 4) -> Tally:
    """Capture and try samples; ``seen`` holds the keys of calls that need not be tried again."""
    tally = Tally()
    for step in sample_steps(dtype, every, most):
        tally.samples += 1
        tally.operators.add(step.name)
        try:
            captured = step.capture()
        except CaptureError:
            tally.refused += 1
            continue
        graph = captured.graph
        try:
            values = step.compute_values(captured, graph)
            try_calls(aten_calls(graph, values), seen, tally)
        except (RuntimeError, NotImplementedError) as error:
            tally.wrong.append(f"{step.name}: the captured step fails: {error}")
            continue
        if not _agrees(step, graph, [values[x] if isinstance(x, fx.Node) else x for x in graph.outputs]):
            tally.wrong.append(f"{step.name}: the captured step computes something else")
    return tally


def _agrees(step: SampledStep, graph: StepGraph, results: list[Any]) -> bool:
    """Whether what was captured computes what the op does.  Random numbers are other ones, memory is as it is."""
    ops = [node.target for node in graph.nodes if node.op == "call_function"]
    if any(op in DRAWS or op_name(op).startswith(UNSPECIFIED) for op in ops):
        return [x.shape for x in results] == [x.shape for x in step.expected]
    if step.name in SAVED_WIDER:
        return _close(results[0], step.expected[0])
    if step.name in NAN_IN_16_BITS and results[0].dtype.itemsize == 2:
        return not any(x.isnan().any() for x in results)
    return all(map(_close, results, step.expected))


def _close(x: Tensor, expected: Tensor) -> bool:
    if expected.layout != torch.strided:
        return x.layout == expected.layout
    is_exact = not (expected.is_floating_point() or expected.is_complex())
    tolerance = 0.0 if is_exact else 64 * torch.finfo(expected.dtype).eps
    return x.dtype == expected.dtype and torch.allclose(x, expected, tolerance, tolerance, equal_nan=True)


def try_calls(calls: Iterable[AtenCall], seen: set[Any], tally: Tally, largest: int = 4000) -> None:
    """Check calls that have not been seen; see ``try_call``."""
    for call in calls:
        if call.key() not in seen:
            seen.add(call.key())
            try_call(call, tally, largest)


def try_call(call: AtenCall, tally: Tally, largest: int) -> None:
    """Hold one call to the law, and count it; not where a tensor has more than ``largest`` elements."""
    tally.calls += 1
    name = op_name(call.op)
    if not has_rule(call.op):
        tally.bare[name] += 1
    elif call.op in DRAWS:
        tally.split += 1
    elif all(x.numel() < 2 for x in call.tensors):
        tally.tiny += 1
    elif any(x.layout != torch.strided or x.numel() > largest or not _small(x) for x in call.tensors):
        tally.untried += 1
    elif len(call.signatures()) == 1:
        tally.whole[name] += 1
    else:
        tally.split += 1
        values = [*call.tensors, *(x for x in call.results() if x is not None)]
        compared = not name.startswith(UNSPECIFIED) and not any(x.dtype in COARSE for x in values)
        for ranks in RANKS:
            tally.wrong += violations(call.op, call.args, call.kwargs, ranks, values=compared)


def _small(x: Tensor) -> bool:
    """Huge values drown the partial addends, which are of order ten."""
    return x.dtype == torch.bool or not bool(((x if x.is_complex() else x.double()).abs() > 1e5).any())


def format_report(what: str, tallies: dict[str, Tally]) -> str:
    """The table, which ops are whole on every rank, and what is wrong."""
    head = [what, "operators", "samples", "refused", "calls", "may be split", "one element", "whole", "no rule",
            "not tried", "wrong"]  # fmt: skip
    rows = [
        [name, len(t.operators), t.samples, t.refused, t.calls, t.split, t.tiny, t.whole.total(), t.bare.total(),
         t.untried, len(t.wrong)]
        for name, t in tallies.items()
    ]  # fmt: skip
    whole = [f"{name}: whole {', '.join(sorted(t.whole))}; no rule {', '.join(t.bare)}" for name, t in tallies.items()]
    return "\n\n".join([format_table(head, rows), *whole, *(line for t in tallies.values() for line in t.wrong)])


# ---- whole training steps


def model_calls(model: str) -> Iterator[AtenCall]:
    """Every call of an op in the model's first step, with its values."""
    graph = build_graph(model, LAYOUTS["dp4"], 0)
    with graph.prepared_call(f"the ops of {model}", CASES[model].batch(0, BATCH, torch.float64), {}) as prepared:
        captured = prepared.program.history[0].before
        values = walk(captured, start_of(prepared, False).values, CPU)
    yield from aten_calls(captured, {node: moderate(x) for node, x in values.items()})


def moderate(x: Any) -> Any:
    """``x`` without values that would drown the law's partial addends, which are of order ten, or blow them up."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    size = x.abs()
    x = torch.where((size < 1e-3) & (size > 0), x.sign(), x)
    return torch.where((size > 1e4) & size.isfinite(), 100 * x.sign(), x)


def tally_model(model: str) -> Tally:
    """Counts of a model's calls and violations of the law, each shape of an op once."""
    calls, tally = list(model_calls(model)), Tally()
    tally.samples = len(calls)
    try_calls(calls, set(), tally, largest=1 << 22)
    return tally


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--dtypes", nargs="+", default=[str(d).removeprefix("torch.") for d in DTYPES])
    parser.add_argument("--every", type=int, default=1, help="take every n-th operator")
    parser.add_argument("--most", type=int, default=1, help="samples of one operator and dtype")
    parser.add_argument("--models", nargs="*", metavar="MODEL", help=f"training steps of these instead, of {MODELS}")
    options = parse_options(parser)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    started = time.perf_counter()
    seen = set[Any]()
    if options.models is None:
        dtypes = {name: getattr(torch, name) for name in options.dtypes}
        tallies = {name: tally_samples(dtype, seen, options.every, options.most) for name, dtype in dtypes.items()}
    else:
        tallies = {model: tally_model(model) for model in options.models or MODELS}
    print(format_report("dtype" if options.models is None else "model", tallies))
    print(f"\n{time.perf_counter() - started:.0f} s")
    if any(t.wrong for t in tallies.values()):
        raise SystemExit("some results are wrong")


if __name__ == "__main__":
    main()
