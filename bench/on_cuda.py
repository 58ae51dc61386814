"""Step time and memory of GPT-2 on one GPU: a world of one, beside plain PyTorch and torch.compile.

    PYTHONPATH=. python bench/on_cuda.py                      # 124M in bf16, a row per system
    PYTHONPATH=. python bench/on_cuda.py --size 350M --batch 16 --context 1024 --steps 50
    PYTHONPATH=. python bench/on_cuda.py --kernels 25         # and where each system's step goes
    PYTHONPATH=. python bench/on_cuda.py --dtypes amp --micro-batches 4

Each row is a fresh process, whose figures are printed as soon as they are there.  One that
fails, or takes more than ``--seconds``, is a row that says so; none begins after ``--minutes``.

Every system trains the same model in the same dtype, parameters and optimizer states included, on the same tokens, with
fused AdamW; "amp" is float32 with bf16 compute: ``config.enable_amp()`` and, for PyTorch, ``torch.autocast``.  "CUDA
graph" is the whole step, update included, in one: for graphzero ``config.set_cuda_graph()``, for PyTorch captured by
hand as its documentation says; "reduce-overhead" is torch.compile's own way, which leaves the update outside.  The
columns are explained in bench/results/on_cuda.md.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from _run import command_parser, format_table, run_in_fresh_process
from parity import TrainGraph
from systems import build_loop
from torch import Tensor
from workloads import GPT, Shape

import graphzero as gz

GPT2 = {
    "124M": Shape(vocabulary=50257, width=768, layers=12, heads=12, batch=8, context=512, tied=True),
    "350M": Shape(vocabulary=50257, width=1024, layers=24, heads=16, batch=8, context=512, tied=True),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "amp": torch.float32}
OURS = {  # the executor, and whether its step is in a CUDA graph
    "graphzero + inductor, CUDA graph": ("inductor", True),
    "graphzero, CUDA graph": ("eager", True),
    "graphzero + inductor": ("inductor", False),
    "graphzero": ("eager", False),
}
BASE = "torch.compile, fused AdamW"
PEERS = {  # torch.compile's mode ("" for none of it), and whether the whole step is in a CUDA graph
    BASE: ("default", False),
    "torch.compile, fused AdamW, CUDA graph": ("default", True),
    "PyTorch, fused AdamW": ("", False),
    "PyTorch, fused AdamW, CUDA graph": ("", True),
    "torch.compile reduce-overhead, fused AdamW": ("reduce-overhead", False),
    "torch.compile max-autotune-no-cudagraphs, fused AdamW": ("max-autotune-no-cudagraphs", False),
}
SYSTEMS = (  # in the order in which they run: what matters most comes first, what takes long last
    BASE, *(name for name, how in OURS.items() if how[1]), *(name for name, how in OURS.items() if not how[1]),
    *(name for name in PEERS if name != BASE),
)  # fmt: skip
WARM_UP = 2  # steps before CUDA graphs are captured, graphzero's and those by hand
Step = Callable[[Tensor, Tensor], Any]


def build_graph(model: GPT, device: str, executor: str, in_cuda_graph: bool, amp: bool, parts: int) -> TrainGraph:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    graph = TrainGraph(model, optimizer, placement=gz.placement(device, range(1), virtual=True))
    graph.config.enable_amp(amp)
    graph.config.set_gradient_accumulation_steps(parts)
    graph.config.set_executor(executor)
    graph.config.set_cuda_graph(in_cuda_graph)
    return graph


def build_peer(model: GPT, mode: str, in_cuda_graph: bool, amp: bool, parts: int) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True, capturable=in_cuda_graph)
    forward = torch.compile(model, mode=mode) if mode else model
    step = build_loop(forward, optimizer, parts, torch.bfloat16 if amp else None)
    return CapturedStep(step) if in_cuda_graph else step


class CapturedStep:
    """A step that is captured in its third call, and replayed from then on."""

    def __init__(self, step: Step) -> None:
        self.step, self.calls = step, 0
        self.graph, self.stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        self.inputs: tuple[Tensor, Tensor] | None = None
        self.loss: Any = None

    def __call__(self, x: Tensor, y: Tensor) -> Any:
        self.calls += 1
        if self.calls <= WARM_UP:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                loss = self.step(x, y)
            torch.cuda.current_stream().wait_stream(self.stream)
            return loss
        if self.inputs is None:
            self.inputs = x.clone(), y.clone()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.loss = self.step(*self.inputs)
        for own, given in zip(self.inputs, (x, y), strict=True):
            own.copy_(given)
        self.graph.replay()
        return self.loss.clone()


def list_kernels(step: Callable[[], Any], most: int, steps: int = 5) -> list[str]:
    """The kernels of the GPU that take most of a step: microseconds a step, calls a step, name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    entries = [
        (entry.self_device_time_total / steps, entry.count / steps, entry.key) for entry in profile.key_averages()
    ]
    entries = sorted((entry for entry in entries if entry[0]), reverse=True)
    total, count = (sum(entry[i] for entry in entries) for i in (0, 1))
    lines = [f"{time:9.1f} {calls:6.1f}  {name[:110]}" for time, calls, name in entries[:most]]
    return [f"{total:9.0f} us in all, {count:.0f} kernels", *lines]


