"""Running averages of a model, as part of the step: what an ``AveragedModel``'s own ``update_parameters`` computes.

It runs on fakes after the optimizers, told that it is not the first call; in the first one the model's values are
taken as they are, by value: ``where(n_averaged == 0, model, average)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim.swa_utils import AveragedModel

from graphzero import _compat
from graphzero.capture.optimizer.step_functions import HostNumbers, pure_module
from graphzero.capture.problems import first_line, problem
from graphzero.capture.rewrite import decompositions
from graphzero.capture.spec import AverageSpec
from graphzero.errors import CaptureError


class _TracedCount:
    """Number of models in an average, not zero; the number itself is a tensor of the graph."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        return False if other == 0 else NotImplemented

    def __gt__(self, other: object) -> bool:
        return True if other == 0 else NotImplemented

    def __hash__(self) -> int:
        return id(self)

    def __iadd__(self, more: int) -> _TracedCount:
        return _TracedCount(self.tensor + more)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return self.tensor.to(*args, **kwargs)


class _TracedAverage:
    """Replacement of an ``AveragedModel`` while its ``update_parameters`` runs."""

    def __init__(self, real: AveragedModel, module: Any, count: Any) -> None:
        self.real, self.module, self.n_averaged = real, module, _TracedCount(count)
        self.parameters = module.parameters

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


@dataclass(frozen=True)
class _NamedFunction:
    """A function, by itself where two are compared, and by its name in a text."""

    function: Any

    def __str__(self) -> str:
        return str(getattr(self.function, "__qualname__", type(self.function).__qualname__))

    __repr__ = __str__


def constants_of_average(spec: AverageSpec) -> tuple[Any, ...]:
    """Properties of an average that a capture holds fixed."""
    averaged = spec.averaged
    functions = (_NamedFunction(one) for one in (averaged.avg_fn, averaged.multi_avg_fn))
    return type(averaged).__qualname__, averaged.use_buffers, *functions


def tensors_of(module: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters and buffers, as ``update_parameters`` goes through them."""
    return list(module.parameters()), list(module.buffers())


def trace_average(spec: AverageSpec, rounds: Callable[[Tensor], bool]) -> fx.Graph:
    """Trace one update of an average.  Raises CaptureError where it cannot be a graph, or does not fit its model.

    rounds: of a step; what is rounded stochastically is averaged in float32.
    Returns a graph of the count, the average's tensors and the model's, in this order, parameters before buffers; its
    results are the new count and the average's new tensors.
    """
    averages, models = tensors_of(spec.averaged.module), tensors_of(spec.of)
    if _shapes(averages) != _shapes(models):
        raise problem(
            f"the average is of a module with other parameters or buffers than the {type(spec.of).__name__} that it is "
            "to follow",
            "make the AveragedModel of that module as it is now, after adapters are put in and the like",
        )
    sizes = tuple(map(len, averages))
    mode = _compat.FakeTensorMode()
    with mode:
        values = [torch.empty((), dtype=torch.int64)]
        tensors = [x for some in (*averages, *models) for x in some]
        values += [torch.empty(x.shape, dtype=torch.float32 if rounds(x) else x.dtype) for x in tensors]

    def program(count: Any, *tensors: Any) -> list[Any]:
        return _updated(spec.averaged, count, list(tensors), sizes)

    try:
        with mode, _compat.preserve_node_meta(), _compat.annotate({"phase": "update", "source": ""}):
            traced = torch.func.functionalize(program, remove="mutations")
            return pure_module(_compat.make_fx(traced, decompositions.TABLE)(*values)).graph
    except CaptureError:
        raise
    except Exception as error:
        raise problem(
            f"update_parameters of {type(spec.averaged).__name__} cannot be a graph: {first_line(error)}",
            "its averaging function may compute with tensors and n_averaged, but must not read values; or call "
            "update_parameters between calls of the Graph, and leave out add_average",
        ) from error


def _shapes(tensors: tuple[list[Tensor], list[Tensor]]) -> list[list[torch.Size]]:
    return [[x.shape for x in some] for some in tensors]


def _module_of(params: list[Any], others: list[Any]) -> Any:
    """Tensors in the place of a module's."""
    return SimpleNamespace(parameters=lambda: iter(params), buffers=lambda: iter(others))


def _updated(averaged: AveragedModel, count: Any, tensors: list[Any], sizes: tuple[int, ...]) -> list[Any]:
    total = sum(sizes)
    ours, theirs = tensors[:total], tensors[total:]
    average, model = (_module_of(some[: sizes[0]], some[sizes[0] :]) for some in (ours, theirs))
    stand_in = _TracedAverage(averaged, average, count)
    with torch.no_grad(), HostNumbers():
        type(averaged).update_parameters(stand_in, model)  # type: ignore[arg-type]
    taken = total if averaged.use_buffers else sizes[0]  # other buffers are those of the model in any case
    first = count == 0
    new = [torch.where(first, m.to(a.dtype), a) for a, m in zip(ours[:taken], theirs[:taken], strict=True)]
    return [stand_in.n_averaged.tensor, *new, *ours[taken:]]
