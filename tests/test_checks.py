"""What build only raises on is checked in every step: a step that is stopped has changed nothing, on any rank."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import graphzero as gz
from graphzero.ir.verifier.verify import verify
from graphzero.testing import fake_world, measure_step

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
LARGE = torch.cat([X[:7], X[7:] * 1e6])  # of the last rank's share alone


class CheckedGraph(gz.Graph):
    """A step whose ``check`` looks at its input, its loss, and the modules."""

    def __init__(self, check, ranks=2, stage=2, executor="eager", early=False, placement=None):
        super().__init__(placement or gz.placement("cpu", range(ranks), virtual=True))
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.add_optimizer(self.optimizer, lr_sch=torch.optim.lr_scheduler.StepLR(self.optimizer, 1))
        self.config.enable_zero(stage > 0, stage=stage or 2)
        self.config.set_executor(executor)
        self.config.set_optimizer_in_backward(early)
        self.check = check

    def build(self, x, y):
        loss = F.cross_entropy(self.model(x), y)
        self.check(self, x, loss)
        loss.backward()
        return loss


def asserts(self, x, loss):
    assert (x.abs() < 1e3).all(), "x is large"


def all_of(graph):
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in pytree.tree_leaves(graph.full_state_dict())]


def assert_same(before, after):
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def assert_stops(graph, *words, x=LARGE):
    before = all_of(graph)
    with pytest.raises(gz.CheckError) as caught:
        graph(x, Y)
    for word in words:
        assert word in str(caught.value)
    assert_same(before, all_of(graph))


# ---- what a check is


def item(self, x, loss):
    if x.abs().max().item() > 1e3:
        raise ValueError(f"{x.max().item()} is large")


def count(self, x, loss):
    large = (x.abs() > 1e3).sum().item()
    assert large * 2 + 1 <= len(x) // 8, f"{large} rows"


def torch_check(self, x, loss):
    torch._check(x.abs().max().item() < 1e3, lambda: "x is large")


def torch_check_all(self, x, loss):
    torch._check_tensor_all(x.abs() < 1e3, lambda: f"{x} is large")


def torch_assert(self, x, loss):
    torch._assert(x.abs().max() < 1e3, "x is large")


def torch_assert_async(self, x, loss):
    torch._assert_async(x.abs().max() < 1e3, "x is large")


def finite(self, x, loss):
    assert math.isfinite(x.square().square().square().sum().item())


def equal(self, x, loss):
    assert torch.equal(x.clamp(-1e3, 1e3), x)


def listed(self, x, loss):
    for low, high in torch.stack(x.aminmax(dim=1), 1).tolist():
        if high - low > 1e4:
            raise ValueError("spread")


def parameter(self, x, loss):
    torch.distributions.Normal(x.mean(1), 1e3 - x.abs().amax(1))


def sample(self, x, loss):
    torch.distributions.Uniform(-1e3, 1e3).log_prob(x)


def variance(self, x, loss):
    F.gaussian_nll_loss(x, x, 1e3 - x)


def factor(self, x, loss):
    torch.linalg.cholesky(torch.eye(4) * (1e3 - x.abs().max()))


def probabilities(self, x, loss):
    torch.bernoulli(x.abs() / 1e3)


def deviations(self, x, loss):
    torch.normal(x, 1e3 - x.abs())


CHECKS = {
    "assert": (asserts, "AssertionError: x is large"),
    "item": (item, "ValueError: {x.max().item()} is large"),
    "count": (count, "AssertionError: {large} rows"),
    "torch._check": (torch_check, "RuntimeError: x is large"),
    "torch._check_tensor_all": (
        torch_check_all,
        "RuntimeError: tensor(..., size=(8, 4), dtype=torch.float32) is large",
    ),
    "torch._assert": (torch_assert, "AssertionError: x is large"),
    "torch._assert_async": (torch_assert_async, "x is large"),
    "isfinite": (finite, "AssertionError: math.isfinite"),
    "equal": (equal, "AssertionError: torch.equal(x.clamp(-1000.0, 1000.0), x)"),
    "tolist": (listed, "ValueError: spread"),
    "a parameter of a distribution": (parameter, "ValueError: Expected parameter scale"),
    "a matrix": (factor, "LinAlgError: linalg.cholesky: the input is singular or not positive-definite"),
    "probabilities": (probabilities, "RuntimeError: bernoulli expects all elements of p to be in [0, 1]"),
    "deviations": (deviations, "RuntimeError: normal expects all elements of std >= 0.0"),
    "a variance": (variance, "AssertionError: var has negative"),
    "a sample of a distribution": (sample, "ValueError: Expected value argument"),
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_over_the_whole_batch_stops_the_step_with_its_words_and_line(name):
    check, words = CHECKS[name]
    graph = CheckedGraph(check)
    expected = F.cross_entropy(graph.model(X), Y).detach()
    graph.model[1].reset_running_stats()
    torch.testing.assert_close(graph(X, Y), expected)
    x = LARGE * 1e6 if name == "isfinite" else LARGE
    assert_stops(graph, words, "test_checks.py:", "as they were before the call", x=x)
    graph(X, Y)


def test_binary_cross_entropy_of_what_is_no_probability_raises():
    class Losses(gz.Graph):
        def build(self, p, y):
            return F.binary_cross_entropy(p, y)

    graph = Losses(gz.placement("cpu", range(2), virtual=True))
    p = torch.full((4,), 0.25)
    torch.testing.assert_close(graph(p, 2 * p), F.binary_cross_entropy(p, 2 * p))
    for bad in ((2 - p, p), (p, 2 - p)):
        with pytest.raises(RuntimeError, match="should be between 0 and 1"):
            graph(*bad)


def test_one_hot_of_a_class_that_does_not_exist_raises():
    class Counts(gz.Graph):
        def build(self, y):
            return F.one_hot(y, 3).sum(0)

    graph = Counts(gz.placement("cpu", range(2), virtual=True))
    assert graph(Y).tolist() == [3, 3, 2]
    for wrong in (3, -1):
        with pytest.raises(RuntimeError, match=f"index {wrong} is out of bounds"):
            graph(torch.where(Y == 0, wrong, Y))


@pytest.mark.parametrize("executor", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("stage", "early"), [(0, False), (1, False), (2, True), (3, False), (3, True)])
def test_a_step_that_is_stopped_has_changed_nothing_at_any_stage(stage, early, executor):
    def late(self, x, loss):
        x = x.abs().max()
        loss.register_hook(lambda grad: grad)
        assert x < 1e3, "late"

    graph = CheckedGraph(late, ranks=4, stage=stage, executor=executor, early=early)
    graph(X, Y)
    assert_stops(graph, "late")
    graph(X, Y)


def test_a_check_of_gradients_comes_before_every_write_where_the_optimizer_steps_in_backward():
    class Finite(CheckedGraph):
        def build(self, x, y):
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            for p in self.model.parameters():
                assert torch.isfinite(p.grad).all(), "a gradient is not finite"
            return loss

    graph = Finite(None, ranks=4, stage=2, early=True)
    graph(X, Y)
    assert_stops(graph, "a gradient is not finite", x=X * float("nan"))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_plan_counts_checks_and_what_waits_for_them(stage):
    with fake_world(2):
        graph = CheckedGraph(asserts, stage=stage, placement=gz.placement("cpu", range(2)))
        graph.config.set_arena(False)
        graph(X[:4], Y[:4])
        assert measure_step(graph, X[:4], Y[:4]).peak == graph.plan.memory.peak


def test_what_recomputation_checks_again_is_one_check():
    def checked(self, x, loss):
        def part(h):
            assert (h.abs() < 1e3).all(), "inside"
            return h * 2

        checkpoint(part, x.clone().requires_grad_(), use_reentrant=False)

    graph = CheckedGraph(checked)
    assert str(graph.compile(X, Y).program).count("check(") == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_recomputed_for_backward_may_check(reentrant):
    class Recomputes(CheckedGraph):
        def build(self, x, y):
            def checked(h):
                if (h.abs() > 1e3).any():
                    raise ValueError("inside")
                if h.sum().item() > 1e9:
                    raise ValueError("sum")
                return self.model(h)

            loss = F.cross_entropy(checkpoint(checked, x.clone().requires_grad_(), use_reentrant=reentrant), y)
            loss.backward()
            return loss

    graph = Recomputes(None)
    graph(X, Y)
    assert str(graph.program).count("check(") == 2
    assert_stops(graph, "inside")


def test_checks_can_be_left_out_and_put_back_without_another_capture():
    graph = CheckedGraph(asserts)
    graph(X, Y)
    with_checks = str(graph.program)
    graph.config.check_values = False
    graph(LARGE, Y)
    assert "check" not in str(graph.program)
    graph.config.check_values = True
    with pytest.raises(gz.CheckError):
        graph(LARGE, Y)
    assert str(graph.program) == with_checks
    assert len(graph._selection.programs.captures) == 1


def test_check_values_takes_true_or_false():
    graph = CheckedGraph(asserts)
    with pytest.raises(gz.ConfigError, match="True or False"):
        graph.config.check_values = "sometimes"


def test_a_program_with_checks_prints_and_parses_whatever_the_words():
    def words(self, x, loss):
        torch._assert((x < 1e9).all(), "a : b; c, 'd' \"e\" \\ [f] ; loss() = g\nh \N{SNOWMAN}")

    text = str(CheckedGraph(words).compile(X, Y).program)
    assert str(gz.parse(text)) == text


def test_a_program_that_writes_a_state_before_its_last_check_is_refused():
    graph = CheckedGraph(asserts).compile(X, Y).program.clone()
    check = next(node for node in graph.nodes if "check" in str(node.target))
    last = [node for node in graph.nodes if node.op == "call_function"][-1]
    last.append(check)
    with pytest.raises(gz.VerifyError, match="before 'check' is checked"):
        verify(graph, "here")


def test_a_fake_world_has_no_values_to_check():
    with fake_world(2):
        CheckedGraph(asserts, placement=gz.placement("cpu", range(2)))(LARGE[4:], Y[4:])


class Whitened(torch.optim.Optimizer):
    """Divides by the root of a matrix that must be positive definite; vectors by their size."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim == 2:
                    spread = p.grad.T @ p.grad
                    root = torch.linalg.cholesky(torch.eye(len(spread)) * 4 - spread)
                    p.sub_(torch.linalg.solve_triangular(root, p.grad.T, upper=False).T, alpha=group["lr"])
                elif p.grad.norm() > 1e-3:
                    p.sub_(torch.linalg.inv(p.grad.square().sum().view(1, 1))[0] * p.grad, alpha=group["lr"])


