"""`Fabric(strategy=...)` on real processes against the methods in a plain loop, and against `strategy="ddp"`."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from lightning_pipesync import DeAR, EAPipe, PipeSGD, SelDPSampler, SelSync
from lightning_pipesync.fabric import DeARFabricStrategy, PipeSGDFabricStrategy, SelSyncFabricStrategy
from tests.harness import assert_refused, launch, raised
from tests.lightning_models import LOCAL, dataset
from tests.models import batch, seeded_mlp, state

STEPS = 8
NAMES = ["dear", "pipe_sgd", "selsync"]
METHODS: dict[str, Any] = {"dear": DeAR, "pipe_sgd": PipeSGD, "selsync": SelSync}
STRATEGIES: dict[str, Any] = {
    "dear": DeARFabricStrategy,
    "pipe_sgd": PipeSGDFabricStrategy,
    "selsync": SelSyncFabricStrategy,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "dear": {"fusion": "buffer", "bucket_mb": 1e-4},
    "pipe_sgd": {"compression": "int8"},
    "selsync": {"delta": 0.3, "smoothing": 0.5, "compression": "bf16"},
}
#: With these a method is synchronous SGD.
SYNCHRONOUS: dict[str, dict[str, Any]] = {
    "dear": {},
    "pipe_sgd": {"staleness": 0},
    "selsync": {"delta": 0.0, "aggregation": "gradients"},
}
DROPPED = "gradients that were on their way are dropped, and the pipeline fills anew."


def launched(name: str, settings: Mapping[str, Any] | None = None, **kwargs: Any) -> Fabric:
    """A launched Fabric on the CPU, whose strategy is given by its name, or by its settings; the processes exist."""
    strategy = name if settings is None else STRATEGIES[name](**settings)
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, **kwargs)
    fabric.launch()
    return fabric


def assert_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    x, y = batch(step, rank)
    return nn.functional.cross_entropy(model(x), y)


def in_turns(model: nn.Module) -> list[SGD]:
    """Two optimizers that are stepped in turns."""
    first, second = (SGD(part.parameters(), lr=0.1, momentum=0.9) for part in (model[0], model[2]))
    return [first, second]


def in_a_plain_loop(name: str) -> dict[str, Any]:
    """Trains with accumulation, clipping and schedules; each rank has weights of its own at first."""
    rank = int(os.environ["RANK"])
    model = seeded_mlp(rank)
    optimizers = in_turns(model)
    sync = METHODS[name](model, optimizers, **SETTINGS[name])
    schedulers, norms = [StepLR(optimizer, 5, 0.7) for optimizer in optimizers], []
    for i in range(STEPS):
        optimizer, scheduler = optimizers[i % 2], schedulers[i % 2]
        with sync.no_sync():
            loss_of(model, 2 * i, rank).backward()
        loss_of(model, 2 * i + 1, rank).backward()
        norms.append(sync.clip(0.5, optimizer))
        sync.step(optimizer=optimizer)
        scheduler.step()
        model.zero_grad()
    own = state(model)
    sync.flush()
    sync.detach()
    return {"own": own, "weights": state(model), "norms": norms}


def in_fabric(fabric: Fabric) -> dict[str, Any]:
    """The same in Fabric's words; model and optimizers are set up one by one."""
    rank, norms = fabric.global_rank, []
    model = seeded_mlp(rank)
    optimizers = list(in_turns(model))
    model = fabric.setup_module(model)
    optimizers = [fabric.setup_optimizers(optimizer) for optimizer in optimizers]
    schedulers = [StepLR(optimizer, 5, 0.7) for optimizer in optimizers]
    for i in range(2 * STEPS):
        optimizer, scheduler = optimizers[i // 2 % 2], schedulers[i // 2 % 2]
        accumulating = i % 2 == 0
        with fabric.no_backward_sync(model, enabled=accumulating):
            fabric.backward(loss_of(model, i, rank))
        if accumulating:
            continue
        norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.5))
        optimizer.step()
        model.zero_grad()
        scheduler.step()
    if not isinstance(fabric.strategy, tuple(STRATEGIES.values())):
        return {"weights": state(model), "norms": norms}
    own, metrics = state(model), fabric.strategy.method_of(optimizers[0]).metrics()
    with fabric.strategy.consolidated():
        weights = state(model)
    assert_equal(state(model), own)
    return {"own": own, "weights": weights, "norms": norms, "metrics": metrics}


