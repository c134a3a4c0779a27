"""`Fabric(strategy=...)` on real processes: what is particular to Fabric, beside the conformance suite."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader

from lightning_pipesync import EAPipe, SelDPSampler, SelSync
from lightning_pipesync.fabric import DeARFabricStrategy, PipeSGDFabricStrategy, SelSyncFabricStrategy
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_refused, on_ranks, raised
from tests.support.lightning_models import LOCAL, dataset
from tests.support.models import batch, loss, seeded_mlp, state

STRATEGIES: dict[str, Any] = {
    "dear": DeARFabricStrategy,
    "pipe_sgd": PipeSGDFabricStrategy,
    "selsync": SelSyncFabricStrategy,
}
NAMES = list(STRATEGIES)
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
DROPPED = "gradients in flight are dropped, and the pipeline fills anew."


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


def scaling(scale: float) -> MixedPrecision:
    """16-mixed precision with its loss scaler on the CPU, where Fabric would quietly take bf16-mixed."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3))


def train_in_double_precision(name: str) -> dict[str, Tensor]:
    """All methods can be synchronous SGD."""
    fabric = launched(name, SYNCHRONOUS.get(name), precision="64-true")
    model = seeded_mlp()
    model, optimizer = fabric.setup(model, AdamW(model.parameters(), lr=0.01))
    for i in range(8):
        optimizer.zero_grad()
        fabric.backward(loss(model, i, fabric.global_rank))
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
    return state(model)


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
            fabric.backward(loss(model, i, fabric.global_rank))
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


def resume(name: str, directory: Path) -> dict[str, Any]:
    settings = {"compression": "bf16", **SETTINGS[name]}
    outcomes = {}
    for key, steps in (("whole", range(11)), ("resumed", range(5, 11))):
        fabric = launched(name, settings, plugins=[scaling(2.0**10)])
        outcomes[key] = train_from(fabric, steps, directory / name, dropout=0.2, save_at=5)
    train_from(launched(name), range(3), directory / f"{name}, plain", save_at=2)
    return outcomes


def go_on(name: str, directory: Path) -> tuple[tuple[str, str] | None, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = raised(lambda: train_from(launched(name), range(2, 4), directory / f"{name}, plain"))
    return outcome, [str(one.message) for one in caught if "there are 1" in str(one.message)]


def validate_and_save(directory: Path) -> dict[str, Any]:
    """Replicas part after the first step; who looks at the weights finds their average, and training goes on."""
    fabric = launched("selsync", LOCAL)
    model = seeded_mlp(batch_norm=True)
    model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.1))
    seen = []
    for i in range(4):
        fabric.backward(loss(model, i, fabric.global_rank))
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


def train_two_models(name: str) -> dict[str, Tensor]:
    """One of them computes its gradients in a closure; a third one is not trained."""
    fabric = launched(name, SYNCHRONOUS.get(name))
    rank = fabric.global_rank
    models = [seeded_mlp(seed + 3 * rank) for seed in range(3)]
    teacher = fabric.setup_module(models[2])
    first, first_optimizer = fabric.setup(models[0], SGD(models[0].parameters(), lr=0.1))
    second, second_optimizer = fabric.setup(models[1], SGD(models[1].parameters(), lr=0.1))

    def compute(model: nn.Module, step: int) -> Tensor:
        model.zero_grad()
        x, _ = batch(step, rank)
        with torch.no_grad():
            target = teacher(x)
        distance = nn.functional.mse_loss(model(x), target)
        fabric.backward(distance)
        return distance

    for i in range(3):
        compute(first, i)
        first_optimizer.step()
        assert second_optimizer.step(lambda step=i: compute(second, step)) > 0
    return state(nn.ModuleList(models))


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
            fabric.backward(loss(model, i, fabric.global_rank))
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
    fabric.backward(loss(model, 0, fabric.global_rank))
    optimizer.step()
    seen.append([threading.active_count(), len(fabric.strategy._sessions.sessions)])
    return seen


