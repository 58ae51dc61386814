"""The minimum cut of a small graph of flows.

Not ``networkx.minimum_cut``: of equal cuts that takes the one nearest to the sink, it is slower, and its import, which
a compile does not do otherwise, takes 0.2 s (``python -X importtime -c "import networkx"``).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

SOURCE, SINK = "source", "sink"
FOREVER = float("inf")
Capacity = dict[Any, dict[Any, float]]  # from -> to -> what it costs to have the first here and the second there


def no_edges() -> Capacity:
    """To be filled: an edge that is not there costs nothing."""
    return defaultdict(lambda: defaultdict(float))


def sink_side(capacity: Mapping[Any, Mapping[Any, float]]) -> set[Any]:
    """Nodes on the sink side of the minimum cut that lies nearest to the source (Edmonds and Karp, 1972).

    The sink alone where every cut costs ``FOREVER``.
    """
    residual = no_edges()
    for a, edges in capacity.items():
        for b, amount in edges.items():
            residual[a][b] += amount
            residual[b][a] += 0.0
    while True:
        parents = _search(residual)
        if SINK not in parents:
            return set(residual) - set(parents)
        path = [SINK]
        while path[-1] != SOURCE:
            path.append(parents[path[-1]])
        steps = list(zip(path[1:], path[:-1], strict=True))
        amount = min(residual[a][b] for a, b in steps)
        if amount == FOREVER:
            return {SINK}
        for a, b in steps:
            residual[a][b] -= amount
            residual[b][a] += amount


def _search(residual: Capacity) -> dict[Any, Any]:
    parents: dict[Any, Any] = {SOURCE: SOURCE}
    queue = deque([SOURCE])
    while queue and SINK not in parents:
        at = queue.popleft()
        for b, amount in residual[at].items():
            if amount > 1e-9 and b not in parents:
                parents[b] = at
                queue.append(b)
    return parents
