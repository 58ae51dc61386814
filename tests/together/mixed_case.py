"""A case: a model, how it is stepped, a layout, and what is done between steps, all drawn from one number."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from mixed_actions import ACTIONS
from mixed_layouts import ROWS, Layout, draw_layout
from mixed_models import KINDS, Loss, Parts, Whole, has_batch_statistics
from mixed_optimizers import AVERAGES, Clip, draw_clip, draw_steppings
from mixed_runs import Batch, Found, OfGraph, Plain, Run
from random_models import CLASSES, TOKENS, D, Tokens
from torch import nn

STEPS = 3
IN_FLOAT32 = ("NAdam", "RAdam", "Muon")


@dataclass
class Case:
    seed: int
    steps: int = STEPS
    small: bool = False  # a model without blocks, no bytes to be met, one action: few programs
    words: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        r = self.random = random.Random(f"mixed {self.seed}")
        self.kind = r.choice(["tokens", "features"] if self.small else ["tokens", "tokens", "features"])
        torch.manual_seed(self.seed)
        self.draws = Parts(self.seed, kind=self.kind, small=self.small)
        self.drops = self.draws.drops
        self.around = r.random() < 0.3, r.random() < 0.3, r.random() < 0.3
        self.model_state = self.draws.random.getstate()
        model = self._made()
        self.drops = any(isinstance(part, nn.Dropout) for part in model.modules())
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.05 * torch.randn_like(p))
        self.start = {k: v.clone() for k, v in model.state_dict().items()}
        names = [n for n, _ in model.named_parameters()]
        self.frozen = {n for n in names if n != "scale" and r.random() < 0.1} if r.random() < 0.3 else set()
        self.loss = Loss(r.choice(KINDS), r.choice([0.0, 0.1]), r.choice([-100, 3]))
        self.steppings = draw_steppings(r, model, self.frozen)
        self.clip = Clip(**{**vars(draw_clip(r)), "inside": True}) if r.random() < 0.2 else Clip()
        self.average = r.choice(list(AVERAGES)) if r.random() < 0.3 else None
        self.averages_by_hand = r.random() < 0.3
        self.layout = draw_layout(r, model, has_batch_statistics(model) or self.around[1])
        self.shapes = self._ragged(r, model)
        if self.small:
            bytes_ = {"memory": None if isinstance(self.layout.memory, float) else self.layout.memory, "budget": None}
            self.layout = replace(self.layout, **bytes_)
        counts = [0, 1] if self.small else [0, 1, 1]
        self.actions = [[r.choice(list(ACTIONS)) for _ in range(r.choice(counts))] for _ in range(self.steps)]
        self.actions[0] = []
        self.words += [
            f"seed {self.seed}: {self.kind}",
            *self.draws.words,
            f"around {self.around}",
            f"loss {self.loss.kind} {self.loss.smoothing} {self.loss.ignored}",
        ]
        self.words += [f"frozen {self.frozen}", *map(str, self.steppings), f"in build {self.clip}"]
        self.words += [f"average {self.average} {self.averages_by_hand}", str(self.layout), f"shapes {self.shapes}"]
        self.words += [f"actions {self.actions}"]

    def __str__(self) -> str:
        return "\n  ".join(self.words)

    @property
    def limit(self) -> float:
        """What rounding explains: some of torch's optimizers compute numbers of their own in float32."""
        return 1e-6 if any(stepping.kind in IN_FLOAT32 for stepping in self.steppings) else 1e-9

    def _made(self) -> Whole:
        drift, calls, unused = self.around
        return Whole(self.draws.model(), drift, calls, unused).to(D)

    def fresh(self) -> Whole:
        draws = Parts(self.seed, kind=self.kind, small=self.small)
        draws.random.setstate(self.model_state)
        self.draws = draws
        model = self._made()
        model.load_state_dict(self.start)
        for name, p in model.named_parameters():
            p.requires_grad_(name not in self.frozen)
        return model

    def _ragged(self, r: random.Random, model: Whole) -> Any:
        """Which dims are ragged; none where the model knows its length, or draws."""
        if r.random() > 0.2 or self.drops:
            return None
        free = self.kind == "tokens" and isinstance(model.inner, Tokens) and model.inner.position is None
        if free and r.random() < 0.6:
            return {"x": ("rows", "tokens"), "y": ("rows", "tokens")}, {"rows": 12, "tokens": [4, TOKENS]}
        return {"x": {0: "rows"}, "y": {0: "rows"}}, {"rows": r.choice([4, 12, "powers"])}

    def batch(self, number: int) -> Batch:
        generator = torch.Generator().manual_seed(number)
        rows, tokens = (2 * ROWS if number == 2 and self.seed % 3 == 0 else ROWS), TOKENS
        if self.shapes is not None:
            rows = int(torch.randint(3, ROWS, (), generator=generator))
            if len(self.shapes[1]) == 2:
                tokens = int(torch.randint(2, TOKENS + 1, (), generator=generator))
        shape = (rows, tokens) if self.kind == "tokens" else (rows,)
        y = torch.randint(0, CLASSES, shape, generator=generator)
        weight = torch.rand(CLASSES, generator=generator, dtype=D) + 0.5
        if self.kind == "tokens":
            return torch.randint(0, CLASSES, shape, generator=generator), y, weight
        return torch.randn(rows, 5, generator=generator, dtype=D), y, weight

    def play(self, run: Run) -> list[tuple[str, Found]]:
        """What each step and action gives, and what stands in model, optimizers and averages after it."""
        found: list[tuple[str, Found]] = []
        torch.manual_seed(self.seed)
        for number, names in enumerate(self.actions):
            for place, name in enumerate(names):
                said = ACTIONS[name](run, random.Random(f"{self.seed} {number} {place}"), number)
                found.append((f"{name} before step {number}", {**(said or {}), **run.state()}))
            taken = run.take_step(self.batch(number))
            found.append((f"step {number}", {**taken, **run.state()}))
        return found

    def found(self) -> tuple[list[tuple[str, Found]], OfGraph]:
        torch.manual_seed(self.seed)
        run = OfGraph(self, self.layout)
        return self.play(run), run

    def expected(self) -> list[tuple[str, Found]]:
        if self.drops:
            run = OfGraph(self, Layout())
            run.move = run.relayout = lambda *args: None  # type: ignore[method-assign]
            return self.play(run)
        return self.play(Plain(self))
