"""Pipelines side by side on real processes, two of two stages, against one-process simulations with plain tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipesync import EAPipe
from tests.references.ea_pipe import reference_of
from tests.references.side_by_side import side_by_side
from tests.support.case_table import Outcomes, launch_cases
from tests.support.ea_pipe_runs import ASYNCHRONOUS, CUTS, OPTIMIZERS, assert_equal, engine_on, layers, train_on
from tests.support.harness import assert_raised, assert_refused, launch, raised
from tests.support.lost_ranks import die
from tests.support.models import assert_same, batch, state

STEPS, PIPELINES, STAGES = 11, 2, 2
STAGE_OF = [0, 0, 1, 1, 1]
EXACT: dict[str, tuple[str, dict[str, Any]]] = {
    **{algorithm: ("sgd", {"algorithm": algorithm}) for algorithm in ASYNCHRONOUS if algorithm != "pipedream"},
    "same stage on neighbors": ("adam", {"neighbors": "pipelines"}),
}
SYNCHRONOUS = ("gpipe", "1f1b")
ELASTIC: dict[str, tuple[str, dict[str, Any]]] = {
    **{algorithm: ("sgd", {"algorithm": algorithm, "average_period": 3}) for algorithm in SYNCHRONOUS},
    "each mini-batch": ("adam", {"algorithm": "gpipe", "average_force": 0.25}),
    "ea_pipe": ("adam", {"neighbors": "pipelines", "replicas": 3}),
}

CLIPPED: dict[str, dict[str, Any]] = {
    **{algorithm: {"algorithm": algorithm} for algorithm in SYNCHRONOUS},
    "ea_pipe": {"replicas": 1},
}


def engine_of(model: nn.Module, optimizer: Any = "sgd", **settings: Any) -> EAPipe:
    given = {"num_pipelines": PIPELINES, "split": CUTS[STAGES], "virtual_stages": None, **settings}
    return engine_on(model, optimizer, **given)


def gathered(engine: EAPipe, model: nn.Module) -> dict[str, Tensor]:
    engine.gather()
    engine.detach()
    return state(model)


def train(optimizer: str, settings: dict[str, Any]) -> list[Tensor]:
    model = layers(seed=dist.get_rank())  # rank 0's weights count
    engine = engine_of(model, optimizer, **settings)
    train_on(engine, range(STEPS))
    return list(gathered(engine, model).values())


@cache
def trained() -> Outcomes:
    cases: dict[Any, Any] = {name: partial(train, *case) for name, case in EXACT.items()}
    for name, (kind, settings) in ELASTIC.items():
        cases["elastic", name] = partial(train, kind, {"average": "elastic", **settings})
    for name, settings in CLIPPED.items():
        cases["clipped", name] = partial(train, "sgd", {**settings, "clip_norm": 0.2})
    cases |= {("resumed", *case): partial(resume, *case) for case in RESUMED}
    cases |= {function: function for function in (missing_gradient, running_average, write, same_batches, make_badly)}
    return launch_cases(cases, PIPELINES * STAGES)


@pytest.mark.parametrize("case", EXACT)
def test_a_mini_batch_of_all_pipelines(case: str) -> None:
    """Bit for bit, on every rank: the mean gradient of the pipelines is that of their mini-batches as one."""
    optimizer, settings = EXACT[case]
    known = {name: value for name, value in settings.items() if name != "neighbors"}
    mini_batches = [[batch(t, pipeline) for pipeline in range(PIPELINES)] for t in range(STEPS)]
    expected = reference_of(known, layers(), OPTIMIZERS[optimizer], mini_batches, STAGE_OF, 0.0)
    for weights in trained()[case]:
        assert_equal(weights, expected)


@pytest.mark.parametrize("case", ELASTIC)
def test_a_reference_attracts_the_pipelines(case: str) -> None:
    """Bit for bit, on every rank."""
    optimizer, settings = ELASTIC[case]
    known = {name: value for name, value in settings.items() if name not in ("neighbors", "algorithm")}
    known = {"average_force": 0.9 / PIPELINES, **known}
    if settings.get("algorithm", "ea_pipe") == "ea_pipe":
        known = {"replicas": STAGES, **known}
    mini_batches = [[batch(t, pipeline) for pipeline in range(PIPELINES)] for t in range(STEPS)]
    expected = side_by_side(layers(), OPTIMIZERS[optimizer], mini_batches, **known)
    for weights in trained()["elastic", case]:
        assert_equal(weights, expected)


@pytest.mark.parametrize("algorithm", CLIPPED)
def test_clipping_takes_the_norm_over_all_stages_and_pipelines(algorithm: str) -> None:
    model, master = layers(), layers()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for t in range(STEPS):
        optimizer.zero_grad()
        for pipeline in range(PIPELINES):
            x, y = batch(t, pipeline)
            (nn.functional.cross_entropy(model(x), y) / PIPELINES).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        if algorithm == "ea_pipe":  # the only replica and the master meet halfway
            with torch.no_grad():
                for x, c in zip(model.parameters(), master.parameters(), strict=True):
                    c.copy_((x + c) / 2)
                    x.copy_(c)
    for weights in trained()["clipped", algorithm]:
        torch.testing.assert_close(weights, [p.detach() for p in model.parameters()])


# --- checkpoints ------------------------------------------------------------------------------------------------------

RESUMED = [("ea_pipe", "gradients", 1), ("1f1b", "gradients", 1), ("ea_pipe", "elastic", 4), ("1f1b", "elastic", 4)]


def uneven(seed: int = 0) -> nn.Sequential:
    """Has running averages, which depend on the batches, and dropout, which pipelines draw by themselves."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Dropout(0.3), nn.Linear(9, 8), nn.BatchNorm1d(8),
        nn.Linear(8, 3),
    )  # fmt: skip


