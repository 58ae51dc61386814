"""Training recipes written by hand: what people do with models beside forward, loss, backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from zoo.trial import Trial, descend, trainable

BATCH, WIDTH, CLASSES, WORDS, LENGTH = 8, 16, 8, 32, 8
Batch = dict[str, Tensor]


def perceptron(inputs: int = WIDTH, outputs: int = CLASSES) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, outputs))


class Speaker(nn.Module):
    """A causal transformer over words that takes padding: ids [b, t] -> logits [b, t, words]."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        hidden = self.encoder(self.embedding(ids), mask=causal, src_key_padding_mask=padding)
        logits: Tensor = self.head(hidden)
        return logits


def words(*shape: int) -> Tensor:
    return torch.randint(1, WORDS, shape)


def features(step: int) -> Batch:
    del step
    return {"x": torch.randn(BATCH, WIDTH), "y": torch.randint(0, CLASSES, (BATCH,))}


def gan() -> Trial:
    """Both players' losses in one step, an optimizer each."""
    module = nn.ModuleDict({"maker": perceptron(8, WIDTH), "judge": perceptron(WIDTH, 1)})

    def train(module: Any, batch: Batch) -> Any:
        fake = module["maker"](batch["z"])
        real = module["judge"](batch["x"])
        judged = module["judge"](fake.detach())
        judge_loss = F.softplus(-real).mean() + F.softplus(judged).mean()
        judge_loss.backward()
        for p in module["judge"].parameters():
            p.requires_grad_(False)
        maker_loss = F.softplus(-module["judge"](fake)).mean()
        maker_loss.backward()
        for p in module["judge"].parameters():
            p.requires_grad_(True)
        return judge_loss, maker_loss

    return Trial(
        module,
        lambda step: {"x": torch.randn(BATCH, WIDTH), "z": torch.randn(BATCH, 8)},
        train,
        lambda module: [list(module["maker"].parameters()), list(module["judge"].parameters())],
        lambda module, batch: F.softplus(-module["judge"](module["maker"](batch["z"]))).mean(),
    )


def wasserstein() -> Trial:
    """A critic with a gradient penalty: a gradient of a gradient."""
    module = perceptron(WIDTH, 1)

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        mixed = (batch["mix"] * batch["x"] + (1 - batch["mix"]) * batch["fake"]).requires_grad_(True)
        (slope,) = torch.autograd.grad(module(mixed).sum(), mixed, create_graph=True)
        penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
        return module(batch["fake"]).mean() - module(batch["x"]).mean() + 10 * penalty

    def draw(step: int) -> Batch:
        return {"x": torch.randn(BATCH, WIDTH), "fake": torch.randn(BATCH, WIDTH), "mix": torch.rand(BATCH, 1)}

    return by_loss(module, draw, loss)


def by_loss(module: nn.Module, draw: Callable[[int], Batch], loss: Callable[[Any, Batch], Tensor]) -> Trial:
    def train(module: nn.Module, batch: Batch) -> Tensor:
        found = loss(module, batch)
        found.backward()
        return found

    return Trial(module, draw, train, loss=loss)


def preferences() -> Trial:
    """DPO: a policy against a frozen reference, over chosen and rejected answers."""
    policy = Speaker()
    reference = copy.deepcopy(policy).requires_grad_(False)
    module = nn.ModuleDict({"policy": policy, "reference": reference})

    def likelihood(model: nn.Module, ids: Tensor) -> Tensor:
        logits = model(ids)[:, :-1].log_softmax(-1)
        return logits.gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1)

    def loss(module: Any, batch: Batch) -> Tensor:
        better, worse = (likelihood(module["policy"], batch[k]) for k in ("chosen", "rejected"))
        with torch.no_grad():
            base_better, base_worse = (likelihood(module["reference"], batch[k]) for k in ("chosen", "rejected"))
        return -F.logsigmoid(0.1 * ((better - base_better) - (worse - base_worse))).mean()

    return by_loss(module, lambda step: {"chosen": words(BATCH, LENGTH), "rejected": words(BATCH, LENGTH)}, loss)