def order_of_the_data() -> tuple[list[list[int]], Any, Any]:
    """The order of a Fabric's loader in three epochs, and with injection, in a Fabric and in a plain loop."""
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
        loss(model, 0, fabric.global_rank).backward()
        refused = raised(optimizer.step)
        loader = fabric.strategy.prepare_train_loader(DataLoader(dataset(), 8))
        injected[name] = [indices.tolist() for indices, *_ in loader]
        optimizer.step()
    fabric = launched("selsync")
    sampler = SelDPSampler(dataset())
    loader = fabric.setup_dataloaders(DataLoader(dataset(), 4, sampler=sampler))
    assert loader.sampler is sampler
    return [[int(index) for indices, *_ in loader for index in indices] for _ in range(3)], injected, refused


def inject_after(change: str, folder: Path) -> list[list[int]]:
    """The batches of a second epoch, after a checkpoint was loaded, or another optimizer was set up, or neither."""
    fabric = launched("selsync", {"injection": (0.5, 0.5)})
    model = seeded_mlp()
    wrapped, optimizer = fabric.setup(model, SGD(model[0].parameters(), lr=0.1))
    loader = fabric.strategy.prepare_train_loader(DataLoader(dataset(), 8))
    progress = {"model": wrapped, "optimizer": optimizer, "loader": loader}
    seen: list[list[int]] = []
    for epoch in range(2):
        if epoch and change == "checkpoint":
            fabric.save(folder / "injected", progress)
            fabric.load(folder / "injected", progress)
        elif epoch and change == "optimizer":
            fabric.setup_optimizers(SGD(model[2].parameters(), lr=0.1))
        seen.clear()
        for i, (indices, *_) in enumerate(loader):
            seen.append(indices.tolist())
            fabric.backward(loss(wrapped, i, fabric.global_rank))
            optimizer.step()
    fabric.strategy.teardown()
    return seen


#: What is named, or said, where Fabric is used wrongly.
WRONG = ("No model that was set up", "fused=False", "norm_type=inf", "'pipesync'", "was not set up", "called directly")


def do_it_wrong(kind: str) -> tuple[str, str] | None:
    fused = kind == "fused=False"
    fabric = launched("dear", plugins=[scaling(2.0**10)] if fused else [])
    model = seeded_mlp()
    optimizer, late = (SGD(part.parameters(), lr=0.1, fused=fused) for part in (model[0], model[2]))
    if kind == "No model that was set up":
        return raised(lambda: fabric.setup_optimizers(optimizer))
    if fused:
        return raised(lambda: fabric.setup(model, optimizer))
    model, optimizer = fabric.setup(model, optimizer)
    fabric.backward(loss(model, 0, fabric.global_rank))
    actions = {
        "norm_type=inf": lambda: fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type=float("inf")),
        "'pipesync'": lambda: fabric.save("nowhere", {"model": model, "pipesync": 1}),
        "was not set up": lambda: fabric.strategy.method_of(late),
        "called directly": optimizer.optimizer.step,
    }
    return raised(actions[kind])


def train_a_part_later(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The second layer has an optimizer from the second step on, also where the first one's is Adam."""
    fabric = launched(name, SYNCHRONOUS[name])
    model, expected = seeded_mlp(), seeded_mlp()
    (first, second), reference = (
        [AdamW(one[0].parameters(), lr=0.01), SGD(one[2].parameters(), lr=0.1)] for one in (model, expected)
    )
    wrapped, *optimizers = fabric.setup(model, first)
    for i in range(4):
        if i == 1:
            optimizers.append(fabric.setup_optimizers(second))
        loss(wrapped, i, fabric.global_rank).backward()
        (sum(loss(expected, i, rank) for rank in range(2)) / 2).backward()
        for optimizer in [*optimizers, *reference[: len(optimizers)]]:
            optimizer.step()
        wrapped.zero_grad()
        expected.zero_grad()
    with fabric.strategy.consolidated():
        return state(model), state(expected)


def leave_out_a_step(how: str) -> dict[str, Tensor] | tuple[str, str] | None:
    """Step 1 is left out before clipping, or after it with gradients set to zero; the others' are changed after it."""
    fabric = launched("selsync", {"delta": 0.2, "smoothing": 0.3, "aggregation": "gradients"})
    model = seeded_mlp()
    model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.1))

    def train_on() -> None:
        for i in range(6):
            if i == 1 and how == "before":
                continue
            fabric.backward(loss(model, i, fabric.global_rank))
            for _ in range(2):  # it may well be clipped twice
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
            for parameter in model.parameters():
                parameter.grad = parameter.grad + 0.01
            if i != 1 or (how == "alone" and fabric.global_rank == 0):
                optimizer.step()
            optimizer.zero_grad(set_to_none=how != "set to zero")

    return raised(train_on) or state(model)


