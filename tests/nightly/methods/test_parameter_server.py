"""Parameter servers: more policies, numbers of ranks and servers whose logs explain the weights; and what is loaded."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipesync import ParameterServer
from lightning_pipesync.methods.servers.messages import Update
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_raised, assert_refused, on_ranks, raised
from tests.support.lost_ranks import wait_for
from tests.support.models import OPTIMIZERS, Run, loss, seeded_mlp, state
from tests.support.server_runs import STEPS, Case, ServedRun, assert_explains, assert_weights, train

HALF: dict[str, Any] = {"servers": 2, "dedicated_servers": True}
SERVES: dict[str, Any] = {"servers": 1, "dedicated_servers": True}
DC_ASGD: dict[str, Any] = {"delay_compensation": "dc_asgd", "dc_lambda": 2.0}
BY_DISTANCE: dict[str, Any] = {"staleness_lr": "distance", "distance_bound": 1e-3}
SEVERAL: dict[str, Any] = {"policy": "k_batch_async", "k": 2}
SHARDS: dict[str, Any] = {"policy": "async", "independent_shards": True}
DOWNPOUR_SHARDS: dict[str, Any] = {"policy": "downpour", "independent_shards": True, "n_push": 2}
DILOCO: dict[str, Any] = {"policy": "diloco", "period": 2}

#: By number of ranks.
CASES: dict[int, dict[str, Case]] = {
    2: {"n_push": Case({"policy": "downpour", "n_push": 1}), "diloco": Case({**DILOCO, "k": 1, "outer_momentum": 0.0})},
    3: {
        "one server": Case({**SEVERAL, "servers": 1}),
        "dedicated, sync": Case({"policy": "sync", **SERVES}),
        "dedicated, ssp": Case({"policy": "ssp", "staleness_bound": 0, **SERVES}),
        "dedicated, easgd": Case({"policy": "easgd", "period": 2, **SERVES}),
        "diloco, overlap": Case({**DILOCO, "k": 2, "overlap_steps": 2, "servers": 1}),
        "encoded, diloco": Case({**DILOCO, "k": 1, "servers": 1, "compression": "int8"}, flushes=False),
        "shards, by gradient": Case({**SHARDS, "staleness_lr": "gradient"}, "adamw"),
        "shards, dc_asgd": Case({**SHARDS, **DC_ASGD, "servers": 2}),
        "shards, clipped": Case(SHARDS, "adamw", max_norm=0.5),
        "shards, downpour": Case({**DOWNPOUR_SHARDS, "n_push": 1}, "adamw"),
        "shards, downpour, pushes": Case({**DOWNPOUR_SHARDS, "n_push": 3, "n_fetch": 2}),
        "shards, downpour, adagrad": Case({**DOWNPOUR_SHARDS, "n_fetch": 2}, "adagrad"),
    },
    4: {
        "k_sync": Case({"policy": "k_sync", "k": 2}, "adamw"),
        "k_batch_sync": Case({"policy": "k_batch_sync", "k": 2}, "adamw"),
        "k_async": Case({"policy": "k_async", "k": 2, "servers": 2}, "adamw"),
        "n_softsync": Case({"policy": "n_softsync", "n": 2, "staleness_lr": "mean"}, "adamw"),
        "ssp": Case({"policy": "ssp", "staleness_bound": 1}, "adamw"),
        "dc_asgd": Case({**SEVERAL, **DC_ASGD}, "adamw"),
        "distance": Case({**SEVERAL, **BY_DISTANCE, "delay_compensation": "momentum"}, "adamw"),
        "predicted": Case({**SEVERAL, "delay_compensation": "momentum", "staleness_lr": "mean"}, "adamw"),
        "downpour": Case({"policy": "downpour", "n_push": 3}),
        "easgd": Case({"policy": "easgd", "period": 2, "elastic_force": 0.5}),
        "diloco": Case({**DILOCO, "k": 1, "grace_s": 0.02, "staleness_lr": "gradient"}),
        "diloco, overlap": Case({**DILOCO, "period": 3, "overlap_steps": 1}, "adamw"),
        "dedicated, k_batch_sync": Case({"policy": "k_batch_sync", "k": 2, **HALF}),
        "dedicated, predicted": Case({"policy": "async", "delay_compensation": "momentum", **HALF}),
        "dedicated, downpour": Case({"policy": "downpour", "n_push": 2, **HALF}),
        "dedicated, diloco": Case({**DILOCO, "k": 1, **HALF}),
        "dedicated, shards": Case({**SHARDS, **HALF}),
        "dedicated, shards, downpour": Case({**DOWNPOUR_SHARDS, **HALF}, "adagrad"),
    },
}


@cache
def trained(world_size: int) -> Outcomes:
    return launch_cases({name: partial(train, case) for name, case in CASES[world_size].items()}, world_size)


@pytest.mark.parametrize(("world_size", "name"), [(number, name) for number, cases in CASES.items() for name in cases])
def test_the_log_explains_the_weights(world_size: int, name: str) -> None:
    assert_explains(CASES[world_size][name], trained(world_size)[name])


def train_unevenly(settings: dict[str, Any], folder: Path, awaited: int) -> list[Update]:
    """Trains with a rank 1 that takes its step `awaited` only when the others have ended."""
    run = ServedRun(keep_log=True, **settings)
    for i in range(STEPS):
        if run.rank == 1 and i == awaited:
            wait_for(lambda: len(list(folder.iterdir())) == 2)
        run.step(i)
    (folder / str(run.rank)).touch()
    run.end()
    return run.sync.log


def test_a_slow_rank_does_not_stop_the_others(tmp_path: Path) -> None:
    """Its late gradients are used after theirs, or dropped."""
    kinds = {"async": ({"policy": "async"}, 4), "n_softsync": ({"policy": "n_softsync"}, 4)}
    cases: dict[str, Any] = {**kinds, "k_sync": ({"policy": "k_sync", "k": 2}, 0)}
    for name in cases:
        (tmp_path / name).mkdir()
    partials = {name: partial(train_unevenly, given, tmp_path / name, at) for name, (given, at) in cases.items()}
    outcomes = launch_cases(partials, 3)
    used = {name: [[(g.rank, g.step) for g in update.gradients] for update in outcomes[name][0]] for name in cases}
    for name in kinds:
        late = [number for number, update in enumerate(used[name]) for rank, step in update if rank == 1 and step > 4]
        assert len(late) == STEPS - 4
        assert min(late) >= max(number for number, update in enumerate(used[name]) if dict(update).keys() - {1})
    together = [[(0, step), (2, step)] for step in range(1, STEPS + 1)]
    alone = [[(1, step)] for step in range(2, STEPS + 1)]
    assert used["k_sync"] == together + alone, "its first one was of the first weights"


# --- checkpoints, and what is loaded in a training --------------------------------------------------------------------


def resume(settings: dict[str, Any], kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    """Trains with one learner, so that timing plays no part; flushed, or resumed, within a period."""
    run = Run(ParameterServer, "adamw", timeout_s=60, **settings)
    run.steps(range(7))
    if kind == "resumed":
        run = run.resumed(seeded_mlp(1))
    elif kind == "flushed":
        run.sync.flush()
        run.sync.resume()
    run.steps(range(7, 12))
    run.sync.flush()
    weights, versions = state(run.model), run.sync.state_dict().get("versions")
    run.sync.resume()
    own = state(run.model)
    run.sync.detach()
    return weights, own, versions


def test_learners_resume_with_their_replicas_and_optimizers() -> None:
    kinds: dict[str, dict[str, Any]] = {
        "easgd": {"policy": "easgd", "period": 3},
        "diloco": {"policy": "diloco", "period": 3},
        "async": SHARDS,
        "downpour": DOWNPOUR_SHARDS,
    }
    cases = {(name, how): partial(resume, kinds[name], how) for name in kinds for how in ("flushed", "resumed")}
    outcomes = launch_cases(cases, 1)
    for name in kinds:
        [(weights, own, versions)], [(resumed, resumed_own, same)] = (outcomes[name, h] for h in ("flushed", "resumed"))
        assert_weights([resumed], weights)
        assert_weights([resumed_own], own)
        assert same == versions


def load_in_midst(settings: dict[str, Any]) -> dict[str, Tensor]:
    run = ServedRun(**settings)
    run.steps(range(5))
    run.model.load_state_dict(seeded_mlp(1).state_dict())
    if "compression" in settings:  # residuals of the weights before, with which nothing may move
        for group in (group for optimizer in run.sync.optimizers for group in optimizer.param_groups):
            group["lr"] = 0.0
        run.steps(range(4))
    return run.end()


def test_training_continues_from_loaded_weights() -> None:
    """Gradients that were pushed or accrued before, weights that were requested, and residuals have no effect."""
    cases: dict[str, dict[str, Any]] = {
        "downpour": {"policy": "downpour", "n_push": 2},
        "easgd": {"policy": "easgd", "period": 2},
        "diloco": {"policy": "diloco", "period": 3, "k": 1},
        "on their way": {"policy": "diloco", "period": 4, "k": 2, "overlap_steps": 3},
        "k_sync": {"policy": "k_sync", "k": 2},
        "k_batch_async": {"policy": "k_batch_async", "k": 2},
        "residuals": {"policy": "diloco", "compression": "topk", "period": 2, "outer_momentum": 0.0},
    }
    outcomes = launch_cases({name: partial(load_in_midst, settings) for name, settings in cases.items()}, 3)
    for name in cases:
        assert_weights(outcomes[name], seeded_mlp(1).state_dict())


def load_on_some(settings: dict[str, Any]) -> tuple[str, str] | None:
    """Loads weights on rank 1 alone during a training; returns what a rank raises."""
    run = ServedRun(**settings, timeout_s=600)

    def steps() -> None:
        for i in range(0 if run.sync.only_serves else 6):
            if run.rank == 1 and i == 3:
                run.model.load_state_dict(seeded_mlp(1).state_dict())
            run.step(i)
        run.sync.flush()

    outcome = raised(steps)
    run.sync.detach(timeout_s=3.0)
    return outcome


def test_weights_that_some_ranks_load_are_refused_on_all() -> None:
    """Rank 1 waits in its next step until the others come to theirs, or to a flush: not for the timeout."""
    cases: dict[str, dict[str, Any]] = {
        "sync": {"policy": "sync"},
        "async": {"policy": "async"},
        "downpour": {"policy": "downpour", "n_push": 2},
        "dedicated": {"policy": "async", **SERVES, "on_lost_rank": "raise"},
    }
    outcomes = launch_cases({name: partial(load_on_some, settings) for name, settings in cases.items()}, 3)
    for name in cases:
        for outcome in outcomes[name]:
            assert_raised(outcome, "RuntimeError", "were loaded on rank 1 and not on rank 0, 2: load them on all ranks")


class WithTarget(nn.Module):
    """A network with a copy of itself that no optimizer trains, as in DQN."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.target = seeded_mlp(), seeded_mlp(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