def distillation() -> Trial:
    module = nn.ModuleDict({"student": perceptron(), "teacher": perceptron().requires_grad_(False)})

    def loss(module: Any, batch: Batch) -> Tensor:
        with torch.no_grad():
            wanted = (module["teacher"](batch["x"]) / 2).softmax(-1)
        logits = module["student"](batch["x"])
        soft = F.kl_div((logits / 2).log_softmax(-1), wanted, reduction="batchmean")
        return F.cross_entropy(logits, batch["y"]) + 4 * soft

    return by_loss(module, features, loss)


def contrastive() -> Trial:
    """Two towers and a temperature; every sample's negatives are the whole batch."""
    module = nn.ModuleDict({"left": perceptron(), "right": perceptron()})
    module.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))

    def loss(module: Any, batch: Batch) -> Tensor:
        left, right = F.normalize(module["left"](batch["x"])), F.normalize(module["right"](batch["z"]))
        scores = module.scale.exp() * left @ right.T
        target = torch.arange(scores.shape[0])
        return (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2

    return by_loss(module, lambda step: {"x": torch.randn(BATCH, WIDTH), "z": torch.randn(BATCH, WIDTH)}, loss)


def q_learning() -> Trial:
    """A target network that follows slowly."""
    online = perceptron()
    module = nn.ModuleDict({"online": online, "target": copy.deepcopy(online).requires_grad_(False)})

    def loss(module: Any, batch: Batch) -> Tensor:
        with torch.no_grad():
            best = module["online"](batch["next"]).argmax(-1, keepdim=True)
            value = module["target"](batch["next"]).gather(-1, best).squeeze(-1)
            wanted = batch["reward"] + 0.9 * (1 - batch["ended"]) * value
        found = module["online"](batch["x"]).gather(-1, batch["action"][:, None]).squeeze(-1)
        return F.smooth_l1_loss(found, wanted)

    def train(module: Any, batch: Batch) -> Tensor:
        found = loss(module, batch)
        found.backward()
        follow(module["target"], module["online"], 0.05)
        return found

    def draw(step: int) -> Batch:
        return {
            "x": torch.randn(BATCH, WIDTH), "next": torch.randn(BATCH, WIDTH), "reward": torch.randn(BATCH),
            "ended": torch.randint(0, 2, (BATCH,)).to(torch.float64), "action": torch.randint(0, CLASSES, (BATCH,)),
        }  # fmt: skip

    return Trial(module, draw, train, loss=loss)


@torch.no_grad()
def follow(slow: nn.Module, fast: nn.Module, rate: float) -> None:
    for s, f in zip(slow.parameters(), fast.parameters(), strict=True):
        s.lerp_(f, rate)


def policy_gradient() -> Trial:
    """PPO's clipped ratio, a value head and an entropy bonus."""
    module = nn.ModuleDict(
        {"body": perceptron(WIDTH, WIDTH), "policy": nn.Linear(WIDTH, 4), "value": nn.Linear(WIDTH, 1)}
    )

    def loss(module: Any, batch: Batch) -> Tensor:
        hidden = module["body"](batch["x"])
        chances = module["policy"](hidden).log_softmax(-1)
        ratio = (chances.gather(-1, batch["action"][:, None]).squeeze(-1) - batch["before"]).exp()
        gain = batch["advantage"]
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        clipped = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        value = F.mse_loss(module["value"](hidden).squeeze(-1), batch["returned"])
        return clipped + 0.5 * value + 0.01 * (chances.exp() * chances).sum(-1).mean()

    def draw(step: int) -> Batch:
        return {
            "x": torch.randn(BATCH, WIDTH), "action": torch.randint(0, 4, (BATCH,)), "before": -torch.rand(BATCH),
            "advantage": torch.randn(BATCH), "returned": torch.randn(BATCH),
        }  # fmt: skip

    return by_loss(module, draw, loss)


def inner_steps() -> Trial:
    """MAML: gradients through two steps of descent."""

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        fast = dict(module.named_parameters())
        for _ in range(2):
            inner = F.mse_loss(functional_call(module, fast, (batch["x"],)), batch["y"])
            slopes = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
            fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), slopes, strict=True)}
        return F.mse_loss(functional_call(module, fast, (batch["x2"],)), batch["y2"])

    def draw(step: int) -> Batch:
        return {name: torch.randn(BATCH, WIDTH if name[0] == "x" else 2) for name in ("x", "y", "x2", "y2")}

    return by_loss(perceptron(WIDTH, 2), draw, loss)


