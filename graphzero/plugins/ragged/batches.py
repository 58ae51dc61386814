"""Loops over loaders that end at different times on different ranks: ``IterableDataset``, shares of unequal length."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any, TypeVar

from torch import Tensor
from torch.utils import _pytree as pytree

from graphzero.errors import ConfigError
from graphzero.graph import Graph
from graphzero.runtime.world.consensus import Ranks, Topic

T = TypeVar("T")
_END: Any = object()
_NEXT = Topic("the next batch of {}", "the next batch", "Every rank must begin and end the loop, see gz.until_all_end")


def until_all_end(batches: Iterable[T], graph: Graph) -> Iterator[T]:
    """Batches of this rank, followed by batches without rows until the batches of every rank have ended.

    For loaders whose length differs between ranks or is not known, such as an ``IterableDataset``.  Every rank must
    call a Graph equally often, and a rank that passes no rows takes part in the step of the others' rows.

    batches: of dicts, lists or tuples of tensors, with rows in dim 0; any iterable, such as a DataLoader.
    graph: the Graph that is called in the loop, whose ``config.set_shapes`` pads rows; on one process, and on virtual
    ranks, nothing is added.

    Every rank begins the loop and stays in it to its end.  An error of one rank's loader is raised on all ranks.
    Raises ConfigError if ``config.set_shapes``, which pads, has not been called.
    """
    ranks = Ranks(graph.placement, graph.name)
    if not ranks.active:
        yield from batches
        return
    if graph.config.shapes is None:
        raise ConfigError(
            "gz.until_all_end gives a rank whose loader has ended batches without rows, which only "
            'config.set_shapes can pad: config.set_shapes({"*": ("rows",)}, {"rows": batch_size})'
        )
    loader: Iterator[T] | None = None
    while True:
        batch, failure = _END, None
        with ranks.together(f"next batch of {graph.name}"):
            try:
                loader = iter(batches) if loader is None else loader
                batch = next(loader, _END)
            except Exception as error:  # noqa: BLE001 - every rank must hear of it; agree raises it
                failure = error
            has_ended = batch is _END
            some_go_on, some_have_ended = ranks.agree(_NEXT, failure=failure, needs=(not has_ended, has_ended)).needs
            if not some_go_on:
                return
            if some_have_ended:
                others = ranks.collect(None if has_ended else _without_rows(batch))
                batch = next(other for other in others if other is not None) if has_ended else batch
        yield batch


def _without_rows(batch: Any) -> Any:
    """The same structure with CPU tensors of no rows."""
    return pytree.tree_map(_empty_leaf, batch, is_leaf=lambda x: isinstance(x, MutableMapping))


def _empty_leaf(x: Any) -> Any:
    if isinstance(x, MutableMapping):  # such as the BatchEncoding of a tokenizer, which is not a dict
        empty = copy.copy(x)
        for name, inner in x.items():
            empty[name] = _without_rows(inner)
        return empty
    return x.new_empty((0, *x.shape[1:]), device="cpu") if isinstance(x, Tensor) and x.dim() else x