def train_a_pipeline(within: bool) -> list[Tensor]:
    """A pipeline within Fabric, or one without."""
    fabric = launched("ddp") if within else None
    model = seeded_mlp()
    engine = EAPipe(model, nn.functional.cross_entropy, lambda weights: SGD(weights, lr=0.05))
    for i in range(10):
        result = engine.train_batch(batch(i, 0))
        assert result is None or fabric is None or fabric.to_device(result) > 0
    engine.gather()
    engine.detach()
    return [p.detach().clone() for p in model.parameters()]


#: After which a loader is used on.
CHANGES = ("nothing", "checkpoint", "optimizer")
#: Whose steps are left out, and how; last, where ranks disagree.
LEFT_OUT = ("before", "set to None", "set to zero", "alone")


@pytest.fixture(scope="module")
def trained(folder: Path) -> Outcomes:
    cases: dict[Any, Any] = {}
    for function in (train_folds, train_a_part_later):  # first those that count threads
        cases |= {(function, name): partial(function, name) for name in NAMES}
    cases |= {("resume", name): partial(resume, name, folder) for name in NAMES}
    for function in (train_in_double_precision, train_two_models):
        cases |= {(function, name): partial(function, name) for name in ["ddp", *NAMES]}
    cases |= {"validation": partial(validate_and_save, folder), "data": order_of_the_data}
    cases |= {("pipeline", within): partial(train_a_pipeline, within) for within in (True, False)}
    cases |= {(inject_after, change): partial(inject_after, change, folder) for change in CHANGES}
    cases |= {kind: partial(do_it_wrong, kind) for kind in WRONG}
    return launch_cases({**cases, **{how: partial(leave_out_a_step, how) for how in LEFT_OUT}}, 2, init=False)


@pytest.mark.parametrize("name", NAMES)
def test_double_precision(name: str, trained: Outcomes) -> None:
    expected, _ = trained[train_in_double_precision, "ddp"]
    for weights in trained[train_in_double_precision, name]:
        torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints(name: str, trained: Outcomes, folder: Path) -> None:
    """A resumed run, with a loss scaler, is the uninterrupted one bit for bit, also in the same run."""
    outcomes = trained["resume", name]
    for outcome in outcomes:
        whole, resumed = outcome["whole"], outcome["resumed"]
        assert_equal(resumed["weights"], whole["weights"])
        assert_equal(whole["weights again"], whole["weights"])
        weights_only = torch.load(folder / f"{name}.weights", weights_only=True)
        assert list(weights_only) == ["model"]
        for key, value in whole["reloaded"].items():
            assert torch.equal(value, weights_only["model"][key.removeprefix("_forward_module.module.")]), key
        assert resumed["scale"] == whole["scale"] > 2.0**10
        assert (resumed["step"], resumed["remainder"]) == (5, [])
    saved = torch.load(folder / f"{name}, plain", weights_only=True)
    assert saved["pipesync"]["ranks"].keys() == {0, 1}
    if name == "selsync":
        one, other = (outcome["whole"]["weights"] for outcome in outcomes)
        assert not torch.equal(one["0.0.weight"], other["0.0.weight"]), "each rank has gone on from its own weights"


def test_checkpoints_of_another_number_of_ranks(trained: Outcomes, folder: Path) -> None:
    assert all(trained["resume", name] for name in NAMES)
    alone = launch_cases({name: partial(go_on, name, folder) for name in NAMES}, 1, init=False)
    assert alone["dear"] == [(None, [])]
    assert alone["pipe_sgd"] == [(None, ["The checkpoint is of 2 ranks, and there are 1: " + DROPPED])]
    assert_refused({"the state of 2 ranks": alone["selsync"][0][0]})


def test_validation(trained: Outcomes, folder: Path) -> None:
    one, other = trained["validation"]
    for average, same in zip(one["seen"], other["seen"], strict=True):
        assert_equal(average, same)
    for name, average in one["seen"][-1].items():
        if average.is_floating_point():
            torch.testing.assert_close(average, (one["own"][name] + other["own"][name]) / 2)
    assert not torch.equal(one["own"]["0.weight"], other["own"]["0.weight"])
    for file in ("within", "outside"):
        assert_equal(torch.load(folder / file, weights_only=True)["model"], one["seen"][-1])


