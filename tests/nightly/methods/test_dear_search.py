"""DeAR's search for the best bucket size: what to try, and changing it while the training goes on."""

from __future__ import annotations

import json
import operator
import random
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from benchmarks.bucket_search import BucketSearch, Step, first_good
from lightning_pipesync.core.buckets import MIB, Fusion, num_bytes
from lightning_pipesync.core.cost import LinkCost
from lightning_pipesync.core.parameters import NamedParameter, collect_parameters
from lightning_pipesync.methods.dear import DeAR
from lightning_pipesync.methods.dear.search import SEARCHES, Trial, fastest
from lightning_pipesync.methods.dear.tuner import TuningFile
from tests.nightly.methods.test_dear_models import Backwards
from tests.support.harness import assert_refused, on_ranks, raised
from tests.support.models import OPTIMIZERS, Averaged, Run, assert_same, loss, state

LINK, WORLD_SIZE = LinkCost(alpha=3e-4, beta=1 / 119e6), 4  # 1 Gbit/s


def chain(widths: list[int]) -> list[NamedParameter]:
    """The parameters of a chain of layers, in the order of their gradients."""
    model = nn.Sequential(*(nn.Linear(width, width, device="meta") for width in widths))
    return collect_parameters(model, [])[::-1]


@pytest.mark.parametrize(
    ("widths", "ratio"),
    [([512] * 96, 1.0), ([1024] * 4 + [64] * 400, 0.5), ([256] * 40 + [1800] * 6, 2.0)],
    ids=["alike", "many small", "some large"],
)
def test_bayesian_search_finds_what_a_fine_grid_finds(widths: list[int], ratio: float) -> None:
    """Within 3 % in at most 20 trials, each of which is off by 1 %, in less time than 1 % of 1,000 steps."""
    parameters = chain(widths)
    total = sum(map(num_bytes, parameters))
    backward = 2 / 3 * LINK.all_reduce(total, WORLD_SIZE) / ratio
    step = Step(parameters, [num_bytes(one) / total for one in parameters], backward, LINK, WORLD_SIZE)
    largest = min(100.0, total / MIB)
    best = step.best(largest)
    noise = random.Random(0)
    search = SEARCHES["bo"](Fusion(bucket_mb=25), 1, largest, 20)
    lost = 0.0
    while not search.converged:
        fusion = search.suggest()
        seconds = step.seconds(fusion)
        lost += 10 * (seconds - best)
        search.register(Trial(fusion, seconds * noise.gauss(1, 0.01)))
    assert search.trials[0].fusion == Fusion(bucket_mb=25)
    assert len(search.trials) <= 20
    assert step.seconds(fastest(search.trials).fusion) < 1.03 * best
    assert lost < 0.01 * 1000 * best


@pytest.mark.parametrize("kind", ["random", "grid"])
def test_other_searches_stay_in_their_ranges(kind: str) -> None:
    search = SEARCHES[kind](Fusion(bucket_mb=25), 2, 64, 13)
    while not search.converged:
        search.register(Trial(search.suggest(), 1.0))
    assert len(search.trials) == 13
    sizes = [(trial.fusion.bucket_mb or 0, trial.fusion.edge_mb or 0) for trial in search.trials[1:]]
    assert len(set(sizes)) == 12
    assert all(2 <= size < 64.01 and size / 16.01 < edge <= size for size, edge in sizes)
    assert max(size for size, _ in sizes) > 32
    assert min(size for size, _ in sizes) < 8


def test_searches_of_a_network_are_compared(tmp_path: Path) -> None:
    benchmark = BucketSearch(models=("resnet50",), trials=10, seeds=(0, 1), noise=0, output=tmp_path)
    [result] = results = benchmark.results()
    for run in result["runs"]:
        assert len(run["steps"]) <= 10
        assert run["steps"] == sorted(run["steps"], reverse=True)  # without noise the best so far only gets better
        assert 0.98 * run["best"] < run["steps"][-1] <= run["steps"][0]
        assert run["search"] != "bo" or run["steps"][-1] < run["steps"][0]  # the others need more trials
        number = first_good(run)
        assert (number is None) == (run["steps"][-1] > 1.03 * run["best"])
    drawn = [run["steps"] for run in result["runs"] if run["search"] == "random"]
    assert drawn[0] != drawn[1]
    assert "resnet50, grid" in benchmark.write(results)
    assert (tmp_path / "bucket_search.png").exists()


# --- changing it while the training goes on --------------------------------------------------------------------------

#: Sizes of some values each, so that a small model has several buckets.
SEARCHING: dict[str, Any] = {"bucket_mb": 1e-4, "search_mb": (4e-5, 4e-4), "trial_steps": 4, "max_trials": 5}
STEPS = 40


def backwards() -> nn.Module:
    torch.manual_seed(0)
    return Backwards()


