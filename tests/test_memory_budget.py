"""A memory budget: what stays gathered at stage 3, which stage is taken, and what is said when nothing fits."""

import gc
import itertools
import random
import re
import warnings
from functools import cache

import pytest
import torch
from bad_input.wrong import says
from inside import executor_of
from test_plan_measured import Storages
from torch import nn
from torch.utils._pytree import tree_leaves

import graphzero as gz
from graphzero.passes import KeepGathered, Options, Pipeline, default_passes
from graphzero.plan import plan_of
from graphzero.plan.memory.memory_candidate import knapsack
from graphzero.runtime.world import device_memory
from graphzero.runtime.world.consensus import Ranks
from graphzero.testing import fake_world

FOUR = gz.placement("cpu", range(4), virtual=True)
WIDTHS = (32, 64, 48, 96, 32, 64)
SLOW = gz.Link(latency=1e-5, bandwidth=1e9)


class BudgetGraph(gz.Graph):
    """With 512 rows activations outweigh model state and communication slots."""

    def __init__(self, stage=3, budget=None, widths=WIDTHS, placement=FOUR, links=None, bucket_bytes=8192, **zero):
        super().__init__(placement)
        torch.manual_seed(0)
        pairs = itertools.pairwise(widths)
        self.model = nn.Sequential(*(layer for a, b in pairs for layer in (nn.Linear(a, b, bias=False), nn.Tanh())))
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9))
        if stage:
            self.config.enable_zero(stage=stage, **zero)
        self.config.set_memory_budget(budget)
        self.config.bucket_bytes = bucket_bytes
        if links:
            self.config.set_links({"dp": links})

    def build(self, x):
        loss = self.model(x).square().mean()
        loss.backward()
        return loss

    def planned(self, rows=512):
        """Itself, compiled for so many rows."""
        return self.compile(torch.zeros(rows, self.model[0].in_features))


@cache
def captured(rows, **settings):
    """A graph whose capture serves all configurations."""
    return BudgetGraph(**settings).planned(rows)


@cache
def plan(rows=512, stage=3, budget=None, keep_gathered=False, links=None, bucket_bytes=8192, **settings):
    graph = captured(rows, **settings)
    graph.config.enable_zero(bool(stage), stage=stage or 1, keep_gathered=keep_gathered)
    graph.config.set_memory_budget(budget)
    graph.config.set_links({"dp": links} if links else None)
    graph.config.bucket_bytes = bucket_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # so many programs
        return graph.planned(rows).plan


def ends(**settings):
    """Peaks of the programs that keep nothing and everything."""
    return plan(**settings).memory.peak, plan(keep_gathered=True, **settings).memory.peak


# ---- keep_gathered


def test_keeping_all_sends_as_little_as_stage_2():
    assert plan(keep_gathered=True).comm_bytes == plan(stage=2).comm_bytes < plan().comm_bytes


def test_the_plan_and_the_configuration_name_what_is_kept():
    graph = BudgetGraph(keep_gathered=("model.2.*", "model.0.weight")).planned()
    assert graph.plan.kept == ("model.2.weight",)  # backward does not read the first
    assert graph.plan.to_dict()["kept"] == ["model.2.weight"]
    assert "keep_gathered=('model.2.*', 'model.0.weight')" in repr(graph.config)
    assert "keep_gathered" in [record.name for record in graph.history]
    assert "keep_gathered" not in [record.name for record in BudgetGraph().planned().history]


def test_a_name_of_no_parameter_is_refused_when_the_step_is_known():
    with says(gz.ConfigError, "keep_gathered='head.*'", "model.0.weight"):
        BudgetGraph(keep_gathered="head.*").planned()