def measure(
    system: str, dtype: str, shape: Shape, steps: int, device: str = "cuda", listed: int = 0, parts: int = 1
) -> dict[str, Any]:
    """Milliseconds of the median step, and bytes; ``listed``: so many of its kernels too."""
    torch.manual_seed(0)
    model = GPT(shape).to(device=device, dtype=DTYPES[dtype])
    size = (shape.batch, shape.context + 1)
    ids = torch.randint(shape.vocabulary, size, device=device)
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    how, in_cuda_graph = (OURS | PEERS)[system]
    in_cuda_graph &= device != "cpu"
    settings = how, in_cuda_graph, dtype == "amp", parts
    step: Any = build_graph(model, device, *settings) if system in OURS else build_peer(model, *settings)
    for i in range(5):
        if i == WARM_UP and device != "cpu":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        loss = step(x, y)
    planned = step.plan.memory.peak if system in OURS else None
    if device == "cpu":
        return {"ms": 0.0, "planned": planned, "loss": float(loss), **dict.fromkeys(MEMORY, 0)}
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        loss = step(x, y)
        event.record()
    torch.cuda.synchronize()
    times = [one.elapsed_time(other) for one, other in zip(events, events[1:], strict=False)]
    memory = torch.cuda.memory_stats()
    figures = {"ms": statistics.median(times), "planned": planned, "loss": float(loss)}
    figures |= {name: memory[f"{key}_bytes.all.peak"] for name, key in MEMORY.items()}
    if in_cuda_graph and system in OURS:
        figures["how"] = next(line for line in repr(step).splitlines() if line.startswith("CUDA graph"))
    if listed:
        figures["kernels"] = list_kernels(lambda: step(x, y), listed)
    return figures


MEMORY = {"peak": "allocated", "requested": "requested", "reserved": "reserved"}  # names -> CUDA's allocator's
HEAD = ["system", "ms a step", "ratio", "tokens/s", "planned", "peak", "requested", "reserved", "loss"]


def format_row(label: str, figures: dict[str, Any], base: float | None, tokens: int) -> list[str]:
    """A line of the table.  base: milliseconds of what it is compared with."""
    if "failed" in figures:
        return [label, figures["failed"], *[""] * (len(HEAD) - 2)]
    ratio = "" if not base else f"{figures['ms'] / base:.3f}"
    memory = [figures[name] for name in HEAD[4:8]]
    cells = ["" if nbytes is None else f"{nbytes / 1e9:.3f} GB" for nbytes in memory]
    speed = f"{tokens / figures['ms'] * 1e3:,.0f}" if figures["ms"] else ""
    return [label, f"{figures['ms']:.2f}", ratio, speed, *cells, f"{figures['loss']:.4f}"]


def measure_row(seconds: float, *how: Any) -> dict[str, Any]:
    """One row's figures, or why there are none."""
    try:
        figures: dict[str, Any] = run_in_fresh_process(measure, *how, seconds=seconds)
        return figures
    except TimeoutError:
        return {"failed": f"took over {seconds:.0f} s"}
    except Exception as error:  # of any kind in that process, or its end
        print(error, file=sys.stderr, flush=True)
        return {"failed": (str(error).strip().splitlines() or [type(error).__name__])[-1][:120]}


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--size", choices=GPT2, default="124M")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16"])
    parser.add_argument("--vocabulary", type=int, default=50257, help="50304 is a multiple of 128")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=1, help="in which a step computes the batch")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--seconds", type=float, default=200.0, help="that one row may take")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no row begins")
    parser.add_argument("--kernels", type=int, default=0, help="how many of the costliest kernels to list per system")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(f"bench/on_cuda.py needs a GPU; torch {torch.__version__} finds none. On the CPU: bench/peers.py")
    sizes = {"vocabulary": options.vocabulary, "batch": options.batch, "context": options.context}
    shape = replace(GPT2[options.size], **sizes)
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    parts = f" in {options.micro_batches} micro-batches" if options.micro_batches > 1 else ""
    size = f"{shape.batch} x {shape.context} tokens{parts}"
    print(f"GPT-2 {options.size}, vocabulary {shape.vocabulary}, {size}, {where}", flush=True)
    print(f"\n{format_table(HEAD, measure_rows(options, shape))}")


def measure_rows(options: Any, shape: Shape) -> list[list[str]]:
    """Run all rows, telling of each as it is there."""
    end, rows = time.monotonic() + 60 * options.minutes, []
    for dtype in options.dtypes:
        base: float | None = None
        for system in options.systems:
            left = end - time.monotonic()
            if left <= 0:
                continue
            how = system, dtype, shape, options.steps, "cuda", options.kernels, options.micro_batches
            figures = measure_row(min(options.seconds, left), *how)
            base = figures.get("ms") if system == BASE else base
            label = f"{system}, {dtype}"
            lines = figures.pop("kernels", [])
            print("\n".join([json.dumps({"row": label, **figures}), *lines]), flush=True)
            rows.append(format_row(label, figures, base, shape.batch * shape.context))
    return rows


if __name__ == "__main__":
    main()