@pytest.mark.parametrize("name", NAMES)
def test_several_models(name: str, trained: Outcomes) -> None:
    for weights, expected in zip(trained[train_two_models, name], trained[train_two_models, "ddp"], strict=True):
        assert_equal(weights, expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_no_rank_holds_is_let_go_of(name: str, trained: Outcomes) -> None:
    for seen in trained[train_folds, name]:
        # A name stands for the model before until it is set up.
        assert [methods for _, methods in seen] == [1, 2, 2, 2, 3, 2, 1]
        assert seen[0][0] == seen[6][0] + 1, "teardown has ended the watch over the job, too"
        assert seen[1] == seen[2] == seen[3] == seen[5]


def test_the_training_data_of_selsync(trained: Outcomes) -> None:
    """Fabric leaves a sampler alone, and tells it the epoch; with ``prepare_train_loader`` it is as in a plain loop."""
    for rank, (epochs, injected, refused) in enumerate(trained["data"]):
        assert injected["fabric"] == injected["alone"]
        assert max(map(len, injected["alone"])) == 5 + 2
        assert refused is not None
        assert "injection=(0.5, 0.5) has no effect" in refused[1]
        for epoch, seen in enumerate(epochs):
            sampler = SelDPSampler(dataset(), 2, rank)
            sampler.set_epoch(epoch)
            assert seen == list(sampler)
        assert sorted(epochs[0] + epochs[1]) == list(range(64))


@pytest.mark.parametrize("change", CHANGES[1:])
def test_a_prepared_loader_follows_the_method_of_that_time(change: str, trained: Outcomes) -> None:
    """A checkpoint has the place in the sequence of draws; with another optimizer it begins anew."""
    for batches, expected in zip(trained[inject_after, change], trained[inject_after, "nothing"], strict=True):
        assert max(map(len, batches)) == 5 + 2
        assert change == "optimizer" or batches == expected


@pytest.mark.parametrize("kind", WRONG)
def test_what_would_go_wrong_is_named(kind: str, trained: Outcomes) -> None:
    for outcome in trained[kind]:
        if kind != "called directly":
            assert_refused({kind: outcome})
            continue
        assert outcome is not None
        assert outcome[0] == "RuntimeError"
        assert "step() was called directly" in outcome[1]
        assert "fabric.setup()" in outcome[1]


@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_may_be_set_up_later(name: str, trained: Outcomes) -> None:
    outcomes = trained[train_a_part_later, name]
    for weights, expected in outcomes:
        assert_equal(weights, outcomes[0][0])
        torch.testing.assert_close(weights, expected)


def test_selsync_where_a_step_is_left_out_after_clipping(trained: Outcomes) -> None:
    for rank, (kind, message) in enumerate(trained["alone"]):
        assert kind == "RuntimeError"
        assert "Rank 1 and rank 0 have not skipped the same steps" in message
        for how in LEFT_OUT[:-1]:
            assert_equal(trained[how][rank], trained["before"][rank])


@pytest.mark.parametrize("name", NAMES)
def test_settings(name: str) -> None:
    with pytest.raises(ValueError, match=r"no setting 'timeout_ms'.*timeout_s"):
        STRATEGIES[name](timeout_ms=5)
    with pytest.raises(ValueError, match="timeout_s"):
        STRATEGIES[name](timeout_s=0)


def test_a_drained_pipeline_is_refused() -> None:
    with pytest.raises(ValueError, match=r"drain\(\)"):
        PipeSGDFabricStrategy(drain=True)


def test_ea_pipe(trained: Outcomes) -> None:
    with pytest.raises(ValueError, match=r"EAPipe.*train_batch"):
        Fabric(accelerator="cpu", devices=2, strategy="ea_pipe")
    initial = list(seeded_mlp().parameters())
    for within, without in zip(trained["pipeline", True], trained["pipeline", False], strict=True):
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
    on_ranks(fork_ranks, 1, tmp_path / "loss", init=False)
    assert float((tmp_path / "loss").read_text()) > 0
