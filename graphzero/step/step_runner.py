"""Taking a step whose program is there: tensors bound to it, the program run, the user's objects true after it.

Modules and optimizers hold what the step has written also where it fails; what it cannot have left whole is told.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from graphzero.errors import ConfigError
from graphzero.logs import event, is_on, phase, working
from graphzero.runtime.execute.executor import Results
from graphzero.runtime.state import preflight
from graphzero.runtime.state.bind import bind
from graphzero.runtime.state.host_states import HostStates
from graphzero.runtime.world.consensus import BIND
from graphzero.step.build_call import BuildCall
from graphzero.step.program import StepProgram
from graphzero.step.program_selector import PreparedCall, ProgramSelector
from graphzero.step.user_graph import UserGraph


class StepRunner:
    """Runs the steps of one Graph, and keeps the results of the last training call other than its outputs."""

    def __init__(self, source: UserGraph, selection: ProgramSelector) -> None:
        self.source, self.selection = source, selection
        self._skips: list[Tensor] = []  # whether the last training call was skipped, if it may have been
        self._grad_norms: dict[str, Tensor] = {}
        self.is_watched = False  # whether the last step was measured or traced

    def bind(self, prepared: PreparedCall) -> None:
        """Put the tensors in their places, if the program is not the one for which they are."""
        program, state = prepared.program, prepared.call.state
        if program is state.program:
            return
        with working(f"binding {self.source.name}", self.source.speaks):
            self._bind_anew(prepared)

    def _bind_anew(self, prepared: PreparedCall) -> None:
        program, state = prepared.program, prepared.call.state
        captured, tensors = program.captured, state.tensors()
        ranks = self.source.ranks
        world = prepared.source.world
        folder = prepared.call.settings.offload.path
        host = HostStates(program.graphs_in(world), world, folder, program.round_trip_space(world))
        shared = ranks.agree_on(
            BIND,
            lambda: preflight.check_binding(state, program.graph, captured.states, tensors, host),
            lambda _: preflight.describe_binding(state, captured.states, captured.constants, tensors, program.repeated),
            needs=bool,
        )
        if ranks.active and ranks.is_needed:
            try:
                preflight.check_ranks_apart(ranks.ids, ranks.collect(shared))
            except ConfigError as error:  # on all ranks, which know the same
                state.apart.clear()
                raise ranks.by_all(error, ranks.ids[0]) from None
        with phase("code"):
            executor = program.executor(world)
        with phase("tensors"):
            values = bind(state, program.graph, captured.states, captured.constants, tensors, program.homes, host)
            executor.bind(values)
        state.finish_binding(program, executor)
        self.selection.record_bound(prepared)

    def run_step(self, prepared: PreparedCall) -> Any:
        """Take the step; what ``build`` returns.  One that ends within its update leaves a state that says so."""
        program, call, world = prepared.program, prepared.call, prepared.source.world
        state, progress = call.state, self.selection.progress
        executor, training = program.executor(world), program.captured.training
        self.is_watched = executor.meter is not None or world.trace is not None
        if program.uses_seed:
            state.random.begin(self.source.ranks.share)
        arguments = program.arguments(call, world)
        is_taken = False
        try:
            state.read_pieces()
            results = executor.run_step(arguments)
            state.write_back(training, program.uses_seed)
            is_step = executor.writes_state or program.uses_seed
            progress.taken += is_step
            is_taken = True
            if training:
                self._follow(program, call, results)
            progress.completed += is_step
            executor.finish()
        except BaseException as error:
            is_schedulers_own = is_taken and isinstance(error, Exception)
            if executor.has_written and not is_schedulers_own:
                written = program.graph.updates
                params = (node for node in program.graph.placeholders("param", "buffer") if node.name in written)
                state.mark_partial_update(self._why_torn(error), {node.meta["role"].of for node in params})
            raise
        return program.outputs(call, results, world)

    def _follow(self, program: StepProgram, call: BuildCall, results: Results) -> None:
        """Keep what a step reports other than outputs, advance the numbers of groups, and step schedulers."""
        norms = {name: tensors[0] for name, tensors in results.aux.items() if name.startswith("grad_norm")}
        self._grad_norms = {name: norm.detach().clone() for name, norm in norms.items()}
        self._skips = [tensors[0].detach().clone() for name, tensors in results.aux.items() if name == "skipped"]
        if self._skips and is_on() and self.skipped:
            self._tell_skipped()
        carries = program.captured.carries
        if not ((carries or self.source.has_schedule) and self.skipped):
            self.source.carry(carries, call.numbers)
            self.source.step_schedulers()

    def log_step(self, seconds: float) -> None:
        """An event of the log."""
        taken = self.selection.progress.taken
        name = self.source.name
        message = f"{name} step {taken} in {seconds:.4f} s"
        event("step", message, graph=name, step=taken, seconds=seconds)

    def _tell_skipped(self) -> None:
        taken, scale = self.selection.progress.taken, self.source.next_loss_scale
        message = f"{self.source.name} skipped step {taken}: a gradient is not finite; the loss scale is {scale:g} now"
        event("step_skipped", message, graph=self.source.name, step=taken, loss_scale=scale)

    def _why_torn(self, error: BaseException) -> str:
        return (
            f"a call of {self.source.name} ended in the middle of its update ({type(error).__name__}: {error}), so "
            "parameters, optimizer states and schedulers are partly those of before it and partly those of after it; "
            "load a checkpoint of all of them, graph.load_state_dict(...), or make new modules, optimizer and Graph"
        )

    # ---- reading

    @property
    def grad_norm(self) -> Any:
        """Before clipping: a tensor, None where nothing is clipped, or a tuple for several optimizers that clip."""
        if len(self._grad_norms) < 2:
            return next(iter(self._grad_norms.values()), None)
        return tuple(self._grad_norms.get(f"grad_norm.{i}") for i in range(len(self.source.optimizers)))

    @property
    def skipped(self) -> bool:
        """Whether the last training call changed nothing. On a GPU this waits for that call."""
        return any(map(bool, self._skips))
