"""Random draws as functions of (seed, step, op, global index of the element).

Every draw of the step becomes ``uniform_like(like, key, op, start, total)`` and arithmetic.  ``op`` counts draws in
program order; torch's "state of the generator" is that counter while a step is traced, so a recomputed region
(``torch.utils.checkpoint``) draws its masks again as they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphzero import _compat
from graphzero.capture.problems import problem_here
from graphzero.ops import UNIFORM_LIKE

aten = torch.ops.aten
SEEDS = (
    "build sets the random seed, which would make every step draw the same",
    "call torch.manual_seed once, before the first call; what a Graph draws follows from it and from the step",
)
_LEAST = 2.0**-25  # half a step of the 24-bit grid: keeps log(u) finite


@dataclass(frozen=True)
class _Counter:
    count: int


class Draws:
    """The decomposition table of random ops for one trace; ``key`` is the step's 0-d int64 seed value."""

    def __init__(self, key: Tensor) -> None:
        self.key = key
        self.count = 0

    def uniform(self, like: Tensor) -> Tensor:
        """Uniform in [0, 1), float32."""
        op, self.count = self.count, self.count + 1
        shape = list(like.shape)
        return UNIFORM_LIKE(like, self.key, op, [0] * len(shape), shape)  # type: ignore[no-any-return]

    def normal(self, like: Tensor) -> Tensor:
        """Standard normal, float32, from two uniform draws (Box and Muller, 1958)."""
        radius = torch.sqrt(-2.0 * torch.log(self.uniform(like) + _LEAST))
        return radius * torch.cos((2 * math.pi) * self.uniform(like))

    def as_generator(self) -> AbstractContextManager[None]:
        """Let torch.get_rng_state and set_rng_state read and set the counter."""

        def write(state: Any) -> None:
            if not isinstance(state, _Counter):
                raise problem_here(*SEEDS)
            self.count = state.count

        def read() -> Any:
            return _Counter(self.count)

        both = {"get_rng_state": read, "set_rng_state": write}
        return _compat.patched_all((holder, *item) for holder in (torch, torch.random) for item in both.items())

    def table(self) -> dict[Any, Callable[..., Any]]:
        """Decompositions by op, for make_fx."""
        table: dict[Any, Callable[..., Any]] = {
            aten.native_dropout.default: self._dropout,
            aten.native_dropout_backward.default: lambda grad, mask, scale: grad * mask * scale,
            aten.bernoulli.default: lambda p, generator=None: (self.uniform(p) < p).to(p.dtype),
            aten.bernoulli.p: lambda x, p=0.5, generator=None: (self.uniform(x) < p).to(x.dtype),
            aten.bernoulli_.float: lambda x, p=0.5, generator=None: x.copy_((self.uniform(x) < p).to(x.dtype)),
            aten.bernoulli_.Tensor: lambda x, p, generator=None: x.copy_((self.uniform(x) < p).to(x.dtype)),
            aten.uniform_.default: lambda x, low=0.0, high=1.0, generator=None: x.copy_(
                self.uniform(x) * (high - low) + low
            ),
            aten.normal_.default: lambda x, mean=0.0, std=1.0, generator=None: x.copy_(self.normal(x) * std + mean),
            aten.normal.Tensor_float: self._normal,
            aten.normal.float_Tensor: self._normal,
            aten.normal.Tensor_Tensor: self._normal,
            aten.normal.float_float: lambda mean, std, size, **kw: _drawn(self.normal, size, **kw) * std + mean,
            aten.randperm.default: self._randperm,
            aten.exponential_.default: lambda x, rate=1.0, generator=None: x.copy_(
                torch.log(self.uniform(x) + _LEAST) * (-1.0 / rate)
            ),
            getattr(aten.random_, "from"): self._random_from_,
            aten.rrelu_with_noise.default: self._rrelu,
            aten.rrelu_with_noise_.default: lambda x, *rest: x.copy_(self._rrelu(x, *rest)),
            aten.rand.default: partial(_drawn, self.uniform),
            aten.randn.default: partial(_drawn, self.normal),
            aten.rand_like.default: lambda x, **kw: self.uniform(x).to(kw.get("dtype") or x.dtype),
            aten.randn_like.default: lambda x, **kw: self.normal(x).to(kw.get("dtype") or x.dtype),
            aten.randint.default: lambda high, size, **kw: self._randint(0, high, size, **kw),
            aten.randint.low: self._randint,
            aten.randint_like.default: lambda x, high, **kw: self._integers(x, 0, high).to(kw.get("dtype") or x.dtype),
            aten.randint_like.low_dtype: lambda x, low, high, **kw: self._integers(x, low, high).to(
                kw.get("dtype") or x.dtype
            ),
        }
        for op, draw in list(table.items()):  # the same with generator=None; one that is given is refused before
            name = op._overloadname.replace("low", "low_generator").replace("default", "generator")
            if "generator" in name and name in op.overloadpacket.overloads():
                table[getattr(op.overloadpacket, name)] = draw
        table = {op: _checking_numbers(op, draw) for op, draw in table.items()}
        table.update(dict.fromkeys(_refused(), self._refuse))
        return table

    def _dropout(self, x: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
        if train is False or p == 0:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        if p == 1:
            return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
        if isinstance(p, float):  # torch's kernel draws by this op, which raises for a probability of 2
            with _compat.no_modes():
                torch.ones(1).bernoulli_(1 - p, generator=torch.Generator())
        mask = self.uniform(x) >= p
        return x * mask * (1.0 / (1.0 - p)), mask

    def _normal(self, mean: Any, std: Any = 1.0, generator: Any = None) -> Tensor:
        like: Tensor = next(x for x in (mean, std) if isinstance(x, Tensor))
        noise: Tensor = self.normal(like.new_zeros((mean + std).shape)).to(like.dtype)
        drawn: Tensor = noise * std + mean
        return drawn

    def _randperm(self, n: int, dtype: Any = None, **_: Any) -> Tensor:
        """The order of 48 random bits each, in which hardly two are alike; those that are stay in order."""
        like = torch.zeros([n], dtype=torch.float32)
        keys = self.uniform(like).double() + self.uniform(like).double() * 2.0**-24
        return torch.sort(keys, stable=True)[1].to(dtype or torch.int64)

    def _random_from_(self, x: Tensor, low: int, high: int | None, generator: Any = None) -> Any:
        return NotImplemented if high is None else x.copy_(self._integers(x, low, high).to(x.dtype))

    def _rrelu(
        self, x: Tensor, noise: Tensor, lower: Any = 0.125, upper: Any = 1 / 3, training: bool = False, _: Any = None
    ) -> Tensor:
        if not training:
            return torch.where(x <= 0, x * ((lower + upper) / 2), x)
        slope = (self.uniform(x) * (upper - lower) + lower).to(x.dtype)
        noise.copy_(torch.where(x <= 0, slope, torch.ones_like(slope)))
        return x * noise

    def _randint(self, low: int, high: int, size: list[int], dtype: Any = None, **_: Any) -> Tensor:
        return self._integers(torch.zeros(size, dtype=torch.float32), low, high).to(dtype or torch.int64)

    def _integers(self, like: Tensor, low: int, high: int) -> Tensor:
        return torch.floor(self.uniform(like) * (high - low)) + low

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise problem_here(
            "build draws random numbers in a way that a graph cannot repeat on every placement",
            "draw with torch.rand, randn, normal, randint, randperm, bernoulli or dropout, or draw outside of build "
            "and pass it in",
        )


def _checking_numbers(op: Any, draw: Callable[..., Any]) -> Callable[..., Any]:
    """``draw``, where torch takes these numbers too: it is asked for one element, and raises for a probability of 2."""
    own = {"generator": torch.Generator()} if any(x.name == "generator" for x in op._schema.arguments) else {}

    def alone(x: Any) -> Any:
        if isinstance(x, Tensor):
            return torch.ones(len(own), dtype=x.dtype)
        return [len(own)] if isinstance(x, (list, tuple)) else x

    def checked(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(x, torch.SymFloat) for x in (*args, *kwargs.values())):
            with _compat.no_modes(), torch.no_grad():
                op(*map(alone, args), **{**kwargs, **own})
        return draw(*args, **kwargs)

    return checked


def _drawn(draw: Callable[[Tensor], Tensor], size: list[int], dtype: Any = None, **_: Any) -> Tensor:
    return draw(torch.zeros(size, dtype=torch.float32)).to(dtype or torch.get_default_dtype())


_REFUSED = """
    multinomial poisson binomial cauchy cauchy_ geometric geometric_ log_normal log_normal_ _sample_dirichlet
    _standard_gamma random random_ normal_functional uniform exponential _fused_dropout
    rrelu_with_noise_functional bernoulli.Tensor randint_like.Tensor
"""


def _refused() -> list[Any]:
    """All functions of this torch that draw random numbers and are not in the table."""
    known = {getattr(aten.random_, "from")}
    ops = []
    for name in _REFUSED.split():
        name, _, overload = name.partition(".")
        packet = getattr(aten, name, None)
        for which in () if packet is None else packet.overloads():
            if overload in ("", which) and not which.endswith("out"):
                ops.append(getattr(packet, which))
    return [op for op in ops if op not in known]
