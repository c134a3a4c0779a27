"""A rank that trains with parameter servers, and what explains its weights, as the tests of all policies need it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer

from lightning_pipesync import ParameterServer
from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.methods.servers import ParameterServerConfig
from lightning_pipesync.methods.servers.messages import Push, Request, Update
from lightning_pipesync.methods.servers.router import MessageRouter
from tests.references.parameter_server import replay, replay_diloco, replay_downpour, replay_easgd, replay_shards
from tests.support.models import OPTIMIZERS, Run, assert_same, loss, seeded_mlp, state

STEPS = 8
PAUSES = (0.0, 0.0, 0.01, 0.03)
MAKES: dict[str, Callable[[nn.Module], Optimizer]] = {
    **OPTIMIZERS,
    "adagrad": lambda model: Adagrad(model.parameters(), lr=0.05),
}


class ServedRun(Run):
    """A network that this rank trains, or serves."""

    def __init__(self, optimizer: str = "sgd", *, seed: int = 0, batch_norm: bool = False, **settings: Any) -> None:
        model = seeded_mlp(seed, batch_norm)
        super().__init__(ParameterServer, MAKES[optimizer], model, **{"timeout_s": 60, **settings})
        self.rank = dist.get_rank()

    def step(self, number: int, pauses: Sequence[float] = (0.0,)) -> None:
        """Takes a step, and pauses in it at random, not as in another run."""
        self.backward(number)
        time.sleep(random.Random().choice(pauses))
        self.sync.step()

    def train(self, numbers: Iterable[int], pauses: Sequence[float] = (0.0,)) -> None:
        """Takes steps, if this rank is one that trains."""
        for number in () if self.sync.only_serves else numbers:
            self.step(number, pauses)

    @property
    def slices(self) -> list[dict[str, slice]]:
        """Each server's part of each parameter, by name."""
        return [
            {name: place for bucket in self.sync._buckets for name, place in bucket.slices(server).items()}
            for server in range(self.sync._router.num_servers)
        ]


class Hold:
    """Makes two servers use the first pushes of two learners in different orders, whichever comes first.

    What the last one pushes and requests from its first push on is kept meanwhile; no thread waits, as one may have to
    deliver decisions, by which the other learner gets the weights before its first push.
    """

    def __init__(self, rank: int, learners: tuple[int, int]) -> None:
        self._deliver = MessageRouter._deliver
        self._last, self._first = learners if rank == 1 else learners[::-1]
        self._holds, self._held, self._lock = rank < 2, list[Any](), threading.RLock()

    def deliver(self, router: MessageRouter, rank: int, message: Any) -> None:
        is_push = isinstance(message, Push)
        with self._lock:
            if self._holds and rank == self._last and (is_push or (self._held and isinstance(message, Request))):
                self._held.append(message)
                return
            self._deliver(router, rank, message)
            if self._holds and is_push and rank == self._first:
                self._holds = False
                for held in self._held:
                    self._deliver(router, self._last, held)

    def __enter__(self) -> None:
        MessageRouter._deliver = lambda *given: self.deliver(*given)  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        MessageRouter._deliver = self._deliver  # type: ignore[method-assign]


@dataclass(frozen=True)
class Case:
    """A training with servers.

    Args:
        settings: the method's.
        optimizer: its name.
        max_norm: to which each gradient is clipped.
        flushes: whether the training is flushed in the middle.
    """

    settings: dict[str, Any]
    optimizer: str = "sgd"
    max_norm: float | None = None
    flushes: bool = True

    def steps_of(self, rank: int) -> int:
        """One rank takes fewer steps."""
        return STEPS - 2 * (rank == 1)

    def learners(self, world_size: int) -> range:
        return ParameterServerConfig(**self.settings).roles(world_size).learners


@dataclass(frozen=True)
class Served:
    """What a rank has after its training, and its own buffers before."""

    log: list[Update]
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    metrics: dict[str, float]
    slices: list[dict[str, slice]]