class Whitening(gz.Graph):
    def __init__(self, stage=0, early=False, amp=False):
        super().__init__(gz.placement("cpu", range(2), virtual=True))
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.add_optimizer(Whitened(self.model.parameters(), lr=0.1))
        self.config.enable_zero(stage > 0, stage=stage or 2)
        self.config.set_optimizer_in_backward(early)
        self.config.enable_amp(amp, dtype=torch.float16, init_scale=8.0)

    def build(self, x, y):
        loss = F.mse_loss(self.model(x), y)
        loss.backward()
        return loss


@pytest.mark.parametrize(("stage", "early"), [(0, False), (2, True), (3, False)])
def test_a_matrix_that_an_optimizer_cannot_factor_stops_the_step(stage, early):
    graph, twin = Whitening(stage, early), Whitening()
    optimizer = Whitened(twin.model.parameters(), lr=0.1)
    for scale in (1.0, 1e3, 1.0):
        if scale > 1:
            before = all_of(graph)
            with pytest.raises(gz.CheckError, match=r"LinAlgError: linalg.cholesky[\s\S]*test_checks.py:\d+ in step"):
                graph(X, X * scale)
            assert_same(before, all_of(graph))
            continue
        graph(X, X)
        F.mse_loss(twin.model(X), X).backward()
        optimizer.step()
        optimizer.zero_grad()
        for ours, theirs in zip(
            graph.full_state_dict()["modules"]["model"].values(), twin.model.parameters(), strict=True
        ):
            torch.testing.assert_close(ours, theirs.detach())
    assert str(graph.program).count("check(") == 2  # a line of step, whatever the number of parameters


