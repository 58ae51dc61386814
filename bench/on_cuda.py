"""Step time and memory of GPT-2 on one GPU: a world of one, beside plain PyTorch and torch.compile.

    python bench/on_cuda.py                      # 124M, a row per system and dtype
    python bench/on_cuda.py --size 350M --dtypes bf16 --batch 16 --context 1024 --steps 50

Each row is a fresh process.  Every system trains the same model in the same dtype, parameters and optimizer states
included, on the same tokens; plain PyTorch and torch.compile step with fused AdamW.  "planned" is what ``graph.plan``
says before anything runs, "peak" is torch.cuda.max_memory_allocated; workspaces of cuBLAS are in the latter alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from _run import in_fresh_process, markdown
from gpt import GPT, Shape
from torch import Tensor

import graphzero as gz

GPT2 = {
    "124M": Shape(vocabulary=50257, width=768, layers=12, heads=12, batch=8, context=512),
    "350M": Shape(vocabulary=50257, width=1024, layers=24, heads=16, batch=8, context=512),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
EXECUTORS = {"graphzero": "eager", "graphzero + inductor": "inductor"}
COMPILED = "torch.compile, fused AdamW"
SYSTEMS = (*EXECUTORS, "PyTorch, fused AdamW", COMPILED)
Step = Callable[[Tensor, Tensor], Any]


class Train(gz.Graph):
    def __init__(self, model: torch.nn.Module, device: str, executor: str):
        super().__init__(gz.placement(device, range(1), virtual=True))
        self.config.set_executor(executor)
        self.model = model
        self.add_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-4))

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.model(x, y)
        loss.backward()
        return loss


def graph_step(model: torch.nn.Module, device: str, executor: str) -> tuple[Step, Callable[[], int | None]]:
    graph = Train(model, device, executor)
    return graph, lambda: graph.plan.memory.peak


def eager_step(model: torch.nn.Module, compiled: bool) -> tuple[Step, Callable[[], int | None]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    forward = torch.compile(model) if compiled else model

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = forward(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, lambda: None


def measure(system: str, dtype: str, shape: Shape, steps: int, device: str = "cuda") -> dict[str, Any]:
    """Milliseconds of the median step, and bytes."""
    torch.manual_seed(0)
    model = GPT(shape).to(device=device, dtype=DTYPES[dtype])
    size = (shape.batch, shape.context + 1)
    ids = torch.randint(shape.vocabulary, size, device=device)
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    if system in EXECUTORS:
        step, planned = graph_step(model, device, EXECUTORS[system])
    else:
        step, planned = eager_step(model, system == COMPILED)
    for _ in range(5):
        loss = step(x, y)
    if device == "cpu":
        return {"ms": 0.0, "peak": 0, "planned": planned(), "loss": float(loss)}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        loss = step(x, y)
        event.record()
    torch.cuda.synchronize()
    times = [one.elapsed_time(other) for one, other in zip(events, events[1:], strict=False)]
    peak = torch.cuda.max_memory_allocated()
    return {"ms": statistics.median(times), "peak": peak, "planned": planned(), "loss": float(loss)}


def row(system: str, dtype: str, found: dict[str, Any], shape: Shape) -> list[str]:
    tokens = shape.batch * shape.context / found["ms"] * 1e3
    planned = "" if found["planned"] is None else f"{found['planned'] / 1e9:.2f} GB"
    return [
        f"{system}, {dtype}", f"{found['ms']:.1f}", f"{tokens:,.0f}", planned, f"{found['peak'] / 1e9:.2f} GB",
        f"{found['loss']:.4f}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=GPT2, default="124M")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", choices=SYSTEMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(f"bench/on_cuda.py needs a GPU; torch {torch.__version__} finds none. On the CPU: bench/step_time.py")
    shape = replace(GPT2[options.size], batch=options.batch, context=options.context)
    if options.only:
        print(json.dumps(measure(options.only, options.dtypes[0], shape, options.steps)))
        return
    rows = []
    for dtype in options.dtypes:
        for system in SYSTEMS:
            sizes = ["--batch", shape.batch, "--context", shape.context, "--steps", options.steps]
            words = ["--only", system, "--size", options.size, "--dtypes", dtype, *sizes]
            rows.append(row(system, dtype, in_fresh_process("on_cuda.py", *words), shape))
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"GPT-2 {options.size}, {shape.batch} x {shape.context} tokens, {where}\n")
    print(markdown(["system", "ms a step", "tokens/s", "planned", "peak", "loss"], rows))


if __name__ == "__main__":
    main()