def averaged_teacher() -> Trial:
    """BYOL: a predictor looks at a slow copy of its own network."""
    student = perceptron(WIDTH, WIDTH)
    module = nn.ModuleDict({
        "student": student, "predictor": perceptron(WIDTH, WIDTH),
        "teacher": copy.deepcopy(student).requires_grad_(False)
    })  # fmt: skip

    def loss(module: Any, batch: Batch) -> Tensor:
        guess = module["predictor"](module["student"](batch["x"]))
        with torch.no_grad():
            wanted = module["teacher"](batch["z"])
        return 2 - 2 * F.cosine_similarity(guess, wanted).mean()

    def train(module: Any, batch: Batch) -> Tensor:
        found = loss(module, batch)
        found.backward()
        follow(module["teacher"], module["student"], 0.01)
        return found

    return Trial(
        module, lambda step: {"x": torch.randn(BATCH, WIDTH), "z": torch.randn(BATCH, WIDTH)}, train, loss=loss
    )


def padded(checkpointed: bool = False) -> Trial:
    """Sentences of unequal length, a mean over the words that are there."""

    def loss(module: Any, batch: Batch) -> Tensor:
        ids, padding = batch["ids"], batch["padding"]
        logits = checkpoint(module, ids, padding, use_reentrant=False) if checkpointed else module(ids, padding)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].masked_fill(padding[:, 1:], -100).flatten())

    def draw(step: int) -> Batch:
        length = torch.randint(2, LENGTH + 1, (BATCH, 1))
        return {"ids": words(BATCH, LENGTH), "padding": torch.arange(LENGTH)[None] >= length}

    return by_loss(Speaker(), draw, loss)


def autoencoder() -> Trial:
    """A variational autoencoder whose noise is an input."""
    module = nn.ModuleDict({"encoder": perceptron(WIDTH, 8), "decoder": perceptron(4, WIDTH)})

    def loss(module: Any, batch: Batch) -> Tensor:
        mean, spread = module["encoder"](batch["x"]).chunk(2, -1)
        made = module["decoder"](mean + batch["noise"] * (0.5 * spread).exp())
        return (
            F.mse_loss(made, batch["x"], reduction="sum") / len(made)
            - 0.5 * (1 + spread - mean**2 - spread.exp()).mean()
        )

    return by_loss(module, lambda step: {"x": torch.randn(BATCH, WIDTH), "noise": torch.randn(BATCH, 4)}, loss)


def noise_prediction() -> Trial:
    """Diffusion: a schedule that is looked up, and the noise that was added."""
    module = nn.ModuleDict({"net": perceptron(WIDTH + 4, WIDTH), "times": nn.Embedding(10, 4)})
    module.register_buffer("kept", torch.linspace(0.99, 0.1, 10))

    def loss(module: Any, batch: Batch) -> Tensor:
        kept = module.kept[batch["t"]][:, None]
        noisy = kept.sqrt() * batch["x"] + (1 - kept).sqrt() * batch["noise"]
        return F.mse_loss(module["net"](torch.cat([noisy, module["times"](batch["t"])], -1)), batch["noise"])

    def draw(step: int) -> Batch:
        return {"x": torch.randn(BATCH, WIDTH), "noise": torch.randn(BATCH, WIDTH), "t": torch.randint(0, 10, (BATCH,))}

    return by_loss(module, draw, loss)


