"""EA-Pipe and its baselines on real processes against one-process simulations with plain tensors."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipesync.methods.ea_pipe import EAPipeConfig
from tests.references.ea_pipe import reference_of
from tests.references.side_by_side import side_by_side
from tests.support.case_table import Outcomes, launch_cases
from tests.support.ea_pipe_runs import CUTS, OPTIMIZERS, assert_equal, engine_on, layers
from tests.support.harness import assert_refused, raised
from tests.support.models import batch

STEPS = 11
#: The stage of each Linear, by the number of stages.
STAGE_OF = {2: [0, 0, 1, 1, 1], 3: [0, 1, 1, 2, 2], 4: [0, 1, 2, 2, 3]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"tau={tau}": ("sgd", {"period": tau, "elastic_force": 0.3}) for tau in (1, 2, 3)},
    "adam": ("adam", {"period": 2}),
    "more replicas": ("sgd", {"replicas": 6}),
    "pipedream": ("sgd", {"algorithm": "pipedream"}),
    "pipedream, adam": ("adam", {"algorithm": "pipedream"}),
    "weight stashing": ("sgd", {"algorithm": "weight_stashing"}),
    "weight stashing, adam": ("adam", {"algorithm": "weight_stashing"}),
    "naive": ("sgd", {"algorithm": "naive"}),
    "naive, adam": ("adam", {"algorithm": "naive"}),
    "spectrain": ("sgd", {"algorithm": "spectrain"}),
    "spectrain, adam": ("adam", {"algorithm": "spectrain"}),
    "spectrain, smoothed": ("plain sgd", {"algorithm": "spectrain"}),
}
#: Those that differ in what stages send to each other, and when; by night also on four ranks.
ON_PROCESSES = ("tau=2", "pipedream", "weight stashing", "naive", "spectrain")
SYNCHRONOUS: dict[str, dict[str, Any]] = {
    algorithm + clipped: {"algorithm": algorithm, **({"clip_norm": 0.3} if clipped else {})}
    for algorithm in ("gpipe", "1f1b")
    for clipped in ("", ", clipped")
}
#: Two pipelines of two stages: of one mini-batch, and ones that a reference model attracts.
SIDE_BY_SIDE: dict[str, dict[str, Any]] = {
    "gradients": {"algorithm": "pipedream"},
    "elastic": {"average": "elastic", "average_period": 2, "replicas": 2},
}


class Splits(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.tanh(), x.sigmoid()


class Ends(nn.Module):
    def forward(self, parts: tuple[Tensor, Tensor]) -> Tensor:
        return parts[0] * parts[1]


def with_pairs() -> nn.Sequential:
    """The second stage begins with a tuple, and BatchNorm counts what it has seen."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), Splits(), Ends(), nn.Linear(8, 3))


class Traced(nn.Module):
    """The same layers in a module that has to be traced."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


def train(
    optimizer: Any, settings: dict[str, Any], virtual_stages: int | None = None, wrap: Any = lambda model: model
) -> dict[str, Any]:
    """The losses, where the last stage is, and the master's weights."""
    rank = 0 if virtual_stages else torch.distributed.get_rank()
    model = layers(seed=rank)  # rank 0's weights count
    engine = engine_on(wrap(model), optimizer, virtual_stages=virtual_stages, **settings)
    losses = [engine.train_batch(batch(t, engine.data_part[0])) for t in range(STEPS)]
    engine.gather()
    engine.detach()
    return {"losses": losses, "weights": [p.detach().clone() for p in model.parameters()]}


def train_synchronously(settings: dict[str, Any]) -> list[Tensor]:
    """Mini-batches in one or two parts, of shapes that change."""
    model = with_pairs()
    engine = engine_on(model, virtual_stages=None, split=(3,), **settings)
    for t in range(8):
        x, y = batch(t, 0, size=8 if t < 5 else 4)
        engine.train_batch((x[:4], y[:4]), completes=t >= 5)
        if t < 5:
            engine.train_batch((x[4:], y[4:]))
    engine.gather()
    engine.detach()
    return list(model.state_dict().values())


@cache
def on_processes(num_stages: int) -> Outcomes:
    names = ON_PROCESSES if num_stages == 2 else ("tau=2",)
    cases: dict[Any, Any] = {
        name: partial(train, CASES[name][0], {"split": CUTS[num_stages], **CASES[name][1]}) for name in names
    }
    if num_stages == 2:
        cases["traced"] = partial(train, "sgd", {**CASES["tau=2"][1], "split": ("net.4",)}, wrap=Traced)
        cases |= {name: partial(train_synchronously, settings) for name, settings in SYNCHRONOUS.items()}
    return launch_cases(cases, num_stages)