def test_an_overflow_that_skips_a_step_skips_its_checks():
    graph = Whitening(amp=True)
    graph(X, X)
    before = [p.clone() for p in graph.model.parameters()]
    graph(X * float("inf"), X)
    assert graph.skipped
    assert_same(before, graph.model.parameters())


# ---- what is known while build is traced


def known(self, x, loss):
    assert torch.tensor(2).item() + int(torch.tensor([3])) == 5
    assert torch.tensor([[1, 2], [3, 4]]).sum(0).tolist() == [4, 6]
    assert (torch.arange(6).view(2, 3) * 2).amax().item() == 10
    assert float(torch.zeros(2).sum()) == 0.0
    assert x[: torch.tensor(3)].shape[0] == torch.tensor(3)
    assert f"{torch.tensor(2)}" == "2"
    assert range(torch.tensor(4)) == range(4)
    shapes = torch.as_tensor([[2, 4], [1, 4]])
    assert [h * w for h, w in shapes] == [8, 4]
    assert torch.equal(shapes.prod(1), torch.tensor([8, 4]))


def test_a_tensor_of_pythons_numbers_has_a_value_while_build_is_traced():
    program = CheckedGraph(known).compile(X, Y).program
    assert "check" not in str(program)


def test_a_constant_that_a_value_was_written_into_is_known_no_more():
    def writes(self, x, loss):
        total = torch.zeros(())
        total += x.sum()
        return 1 if total.item() > 0 else 2

    with pytest.raises(gz.CaptureError, match="reads a value"):
        CheckedGraph(writes)(X, Y)