def resume(algorithm: str, average: str, period: int) -> list[dict[str, Tensor]]:
    """What an uninterrupted run has, one that was flushed in between, and one that was saved and loaded."""
    settings = {"algorithm": algorithm, "average": average, "average_period": period, "split": (4,)}
    found = []
    for kind in ("uninterrupted", "flushed", "saved"):
        model = uneven()
        engine = engine_of(model, "adam", **settings)
        train_on(engine, range(6))
        if kind != "uninterrupted":
            engine.flush()
        if kind == "saved":
            engine.gather()
            saved = engine.state_dict()
            engine.detach()
            weights, model = model.state_dict(), uneven(seed=3)
            model.load_state_dict(weights)
            engine = engine_of(model, "adam", **settings)
            engine.load_state_dict(saved)
            found.append({name: value - weights[name] for name, value in state(model).items()})
        train_on(engine, range(6, 11))
        found.append(gathered(engine, model))
    return found


@pytest.mark.parametrize("case", RESUMED)
def test_resumed_run_is_the_uninterrupted_one(case: tuple[str, str, int]) -> None:
    """Bit for bit, running averages included; emptying the pipelines changes nothing, and all ranks have the same."""
    outcomes = trained()[("resumed", *case)]
    for uninterrupted, flushed, unchanged, resumed in outcomes:
        assert_same(uninterrupted, outcomes[0][0])
        assert_same(flushed, uninterrupted)
        assert_same(resumed, uninterrupted)
        assert all(not difference.any() for difference in unchanged.values())


# --- what pipelines have in common ------------------------------------------------------------------------------------


class Sometimes(nn.Module):
    """Uses its weights for some batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.never = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight if x[0, 0] > 0 else x


def missing_gradient() -> list[Tensor]:
    model = layers()
    model.insert(0, Sometimes())
    engine = engine_of(model, "adam", algorithm="naive", split=(5,))
    for t in range(6):
        x, y = batch(t, 0)
        x[0, 0] = x[0, 0].abs() * (1 if (t + engine.data_part[0]) % 3 else -1)
        engine.train_batch((x, y))
    return list(gathered(engine, model).values())


def test_a_gradient_that_only_some_pipelines_have() -> None:
    """It counts as zero in the others; one that no pipeline has stays none: Adam does not count a step."""
    for weights in trained()[missing_gradient]:
        assert_equal(weights, trained()[missing_gradient][0])
        assert not torch.equal(weights[0], torch.ones(6))
        assert torch.equal(weights[1], torch.ones(6))


def running_average() -> Tensor:
    """The running average of the first stage's input; the last stage has none."""
    model = layers()
    model.insert(0, nn.BatchNorm1d(6))
    engine = engine_of(model, algorithm="naive", split=(5,))
    train_on(engine, range(1))
    return gathered(engine, model)["0.running_mean"]


def test_running_averages_are_means_over_the_pipelines() -> None:
    means = [batch(0, pipeline)[0].mean(dim=0) for pipeline in range(PIPELINES)]
    for found in trained()[running_average]:
        torch.testing.assert_close(found, 0.1 * (means[0] + means[1]) / 2)


def write() -> dict[str, Any]:
    """Loads weights between steps: the same everywhere, then others in the second pipeline."""
    found = {}
    for average in ("gradients", "elastic"):
        model, fresh = layers(), layers(seed=7)
        engine, other = (engine_of(net, "plain sgd", average=average) for net in (model, fresh))
        train_on(engine, range(2))
        engine.flush()
        model.load_state_dict(layers(seed=7).state_dict())
        train_on(engine, range(2, 6))
        train_on(other, range(2, 6))
        found[average] = gathered(engine, model), gathered(other, fresh)
    return found


