"""Facts that must be equal on all ranks before a call: one hash, and its parts by name for a message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from graphzero.runtime.world.consensus import digest
from graphzero.step.build_call import BuildCall
from graphzero.step.program_cache import CachedKey, ProgramCache
from graphzero.step.program_key import describe
from graphzero.step.replicated_inputs import FIRST, ReplicatedInputs

_TAKEN = "steps taken (a call has stopped on some ranks only: load a checkpoint on all, graph.load_state_dict(...))"
Parts = Callable[[], Mapping[str, str]]


@dataclass
class Progress:
    """Progress of a Graph.

    taken: steps since it was made or loaded; a call that a rank has stopped is one on some.
    completed: those after which all schedulers have stepped too; one that raises leaves its rank behind.
    repeats: whether the program bound last has what each rank computes by itself.
    """

    taken: int = 0
    completed: int = 0
    repeats: bool = False


def hash_call(
    call: BuildCall, known: CachedKey, cache: ProgramCache, progress: Progress, running: bool
) -> tuple[int, Parts]:
    """The hash and the parts.  known: of the call's key; what is found out is added to it.  cache: of the Graph."""
    settings, state, inputs, attributes = call.settings, call.state, call.inputs, cache.attributes
    numbers, stateless, draws = call.numbers, "", "not begun"
    if state.is_started:
        stateless, draws = state.stateless(), f"seed {state.random.seed}, step {state.random.step}"
    else:  # the first call takes what rank 0 has
        numbers = {role: number for role, number in numbers.items() if role.kind == "scalar"}
    shared = known.shared = known.shared or ReplicatedInputs(inputs, cache.source.whole_placement)
    threads = torch.get_num_threads() if progress.repeats else 0
    is_known = bool(known.programs)  # else this rank compiles, which needs all ranks

    def parts() -> dict[str, str]:
        fact_texts = describe(call.key, inputs, state)
        fact_texts |= attributes.described | {"parameters without optimizer state": stateless}
        fact_texts |= shared.describe(inputs) if running else {}
        fact_texts |= {f"config.{name}": text for name, text in settings.texts.items()}
        fact_texts |= {"random draws": draws, "threads": str(threads)}
        done = "" if progress.completed == progress.taken else f", {progress.completed} completed"
        fact_texts[_TAKEN] = f"{progress.taken}{done}"
        fact_texts["collectives that a stopped step has left"] = state.under_way
        fact_texts["modules"] = "as in an earlier call" if is_known else "not as in any call so far"
        return fact_texts | {f"{role.kind} {role.path}": repr(number) for role, number in numbers.items()}

    if known.hash is None:
        texts = describe(call.key, inputs, state)
        known.hash = digest(*(f"{name}={text}" for name, text in texts.items()))
    steps = f"{progress.taken} {progress.completed}"
    facts = [stateless, draws, settings.description, steps, state.under_way, str(is_known)]
    facts += [str(threads), *attributes.texts, *(shared.values(inputs) if running else ())]
    return digest(str(known.hash), *facts, *map(repr, numbers.values())), parts


def compares_inputs(call: BuildCall, known: CachedKey) -> bool:
    """Return whether a call is one of those that compare the larger inputs that ranks are given alike."""
    shared = known.shared
    return shared is not None and bool(shared.all) and (shared.calls < FIRST or call.settings.check_inputs == "values")