@pytest.mark.parametrize("setting", [{"keep_gathered": True}, {"budget": 1}, {"stage": "auto"}])
def test_a_users_pass_after_keep_runs_with_and_without_it(setting):
    lo, hi = ends()
    if "budget" in setting:
        setting = {"budget": (lo + hi) // 2}
    for graph in (BudgetGraph(**setting), BudgetGraph()):
        graph.config.add_pass(nothing, after="keep_gathered")
        names = [record.name for record in graph.planned().history]
        assert names[names.index("bucket") - 1] == "nothing"


def nothing(graph):
    return graph


@pytest.mark.parametrize("settings", [{"keep_gathered": True}, {"keep_gathered": ("model.4.*",)}, {"budget": "half"}])
def test_steps_are_the_same_to_the_bit(settings):
    if settings == {"budget": "half"}:
        settings = {"budget": sum(ends()) // 2}
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn((512, 32), generator=generator) for _ in range(3)]
    plain, kept = BudgetGraph(), BudgetGraph(**settings)
    for batch in batches:
        assert torch.equal(plain(batch), kept(batch))
    assert kept.plan.kept
    for one, other in zip(plain.model.parameters(), kept.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("settings", [{"keep_gathered": True}, {"keep_gathered": ("model.4.*",)}, {"budget": "half"}])
@pytest.mark.parametrize("bucket_bytes", [4096, None])
def test_the_peak_of_a_call_is_the_plans_to_the_byte(settings, bucket_bytes):
    x = torch.zeros(16, 32)
    with fake_world(4):
        graph = BudgetGraph(placement=None, bucket_bytes=bucket_bytes)
        peaks = []
        for keep in (False, True):
            graph.config.enable_zero(stage=3, keep_gathered=keep)
            peaks.append(graph.compile(x).plan.memory.peak)
        if settings == {"budget": "half"}:
            graph.config.enable_zero(stage=3)
            graph.config.set_memory_budget(sum(peaks) // 2)
        else:
            graph.config.enable_zero(stage=3, **settings)
        graph(x)
        gc.collect()
        known = [t.to_local() if hasattr(t, "to_local") else t for t in tree_leaves(graph.state_dict())]
        slots = [slot for (slot,) in executor_of(graph).slots.values()]
        with Storages([x, *slots, *(t for t in known if isinstance(t, torch.Tensor))]) as mode:
            graph(x)
        memory = graph.plan.memory
        # beside the program: the 0-d loss that the call hands out as a new tensor
        assert 0 <= mode.peak + sum(memory.resident.values()) - memory.peak <= 16


# ---- the choice within a budget


def every(**settings):
    """(peak, seconds or bytes) of the programs that keep each set of the parameters that backward reads."""
    graph = BudgetGraph(keep_gathered=True, **settings).planned()
    before = next(record.before for record in graph.history if record.name == "keep_gathered")
    rest = default_passes(Options(bucket_bytes=graph.config.bucket_bytes), since="bucket")
    found = []
    for count in range(len(graph.plan.kept) + 1):
        for names in itertools.combinations(graph.plan.kept, count):
            one = plan_of(Pipeline([KeepGathered(names), *rest])(before), links=graph.config.links)
            found.append((one.memory.peak, cost(one)))
    return found


def cost(one):
    return one.comm_bytes if one.comm_seconds is None else one.comm_seconds


@pytest.mark.parametrize("links", [None, SLOW])
def test_no_other_choice_within_the_budget_sends_less(links):
    found = every(links=links)
    low, high = min(found)[0], max(found)[0]
    for part in (0, 0.2, 0.5, 0.8, 1):
        budget = int(low + part * (high - low))
        chosen = plan(budget=budget, links=links)
        assert chosen.memory.peak <= budget
        assert cost(chosen) == pytest.approx(min(cost for peak, cost in found if peak <= budget))


def test_a_larger_budget_never_sends_more():
    low, high = ends()
    sent = [plan(budget=int(low + part / 8 * (high - low))).comm_bytes for part in (0, 4, 8)]
    assert sent == sorted(sent, reverse=True) and len(set(sent)) == 3
    assert sent[-1] == plan(keep_gathered=True).comm_bytes


@pytest.mark.parametrize("bucket_bytes", [4096, None])
def test_where_slots_outweigh_values_the_budget_holds_too(bucket_bytes):
    """Keeping all may then need less than keeping nothing: gathers in backward may want the largest slots."""
    ends = [plan(8, keep_gathered=keep, bucket_bytes=bucket_bytes) for keep in (False, True)]
    low, high = sorted(one.memory.peak for one in ends)
    for budget in (low, (low + high) // 2, high, high + 4096):
        one = plan(8, budget=budget, bucket_bytes=bucket_bytes)
        assert one.memory.peak <= budget
        assert one.comm_bytes <= min(end.comm_bytes for end in ends if end.memory.peak <= budget)


def test_the_plan_says_what_was_kept_and_why():
    low, high = ends()
    graph = BudgetGraph(budget=(low + high) // 2).planned()
    (line,) = graph.plan.decisions
    assert line.startswith(f"gathered once a step: {len(graph.plan.kept)} of the 4 parameters that backward reads")
    assert line in str(graph.plan) and line in repr(graph)
    assert f"memory_budget={(low + high) // 2}" in repr(graph.config)


def test_a_change_of_the_budget_compiles_anew_from_the_same_capture():
    graph, (low, high) = BudgetGraph(), ends()
    batch = torch.randn((512, 32))
    losses, kept = [], []
    for budget in (None, low, high, None):
        graph.config.set_memory_budget(budget)
        losses.append(graph(batch))
        kept.append(len(graph.plan.kept))
    assert (kept[0], kept[2], kept[3]) == (0, 4, 0)
    programs = graph._selection.programs
    assert len(programs.all) >= 3 and sum(map(len, programs.captures.values())) == 1
    reference = BudgetGraph()
    assert all(torch.equal(loss, reference(batch)) for loss in losses)


def test_an_evaluation_has_nothing_to_keep():
    class Evaluate(gz.Graph):
        def __init__(self):
            super().__init__(FOUR)
            self.model = nn.Linear(8, 8)
            self.config.enable_zero(stage=3)
            self.config.set_memory_budget(2**40)

        def build(self, x):
            return self.model(x)

    one = Evaluate().compile(torch.zeros(8, 8)).plan
    assert one.kept == () and one.decisions == ()


# ---- what does not fit


def test_a_budget_that_nothing_fits_says_what_it_would_need_and_what_would_need_less():
    low, _ = ends()
    with says(
        gz.ConfigError, "the memory budget is 1 bytes per rank", "BudgetGraph on dp=4 at stage 3", "activations",
        "set_memory_budget(", "set_gradient_accumulation_steps(", "computed again",
    ) as said:  # fmt: skip
        BudgetGraph(budget=1).planned()
    least = int(re.search(r"set_memory_budget\((\d+)\)", said.message)[1])
    assert f"peaks at {least:,} bytes" in said.message
    assert plan(budget=least).memory.peak <= least < low  # where backward computes values of forward again
    assert not plan(budget=low).recomputed


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stages_that_keep_parameters_whole_are_checked(stage):
    peak = plan(8, stage=stage).memory.peak  # model state outweighs activations
    assert plan(8, stage=stage, budget=peak).memory.peak == peak
    with says(gz.ConfigError, f"at stage {stage} peaks at {peak:,}", "a higher ZeRO stage", "more ranks"):
        BudgetGraph(stage=stage, budget=peak - 1).planned(8)


def test_what_the_user_keeps_beyond_the_budget_is_refused():
    low, high = ends()
    with says(gz.ConfigError, "leave keep_gathered out"):
        BudgetGraph(budget=low // 3, keep_gathered=True).planned()
    assert plan(budget=low).memory.peak <= low < high


# ---- stage "auto"


def stages(**settings):
    return {stage: plan(8, stage=stage, **settings) for stage in (1, 2, 3)}


UNLIKE = {"widths": (128,) * 7, "bucket_bytes": 2**16}  # many times what is under way at a time


def test_auto_takes_the_first_stage_that_fits():
    one, two, three = (found.memory.peak for found in stages(**UNLIKE).values())
    assert one > two > three
    taken = {
        budget: plan(8, stage="auto", budget=budget, **UNLIKE) for budget in (2**40, one, one - 1, two, two - 1, three)
    }
    assert [found.stage for found in taken.values()] == [1, 1, 2, 2, 3, 3]
    assert all(found.memory.peak <= budget for budget, found in taken.items())


def test_the_stages_are_tried_in_the_order_of_what_they_send():
    for settings in (UNLIKE, {"widths": (7, 5, 9, 3)}):
        sent = [found.comm_bytes for found in stages(**settings).values()]
        assert sent == sorted(sent)


def test_auto_says_which_stage_it_took_and_why():
    one, two, _ = (found.memory.peak for found in stages(**UNLIKE).values())
    graph = BudgetGraph("auto", two, **UNLIKE).planned(8)
    assert graph.plan.stage == graph.plan.to_dict()["stage"] == 2
    (line,) = graph.plan.decisions
    assert line.startswith('stage="auto": 2 is the first that fits') and "1 would peak at" in line
    assert line in str(graph.plan) and line in repr(graph)
    assert "zero=stage auto over dp" in repr(graph.config)


def test_auto_spends_the_budget_on_gathers_at_stage_3():
    found = stages(**UNLIKE)
    budget = found[2].memory.peak - 1
    chosen = plan(8, stage="auto", budget=budget, **UNLIKE)
    assert (chosen.stage, chosen.kept) == (3, plan(8, budget=budget, **UNLIKE).kept) and len(chosen.decisions) == 2


def test_auto_that_fits_nowhere_says_what_each_stage_needs():
    found = stages(**UNLIKE)
    with says(gz.ConfigError, *(f"{one.memory.peak:,}" for one in found.values())):
        plan(8, stage="auto", budget=found[3].memory.peak - 1, **UNLIKE)
    with says(gz.ConfigError, *(f"{found[stage].memory.peak:,}" for stage in (1, 3))) as said:
        plan(8, stage="auto", budget=2, **UNLIKE)
    assert (
        f"{found[2].memory.peak:,}" not in said.message
    )  # what 1 holds between calls does not fit, and 2 holds as much


def test_auto_trains_as_the_stage_that_it_takes():
    two = plan(8, stage=2, **UNLIKE).memory.peak
    auto, fixed = BudgetGraph("auto", two, **UNLIKE), BudgetGraph(2, **UNLIKE)
    for seed in range(2):
        x = torch.randn(8, 128, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(auto(x), fixed(x))
    assert auto.plan.stage == 2


def test_auto_without_a_budget_asks_the_device(monkeypatch):
    peaks = [found.memory.peak for found in stages(**UNLIKE).values()]
    for nbytes, stage in ((2**34, 1), (peaks[1], 2), (peaks[2], 3)):
        machine = device_memory.DeviceMemory("here", int(nbytes * 4 / device_memory.SHARE) + 8)
        monkeypatch.setattr(device_memory, "_machine", lambda machine=machine: machine)
        found = BudgetGraph("auto", **UNLIKE).planned(8).plan
        assert found.stage == stage and "0.9 of the device's memory" in found.decisions[0]


def test_auto_compiles_on_meta_for_a_fake_world():
    with fake_world(16):
        with torch.device("meta"):
            graph, x = BudgetGraph("auto", placement=None, **UNLIKE), torch.zeros(4, 128)
        assert graph.compile(x).plan.stage == 1


def test_auto_for_a_device_that_this_process_does_not_have_asks_for_a_budget():
    if torch.cuda.is_available():
        pytest.skip("this process has it")
    place = gz.placement("cuda", range(2), virtual=True)
    with says(gz.ConfigError, "memory a cuda device has", "config.set_memory_budget"):
        BudgetGraph("auto", placement=place).planned()
    assert plan(stage="auto", budget=2**40, placement=place).stage == 1


# ---- how much a device has


def room(ranks, mine, everyone):
    class Told(Ranks):
        def collect(self, found):
            assert found == tuple(mine)
            return [tuple(one) for one in everyone]

    place = gz.placement("cpu", range(ranks), virtual=True)
    object.__setattr__(place, "virtual", False)
    return device_memory.memory_limit(Told(place))


def test_the_ranks_of_a_machine_share_it_and_the_least_share_counts(monkeypatch):
    small, large = device_memory.DeviceMemory("a", 1000), device_memory.DeviceMemory("b", 4000)
    for mine in (small, large):
        monkeypatch.setattr(device_memory, "_machine", lambda mine=mine: mine)
        assert room(2, mine, [small, large]) == 900
        assert room(4, mine, [small, large, large, large]) == 900
        assert room(5, mine, [small, large, large, large, large]) == 900
        assert room(6, mine, [small, large, large, large, large, large]) == 720
    told = large._replace(ranks=8)  # by the launcher: other jobs' ranks, or other placements', are there too
    monkeypatch.setattr(device_memory, "_machine", lambda: told)
    assert room(2, told, [told, told]) == 450


def test_virtual_ranks_share_one_device(monkeypatch):
    monkeypatch.setattr(device_memory, "_machine", lambda: device_memory.DeviceMemory("a", 4000))
    assert device_memory.memory_limit(Ranks(FOUR)) == 900


def test_a_machine_has_memory():
    assert 2**28 < device_memory._machine().nbytes < 2**50


# ---- the knapsack


@pytest.mark.parametrize("seed", range(30))
def test_the_knapsack_is_exact_with_a_room_for_each_prefix(seed):
    dice = random.Random(seed)
    count = dice.randint(1, 9)
    items = [(dice.randint(0, 20), dice.choice((1.0, dice.random()))) for _ in range(count)]
    rooms = sorted(dice.randint(0, 90) for _ in range(count))
    if seed % 2:
        dice.shuffle(rooms)

    def fits(chosen):
        weights = itertools.accumulate(items[i][0] * (i in chosen) for i in range(count))
        return all(weight <= room or not weight for weight, room in zip(weights, rooms, strict=True))

    sets = (set(c) for n in range(count + 1) for c in itertools.combinations(range(count), n))
    best = max(sum(items[i][1] for i in chosen) for chosen in sets if fits(chosen))
    found = knapsack(items, rooms)
    assert fits(set(found)) and sum(items[i][1] for i in found) == pytest.approx(best)


def test_many_items_are_chosen_quickly_and_nearly_as_well():
    dice = random.Random(0)
    items = [(dice.randint(10**6, 10**9), dice.random()) for _ in range(400)]
    limit = sum(weight for weight, _ in items) // 2
    found = knapsack(items, [limit] * len(items))
    bound, left = 0.0, limit  # with a part of one item taken, which is at least as good as any choice
    for weight, worth in sorted(items, key=lambda item: -item[1] / item[0]):
        bound += worth * min(1.0, left / weight)
        left -= min(weight, left)
    assert sum(items[i][0] for i in found) <= limit
    assert sum(items[i][1] for i in found) > 0.99 * bound


def test_a_tight_room_after_wide_ones_takes_what_fits_it():
    chosen = knapsack([(10**6 + i, 1.0) for i in range(600)], [10**10] * 599 + [3 * 10**6])
    assert len(chosen) == 2
    assert knapsack([(10**6, 1.0)] * 600, [10**10] * 599 + [0]) == []


def test_keep_is_a_pass_of_the_public_list():
    assert gz.passes.KeepGathered is KeepGathered and KeepGathered().name == "keep_gathered"
