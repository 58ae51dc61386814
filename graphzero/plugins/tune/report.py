"""Report of a search: a table, the reason why each row is behind the one above, and the lines to paste."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from graphzero.plan import mega
from graphzero.plan.device import Device
from graphzero.plugins.tune.captured_step import CapturedStep
from graphzero.plugins.tune.groups import WAYS
from graphzero.plugins.tune.layout import Layout
from graphzero.plugins.tune.patterns import pattern_of, patterns
from graphzero.plugins.tune.price import Price
from graphzero.plugins.tune.proposal import Kind
from graphzero.plugins.tune.search import SearchResult
from graphzero.sbp.types import Sbp

ALIKE = 1e-3  # of a step: less is not a difference
SAID = 0.15  # of a difference: less is not worth a word
WHAT = {"parameters": "parameters", "gradients": "gradients", "other": "activations and small sums"}


def report(result: SearchResult, step: CapturedStep, device: Device, what: str, top: int) -> str:
    """The whole report. At least one layout fits."""
    shown = result.fitting[:top]
    lines = [
        f"{what} on {result.ranks} x {device.name}, {step.rows} rows a step, at most {mega(result.room)} a rank",
        "",
        *_splits(result, step),
        *_table(shown),
        "",
        *_left_out(result),
        "",
        f"to paste, for 1: {shown[0].layout}",
        "",
        *(f"    {line}" for line in lines_of(shown[0], step, device.type)),
    ]
    return "\n".join(line.rstrip() for line in lines)


def _table(shown: Sequence[Price]) -> list[str]:
    rows = [("", "layout", "step", "memory", "")]
    for i, one in enumerate(shown):
        after = f"+{one.seconds / shown[0].seconds - 1:.1%}: {why(one, shown[i - 1])}" if i else ""
        rows.append((str(i + 1), str(one.layout), f"{one.seconds * 1e3:.2f} ms", mega(one.peak), after))
    wide = [max(len(row[i]) for row in rows) for i in range(4)]
    return [
        f"{row[0]:>{wide[0]}}  {row[1]:<{wide[1]}}  {row[2]:>{wide[2]}}  {row[3]:>{wide[3]}}  {row[4]}" for row in rows
    ]


def why(worse: Price, better: Price) -> str:
    """Say why one layout takes longer than another, the main reasons first."""
    total = worse.seconds - better.seconds
    if total <= ALIKE * better.seconds:
        more_memory = worse.peak - better.peak
        return "as fast" + (f", and {mega(more_memory)} more memory" if more_memory > 0 else "")
    mine, other = worse.time.by_phase(), better.time.by_phase()
    update = mine.get("update", 0.0) - other.get("update", 0.0)
    work = worse.time.compute - better.time.compute - update
    waits = worse.time.exposed - better.time.exposed
    host = worse.time.host - better.time.host
    parts = [
        (work, _work(worse, better), "computes less"),
        (update, _update(worse, better), "updates less on a rank"),
        (waits, _waits(worse, better), "waits less for transfers"),
        (host, "waits for the host, which starts more ops", "waits less for the host"),
        (worse.time.idle - better.time.idle, "waits for other pipeline stages", "waits less for other pipeline stages"),
    ]
    more = [f"{words} (+{_ms(spent)})" for spent, words, _ in sorted(parts, reverse=True) if spent > SAID * total]
    less = [f"{words} (-{_ms(-spent)})" for spent, _, words in sorted(parts) if -spent > SAID * total]
    return "; ".join(more) + (f"; but {', '.join(less)}" if less else "")


def _work(worse: Price, better: Price) -> str:
    mine, other = worse.layout, better.layout
    if mine.recompute and not other.recompute:
        return "computes forward again"
    if mine.micro_batches > other.micro_batches and mine.axes == other.axes:
        return f"{mine.micro_batches} smaller micro-batches, not {other.micro_batches}"
    if mine.axes != other.axes:
        return "ranks share less of the work"
    return "computes more"


def _update(worse: Price, better: Price) -> str:
    split = bool(worse.layout.stage) < bool(better.layout.stage)
    return "each rank updates all parameters" if split else "updates more on a rank"


def _waits(worse: Price, better: Price) -> str:
    more = {key: sent - better.traffic.get(key, 0.0) for key, sent in worse.traffic.items()}
    key = max(more, key=lambda key: more[key], default=None)
    if key is None or more[key] <= 0:
        return "waits longer for transfers that it hides less"
    kind, what, axis = key
    return f"waits for transfers: {mega(more[key])} more of {WHAT[what]} sent over {axis} by {kind}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _splits(result: SearchResult, step: CapturedStep) -> list[str]:
    if not result.proposals:
        return []
    lines = []
    first = next(iter(result.proposals.values()))
    if first.kinds:
        lines.append("weights that may be split, found in the program:")
    for kind in first.kinds:
        lines.append(f"  {_weights(kind, first.splits, step)}")
    for verdict in first.verdicts:
        if not verdict.is_taken:
            what, more = _weights(verdict.kind, verdict.kind.splits, step), _signed(verdict.sent)
            lines.append(f"  not {what}: {_ms(verdict.with_it)} a step, not {_ms(verdict.without)}; {more} sent")
    if not first.kinds:
        lines.append("no weights are worth splitting, so no tensor axis is proposed")
    return [*lines, ""]


def _weights(kind: Kind, splits: Mapping[str, Sbp], step: CapturedStep) -> str:
    """``column model.layers.*.up.weight S(0), row model.layers.*.down.weight S(1)``."""
    group, texts = kind.groups[0], []
    for path in sorted(group.splits, key=lambda path: (WAYS.index(group.ways[path]), path)):
        texts.append(f"{group.ways[path]} {'.'.join(pattern_of(path, splits, step.names))} {splits[path]}")
    return ", ".join(texts)


def _signed(nbytes: float) -> str:
    return f"{mega(abs(nbytes))} {'more' if nbytes >= 0 else 'less'}"


def _left_out(result: SearchResult) -> list[str]:
    lines = [f"{result.priced} layouts were priced, {len(result.fitting)} of them fit"]
    if all(one.layout.members == 1 for one in (*result.fitting, *result.too_large)):
        lines.append("  left out: pipeline stages; --pipeline 1,2,4 tries them")
    for reason, count in result.left_out.items():
        at_least = f": at best {_ms(result.least[reason])}" if reason in result.least else ""
        lines.append(f"  left out: {count} {reason}{at_least}")
    lines += [f"  left out: {what}: {reason}" for what, reason in result.refused.items()]
    return lines


# ---- what is pasted


def lines_of(one: Price, step: CapturedStep, device_type: str) -> list[str]:
    """Python that sets a layout in a Graph's ``__init__``."""
    lines = [f"placement = {_placement(one.layout, device_type)}"]
    splits = patterns(one.splits, step.names)
    if splits:
        lines += ["B, S = gz.sbp.B, gz.sbp.S", "# in __init__, before the optimizer is made"]
        whole = "B, " * (len(one.layout.axes) - 1)
        for attribute, by_pattern in splits.items():
            inside = [f"    {pattern!r}: ({whole}{sbp})," for pattern, sbp in by_pattern.items()]
            head = f"self.{attribute} = gz.to_global(self.{attribute}, placement=placement, sbp={{"
            lines += [head.replace("'", '"'), *(line.replace("'", '"') for line in inside), "})"]
    lines += [step.auto_line] if step.auto_line and one.layout.members > 1 else []
    return lines + [f"self.config.{line}" for line in one.layout.lines(step.settings)]


