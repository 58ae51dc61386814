"""Scaling: measured on 1, 2 and 4 gloo ranks of this machine, and modelled for 8 to 1024 ranks of others.

    python bench/scaling.py                 # a GPT of 7.4 M parameters beside DDP + compile and FSDP2; and Llama 7B
    python bench/scaling.py --strong        # also with one batch for all numbers of ranks
    python bench/scaling.py --modelled 8 64 --model toy --layers 2

*Measured*: each rank has one thread and its own share of the batch.  Ranks beyond the cores share them, so that
efficiency falls with the cores and not with the system: "of cores" counts cores in place of ranks, and the processor's
seconds for a sample show what is added.

*Modelled*: plans of worlds that are not there, what links cost, and seconds of compute; nothing ran.  The same model
for the ranks that were measured stands beside their times, so that one sees what it is worth.  ``step_model`` has its
terms.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from _run import markdown, on_gloo, options_of, save
from step_model import UPDATE_BYTES, Bounds, Cluster, Compute, bounds, hierarchies, planned
from step_time import Timed, ms, work
from systems import BASE, chosen, graph
from torch import Tensor, nn
from workloads import WORKLOADS

import graphzero as gz
from graphzero.cli.calibrate import calibrate
from graphzero.testing.timer import StepTimes

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
SHOWN = ["graphzero", BASE, "FSDP2"]
STAGES = range(4)
# Between hosts of this kind, assumed: Ethernet of 25 Gbit/s, which the ranks of a host share, 50 us a message.
ETHERNET, ETHERNET_LATENCY = 25e9 / 8, 50e-6
# DGX H100's data sheet: NVLink 900 GB/s a GPU, half of it each way; one ConnectX-7 of 400 Gbit/s a GPU between hosts.
# Latencies are those of a ring's step in NCCL's own model (src/graph/tuning.cc: Ring, Simple; NVLINK and NET).
DGX = Cluster(per_host=8, inside=gz.Link(3.4e-6, 450e9), between=gz.Link(9.6e-6, 50e9))
FLOPS, UTILISATION = 989e12, 0.4  # dense bf16 of an H100; Llama 3 reached 38 to 43 % (arXiv 2407.21783, table 4)
HBM = 3.35e12  # bytes per second
SEQUENCES, CONTEXT = 2, 2048  # of Llama, a rank

NOT_MODELLED = """\
Not modelled: packing into and out of buckets, cores that transfers take from compute, several ranks that share the
memory of a host, ranks that wait for the slowest, networks that others use, algorithms of fewer messages than a ring
(NCCL's trees and PAT: with hundreds of ranks on one axis the latency shown is too high)."""


@dataclass(frozen=True)
class Subject:
    """A model on a cluster.  model, share: on the meta device.  states: bytes of its optimizer states."""

    name: str
    model: Callable[[], nn.Module]
    share: tuple[Tensor, ...]
    samples: int
    compute: Compute
    states: int
    cluster: Cluster

    def at(self, stages: Iterable[int], shape: tuple[int, ...]) -> dict[int, tuple[Bounds, int]]:
        """By stage, seconds of a step and bytes at the peak."""
        plans = planned(self.model(), self.share, stages, self.cluster, shape)
        return {stage: (bounds(plan, self.compute, self.states), plan.memory.peak) for stage, plan in plans.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=WORKLOADS, default="A")
    parser.add_argument("--systems", nargs="+", metavar="NAME", default=SHOWN, help=f"by default {', '.join(SHOWN)}")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="to measure, beside one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps of a round, the first of which does not count")
    parser.add_argument("--strong", action="store_true", help="also one batch for all: that of the most ranks")
    parser.add_argument("--modelled", type=int, nargs="*", default=[8, 64, 256, 1024], help="ranks to model")
    parser.add_argument("--layers", type=int, default=32, help="of Llama; 0 leaves it out")
    parser.add_argument("--save", metavar="FILE", help="also keep the tables there, for bench/tables.py")
    options = options_of(parser)
    names = [s.name for s in chosen(options.systems) if not s.missing]
    options.ranks = sorted({1, *options.ranks})
    parts = []

    def say(text: str) -> None:
        parts.append(text)
        print(text, end="\n\n", flush=True)

    weak = {n: on_gloo(n, work, options.model, names, options.rounds, options.steps) for n in options.ranks}
    share = WORKLOADS[options.model].share
    say(f"{WORKLOADS[options.model].describe(max(weak))}, {CORES} cores; {share} samples a rank:")
    say(measured(weak, lambda n: share * n))
    if options.strong:
        total = share * max(weak)
        strong = {n: on_gloo(n, work, options.model, names, options.rounds, options.steps, total // n) for n in weak}
        say(f"The same, {total} samples for all ranks together:")
        say(measured(strong, lambda n: total))
    for text in modelled(options, weak):
        say(text)
    if options.save:
        save(options.save, f"{options.model}, scaling", "scaling", "\n\n".join(parts))


def measured(found: Mapping[int, Mapping[str, Timed]], samples: Callable[[int], int]) -> str:
    """found: by ranks and system.  samples: of a step, by ranks."""
    base = min(found)
    more = [n for n in found if n != base]
    rows = []
    for name in found[base]:
        rate = {n: samples(n) / one[name].median for n, one in found.items()}
        cells = [f"{rate[n]:.1f}" for n in found]
        cells += [f"{rate[n] / rate[base] * base / n:.2f}" for n in more]
        cells += [f"{rate[n] / rate[base] * min(base, CORES) / min(n, CORES):.2f}" for n in more if n > CORES]
        cells += [ms(n * one[name].median_cpu / samples(n)) for n, one in found.items()]
        rows.append([name, *cells])
    head = [f"samples/s, {_ranks(n)}" for n in found] + [f"efficiency, {n}" for n in more]
    head += [f"of cores, {n}" for n in more if n > CORES] + [f"CPU ms a sample, {n}" for n in found]
    return markdown(["", *head], rows)


def _ranks(n: int) -> str:
    return f"{n} rank{'s' if n > 1 else ''}"


# ---- modelled


def modelled(options: argparse.Namespace, weak: Mapping[int, Mapping[str, Timed]]) -> Iterable[str]:
    """Texts, one after the other."""
    compute = on_gloo(1, compute_of, options.model, options.rounds)
    links = {n: on_gloo(n, link_of) for n in weak if n > 1}
    if links:
        yield (
            f"Modelled beside measured, ms of a step.  Compute is that of one rank by itself: {_compute(compute)}.\n"
            f"Links are those that `graphzero calibrate` finds here: {_found(links)}.  Ranks beyond {CORES} share the\n"
            "cores."
        )
        yield beside(options.model, compute, links, weak)
    if not options.modelled:
        return
    subjects = [small(options.model, compute, links.get(CORES))] + ([llama(options.layers)] if options.layers else [])
    for subject in subjects:
        yield f"Modelled, {subject.name}; {subject.cluster.describe()}.  Compute: {_compute(subject.compute)} a step."
        yield predicted(subject, options.modelled)
    yield NOT_MODELLED


def beside(model: str, compute: Compute, links: Mapping[int, gz.Link], weak: Mapping[int, Mapping[str, Timed]]) -> str:
    rows = []
    for n, link in links.items():
        subject = small(model, compute.times(max(1.0, n / CORES)), link)
        steps = {stage: weak[n][name] for stage in STAGES if (name := f"graphzero, stage {stage}") in weak[n]}
        for stage, (found, _) in subject.at(steps, (n,)).items():
            one = steps[stage]
            cells = [ms(x) for x in (found.compute, found.communication, found.best, found.worst)]
            rows.append([f"{_ranks(n)}, stage {stage}", *cells, ms(one.median), f"{one.median / found.best:.2f}"])
    return markdown(["", "compute", "communication", "best", "worst", "measured", "measured to best"], rows)


def predicted(subject: Subject, ranks: Iterable[int]) -> str:
    rows = []
    for n in ranks:
        for shape in hierarchies(n, subject.cluster.per_host):
            for stage, (found, peak) in subject.at(STAGES if len(shape) == 1 else STAGES[2:], shape).items():
                layout = " x ".join(map(str, shape))
                rates = [f"{n * subject.samples / second:,.0f}" for second in (found.worst, found.best)]
                rows.append(
                    [f"{layout}, stage {stage}", _ms(found.communication), _ms(found.best), _ms(found.worst),
                     " to ".join(rates), f"{found.compute / found.worst:.2f} to {found.compute / found.best:.2f}",
                     f"{peak / 1e9:.2f}"]
                )  # fmt: skip
    head = ["ranks", "communication, ms", "step, best", "worst", "samples/s", "efficiency", "planned peak, GB"]
    return markdown(head, rows)


def small(model: str, compute: Compute, link: gz.Link | None) -> Subject:
    """One of ``workloads``, on hosts like this machine."""
    workload = WORKLOADS[model]
    with torch.device("meta"):
        model_on_meta = workload.model()
    between = gz.Link(ETHERNET_LATENCY, ETHERNET / CORES)
    cluster = Cluster(CORES, link or between, between)
    share = tuple(x.to("meta") for x in workload.part(0, 0, 1))
    name, states = f"{workload.what}, on hosts like this machine", 2 * _nbytes(model_on_meta)
    return Subject(name, _meta(workload.model), share, workload.share, compute, states, cluster)


def llama(layers: int) -> Subject:
    """Llama 7B in bf16, states included, on hosts of eight H100."""
    from models import WithLoss
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(num_hidden_layers=layers, use_cache=False, bos_token_id=0, eos_token_id=0)

    def make() -> nn.Module:
        return WithLoss(LlamaForCausalLM(config)).to(torch.bfloat16)

    with torch.device("meta"):
        model = make()
        ids = torch.zeros(SEQUENCES, CONTEXT, dtype=torch.long)
    states = 2 * _nbytes(model)
    parameters = sum(p.numel() for p in model.parameters())
    attention = 12 * layers * config.hidden_size * CONTEXT  # operations for a token: arXiv 2204.02311, appendix B
    operations = SEQUENCES * CONTEXT * (6 * parameters + attention)
    seconds = operations / (FLOPS * UTILISATION)
    compute = Compute(seconds / 3, 2 * seconds / 3, UPDATE_BYTES * states / HBM)
    name = (
        f"Llama of {layers} layers, {parameters / 1e9:.1f} G parameters in bf16, {SEQUENCES} sequences of {CONTEXT} a "
        f"rank, on H100 at {UTILISATION:.0%} of {FLOPS / 1e12:.0f} TFLOP/s"
    )
    return Subject(name, _meta(make), (ids, ids), SEQUENCES, compute, states, DGX)


def _meta(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        with torch.device("meta"):
            return make()

    return made


def _nbytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


def _compute(compute: Compute) -> str:
    return (
        f"forward {_ms(compute.forward)}, backward {_ms(compute.backward)}, "
        f"update of all parameters {_ms(compute.update)} ms"
    )


def _found(links: Mapping[int, gz.Link]) -> str:
    return "; ".join(
        f"{n} ranks {link.latency * 1e6:.0f} us a message, {link.bandwidth / 1e9:.2f} GB/s" for n, link in links.items()
    )


# ---- on every rank


def link_of(rank: int) -> gz.Link:
    (found,) = calibrate(gz.placement("cpu", range(dist.get_world_size())))
    return found.link


def compute_of(rank: int, model: str, rounds: int) -> Compute:
    """Of a world of one: the median step, divided as the phases' seconds are in a profile."""
    workload, times, seconds = WORKLOADS[model], StepTimes(), []
    step, batch = graph(0, workload), workload.part(0, 0, 1)
    for i in range(3 * rounds + 2):
        began = time.perf_counter()
        step(*batch)
        if i > 1:
            seconds.append(time.perf_counter() - began)
            gz.testing.profile_step(step, *batch, times=times)
    phases = [times.seconds["compute", phase] for phase in ("forward", "backward", "update")]
    return Compute(*(statistics.median(seconds) * one / sum(phases) for one in phases))


if __name__ == "__main__":
    main()