@cache
def virtual(case: str, num_stages: int) -> dict[str, Any]:
    optimizer, settings = CASES[case]
    return train(optimizer, {"split": CUTS[num_stages], **settings}, virtual_stages=num_stages)


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_follows_the_algorithm(case: str, num_stages: int) -> None:
    optimizer, settings = CASES[case]
    batches = [batch(t, 0) for t in range(STEPS)]
    smoothing = 0.9 if "smoothed" in case else 0.0
    expected = reference_of(settings, layers(), OPTIMIZERS[optimizer], batches, STAGE_OF[num_stages], smoothing)
    assert_equal(virtual(case, num_stages)["weights"], expected)


@pytest.mark.parametrize(("num_stages", "case"), [*((2, case) for case in (*ON_PROCESSES, "traced")), (3, "tau=2")])
def test_processes_are_virtual_stages(num_stages: int, case: str) -> None:
    """Bit for bit, on every rank."""
    outcomes, case = on_processes(num_stages)[case], case.replace("traced", "tau=2")
    for outcome in outcomes:
        assert_equal(outcome["weights"], virtual(case, num_stages)["weights"])
    assert outcomes[0]["losses"] == virtual(case, num_stages)["losses"]


@pytest.mark.parametrize("case", SYNCHRONOUS)
def test_synchronous_pipelines_are_sgd(case: str) -> None:
    """Of two micro-batches, which BatchNorm sees once, not what shapes are looked at with."""
    model = with_pairs()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for t in range(8):
        x, y = batch(t, 0, size=8 if t < 5 else 4)
        optimizer.zero_grad()
        for start in range(0, len(x), 2):
            (nn.functional.cross_entropy(model(x[start : start + 2]), y[start : start + 2]) / 2).backward()
        if "clip_norm" in SYNCHRONOUS[case]:
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    for outcome in on_processes(2)[case]:
        torch.testing.assert_close(outcome, list(model.state_dict().values()))


def test_pipelines_side_by_side_follow_their_algorithm() -> None:
    """Bit for bit: one mini-batch of all pipelines, whose mean gradient counts; or a reference that attracts them."""
    shared = {"num_pipelines": 2, "split": CUTS[2]}
    outcomes = launch_cases({k: partial(train, "sgd", {**shared, **one}) for k, one in SIDE_BY_SIDE.items()}, 4)
    batches = [[batch(t, pipeline) for pipeline in range(2)] for t in range(STEPS)]
    make = OPTIMIZERS["sgd"]
    expected = {
        "gradients": reference_of(SIDE_BY_SIDE["gradients"], layers(), make, batches, STAGE_OF[2], 0.0),
        "elastic": side_by_side(layers(), make, batches, average_force=0.45, average_period=2, replicas=2),
    }
    for name, weights in expected.items():
        for outcome in outcomes[name]:
            assert_equal(outcome["weights"], weights)


@pytest.mark.parametrize("rows", [8, 1])
def test_one_stage_with_hardly_any_force_is_plain_sgd(rows: int) -> None:
    """Products with a single row round by the address of the weights on some processors."""
    engine, plain = engine_on(layers(), virtual_stages=1, elastic_force=1e-30), layers()
    optimizer = OPTIMIZERS["sgd"](plain.parameters())
    for t in range(STEPS):
        x, y = batch(t, 0, size=rows)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(plain(x), y)
        loss.backward()
        optimizer.step()
        assert engine.train_batch((x, y)) == loss


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"clip_norm": 1.0, "algorithm": "naive"}, "clip_norm"),
        ({"clip_norm": 1.0, "algorithm": "weight_stashing"}, "clip_norm"),
        ({"num_pipelines": 4, "average": "elastic", "average_force": 0.3}, "average_force=0.3 .* set 0.25 at most"),
        *(
            (
                {"num_pipelines": 2, "average": "elastic", "algorithm": algorithm},
                f"average='elastic' .* algorithm='{algorithm}'",
            )
            for algorithm in ("pipedream", "weight_stashing", "naive", "spectrain")
        ),
    ],
)
def test_settings_that_exclude_each_other_are_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        EAPipeConfig(**settings)


def make_bad(settings: dict[str, Any]) -> tuple[str, str] | None:
    engine = engine_on(layers(), virtual_stages=None, **settings)
    outcome = raised(lambda: engine.train_batch(batch(0, 0)))
    engine.detach()
    return outcome


def test_settings_that_do_not_fit_the_model_are_refused_on_every_rank() -> None:
    cases: dict[str, dict[str, Any]] = {
        "split=(1, 2)": {"split": (1, 2)},
        "split=(40,)": {"split": (40,)},
        "micro_batches": {"algorithm": "gpipe", "micro_batches": 3},
    }
    outcomes = launch_cases({named: partial(make_bad, settings) for named, settings in cases.items()}, 2)
    for named in cases:
        for outcome in outcomes[named]:
            assert_refused({named: outcome})
    refused = {
        "10 stages need at least as many layers": {"virtual_stages": 10},
        "num_pipelines=2": {"num_pipelines": 2},
    }
    assert_refused({k: raised(partial(engine_on, layers(), **settings)) for k, settings in refused.items()})