def load_target(settings: dict[str, Any], loads: bool) -> dict[str, Tensor]:
    model = WithTarget()
    run = Run(ParameterServer, lambda model: OPTIMIZERS["sgd"](model.net), model, timeout_s=60, **settings)
    for i in () if run.sync.only_serves else range(8):
        run.step(i)
        if loads:
            model.target.load_state_dict(model.net.state_dict())
    return {name: value for name, value in run.end().items() if name.startswith("net")}


def without_state(run: Run) -> dict[str, Any]:
    """Returns what the state_dict() of the optimizer, with one group, was before it began to train."""
    [group] = run.optimizer.param_groups
    return {"state": {}, "param_groups": [{**group, "params": [*range(len(group["params"]))]}]}


def set_rate(settings: dict[str, Any], loads: bool) -> dict[str, Tensor]:
    """Sets the learning rate in the sixth step, by loading a state of the optimizer alone, or after a flush."""
    run = Run(ParameterServer, lambda model: SGD(model.parameters(), lr=0.05), timeout_s=60, **settings)
    run.steps(range(5))
    run.backward(5)
    if loads:
        loaded = without_state(run)
        loaded["param_groups"][0]["lr"] = 0.02
        run.optimizer.load_state_dict(loaded)
    else:
        run.optimizer.param_groups[0]["lr"] = 0.02
        run.sync.flush()
        run.sync.resume()
    run.sync.step()
    run.steps(range(6, 11))
    return run.end()