def step(run: Run, number: int) -> None:
    """Takes a step, and waits until rank 0 has chosen the next size, so that the steps of each trial are known."""
    run.step(number)
    await_decision(run.sync)


def await_decision(sync: Any) -> None:
    if isinstance(sync, DeAR) and sync._tuner._decision is not None:
        sync._tuner._decision.wait()


def train(optimizer_name: str, settings: dict[str, Any]) -> dict[str, Any]:
    run = Run(DeAR, optimizer_name, backwards(), **{**SEARCHING, **settings})
    fusions = []
    for number in range(STEPS):
        fusions.append(run.sync.fusion)
        step(run, number)
    run.sync.flush()
    kept = run.sync.optimizer_state_dict()["state"]
    trials, tuned = run.sync.trials, run.sync.tuned
    return {"weights": run.end(), "optimizer": kept, "fusions": fusions, "trials": trials, "tuned": tuned}


def train_plainly(optimizer_name: str) -> dict[str, Any]:
    run = Run(Averaged, optimizer_name, backwards())
    run.steps(range(STEPS))
    return {"weights": state(run.model), "optimizer": run.optimizer.state_dict()["state"]}


@pytest.mark.parametrize(
    ("optimizer", "world_size", "update", "fusion"),
    [
        ("adamw", 2, "sharded", "bo"),
        ("adamw", 3, "sharded", "random"),
        ("sgd", 2, "replicated", "grid"),
    ],
)
def test_buckets_change_and_nothing_else_does(optimizer: str, world_size: int, update: str, fusion: str) -> None:
    [plain, *_] = on_ranks(train_plainly, world_size, optimizer)
    outcomes = on_ranks(train, world_size, optimizer, {"fusion": fusion, "update": update})
    for outcome in outcomes:
        assert outcome["tuned"]
        assert outcome["trials"] == outcomes[0]["trials"]
        assert outcome["fusions"] == outcomes[0]["fusions"]
        assert len(outcome["trials"]) == 5
        assert len(dict.fromkeys(outcome["fusions"])) >= 3
        best = min(outcome["trials"], key=lambda trial: trial.seconds)
        assert outcome["fusions"][-1] == best.fusion
        assert_same(outcome["weights"], plain["weights"], exact=world_size == 2)
        assert_same(outcome["weights"], outcomes[0]["weights"])
        for index, kept in plain["optimizer"].items():
            assert_same(outcome["optimizer"][index], kept, exact=world_size == 2)


def smallest_tried(settings: dict[str, Any]) -> tuple[float, float]:
    """Returns the smallest size of a grid, and that of the model, in MiB."""
    wide = nn.Sequential(nn.Linear(6, 60_000), nn.Linear(60_000, 3))
    run = Run(DeAR, "sgd", wide, **{**SEARCHING, "fusion": "grid", **settings})
    for number in range(STEPS):
        step(run, number)
    size = sum(parameter.nbytes for parameter in run.model.parameters()) / MIB
    smallest = run.sync.trials[1].fusion.bucket_mb
    run.end()
    return smallest, size


def test_small_models_have_small_buckets() -> None:
    for smallest, size in on_ranks(smallest_tried, 2, {"search_mb": None}):
        assert 1 < size < 40
        assert smallest == pytest.approx(size / 40)
    for smallest, _ in on_ranks(smallest_tried, 2, {"search_mb": (0.5, 1.0)}):
        assert smallest == 0.5


def compressed(update: str) -> tuple[dict[str, Tensor], float]:
    """Returns the weights, and how far what the ranks have dropped is off after buckets have changed."""
    run = Run(DeAR, "sgd", backwards(), **{**SEARCHING, "fusion": "random", "compression": "bf16", "update": update})
    sync, off = run.sync, 0.0
    before = sum_of_residuals(sync)
    for number in range(STEPS):
        fusion = sync.fusion
        run.backward(number)
        if sync.fusion != fusion:
            off = max(off, abs(sum_of_residuals(sync) - before))
        sync.step()
        sync.synchronize()
        await_decision(sync)
        before = sum_of_residuals(sync)
    assert before != 0
    return run.end(), off


def sum_of_residuals(sync: DeAR) -> float:
    total = torch.zeros(1, dtype=torch.float64)
    for bucket in sync._fused.buckets:
        total += sum(state["residual"].double().sum() for state in bucket.residuals_of_shard().values())
    dist.all_reduce(total)
    return float(total)


@pytest.mark.parametrize("update", ["sharded", "replicated"])
def test_what_a_codec_has_dropped_is_carried_over(update: str) -> None:
    outcomes = on_ranks(compressed, 2, update)
    for weights, off in outcomes:
        assert off < 1e-9
        assert_same(weights, outcomes[0][0])


