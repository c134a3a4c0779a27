"""EA-Pipe on models that are not an nn.Sequential: traced and split, against equivalent ones that are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_pipesync import EAPipe, EAPipeStrategy
from tests.support.ea_pipe_runs import OPTIMIZERS
from tests.support.harness import assert_refused, on_ranks, raised
from tests.support.lightning_models import dataset, trainer, val_loader
from tests.support.models import assert_same, batch

STEPS = 8


class Residual(nn.Module):
    """Convolutions with BatchNorm and dropout, and skip connections, of which one spans all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.3))
            for _ in range(2)
        )
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = F.relu(self.norm(self.stem(x)), inplace=True)
        first = x
        for block in self.blocks:
            x = x + block(x)
        return self.head((scale * (x + first)).mean((2, 3)))

    def as_sequential(self) -> nn.Sequential:
        def begin(x: Tensor) -> tuple[Tensor, Tensor]:
            x = F.relu(self.norm(self.stem(x)), inplace=True)
            return x + self.blocks[0](x), x

        def go_on(values: tuple[Tensor, Tensor]) -> Tensor:
            x, first = values
            return (x + self.blocks[1](x) + first).mean((2, 3))

        layers = (Of(begin, self.stem, self.norm, self.blocks[0]), Of(go_on, self.blocks[1]), self.head)
        return nn.Sequential(*layers)