def train_again(optimizer: str, restarts: bool) -> dict[str, Tensor]:
    """Trains, and again from where it began, with the optimizer's first state: it has none."""
    run = ServedRun(optimizer, policy="sync")
    first = state(run.model), without_state(run)
    if restarts:
        run.steps(range(4))
        run.model.load_state_dict(first[0])
        run.optimizer.load_state_dict(first[1])
    run.steps(range(4))
    return run.end()


def load_weights_alone(optimizer: str, flushes: bool) -> dict[str, Tensor]:
    """Loads weights when the optimizer holds a copy of its state, as it does after it was given back to be saved."""
    run = ServedRun(optimizer, policy="sync")
    run.steps(range(2))
    if flushes:
        run.sync.flush()
        run.sync.return_optimizer_states()
    run.steps(range(2, 4))
    run.model.load_state_dict(seeded_mlp(1).state_dict())
    run.steps(range(4, 6))
    return run.end()


#: By what is loaded, and another difference: how many ranks train so, and how they do. Of one timing plays no part.
LOADS: dict[tuple[str, str], tuple[int, Any]] = {
    ("target network", "easgd"): (1, partial(load_target, {"policy": "easgd", "period": 3})),
    ("target network", "downpour"): (1, partial(load_target, {"policy": "downpour", "n_push": 2, "n_fetch": 3})),
    ("target network", "dedicated"): (2, partial(load_target, {"policy": "async", **SERVES})),
    ("optimizer alone", "easgd"): (1, partial(set_rate, {"policy": "easgd", "period": 3})),
    ("optimizer alone", "downpour"): (1, partial(set_rate, {"policy": "downpour", "n_push": 2, "n_fetch": 3})),
    ("optimizer without a state", "sgd"): (2, partial(train_again, "sgd")),
    ("optimizer without a state", "adamw"): (2, partial(train_again, "adamw")),
    ("weights alone", "sgd"): (2, partial(load_weights_alone, "sgd")),
}