class Mixed(nn.Module):
    """In two types, in two parameter groups of two optimizers; the last layer is frozen at first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 9), nn.Linear(9, 6).bfloat16()
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(x)).bfloat16()).float()
        return self.head(self.norm(x))


def train_mixed(method: Callable[..., Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Trains with two optimizers in turns, loads a state of one in mid-search, and thaws a layer."""
    torch.manual_seed(0)
    model = Mixed()
    model.head.requires_grad_(False)
    groups = [{"params": [model.first.weight, model.second.weight]}, {"params": [model.first.bias], "lr": 0.02}]
    optimizers = [AdamW(groups, lr=0.01), SGD([model.second.bias, *model.norm.parameters()], lr=0.1, momentum=0.9)]
    sync = method(model, optimizers, **settings)
    fusions, saved = [], None
    for number in range(STEPS):
        for optimizer in optimizers:
            model.zero_grad()
            loss(model, number, dist.get_rank()).backward()
            sync.step(optimizer=optimizer)
            await_decision(sync)
        fusions.append(getattr(sync, "fusion", None))
        if number == 5:
            saved = deepcopy(sync.optimizer_state_dict(optimizers[0]))
        if saved is not None and number % 5 == 4:  # also where buckets are about to change
            optimizers[0].load_state_dict(deepcopy(saved))
        if number == 20:
            model.head.requires_grad_(True)
            optimizers[1].add_param_group({"params": list(model.head.parameters())})
    sync.flush()
    kept = [sync.optimizer_state_dict(optimizer)["state"] for optimizer in optimizers]
    sync.detach()
    return {"weights": state(model), "kept": kept, "fusions": fusions}


def test_types_groups_optimizers_and_thawed_layers_during_a_search() -> None:
    [plain, *_] = on_ranks(train_mixed, 2, Averaged, {})
    for outcome in on_ranks(train_mixed, 2, DeAR, {**SEARCHING, "fusion": "grid", "max_trials": 8}):
        assert sum(map(operator.ne, outcome["fusions"], outcome["fusions"][1:])) > 3
        assert_same(outcome["weights"], plain["weights"])
        for states, expected in zip(outcome["kept"], plain["kept"], strict=True):
            assert states.keys() == expected.keys()
            for index, kept in expected.items():
                assert {kind: v.dtype for kind, v in states[index].items()} == {k: v.dtype for k, v in kept.items()}
                assert_same(states[index], kept)


# --- what is kept of a search ----------------------------------------------------------------------------------------


def searched_twice(path: Path) -> list[list[Any]]:
    """The trials of a run, those with which the next one starts, and those of one with another model."""
    kept = []
    for width in (6, 6, 7):
        model = nn.Sequential(nn.Linear(6, width), nn.Linear(width, 3))
        run = Run(DeAR, "sgd", model, **SEARCHING, fusion="random", tuning_file=str(path))
        for steps in (0, STEPS if width == 6 else 2):
            for number in range(steps):
                step(run, number)
            kept.append([run.sync.tuned, list(run.sync.trials), run.sync.fusion])
        run.sync.detach()
    return kept


def test_the_next_run_starts_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "below" / "tuning.json"
    outcomes = on_ranks(searched_twice, 2, path)
    assert outcomes[0] == outcomes[1]
    first, after, second, still, other, _ = outcomes[0]
    for refused in ('{"other": 1}', '{"searches": {"job": {"trials": [1]}}}', "no JSON"):
        path.with_name("other.json").write_text(refused)
        with pytest.raises(ValueError, match="is not a file in which DeAR has kept a search"):
            TuningFile(path.with_name("other.json"))
    assert first[:2] == [False, []]
    assert after[0]
    assert len(after[1]) == 5
    assert second == still == after
    assert other[:2] == [False, []]
    assert list(json.loads(path.read_text())) == ["searches"]


def searched_without_the_package(path: Path) -> list[Any]:
    """Whether there is a search, and the fusion: after a finished search, with its file and without it."""
    finished = searched_twice(path)[1]
    kept: list[Any] = [finished[::2]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "bayes_opt", None)  # as if it was not there
        for file in (str(path), None):
            model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
            run = Run(DeAR, "sgd", model, **SEARCHING, fusion="bo", tuning_file=file)
            kept.append([run.sync.tuned, run.sync.fusion])
            run.sync.detach()
    return kept


def test_without_its_package_there_is_no_search(tmp_path: Path) -> None:
    """A finished one is taken from the file all the same."""
    for finished, with_file, without in on_ranks(searched_without_the_package, 2, tmp_path / "tuning.json"):
        assert with_file == finished
        assert without == [True, Fusion(bucket_mb=SEARCHING["bucket_mb"])]