class Block(nn.Module):
    """Attention under a mask, as the parameters of functions; a part of it without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.queries, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.queries(self.norm(x)).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, dim=-1)
        with torch.no_grad():
            gate = torch.sigmoid(x.mean(dim=-1, keepdim=True))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.2 if self.training else 0.0)
        return x + gate * F.dropout(self.out(attended.transpose(1, 2).flatten(2)), 0.2, self.training)


class Transformer(nn.Module):
    """Uses a view of a weight at its begin and at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(10, 8), nn.Parameter(torch.randn(9, 8))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x, mask, positions = self.begin(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x.mean(dim=1) + positions[0])

    def begin(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        positions = self.positions[: tokens.shape[1]]
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        return self.embed(tokens) + positions, mask, positions

    def as_sequential(self) -> nn.Sequential:
        def begin(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            x, mask, positions = self.begin(tokens)
            return self.blocks[0](x, mask), mask, positions

        def go_on(values: tuple[Tensor, Tensor, Tensor]) -> Tensor:
            x, mask, positions = values
            return self.blocks[1](x, mask).mean(dim=1) + positions[0]

        positions = nn.ParameterList([self.positions])
        layers = (Of(begin, self.embed, positions, self.blocks[0]), Of(go_on, self.blocks[1]), self.head)
        return nn.Sequential(*layers)


class Of(nn.Module):
    """A function and the modules that it uses."""

    def __init__(self, function: Callable[[Any], Any], *used: nn.Module) -> None:
        super().__init__()
        self.function, self.used = function, nn.ModuleList(used)

    def forward(self, value: Any) -> Any:
        return self.function(value)


MODELS: dict[str, type[Residual] | type[Transformer]] = {"residual": Residual, "transformer": Transformer}
#: With these names, and with these indices of the equivalent Sequential, the later stages begin.
CUTS: dict[int, tuple[tuple[str, ...], tuple[int, ...]]] = {2: (("blocks.1",), (1,)), 3: (("blocks.1", "head"), (1, 2))}


def data(name: str, t: int) -> tuple[Tensor, Tensor]:
    """The last batches are smaller."""
    x, y = batch(t, 0, size=8 if t < 6 else 3)
    return (x.view(-1, 1, 2, 3) if name == "residual" else x.abs().long().clamp(max=9)), y


def model_of(name: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return MODELS[name]()


def run(engine: EAPipe, layers: nn.Module, name: str, steps: range) -> list[Any]:
    """Trains, and validates in the midst of it; returns losses and outputs, where the last stage is."""
    seen = []
    for t in steps:
        seen.append(engine.train_batch(data(name, t)))
        if t == 4:
            layers.eval()
            seen.append(engine.forward(data(name, 50)[0]))
            layers.train()
    return seen


def train(name: str, num_stages: int, traced: bool, virtual: bool, **settings: Any) -> dict[str, Any]:
    model = model_of(name, seed=0 if virtual else torch.distributed.get_rank())  # rank 0's weights count
    layers = model if traced else model.as_sequential()
    engine = EAPipe(
        layers,
        F.cross_entropy,
        OPTIMIZERS["sgd"],
        split=CUTS[num_stages][0 if traced else 1],
        virtual_stages=num_stages if virtual else None,
        **settings,
    )
    seen = run(engine, layers, name, range(STEPS))
    engine.gather()
    layers.eval()
    output = engine.forward(data(name, 60)[0])
    engine.detach()
    with torch.no_grad():
        eager = model(data(name, 60)[0])
    return {"seen": seen, "state": model.state_dict(), "output": output, "eager": eager, "said": engine.describe()}


def assert_same_training(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert_same(other["state"], one["state"])
    for value, expected in zip(one["seen"], other["seen"], strict=True):
        assert torch.equal(value, expected)


@pytest.mark.parametrize(
    ("name", "settings", "autocast"),
    [
        ("residual", {}, False),
        ("residual", {"clip_norm": 0.1, "replicas": 5}, True),
        ("transformer", {}, True),
        ("transformer", {"algorithm": "naive"}, False),
    ],
)
def test_traced_stages_are_those_of_a_sequential(name: str, settings: dict[str, Any], autocast: bool) -> None:
    """Bit for bit, on three stages: dropout, BatchNorm's averages, smaller batches, values for the stage after next."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        traced, sequential = (train(name, 3, traced, virtual=True, **settings) for traced in (True, False))
    assert_same_training(traced, sequential)
    assert torch.equal(traced["output"], sequential["output"])


def test_a_state_of_another_split_is_refused() -> None:
    make = partial(EAPipe, loss=F.cross_entropy, optimizer_factory=OPTIMIZERS["sgd"], virtual_stages=2)
    engine = make(model_of("residual"), split=CUTS[2][0])
    engine.train_batch(data("residual", 0))
    with pytest.raises(ValueError, match=r"split_names=\('blocks\.1',\)"):
        make(model_of("residual"), split=("head",)).load_state_dict(engine.state_dict())


# --- on processes -----------------------------------------------------------------------------------------------------


def train_models() -> dict[str, dict[str, Any]]:
    return {name: train(name, 2, traced=True, virtual=False) for name in MODELS}


def test_processes_are_virtual_stages() -> None:
    """Bit for bit, also in evaluation, which is that of the master without dropout."""
    outcomes = on_ranks(train_models, 2)
    for name in MODELS:
        virtual = train(name, 2, traced=True, virtual=True)
        first, second = (outcome[name] for outcome in outcomes)
        assert_same_training(first, virtual)
        assert_same_training({**second, "seen": []}, {**virtual, "seen": []})
        assert torch.equal(first["output"], first["eager"])
        assert second["output"] is None
        assert "stage 2 of 2 on rank 0: layers from blocks.1, " in first["said"]


# --- in the Trainer ---------------------------------------------------------------------------------------------------


class Images(pl.LightningModule):
    """Any LightningModule; its network takes more than a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model_of("residual")
        self.seen: list[list[int]] = []

    def loss(self, batch: Any) -> Tensor:
        indices, x, y = batch
        if self.training:
            self.seen.append(indices.tolist())
        return F.cross_entropy(self.net(x.view(-1, 1, 2, 3), scale=0.5), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS["sgd"](self.parameters())


def fit_images(directory: Path) -> dict[str, Any]:
    """Two epochs, and again from the checkpoint after the first; the last batch of each is smaller."""
    found = {}
    for case, path in (("whole", None), ("resumed", directory / "epoch=0.ckpt")):
        model = Images()
        saving = ModelCheckpoint(directory, filename="{epoch}", save_top_k=-1)
        run = trainer(
            EAPipeStrategy(module="net", split=CUTS[2][0]),
            2,
            directory,
            enable_checkpointing=True,
            callbacks=[saving] if path is None else [],
            num_sanity_val_steps=1,
        )
        loader = DataLoader(dataset(), batch_size=5, shuffle=True)
        run.fit(model, loader, val_loader(), ckpt_path=path)
        found[case] = {"state": model.state_dict(), "seen": model.seen, "val_loss": run.callback_metrics["val_loss"]}
    for words, settings in (
        ("split= needs module=", {}),
        ("there is no such submodule", {"module": "nets"}),
        ("that is a Residual. Any other submodule is traced", {"module": "net", "split": "balanced"}),
        ("It has: stem, norm, blocks, head", {"module": "net", "split": ("x",)}),
    ):
        run = trainer(EAPipeStrategy(**{"split": CUTS[2][0], **settings}), 2, directory)
        found[words] = raised(lambda run=run: run.fit(Images(), val_loader()))
    return found


def test_a_trainer_with_a_traced_module(tmp_path: Path) -> None:
    """Its checkpoints have the user's own names, and a resumed run is the uninterrupted one bit for bit."""
    outcomes = on_ranks(fit_images, 2, tmp_path, init=False)
    whole, resumed = outcomes[0].pop("whole"), outcomes[0].pop("resumed")
    assert set(outcomes[1]) == {"whole", "resumed", *outcomes[0]}
    model = Images()
    engine = EAPipe(
        Of(lambda x: model.net(x, scale=0.5), model.net),
        F.cross_entropy,
        OPTIMIZERS["sgd"],
        virtual_stages=2,
        split=("used.0.blocks.1",),
    )
    for indices in whole["seen"]:
        _, x, y = dataset()[torch.tensor(indices)]
        engine.train_batch((x.view(-1, 1, 2, 3), y))
    engine.flush()
    for name, value in model.state_dict().items():
        assert torch.equal(whole["state"][name], value), name
        assert torch.equal(resumed["state"][name], value), name
        assert torch.equal(outcomes[1]["whole"]["state"][name], value), name
    assert resumed["seen"] == whole["seen"][13:]
    plain = Images()
    plain.load_state_dict(torch.load(tmp_path / "epoch=1.ckpt", weights_only=True)["state_dict"])
    [validated] = trainer("auto", 1, tmp_path).validate(plain, val_loader(), verbose=False)
    assert validated["val_loss"] == pytest.approx(float(whole["val_loss"]))
    for outcome in outcomes:
        assert_refused({words: failed for words, failed in outcome.items() if words not in ("whole", "resumed")})
