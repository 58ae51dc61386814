"""Selecting the program for a call: read the call, agree among ranks, find or compile the program.

All of it happens before a step is taken, and what one rank cannot do, or would do otherwise, raises on every rank.
``build_call`` says what a call consists of, ``facts`` what ranks compare, ``compile_step`` how a program is made;
``step_runner`` binds and runs it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from graphzero.capture import GuardedAttributes
from graphzero.errors import ConfigError, GraphZeroError
from graphzero.logs import event, is_on, working
from graphzero.logs.progress import LongTask
from graphzero.runtime.execute.executor import Executor
from graphzero.runtime.world import device_memory
from graphzero.runtime.world.consensus import CALL, COMPILE, PROGRAM
from graphzero.step.build_call import BuildCall, BuildCallReader
from graphzero.step.build_inputs import text_of
from graphzero.step.compile_step import compile_step
from graphzero.step.facts import Parts, Progress, compares_inputs, hash_call
from graphzero.step.program import StepProgram
from graphzero.step.program_cache import CachedKey, ProgramCache
from graphzero.step.program_key import ProgramKey, differing, placed_of
from graphzero.step.user_graph import UserGraph


@dataclass(frozen=True)
class PreparedCall:
    """A call that may run, on all ranks: of what Graph, as it was read, and its program."""

    source: UserGraph
    call: BuildCall
    program: StepProgram

    def whole_executor(self, doing: str) -> Executor:
        """The executor of the whole program.  Raises ConfigError for one of pipeline stages, which has one a part."""
        executor = self.program.executor(self.source.world)
        if not isinstance(executor, Executor):
            raise ConfigError(
                f"{doing} does not measure pipeline stages\n  gz.trace has when each part runs, and graph.plan the "
                "memory of each stage; or leave out config.set_stage"
            )
        return executor


class ProgramSelector:
    """Selects among the programs of one Graph, and makes those that are not there yet.

    last: the program used or compiled last.
    is_settled: whether the last call has come to its end, so that what is kept of what it read may be used again.
    """

    def __init__(self, source: UserGraph) -> None:
        self.source, self.progress = source, Progress()
        self.last: StepProgram | None = None
        self.is_settled = True
        self._last_key: ProgramKey | None = None
        attributes = GuardedAttributes(source.owner)
        self.programs = ProgramCache(source, attributes)
        self._calls = BuildCallReader(source, attributes)

    def settle(self) -> None:
        """Read all again, if the last call may have been interrupted as it wrote down what it had read."""
        if not self.is_settled:
            attributes = GuardedAttributes(self.source.owner)
            self.programs.settle(attributes)
            self._calls = BuildCallReader(self.source, attributes)
            self.source.state().forget()
        self.is_settled = False

    def prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], running: bool, verifies: bool = True
    ) -> PreparedCall:
        """The program for these arguments, agreed on by all ranks.

        running: for a call, not for ``compile``.  verifies: see ``Pipeline``, of a program that is made.
        """
        source, state = self.source, self.source.state()
        ranks, talks = source.ranks, source.ranks.active
        self.settle()
        call: BuildCall | None = None
        known: CachedKey | None = None
        failure: Exception | None = None
        hash_, restart = 0, False
        parts: Parts = dict
        try:
            if running and (reason := state.partial_update_reason()):
                raise GraphZeroError(reason)
            call = self._calls.read_call(args, kwargs, state, running)
            known = self.programs.known(call.key)
            if talks:
                hash_, parts = hash_call(call, known, self.programs, self.progress, running)
            restart = state.random.is_outdated
        except Exception as error:  # noqa: BLE001 - every rank must hear of it; agree raises it
            if id(error) == ranks.raised_by_all:  # a transform of inputs has agreed on it: no other rank waits
                raise
            failure = error
        is_new = not (self.programs.all if known is None else known.programs)
        is_unbound = running and state.program is None
        is_talking = is_new or is_unbound or source.config.settings.check_inputs != "first" or ranks.must_talk
        if is_talking:
            compares = running and talks and call is not None and known is not None and compares_inputs(call, known)
            needs = is_unbound, compares  # what one rank has to do, all do
            agreed = ranks.agree(CALL if running else COMPILE, hash_, parts, failure, restart, needs)
            restart = agreed.wish
            if agreed.needs[0]:
                state.invalidate()
            if agreed.needs[1] and call is not None and known is not None and known.shared is not None:
                known.shared.check(call.inputs, ranks)
        elif failure is not None:
            raise failure
        assert call is not None and known is not None
        state.ensure_world()
        if running:
            call = self._begun(call, restart and (is_talking or not talks))
        program = self.programs.find(call, known)
        if program is None:
            program = self._compiled(call, verifies)
        else:
            if program is not self.last:
                self._tell_of_other(call, "program_reused", "runs a program that it has")
            if not is_talking:  # a rank that runs another program would wait, or take what is not meant for it
                ranks.agree(PROGRAM, program.hash, program.lines)
        self.last, self._last_key = program, call.key
        self.is_settled = not running
        return PreparedCall(source, call, program)

    def recall(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PreparedCall:
        """Find the program without talking to other ranks. Raises ConfigError for arguments whose program has never
        run."""
        call = self._calls.read_call(args, kwargs, self.source.state(), running=False)
        program = self.programs.find(call, self.programs.known(call.key))
        if program is None or not program.has_executor:
            raise ConfigError(
                f"{self.source.name} has not run yet: call it once with such a batch, then measure a call"
            )
        return PreparedCall(self.source, call, program)

    def _begun(self, call: BuildCall, restart: bool) -> BuildCall:
        """``call`` when rank 0's numbers are those of all: before the capture, which hyperparameters may decide."""
        state = call.state
        if not state.is_started:
            state.start(self.source.schedulers)
            call = self._calls.with_numbers_now(call)
        if restart:
            state.random.set(None, 0)
        return call

    def _compiled(self, call: BuildCall, verifies: bool) -> StepProgram:
        ranks = self.source.ranks
        program: StepProgram | None = None
        failure: Exception | None = None
        needs_room = call.settings.needs_budget and call.settings.memory_budget is None
        room = device_memory.memory_limit(ranks) if needs_room else None
        self._tell_of_other(call, "compile_begun", "compiles a program")
        with working(f"compiling {self.source.name}", self.source.speaks) as work:
            try:
                captured, whole = self.programs.find_capture(call), self.source.whole_placement
                program = compile_step(self.source.step, call, captured, room, verifies, whole)
            except Exception as error:  # noqa: BLE001 - every rank must hear of it; agree raises it
                failure = error
        self._tell_of_compile(work, failure)
        compiled = program
        ranks.agree(
            PROGRAM,
            compiled.hash if compiled and ranks.active else 0,
            lambda: compiled.lines() if compiled else {},
            failure,
        )
        assert program is not None
        self.programs.add(call.key, program, call.numbers)
        return program

    def _tell_of_other(self, call: BuildCall, name: str, does: str) -> None:
        """Log that a call runs another program than the last one."""
        if not is_on():
            return
        changed = [] if self._last_key is None else differing(self._last_key, call.key) or ["guarded values"]
        inputs = {leaf.name: text_of(leaf) for leaf in call.inputs.leaves}
        why = f", for {', '.join(changed)} changed" if changed else ""
        graph, count = self.source.name, len(self.programs.all)
        event(name, f"{graph} {does}{why}", graph=graph, programs=count, changed=changed, inputs=inputs)

    def _tell_of_compile(self, work: LongTask, failure: Exception | None) -> None:
        graph, seconds = self.source.name, work.elapsed
        if failure is None:
            event("compile_done", f"{graph} compiled in {seconds:.2f} s", graph=graph, seconds=seconds,
                  phases=work.seconds)  # fmt: skip
        else:
            why = f"{type(failure).__name__}: {failure}"
            event("compile_failed", f"{graph} was not compiled: {why}", graph=graph, seconds=seconds, error=why)

    def record_bound(self, prepared: PreparedCall) -> None:
        """Its program is bound: the same call, made again, finds it though parameters are split now."""
        call, program = prepared.call, prepared.program
        self.progress.repeats = bool(program.repeated)
        nds = call.state.given_nds(call.state.tensors())
        self.programs.alias(replace(call.key, placed=placed_of(call.inputs, nds)), program)