def resumed_search() -> list[Any]:
    """What a run has when it is saved, and a new one that has loaded that."""
    run = Run(DeAR, "sgd", Backwards(), **SEARCHING, fusion="random")
    while len(run.sync.trials) < 2:
        run.step(0)
    saved = run.sync.state_dict()
    kept = [(list(run.sync.trials), run.sync.fusion, saved["plan"], run.sync.tuned)]
    run.sync.detach()
    run = Run(DeAR, "sgd", Backwards(), **SEARCHING, fusion="random")
    run.sync.load_state_dict(saved)
    kept.append((list(run.sync.trials), run.sync.fusion, run.sync.state_dict()["plan"], run.sync.tuned))
    run.sync.detach()
    return kept


def test_a_state_holds_the_search() -> None:
    for before, after in on_ranks(resumed_search, 2):
        assert len(before[0]) == 2
        assert before == after
        assert not after[-1]


def resumed_with_other_settings() -> list[Any]:
    """Loads the state of a search where none is wanted: the buckets are soon those of the settings."""
    run = Run(DeAR, "sgd", Backwards(), **SEARCHING, fusion="random")
    while len(run.sync.trials) < 2:
        run.step(0)
    saved = run.sync.state_dict()
    run.sync.detach()
    run = Run(DeAR, "sgd", run.model, fusion="buffer", bucket_mb=2e-4)
    run.sync.load_state_dict(saved)
    run.steps(range(3))
    sync = run.sync
    kept = [sync.fusion, sync.tuned, sync._fused.differs_from(Fusion(bucket_mb=2e-4)), list(sync.trials)]
    sync.detach()
    return kept


def test_a_state_of_a_search_does_not_outlive_the_wish_for_it() -> None:
    assert on_ranks(resumed_with_other_settings, 2) == [[Fusion(bucket_mb=2e-4), True, False, []]] * 2


def searched_without_a_place_to_write(path: Path) -> bool:
    run = Run(DeAR, "sgd", Backwards(), **SEARCHING, fusion="random", tuning_file=str(path))
    for number in range(STEPS):
        step(run, number)
    run.sync.detach()
    return run.sync.tuned


def test_a_file_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert on_ranks(searched_without_a_place_to_write, 2, tmp_path / "file" / "tuning.json") == [True, True]


@pytest.mark.parametrize("kind", ["random", "grid"])
def test_a_resumed_search_tries_what_is_left(kind: str) -> None:
    whole, resumed = (SEARCHES[kind](Fusion(bucket_mb=25), 2, 64, 13) for _ in range(2))
    while not whole.converged:
        whole.register(Trial(whole.suggest(), 1.0))
    resumed.trials = whole.trials[:7]
    while not resumed.converged:
        resumed.register(Trial(resumed.suggest(), 1.0))
    assert resumed.trials == whole.trials


def misuse(path: Path) -> dict[str, Any]:
    model = Backwards()
    sgd = OPTIMIZERS["sgd"](model)
    outcomes = {
        "edge_mb": raised(lambda: DeAR(model, sgd, edge_mb=30)),
        "search_mb": raised(lambda: DeAR(model, sgd, search_mb=(10, 5))),
        "trial_steps": raised(lambda: DeAR(model, sgd, trial_steps=2)),
        "max_trials": raised(lambda: DeAR(model, sgd, max_trials=0)),
        "tuning_file": raised(lambda: DeAR(model, sgd, tuning_file=str(path))),
    }
    torch.use_deterministic_algorithms(True)
    sync = DeAR(model, sgd, **SEARCHING)
    torch.use_deterministic_algorithms(False)
    outcomes["tuned"] = ("ValueError", "tuned") if sync.tuned else None
    sync.detach()
    return outcomes


def test_settings_that_cannot_be(tmp_path: Path) -> None:
    """Also: who wants deterministic algorithms gets no search."""
    path = tmp_path / "tuning.json"
    path.write_text('{"other": 1}')
    for outcomes in on_ranks(misuse, 2, path):
        assert_refused(outcomes)


def load_in_a_search(method: Callable[..., Any], settings: dict[str, Any], loaded_at: int) -> dict[str, Tensor]:
    """Loads an optimizer's state before a step, in some of which buckets change."""
    run = Run(method, "adamw", **settings)
    for number in range(12):
        if number == 1:
            saved = deepcopy(run.sync.optimizer_state_dict())
        if number == loaded_at:
            run.optimizer.load_state_dict(saved)
        run.step(number)
    return run.end()


@pytest.mark.parametrize("loaded_at", range(2, 12))
def test_a_state_that_is_loaded_as_buckets_change_counts(loaded_at: int) -> None:
    settings = {"fusion": "bo", "search_mb": (1e-4, 1e-2), "trial_steps": 4, "update": "sharded"}
    [expected, *_] = on_ranks(load_in_a_search, 2, Averaged, {}, loaded_at)
    for weights in on_ranks(load_in_a_search, 2, DeAR, settings, loaded_at):
        assert_same(weights, expected)