def train_all() -> dict[str, dict[str, Any]]:
    outcomes = {"ddp": in_fabric(launched("ddp"))}
    for name in NAMES:
        outcomes |= {name: in_fabric(launched(name, SETTINGS[name])), f"{name}, plain": in_a_plain_loop(name)}
    return outcomes


@cache
def trained() -> list[dict[str, dict[str, Any]]]:
    return launch(train_all, 2, init=False)


@pytest.mark.parametrize("name", NAMES)
def test_model_and_optimizers_may_be_set_up_one_by_one(name: str) -> None:
    """Bit for bit the plain loop, before weights are consolidated and after it."""
    for of_rank in trained():
        actual, expected = of_rank[name], of_rank[f"{name}, plain"]
        assert_equal(actual["own"], expected["own"])
        assert_equal(actual["weights"], expected["weights"])
        assert_equal(actual["weights"], trained()[0][name]["weights"])
        assert actual["norms"] == expected["norms"]
        assert len(actual["norms"]) == STEPS
    [one, other] = [of_rank[name] for of_rank in trained()]
    if name == "selsync":
        assert 0 < one["metrics"]["lssr"] < 1
        assert not torch.equal(one["own"]["0.weight"], other["own"]["0.weight"]), "the last steps were local"
    else:
        assert_equal(one["own"], other["own"])


def test_dear_is_ddp() -> None:
    """But for the norm, which is put together in another order."""
    for of_rank in trained():
        torch.testing.assert_close(of_rank["dear"]["norms"], of_rank["ddp"]["norms"])
        torch.testing.assert_close(of_rank["dear"]["weights"], of_rank["ddp"]["weights"])