def triplets() -> Trial:
    """Hardest negatives within the batch, found by distance."""

    def loss(module: Any, batch: Batch) -> Tensor:
        found = F.normalize(module(batch["x"]))
        apart = torch.cdist(found, found)
        same = batch["y"][:, None] == batch["y"][None]
        far = apart.masked_fill(~same, -1.0).max(1).values
        near = apart.masked_fill(same, 9.0).min(1).values
        return F.relu(far - near + 0.2).mean()

    return by_loss(perceptron(), features, loss)


def several_tasks() -> Trial:
    """Losses weighed by what each is uncertain of, one body frozen below a layer, gradients clipped by hand."""
    module = nn.ModuleDict(
        {"body": perceptron(WIDTH, WIDTH), "one": nn.Linear(WIDTH, CLASSES), "two": nn.Linear(WIDTH, 1)}
    )
    module["body"][0].requires_grad_(False)
    module.register_parameter("doubt", nn.Parameter(torch.zeros(2)))

    def loss(module: Any, batch: Batch) -> Tensor:
        hidden = module["body"](batch["x"])
        losses = torch.stack([F.cross_entropy(module["one"](hidden), batch["y"]), module["two"](hidden).pow(2).mean()])
        return (losses * (-module.doubt).exp() + module.doubt).sum()

    def train(module: Any, batch: Batch) -> Tensor:
        found = loss(module, batch)
        found.backward()
        nn.utils.clip_grad_norm_(trainable(module), 0.5)
        return found

    return Trial(module, features, train, loss=loss)


def recurrent(kind: Callable[..., nn.Module]) -> Trial:
    module = nn.ModuleDict(
        {
            "embedding": nn.Embedding(WORDS, WIDTH),
            "core": kind(WIDTH, WIDTH, 2, batch_first=True),
            "head": nn.Linear(WIDTH, WORDS),
        }
    )

    def loss(module: Any, batch: Batch) -> Tensor:
        hidden = module["core"](module["embedding"](batch["ids"]))[0]
        return F.cross_entropy(module["head"](hidden).transpose(1, 2), batch["next"])

    return by_loss(module, lambda step: {"ids": words(BATCH, LENGTH), "next": words(BATCH, LENGTH)}, loss)


def speech() -> Trial:
    """CTC over a recurrent network."""
    module = nn.ModuleDict(
        {"core": nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True), "head": nn.Linear(2 * WIDTH, CLASSES)}
    )

    def loss(module: Any, batch: Batch) -> Tensor:
        chances = module["head"](module["core"](batch["x"])[0]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(chances, batch["y"], (12,) * BATCH, (3,) * BATCH)

    return by_loss(
        module, lambda step: {"x": torch.randn(BATCH, 12, WIDTH), "y": torch.randint(1, CLASSES, (BATCH, 3))}, loss
    )


def plain() -> Trial:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = perceptron()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.body(x), y, label_smoothing=0.1)

    return Trial(Classifier(), features, descend)


RECIPES: dict[str, Callable[[], Trial]] = {
    "classifier": plain, "gan": gan, "wgan-gp": wasserstein, "dpo": preferences, "distillation": distillation,
    "contrastive": contrastive, "q-learning": q_learning, "ppo": policy_gradient, "maml": inner_steps,
    "byol": averaged_teacher, "padded": padded, "padded-checkpointed": partial(padded, True), "vae": autoencoder,
    "diffusion": noise_prediction, "triplets": triplets, "multi-task": several_tasks,
    "lstm": partial(recurrent, nn.LSTM), "gru": partial(recurrent, nn.GRU), "ctc": speech,
}  # fmt: skip


def cases() -> dict[str, tuple[str, Callable[[], Trial]]]:
    return {f"recipes/{name}": ("recipes", make) for name, make in RECIPES.items()}
