"""What is no state dict of a Graph at all, by its outline: which dicts and lists it is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphzero.checkpoint.state_dict.mismatches import SHOWN, is_word
from graphzero.errors import CheckpointError


def check_outline(sd: Any) -> None:
    """Raise CheckpointError for what is no state dict of a Graph at all."""
    wrong = _Outline().wrong_in(sd)
    if wrong:
        shown = "".join(f"\n  {line}" for line in wrong[:SHOWN])
        more = f"\n  ... and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise CheckpointError(
            f"this is no state dict of a Graph; nothing was loaded{shown}{more}\n  give what graph.state_dict() or "
            'full_state_dict() gave; a plain module\'s goes in as {"modules": {attribute: sd}}, with strict=False'
        )


class _Outline:
    def __init__(self) -> None:
        self.wrong: list[str] = []

    def wrong_in(self, sd: Any) -> list[str]:
        if self._expect("it", sd, Mapping, "a dict"):
            parts = sd.get("modules", {})
            if self._expect("modules", parts, Mapping, "a dict of the modules' state dicts by attribute"):
                for name, part in parts.items():
                    self._expect(f"modules.{name}", part, Mapping, "a state dict")
            if self._expect("optimizers", sd.get("optimizers", []), (list, tuple), "a list, one per optimizer"):
                for i, entry in enumerate(sd.get("optimizers", [])):
                    self._check_optimizer(f"optimizers.{i}", entry)
            if self._expect("schedulers", sd.get("schedulers", []), (list, tuple), "a list, one per optimizer"):
                for i, entry in enumerate(sd.get("schedulers", [])):
                    self._expect(f"schedulers.{i}", entry, (Mapping, type(None)), "a scheduler's state dict")
            if "random" in sd:
                self.wrong += _wrong_random(sd["random"])
        return self.wrong

    def _expect(self, what: str, x: Any, kind: Any, called: str) -> bool:
        if not isinstance(x, kind):
            self.wrong.append(f"{what} is a {type(x).__name__}, not {called}")
        return isinstance(x, kind)

    def _check_optimizer(self, what: str, entry: Any) -> None:
        if not self._expect(what, entry, Mapping, "a dict"):
            return
        if self._expect(f"{what}.state", entry.get("state"), Mapping, "a dict by parameter"):
            for name, held in entry["state"].items():
                self._expect(f"{what}.state.{name}", held, Mapping, "a dict of states by key")
        if self._expect(f"{what}.param_groups", entry.get("param_groups"), (list, tuple), "a list"):
            for j, group in enumerate(entry["param_groups"]):
                self._check_group(f"{what}.param_groups.{j}", group)

    def _check_group(self, what: str, group: Any) -> None:
        if self._expect(what, group, Mapping, "a dict") and self._expect(
            f"{what}.params", group.get("params"), (list, tuple), "a list of names"
        ):
            for j, name in enumerate(group["params"]):
                if isinstance(name, bool) or not isinstance(name, (str, int)):
                    self.wrong.append(f"{what}.params.{j} is a {type(name).__name__}, not the name of a parameter")


def _wrong_random(random: Any) -> list[str]:
    if not (isinstance(random, Mapping) and {"seed", "step"} <= random.keys()):
        return ["random has no seed and step"]
    seed, step = random["seed"], random["step"]
    wrong = []
    if seed is not None and not is_word(seed):
        wrong.append(f"random.seed is {seed!r:.40}, not an int of 64 bits or None")
    if not is_word(step) or not 0 <= step < 1 << 63:
        wrong.append(f"random.step is {step!r:.40}, not a number of steps")
    return wrong