def scaling(scale: float) -> MixedPrecision:
    """16-mixed precision with its loss scaler on the CPU, where Fabric would quietly take bf16-mixed."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3))


def train_in_double_precision() -> dict[str, dict[str, Tensor]]:
    outcomes = {}
    for name in ["ddp", *NAMES]:
        fabric = launched(name, SYNCHRONOUS.get(name), precision="64-true")
        model = seeded_mlp()
        model, optimizer = fabric.setup(model, AdamW(model.parameters(), lr=0.01))
        for i in range(8):
            optimizer.zero_grad()
            fabric.backward(loss_of(model, i, fabric.global_rank))
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
        outcomes[name] = state(model)
    return outcomes


def test_double_precision() -> None:
    """All methods can be synchronous SGD."""
    for of_rank in launch(train_in_double_precision, 2, init=False):
        for name, weights in of_rank.items():
            torch.testing.assert_close(weights, of_rank["ddp"], msg=lambda text, name=name: f"{name}: {text}")


def train_from(
    fabric: Fabric, steps: range, path: Path, dropout: float = 0.0, save_at: int | None = None
) -> dict[str, Any]:
    """Trains steps, from a checkpoint unless they begin with 0; returns what the rank has then, and had at first."""
    torch.manual_seed(100 + fabric.global_rank + steps.start)
    model = nn.Sequential(seeded_mlp(steps.start + fabric.global_rank, batch_norm=dropout > 0), nn.Dropout(dropout))
    model, optimizer = fabric.setup(model, AdamW(model.parameters(), lr=0.01))
    progress = {"model": model, "optimizer": optimizer, "step": 0}
    remainder = fabric.load(path, progress) if steps.start else {}
    result = {"remainder": sorted(remainder), "step": progress["step"]}

    def train(steps: range) -> tuple[dict[str, Tensor], float]:
        for i in steps:
            optimizer.zero_grad()
            fabric.backward(loss_of(model, i, fabric.global_rank))
            optimizer.step()
            if i + 1 == save_at:
                fabric.save(path, {**progress, "step": save_at})
                fabric.save(path.with_suffix(".weights"), {"model": model})
        scaler = getattr(fabric.strategy.precision, "scaler", None)
        return state(model), 1.0 if scaler is None else scaler.get_scale()

    result["weights"], result["scale"] = train(steps)
    if save_at in steps:  # back to where it was saved
        fabric.load(path, progress)
        result["weights again"], _ = train(range(save_at, steps.stop))
        fabric.load(path.with_suffix(".weights"), {"model": model})
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        train(range(3))  # nothing is left of what was under way
        result["reloaded"] = {name: value.detach().clone() for name, value in model.named_parameters()}
    return result


def resume_all(directory: Path) -> dict[str, Any]:
    outcomes: dict[str, Any] = {}
    for name in NAMES:
        path, settings = directory / name, {"compression": "bf16", **SETTINGS[name]}
        for key, steps in (("whole", range(11)), ("resumed", range(5, 11))):
            fabric = launched(name, settings, plugins=[scaling(2.0**10)])
            outcomes[f"{name} {key}"] = train_from(fabric, steps, path, dropout=0.2, save_at=5)
        train_from(launched(name), range(3), directory / f"{name}, plain", save_at=2)
    return outcomes


def go_on_alone(directory: Path) -> dict[str, tuple[tuple[str, str] | None, list[str]]]:
    def go_on(name: str) -> tuple[tuple[str, str] | None, list[str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outcome = raised(lambda: train_from(launched(name), range(2, 4), directory / f"{name}, plain"))
        return outcome, [str(one.message) for one in caught if "there are 1" in str(one.message)]

    return {name: go_on(name) for name in NAMES}


def test_checkpoints(tmp_path: Path) -> None:
    """A resumed run is the uninterrupted one bit for bit, also in the same run, and with as many ranks only."""
    outcomes = launch(resume_all, 2, tmp_path, init=False)
    for of_rank in outcomes:
        for name in NAMES:
            whole, resumed = of_rank[f"{name} whole"], of_rank[f"{name} resumed"]
            assert_equal(resumed["weights"], whole["weights"])
            assert_equal(whole["weights again"], whole["weights"])
            weights_only = torch.load(tmp_path / f"{name}.weights", weights_only=True)
            assert list(weights_only) == ["model"]
            for key, value in whole["reloaded"].items():
                assert torch.equal(value, weights_only["model"][key.removeprefix("_forward_module.module.")]), key
            assert resumed["scale"] == whole["scale"] > 2.0**10
            assert (resumed["step"], resumed["remainder"]) == (5, [])
            saved = torch.load(tmp_path / f"{name}, plain", weights_only=True)
            assert saved["pipesync"]["ranks"].keys() == {0, 1}
    [alone] = launch(go_on_alone, 1, tmp_path, init=False)
    assert alone["dear"] == (None, [])
    outcome, [message] = alone["pipe_sgd"]
    assert outcome is None
    assert message == "The checkpoint is of 2 ranks, and there are 1: " + DROPPED
    assert_refused({"the state of 2 ranks": alone["selsync"][0]})
    one, other = (of_rank["selsync whole"]["weights"] for of_rank in outcomes)
    assert not torch.equal(one["0.0.weight"], other["0.0.weight"]), "each rank has gone on from weights of its own"


def validate_and_save(directory: Path) -> dict[str, Any]:
    """Replicas part after the first step; who looks at the weights finds their average, and training goes on."""
    fabric = launched("selsync", LOCAL)
    model = seeded_mlp(batch_norm=True)
    model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.1))
    seen = []
    for i in range(4):
        fabric.backward(loss_of(model, i, fabric.global_rank))
        optimizer.step()
        before = state(model)
        with fabric.strategy.consolidated():
            seen.append(state(model))
            fabric.save(directory / "within", {"model": model, "optimizer": optimizer})
            assert_equal(state(model), seen[-1])
        fabric.save(directory / "outside", {"model": model, "optimizer": optimizer})
        assert_equal(state(model), before)
    with pytest.raises(KeyError), fabric.strategy.consolidated():
        raise KeyError("a bug in the validation")
    assert_equal(state(model), before)
    return {"own": before, "seen": seen}


def test_validation(tmp_path: Path) -> None:
    one, other = launch(validate_and_save, 2, tmp_path, init=False)
    for average, same in zip(one["seen"], other["seen"], strict=True):
        assert_equal(average, same)
    for name, average in one["seen"][-1].items():
        if average.is_floating_point():
            torch.testing.assert_close(average, (one["own"][name] + other["own"][name]) / 2)
    assert not torch.equal(one["own"]["0.weight"], other["own"]["0.weight"])
    for file in ("within", "outside"):
        assert_equal(torch.load(tmp_path / file, weights_only=True)["model"], one["seen"][-1])


def train_two_models(fabric: Fabric) -> dict[str, Tensor]:
    """One of them computes its gradients in a closure; a third one is not trained."""
    rank = fabric.global_rank
    models = [seeded_mlp(seed + 3 * rank) for seed in range(3)]
    teacher = fabric.setup_module(models[2])
    first, first_optimizer = fabric.setup(models[0], SGD(models[0].parameters(), lr=0.1))
    second, second_optimizer = fabric.setup(models[1], SGD(models[1].parameters(), lr=0.1))

    def compute(model: nn.Module, step: int) -> Tensor:
        model.zero_grad()
        with torch.no_grad():
            target = teacher(batch(step, rank)[0])
        loss = nn.functional.mse_loss(model(batch(step, rank)[0]), target)
        fabric.backward(loss)
        return loss

    for i in range(3):
        compute(first, i)
        first_optimizer.step()
        assert second_optimizer.step(lambda step=i: compute(second, step)) > 0
    return state(nn.ModuleList(models))


def train_two_models_with_all() -> dict[str, dict[str, Tensor]]:
    return {name: train_two_models(launched(name, SYNCHRONOUS.get(name))) for name in ["ddp", *NAMES]}


def test_several_models() -> None:
    for of_rank in launch(train_two_models_with_all, 2, init=False):
        for name in NAMES:
            assert_equal(of_rank[name], of_rank["ddp"])


def train_folds(name: str) -> list[list[int]]:
    """Models one after the other; rank 1 keeps one, and the last is set up again. Threads and methods at each."""
    fabric = launched(name, SETTINGS[name])
    kept, seen, net = [], [], nn.Module()
    for fold in range(6):
        net = seeded_mlp(fold) if fold != 5 else net
        before = [parameter.clone() for parameter in net.parameters()]
        model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1))
        for i in range(4):
            optimizer.zero_grad()
            fabric.backward(loss_of(model, i, fabric.global_rank))
            optimizer.step()
        with fabric.strategy.consolidated():
            assert not any(torch.equal(old, new) for old, new in zip(before, net.parameters(), strict=True))
            if fold < 3:
                assert fabric.strategy.method_of() is fabric.strategy.method_of(optimizer)
        if fold == 2 and fabric.global_rank == 1:
            kept.append(model)
        seen.append([threading.active_count(), len(fabric.strategy._sessions.sessions)])
    fabric.strategy.teardown()
    optimizer.optimizer.step()  # it is the user's own
    model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1))
    fabric.backward(loss_of(model, 0, fabric.global_rank))
    optimizer.step()
    seen.append([threading.active_count(), len(fabric.strategy._sessions.sessions)])
    return seen


def train_folds_with_all() -> dict[str, list[list[int]]]:
    seen = {}
    for name in NAMES:
        seen[name] = train_folds(name)
        os.environ["WORLD_SIZE"] = "2"  # which teardown removes, as with any strategy
    return seen


def test_a_model_that_no_rank_holds_is_let_go_of() -> None:
    for of_rank in launch(train_folds_with_all, 2, init=False):
        for name, seen in of_rank.items():
            methods = [number for _, number in seen]
            assert methods == [1, 2, 2, 2, 3, 2, 1], name  # a name stands for the model before until it is set up
            assert seen[0][0] == seen[6][0] + 1, f"{name}: teardown has ended the watch over the job, too"
            assert seen[1] == seen[2] == seen[3] == seen[5], name


def order_of_the_data() -> tuple[list[list[int]], Any, Any]:
    """What the loader of a Fabric hands out in three epochs, and what it trains on with injection; likewise alone."""
    injected, environment = {}, dict(os.environ)
    for name in ("fabric", "alone"):
        os.environ.update(environment)
        model = seeded_mlp()
        optimizer = SGD(model.parameters(), lr=0.1)
        if name == "alone":
            sync = SelSync(model, optimizer, injection=(0.5, 0.5))
            injected[name] = [indices.tolist() for indices, *_ in sync.prepare_train_loader(DataLoader(dataset(), 8))]
            continue
        fabric = launched("selsync", {"injection": (0.5, 0.5)})
        model, optimizer = fabric.setup(model, optimizer)
        loss_of(model, 0, fabric.global_rank).backward()
        refused = raised(optimizer.step)
        loader = fabric.strategy.prepare_train_loader(DataLoader(dataset(), 8))
        injected[name] = [indices.tolist() for indices, *_ in loader]
        optimizer.step()
    fabric = launched("selsync")
    sampler = SelDPSampler(dataset())
    loader = fabric.setup_dataloaders(DataLoader(dataset(), 4, sampler=sampler))
    assert loader.sampler is sampler
    return [[int(index) for indices, *_ in loader for index in indices] for _ in range(3)], injected, refused


def test_the_training_data_of_selsync() -> None:
    """Fabric leaves a sampler alone, and tells it the epoch; with ``prepare_train_loader`` it is as in a plain loop."""
    for rank, (epochs, injected, refused) in enumerate(launch(order_of_the_data, 2, init=False)):
        assert injected["fabric"] == injected["alone"]
        assert max(map(len, injected["alone"])) == 5 + 2
        assert refused is not None
        assert "injection=(0.5, 0.5) has no effect" in refused[1]
        for epoch, seen in enumerate(epochs):
            sampler = SelDPSampler(dataset(), 2, rank)
            sampler.set_epoch(epoch)
            assert seen == list(sampler)
        assert sorted(epochs[0] + epochs[1]) == list(range(64))


def do_it_wrong() -> dict[str, tuple[str, str] | None]:
    def refused(kind: str) -> tuple[str, str] | None:
        fused, plugins = kind == "fused=False", [scaling(2.0**10)] if kind == "fused=False" else []
        fabric = launched("dear", plugins=plugins)
        model = seeded_mlp()
        optimizer, late = (SGD(part.parameters(), lr=0.1, fused=fused) for part in (model[0], model[2]))
        if kind == "No model that was set up":
            return raised(lambda: fabric.setup_optimizers(optimizer))
        if kind == "fused=False":
            return raised(lambda: fabric.setup(model, optimizer))
        model, optimizer = fabric.setup(model, optimizer)
        fabric.backward(loss_of(model, 0, fabric.global_rank))
        actions = {
            "norm_type=inf": lambda: fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type=float("inf")),
            "'pipesync'": lambda: fabric.save("nowhere", {"model": model, "pipesync": 1}),
            "was not set up": lambda: fabric.strategy.method_of(late),
            "step() was called directly": optimizer.optimizer.step,
        }
        return raised(actions[kind])

    kinds = ["No model that was set up", "fused=False", "norm_type=inf", "'pipesync'", "was not set up"]
    return {kind: refused(kind) for kind in [*kinds, "step() was called directly"]}


def test_what_would_go_wrong_is_named() -> None:
    for outcomes in launch(do_it_wrong, 2, init=False):
        kind, message = outcomes.pop("step() was called directly") or ("", "")
        assert kind == "RuntimeError"
        assert "fabric.setup()" in message
        assert_refused(outcomes)


def train_a_part_later() -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """The second layer has an optimizer from the second step on, also where the first one's is Adam."""
    outcomes = []
    for name in NAMES:
        fabric = launched(name, SYNCHRONOUS[name])
        model = seeded_mlp()
        first, second = AdamW(model[0].parameters(), lr=0.01), SGD(model[2].parameters(), lr=0.1)
        reference, expected = [AdamW, SGD], seeded_mlp()
        parts = [expected[0].parameters(), expected[2].parameters()]
        reference = [cls(part, lr=lr) for cls, part, lr in zip(reference, parts, (0.01, 0.1), strict=True)]
        wrapped, *optimizers = fabric.setup(model, first)
        for i in range(4):
            if i == 1:
                optimizers.append(fabric.setup_optimizers(second))
            loss_of(wrapped, i, fabric.global_rank).backward()
            (sum(loss_of(expected, i, rank) for rank in range(2)) / 2).backward()
            for optimizer in [*optimizers, *reference[: len(optimizers)]]:
                optimizer.step()
            wrapped.zero_grad()
            expected.zero_grad()
        with fabric.strategy.consolidated():
            outcomes.append((state(model), state(expected)))
        fabric.strategy.teardown()
        os.environ["WORLD_SIZE"] = "2"  # which teardown removes, as with any strategy
    return outcomes