def train(case: Case) -> Served:
    """Trains with delays at random, other ones in each run, and a closure."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    holds = case.settings.get("independent_shards")
    with Hold(rank, (world_size - 2, world_size - 1)) if holds else nullcontext():
        run = ServedRun(case.optimizer, batch_norm=True, keep_log=True, **case.settings)
        sync, optimizer = run.sync, run.optimizer
        for steps in (range(STEPS // 2), range(STEPS // 2, case.steps_of(rank))):
            for number in () if sync.only_serves else steps:

                def closure(number: int = number) -> None:
                    time.sleep(random.Random().choice(PAUSES))
                    run.backward(number)
                    if case.max_norm is not None or case.settings["policy"] in ("easgd", "diloco"):
                        sync.reduce()
                    if case.max_norm is not None:
                        sync.clip(case.max_norm)

                sync.step(lambda closure=closure: optimizer.step(closure))
            own = {name: buffer.clone() for name, buffer in run.model.named_buffers()}
            if case.flushes or steps.start:
                sync.flush()
                sync.resume()
    sync.flush()  # no step is between, as after a validation at the end
    metrics, slices = sync.metrics(), run.slices
    return Served(sync.log, run.end(), own, metrics, slices)


def explanation(case: Case, outcomes: Sequence[Served], **ignored: Any) -> nn.Module:
    """Returns the model to which the log of a run leads, or the logs of its servers; without some settings."""
    settings, log = {**case.settings, **ignored}, outcomes[0].log
    given = seeded_mlp(batch_norm=True), MAKES[case.optimizer], loss
    dc_lambda, policy = settings.get("dc_lambda", 0.0), settings["policy"]
    if settings.get("independent_shards"):
        logs, max_norm = [outcome.log for outcome in outcomes[: len(outcomes[0].slices)]], case.max_norm
        return replay_shards(*given, logs, outcomes[0].slices, dc_lambda=dc_lambda, max_norm=max_norm)
    if policy == "downpour":
        return replay_downpour(*given, log)[-1]
    if policy == "easgd":
        force = settings.get("elastic_force", 0.9 / len(case.learners(len(outcomes))))
        return replay_easgd(*given, log, force)[-1]
    if policy == "diloco":
        outer = {name: settings[name] for name in ("outer_lr", "outer_momentum") if name in settings}
        codec = get_codec(settings["compression"]) if settings.get("compression") else None
        return replay_diloco(*given, log, **outer, codec=codec)[-1]
    bound = settings.get("distance_bound", 0.0)
    return replay(*given, log, dc_lambda=dc_lambda, distance_bound=bound)[-1]


def assert_weights(of_ranks: Iterable[Mapping[str, Tensor]], expected: Mapping[str, Tensor]) -> None:
    """Asserts that each rank has the expected values bit for bit."""
    for weights in of_ranks:
        assert_same(weights, expected)


def assert_explains(case: Case, outcomes: Sequence[Served]) -> None:
    """Asserts that each rank has what the log says, with the buffers of the first learner; and what a policy promises.

    Settings that are lossy, or change the rate, must have had an effect.
    """
    learners, weights = case.learners(len(outcomes)), [outcome.weights for outcome in outcomes]
    expected = dict(explanation(case, outcomes).named_parameters())
    assert_weights(weights, {**expected, **outcomes[learners[0]].buffers})
    for name in {"compression", "distance_bound", "dc_lambda"} & set(case.settings):
        other = state(explanation(case, outcomes, **{name: 0.0}))
        assert not all(value.equal(other[key]) for key, value in expected.items()), f"{name} has no effect"
    logs = [outcome.log for outcome in outcomes[: len(outcomes[0].slices)]]
    assert all(outcome.metrics["updates"] == len(logs[0]) for outcome in outcomes)
    if not case.settings.get("independent_shards"):
        check_log(case, logs[0], learners)
        return
    orders = [[(update.gradients[0].rank, update.gradients[0].step) for update in log] for log in logs]
    assert all(sorted(order) == sorted(orders[0]) for order in orders), "all shards have had all gradients"
    first, second = len(outcomes) - 2, len(outcomes) - 1
    begun = [next(rank for rank, _ in order if rank in (first, second)) for order in orders[:2]]
    assert begun == [first, second], "in other orders"


def check_log(case: Case, log: Sequence[Update], learners: range) -> None:
    """Asserts what the policy promises."""
    settings, gradients = case.settings, [gradient for update in log for gradient in update.gradients]
    policy, used = settings["policy"], [(gradient.rank, gradient.step) for gradient in gradients]
    total = sum(map(case.steps_of, learners))
    most = max(len(update.gradients) for update in log)
    assert len(used) == len(set(used)), "no gradient is used twice"
    assert [update.version for update in log] == list(range(1, len(log) + 1))
    if policy in ("sync", "k_sync", "k_batch_sync"):
        assert {one for update in log for one in update.staleness} == {0}
    if policy in ("sync", "k_sync", "k_async"):  # distinct learners
        assert all(len({gradient.rank for gradient in update.gradients}) == len(update.gradients) for update in log)
    if policy in ("downpour", "easgd", "diloco"):
        for rank in learners:
            own = [gradient for gradient in gradients if gradient.rank == rank]
            assert [one.accrued.first_step for one in own] == [1, *(one.step + 1 for one in own[:-1])]
            assert policy == "easgd" or own[-1].step == case.steps_of(rank), "nothing that was accrued is lost"
    elif policy not in ("k_sync", "k_batch_sync"):
        assert len(used) == total, "no gradient is lost"
    if policy == "easgd":
        assert len(log) == sum(case.steps_of(rank) // settings["period"] for rank in learners)
    expected = {"sync": len(learners), "n_softsync": len(learners) // settings.get("n", 1)}
    expected |= dict.fromkeys(("async", "ssp", "downpour", "easgd"), 1)
    expected |= dict.fromkeys(("k_sync", "k_batch_sync", "k_async", "k_batch_async"), settings.get("k", len(learners)))
    assert most == expected.get(policy, most)
    if settings.get("delay_compensation") == "momentum":
        assert any(gradient.ahead for gradient in gradients)
    if policy == "ssp":
        clocks = dict.fromkeys(learners, 0)
        for rank, _ in used:
            clocks[rank] += 1
            lead = max(clocks.values()) - min(clocks.values())
            assert lead <= settings["staleness_bound"] + 1 or max(clocks.values()) > case.steps_of(1)
    if policy == "diloco":
        check_diloco(settings, log)


def check_diloco(settings: Mapping[str, Any], log: Sequence[Update]) -> None:
    """Asserts that each learner counts by its steps and its staleness, and takes the weights within the overlap."""
    pushed = [each for update in log for each in update.gradients]
    assert max(each.num_steps for each in pushed) == settings["period"]
    under = [fetch.step - one.accrued.first_step + 1 for one in pushed for fetch in one.accrued.fetches]
    assert all(0 < steps <= settings["overlap_steps"] for steps in under), "a flush takes them earlier"
    assert bool(under) == ("overlap_steps" in settings)
    for update in log:
        by_staleness = [max(1, number) if "staleness_lr" in settings else 1 for number in update.staleness]
        counts = [each.num_steps / number for each, number in zip(update.gradients, by_staleness, strict=True)]
        expected = [count * len(counts) / sum(counts) for count in counts]
        assert all(abs(one - other) < 1e-6 for one, other in zip(update.weights, expected, strict=True))