def _placement(layout: Layout, device_type: str) -> str:
    shape = [n for _, n in layout.axes]
    names = [name for name, _ in layout.axes]
    if len(shape) == 1:
        given = f"range({shape[0]})" + ("" if names == ["dp"] else f', names=("{names[0]}",)')
    else:
        quoted = ", ".join(f'"{name}"' for name in names)
        given = f"torch.arange({prod(shape)}).reshape({', '.join(map(str, shape))}).tolist(), names=({quoted})"
    return f'gz.placement("{device_type}", {given})'


# ---- where nothing fits


def does_not_fit(result: SearchResult, step: CapturedStep, device: Device) -> str:
    """Report that nothing fits, by how much, and what would fit."""
    machine = f"{result.ranks} x {device.name}"
    if result.states is None:
        reasons = [f"  {what}: {reason}" for what, reason in result.refused.items()]
        return "\n".join([f"nothing is left on {machine} for {step.rows} rows a step", *reasons])
    states, layout = result.states
    if states > result.room:
        times = -(-states // result.room)
        return (
            f"nothing fits {mega(result.room)} a rank on {machine}: parameters and optimizer states alone are "
            f"{mega(states)} a rank at the least, in {layout}, {mega(states - result.room)} too much\n"
            f"  What would do: at least {times:.0f} times as many ranks, to split them further; or a larger device"
        )
    least = result.too_large[0]
    at_peak = sorted(least.plan.memory.at_peak.items(), key=lambda item: -item[1])
    categories = ", ".join(f"{name} {mega(nbytes)}" for name, nbytes in at_peak if nbytes * 50 > least.peak)
    rows = step.rows // least.layout.data_ranks // least.layout.micro_batches
    advice = [f"a device of {mega(least.peak / 0.9)} (--memory {least.peak})"]
    if dict(at_peak)["activations"] * 4 > least.peak:
        advice.append(f"smaller samples or fewer of them (it has {rows} row{'s' * (rows > 1)} a rank and micro-batch)")
    if least.layout.data_ranks > 1 or not least.layout.tensor_axis:
        advice.append("more ranks")
    if step.settings.amp.dtype is None:
        advice.append("16-bit activations (config.enable_amp())")
    over = mega(least.peak - result.room)
    return (
        f"nothing fits {mega(result.room)} a rank on {machine}; the nearest of "
        f"{result.priced} layouts, {least.layout}, peaks at {mega(least.peak)}, {over} too much\n"
        f"  its peak is at {least.plan.memory.peak_at}: {categories}\n"
        f"  What would do: {'; '.join(advice)}"
    )