def test_an_optimizer_may_be_set_up_later() -> None:
    for outcomes in zip(*launch(train_a_part_later, 2, init=False), strict=True):
        (weights, expected), (others, _) = outcomes
        for name, value in weights.items():
            assert torch.equal(value, others[name]), name
            torch.testing.assert_close(value, expected[name])


def leave_out_a_step(how: str) -> dict[str, Tensor] | tuple[str, str] | None:
    """Step 1 is left out before clipping, or after it with gradients set to zero; the others' are changed after it."""
    fabric = launched("selsync", {"delta": 0.2, "smoothing": 0.3, "aggregation": "gradients"})
    model = seeded_mlp()
    model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.1))

    def train_on() -> None:
        for i in range(6):
            if i == 1 and how == "before":
                continue
            fabric.backward(loss_of(model, i, fabric.global_rank))
            for _ in range(2):  # it may well be clipped twice
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
            for parameter in model.parameters():
                parameter.grad = parameter.grad + 0.01
            if i != 1 or (how == "alone" and fabric.global_rank == 0):
                optimizer.step()
            optimizer.zero_grad(set_to_none=how != "set to zero")

    return raised(train_on) or state(model)


def leave_out_steps() -> dict[str, Any]:
    return {how: leave_out_a_step(how) for how in ("before", "set to None", "set to zero", "alone")}