def test_the_text_of_a_tensor_says_its_form(capsys):
    def tells(self, x, loss):
        print(f"{x} {loss:.3f} {x.max().item():.2f} {[x.sum()]} {loss!r}")

    CheckedGraph(tells).compile(X, Y)
    scalar = "tensor(..., size=(), dtype=torch.float32)"
    number = "tensor(..., size=(), dtype=torch.float64).item()"
    said = capsys.readouterr().out
    assert said == f"tensor(..., size=(8, 4), dtype=torch.float32) {scalar} {number} [{scalar}] {scalar}\n"


# ---- numbers


class Scaled(gz.Graph):
    def __init__(self, scale):
        super().__init__(gz.placement("cpu", range(2), virtual=True))
        self.scale = scale

    def build(self, x):
        return self.scale(x)


NUMBERS = {
    "times": lambda x: x * x.max().item(),
    "in place": lambda x: x.clone().mul_(x.max().item()),
    "augmented": lambda x: [y := x.clone(), (z := y), z.__iadd__(x.sum().item()), y][-1],
    "integers": lambda x: x.long() * 3 + x.max().item(),
    "halves": lambda x: x.half() * x.double().sum().item(),
    "of python": lambda x: x + (3 - x.sum().item() / 4) % 5 - abs(-x.min().item()),
    "of a count": lambda x: x / (x > 0).sum().item(),
    "of counts": lambda x: x * ((x > 0).sum().item() // 2) + (x > 1).sum().item() / 2,
    "powers": lambda x: x * x.max().item() ** 2 + 2 ** x.min().item() - 5 ** (x > 0).sum().item() ** -1 * 3**0.5,
    "of a function": lambda x: torch.where(x > x.mean().item(), x, torch.minimum(x, x.sum() * 0)),
    "rounded": lambda x: x * round(x.sum().item(), 1),
    "compared": lambda x: x + (16777217 + 0 * (x > 9).sum().item() > 16777216.5) * 1.0,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_of_a_tensor_computes_as_pythons_number_does(name):
    expected, found = NUMBERS[name](X), Scaled(NUMBERS[name])(X)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected)


def test_a_number_stays_what_it_was_when_its_tensor_is_written_to():
    def counts(x):
        total, count = x.sum().double().reshape(1), (x > 0).sum()
        before, number = total.item(), count.item()
        total += 1
        count += 1
        return x * before * number + total * count

    torch.testing.assert_close(Scaled(counts)(X), counts(X), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("function", "refused", "computed"),
    [
        (lambda n: n**0.5, -2.0, [0.0, 4.0, float("inf")]),
        (lambda n: 10.0**n, 400.0, [-400.0, float("inf"), -float("inf")]),
        (lambda n: n**-1, 0, [-2, 4]),
        (lambda n: 1 / n, 0.0, [-2.0, float("inf")]),
        (lambda n: 5.0 % n, 0, [3]),
        (lambda n: 7 // n, 0, [3]),
        (lambda n: divmod(7, n)[1], 0, [3]),
        (lambda n: n * n, 4 * 10**9, [-3 * 10**9, 0]),
        (lambda n: n**30, 10, [2, -4]),
        (lambda n: n + n, 5 * 10**18, [4 * 10**18]),
        (lambda n: 4 * 10**18 - n, -6 * 10**18, [6 * 10**18]),
        (lambda n: -n, -(2**63), [7, -(10**18)]),
        (lambda n: abs(n), -(2**63), [7, -(10**18)]),
        (lambda n: n // -1, -(2**63), [7]),
        (lambda n: round(n), float("inf"), [2.4, -0.5]),
    ],
)
def test_a_step_raises_where_arithmetic_on_pythons_numbers_does(function, refused, computed):
    graph = Scaled(lambda x: x * function(x.max().item()))
    for number in computed:
        expected = torch.full((2,), number) * function(number)
        torch.testing.assert_close(graph(torch.full((2,), number)), expected, equal_nan=True)
    with pytest.raises(gz.CheckError, match="ArithmeticError: a|ZeroDivisionError: division|OverflowError: an"):
        graph(torch.full((2,), refused))


def test_a_number_carries_no_gradient():
    def scaled(self, x, loss):
        loss *= 1.0 + 0.0 * loss.item()

    plain, numbered = CheckedGraph(lambda self, x, loss: None), CheckedGraph(scaled)
    plain(X, Y), numbered(X, Y)
    assert_same(all_of(plain), all_of(numbered))


@pytest.mark.parametrize(
    "look",
    [
        lambda n: 1 if n > 0 else 2,
        lambda n: [1, 2][n],
        lambda n: range(n),
        lambda n: float(n),
        lambda n: int(n),
        lambda n: {n: 1},
        lambda n: n in (1, 2),
        lambda n: max(n, 1),
        lambda n: f"{n > 0}" and n > 0 and 1,
        lambda n: math.sqrt(n),
        lambda n: f"{1.0:.2f} %.2f" % n,
    ],
)
def test_what_must_know_the_number_is_refused_at_its_line(look):
    with pytest.raises(gz.CaptureError, match=r"reads a value[\s\S]*test_checks.py:"):
        Scaled(lambda x: look(x.long().sum().item()))(X)


def test_a_number_is_no_result_of_build():
    with pytest.raises(gz.CaptureError, match="reads a value"):
        Scaled(lambda x: x.sum().item())(X)