@pytest.mark.parametrize("number", [1, 2])
def test_servers_read_what_is_loaded_and_nothing_else(number: int) -> None:
    """Weights are not read with a target network or an optimizer; what was accrued is applied first, as at a flush."""
    names = [name for name, (num_ranks, _) in LOADS.items() if num_ranks == number]
    cases = {(name, loads): partial(LOADS[name][1], loads) for name in names for loads in (True, False)}
    outcomes = launch_cases(cases, number)
    for name in names:
        assert_weights(outcomes[name, True], outcomes[name, False][0])


# --- learners and servers ---------------------------------------------------------------------------------------------


def with_teacher(**settings: Any) -> dict[str, Tensor]:
    """Each rank's teacher follows the weights that it gets itself; nobody changes the frozen layer."""
    model = nn.ModuleDict({"student": seeded_mlp(), "teacher": seeded_mlp(), "frozen": seeded_mlp(1)})
    for name in ("teacher", "frozen"):
        model[name].requires_grad_(False)
    optimizer = OPTIMIZERS["sgd"](model["student"])
    sync = ParameterServer(model, optimizer, policy="async", timeout_s=60, **settings)
    for step in () if sync.only_serves else range(STEPS + dist.get_rank()):
        optimizer.zero_grad()
        loss(model["student"], step, dist.get_rank()).backward()
        sync.step()
        with torch.no_grad():
            for own, other in zip(model["teacher"].parameters(), model["student"].parameters(), strict=True):
                own.lerp_(other, 0.5)
    before = state(model["teacher"])
    sync.flush()
    after = {**state(model), **{f"before.{name}": value for name, value in before.items()}}
    sync.detach()
    return after


@pytest.mark.parametrize("first_learner", [0, 1])
def test_a_teacher_becomes_that_of_the_first_learner(first_learner: int) -> None:
    """It has no optimizer, and each rank another one; rank 0, which only serves, has none but the initial one."""
    outcomes = on_ranks(partial(with_teacher, **(SERVES if first_learner else {})), 3)
    for name, value in outcomes[first_learner].items():
        kind, _, rest = name.partition(".")
        for outcome in outcomes:
            assert kind == "before" or torch.equal(outcome[name], value), name
        if kind == "teacher":
            before = [outcome[f"before.{rest}"] for outcome in outcomes]
            assert torch.equal(value, before[first_learner])
            assert not torch.equal(before[1], before[2]), "or nothing is shown"


def step_and_refuse() -> list[tuple[str, str] | None]:
    run, loader = ServedRun(**SERVES), DataLoader(TensorDataset(torch.arange(8)))
    stepped = raised(lambda: run.step(0)) if run.sync.only_serves else None
    outcomes = [stepped, raised(lambda: run.sync.prepare_train_loader(loader))]
    run.sync.detach()
    for settings in ({"servers": 2}, {"k": 2}):
        dist.barrier()
        outcomes.append(raised(lambda settings=settings: ServedRun(**{**SERVES, **settings})))
    dist.barrier()
    return outcomes


def test_what_a_dedicated_server_cannot_do_is_refused() -> None:
    texts = ["set partition='work_queue'", "leaves none of the 2 ranks to train", "more than the 1 learners"]
    for rank, (stepped, *refused) in enumerate(on_ranks(step_and_refuse, 2)):
        assert rank == 1 or "Rank 0 only serves" in str(stepped)
        assert_refused(dict(zip(texts, refused, strict=True)))