def test_weights_written_between_steps_count() -> None:
    """As if the pipelines had begun with them."""
    for outcome in trained()[write]:
        for loaded, fresh in outcome.values():
            assert_same(loaded, fresh)


def same_batches() -> list[str]:
    """The warnings of pipelines that train on one pipeline's data, and then of some that do not."""
    found = []
    for part in (lambda engine: 0, lambda engine: engine.data_part[0]):
        engine = engine_of(layers())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.train_batch(batch(0, part(engine)))
            engine.flush()
        found.append(" ".join(str(each.message) for each in caught))
        engine.detach()
    return found


def test_pipelines_with_the_same_batches_are_warned_of() -> None:
    outcomes = trained()[same_batches]
    assert ["same batches" in warned for warned, _ in outcomes] == [False, True, False, False]  # by a first stage
    assert not any("same batches" in fine for _, fine in outcomes)


# --- bad input and faults ---------------------------------------------------------------------------------------------


def make_badly() -> dict[str, tuple[str, str] | None]:
    """On each rank: what is refused, by the words that its message must have."""
    rank = dist.get_rank()
    saved: dict[str, Any] = {}

    def save() -> None:
        engine = engine_of(layers(), average="elastic")
        train_on(engine, range(1))
        saved.update(engine.state_dict())
        engine.detach()

    def load(**settings: Any) -> None:
        engine = engine_of(layers(), **settings)
        try:
            engine.load_state_dict(saved)
        finally:
            engine.detach()

    save()
    settings: dict[str, Callable[[], object]] = {
        "set num_pipelines to one of 1, 2": lambda: engine_of(layers(), num_pipelines=3),
        "num_pipelines=4 and": lambda: engine_of(layers(), num_pipelines=4),
        "be the same on all ranks": lambda: engine_of(layers(), num_pipelines=1 + rank % 2),
        "and neighbors=": lambda: engine_of(layers(), neighbors="stages" if rank else "pipelines"),
        "average_period": lambda: engine_of(layers(), average="elastic", average_period=1 + (rank == 3)),
        "average='elastic', and": lambda: load(),
        "num_pipelines=2, and": lambda: load(num_pipelines=1, split=CUTS[4]),
        "neighbors='stages', and": lambda: load(average="elastic", neighbors="pipelines"),
    }
    return {words: raised(function) for words, function in settings.items()}


def test_pipelines_that_cannot_be_formed_are_refused_on_every_rank() -> None:
    for outcomes in trained()[make_badly]:
        assert_refused(outcomes)


def train_until_lost() -> tuple[str, str] | None:
    engine = engine_of(layers(), average="elastic", average_period=2, timeout_s=60)

    def steps() -> None:
        for t in range(40):
            if t == 7 and dist.get_rank() == 2:
                die()
            train_on(engine, range(t, t + 1))
        engine.flush()

    return raised(steps)


def test_all_ranks_name_one_that_is_lost() -> None:
    """Those of its pipeline, and those of the others."""
    outcomes = launch(train_until_lost, 4, may_die=(2,))
    for rank in (0, 1, 3):
        assert_raised(outcomes[rank], "RuntimeError", "Rank 2", "at fault")


def go_separate_ways(what: str) -> tuple[str, str] | None:
    """The second pipeline loads other weights than the first, or empties itself one mini-batch earlier."""
    model = layers()
    engine = engine_of(model, timeout_s=60)
    second = engine.data_part[0] == 1

    def run() -> None:
        train_on(engine, range(4))
        if what == "loads others":
            engine.flush()
            model.load_state_dict(layers(seed=3 + second).state_dict())
        if what == "ends earlier" and second:
            engine.flush()
        train_on(engine, range(4, 8))
        engine.flush()

    found = raised(run)
    engine.detach(timeout_s=1.0)  # or the others would wait for this rank, which is alive
    return found


def test_pipelines_that_do_different_things_are_named() -> None:
    """On some rank, and no rank waits for ever or trains on."""
    whats = {"loads others": "different weights", "ends earlier": "about to consolidate the weights"}
    outcomes = launch_cases({what: partial(go_separate_ways, what) for what in whats}, 4, launch=launch)
    for what, words in whats.items():
        assert all(outcome is not None and outcome[0] == "RuntimeError" for outcome in outcomes[what])
        assert any(words in outcome[1] for outcome in outcomes[what])