def test_selsync_where_a_step_is_left_out_after_clipping() -> None:
    for outcomes in launch(leave_out_steps, 2, init=False):
        kind, message = outcomes.pop("alone")
        assert kind == "RuntimeError"
        assert "Rank 1 and rank 0 have not skipped the same steps" in message
        for outcome in outcomes.values():
            assert_equal(outcome, outcomes["before"])


def test_settings() -> None:
    for name in NAMES:
        with pytest.raises(ValueError, match=r"no setting 'timeout_ms'.*timeout_s"):
            STRATEGIES[name](timeout_ms=5)
        with pytest.raises(ValueError, match="timeout_s"):
            STRATEGIES[name](timeout_s=0)
    for name, setting, instead in [
        ("pipe_sgd", {"drain": True}, r"drain\(\)"),
    ]:
        with pytest.raises(ValueError, match=instead):
            STRATEGIES[name](**setting)


def train_a_pipeline() -> list[list[Tensor]]:
    """A pipeline within Fabric, and one without."""
    trained = []
    for within in (True, False):
        fabric = launched("ddp") if within else None
        model = seeded_mlp()
        engine = EAPipe(model, nn.functional.cross_entropy, lambda weights: SGD(weights, lr=0.05))
        for i in range(10):
            loss = engine.train_batch(batch(i, 0))
            assert loss is None or fabric is None or fabric.to_device(loss) > 0
        engine.gather()
        engine.detach()
        trained.append([p.detach().clone() for p in model.parameters()])
    return trained


def test_ea_pipe() -> None:
    with pytest.raises(ValueError, match=r"EAPipe.*train_batch"):
        Fabric(accelerator="cpu", devices=2, strategy="ea_pipe")
    initial = list(seeded_mlp().parameters())
    for within, without in launch(train_a_pipeline, 2, init=False):
        assert all(torch.equal(one, other) for one, other in zip(within, without, strict=True))
        assert not any(torch.equal(one, other) for one, other in zip(within, initial, strict=True))


def end_early(fabric: Fabric, file: Path) -> None:
    """Rank 0 returns when its last weights are still on their way to rank 1, which looks at them."""
    model = nn.Linear(4000, 4000)
    model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        optimizer.zero_grad()
        fabric.backward(model(torch.ones(1, 4000)).square().mean())
        optimizer.step()
    if fabric.global_rank == 1:
        file.write_text(f"{model(torch.ones(1, 4000)).square().mean():.3f}")


def fork_ranks(file: Path) -> None:
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"):  # Fabric itself starts the processes
        del os.environ[name]
    strategy = DeARFabricStrategy(start_method="fork", fusion="buffer")
    Fabric(accelerator="cpu", devices=2, strategy=strategy).launch(end_early, file)


def test_a_rank_that_is_done_has_sent_everything(tmp_path: Path) -> None:
    launch(fork_ranks, 1, tmp_path / "loss", init=False)
    assert float((tmp_path / "loss").read_text()) > 0
