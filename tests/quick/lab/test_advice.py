"""The line that says what would be faster than a training that runs: when it is said, and of what."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer

from lightning_pipesync.core.comm.traffic import Traffic
from lightning_pipesync.lab.bench.timing import StepRecorder
from lightning_pipesync.lab.plan import advice as advices
from lightning_pipesync.lab.plan.advice import AGAIN, PROBE, Advice, Advisor, Training, advice, cluster_of, is_usual
from lightning_pipesync.lab.plan.predictions import predict
from lightning_pipesync.lab.predictions.cluster import Cluster, MeasuredCost
from lightning_pipesync.lab.predictions.work import MethodWork
from lightning_pipesync.methods.dear.config import DeARConfig
from tests.quick.lab.test_plan import MIB, WORK, cluster

DDP, DEAR, INT4 = ("ddp", "none", None), ("dear", "none", None), ("dear", "int4", None)
#: Of ranks: one computes longer, and all others wait for it, too.
PACE = [(1.0, 0.9), (1.0, 0.8)]


def with_int4(bandwidth: float, **errors: float) -> Cluster:
    """As an advisor measures it; at 20 MB/s an all-reduce of 16 MiB takes 1.3 s, or a seventh of that."""
    at = cluster(bandwidth)
    by_codec = {**at.all_reduces, "int4": MeasuredCost(1e-4, 0.13 / bandwidth + 1e-10, **errors)}
    return replace(at, all_reduces=by_codec, exchanges={}, has_trees=False)


def optimizer_of(kind: type[Optimizer], **settings: Any) -> Optimizer:
    return kind([nn.Parameter(torch.ones(1))], **settings)


def line(
    training: Training = DDP,
    kind: type[Optimizer] = AdamW,
    pace: Any = PACE,
    at: Cluster | None = None,
    work: Any = WORK,
) -> str | None:
    found = advice(training, optimizer_of(kind), pace, work, at or with_int4(2e7))
    return None if found is None else found.line()


# --- what is said -----------------------------------------------------------------------------------------------------


def test_the_line_has_what_was_measured_and_predicted() -> None:
    """Of a step of 1 s, of which 0.8 s are waited, those that are predicted for DeAR with int4 are left."""
    at = with_int4(2e7)
    int4 = next(one for one in predict(WORK, at) if one.title == "dear (compression=int4)")
    gain = 1.0 / (1.0 - (WORK.seconds + 0.8 - int4.seconds))
    assert line(at=at) == (
        f"The network takes 80% of a step. `DeARStrategy(compression='int4')` would take {gain:.2g} times fewer "
        "seconds at DDP's quality in our tests; `pipesync plan` measures it."
    )
    DeARConfig(**int4.settings)


@pytest.mark.parametrize(
    ("training", "kind", "strategy"),
    [
        (DDP, AdamW, "DeARStrategy(compression='int4')"),
        (DDP, SGD, "PipeSGDStrategy(compression='int8')"),
        (DEAR, SGD, "PipeSGDStrategy(compression='int8')"),
        (INT4, AdamW, None),
        (("pipe_sgd", "int8", None), SGD, None),
        (("selsync", "none", None), AdamW, "DeARStrategy(compression='int4')"),
        (DEAR, Adam, None),
    ],
)
def test_what_trains_as_ddp_in_tests_with_this_optimizer(
    training: Training, kind: type[Optimizer], strategy: str | None
) -> None:
    """And trains otherwise than what runs, unless that is what is faster."""
    found = line(training, kind)
    assert (found is None) == (strategy is None)
    assert strategy is None or f"`{strategy}` would take" in (found or "")


def test_an_exact_method_goes_first_where_it_gains_about_as_much() -> None:
    found = line(pace=[(0.15, 0.05)], at=with_int4(3e8))
    assert found is not None
    assert "`DeARStrategy()` would take" in found
    assert "fewer seconds with DDP's weights; " in found


def test_an_exact_method_that_gains_too_little_hides_no_other() -> None:
    """Of a step of 0.5 s, in which something else takes long, DeAR takes 0.03 off and codecs 0.05."""
    found = line(pace=[(0.5, 0.06)], at=with_int4(2.5e8))
    assert found is not None
    assert "compression" in found


@pytest.mark.parametrize(
    ("pace", "at"),
    [
        ([(1.0, 0.0), (1.0, 0.9)], with_int4(2e7)),  # one rank never waits: it is slow, or loads its data slowly
        ([(20.0, 0.8)], with_int4(2e7)),  # of a step in which something else takes most of the time
        (PACE, with_int4(1e11)),  # a network for which no wait is predicted
        (PACE, with_int4(2e5)),  # one on which all that is known takes longer
        (PACE, with_int4(2e7, beta_error=1e-7)),  # costs that may be much higher
    ],
)
def test_nothing_is_said_where_nothing_gains(pace: Any, at: Cluster) -> None:
    without_int8 = {codec: cost for codec, cost in at.all_reduces.items() if codec != "int8"}
    assert line(pace=pace, at=replace(at, all_reduces=without_int8)) is None


def test_what_is_refused_and_low_rank_are_not_advised() -> None:
    at, tensors = with_int4(2e7), [replace(one, shape=(512, 512)) for one in WORK.profile.tensors]
    measured = {"dear": MethodWork(low_rank_seconds=0.001)}
    work = replace(WORK, profile=replace(WORK.profile, tensors=tensors), measured=measured)
    found = predict(work, at)
    assert min(found, key=lambda one: one.seconds).settings.get("low_rank") == 4
    assert "int4" in (line(work=work, at=at) or "")
    work = replace(work, refused={"dear:compression=int4": "no"})
    assert "`PipeSGDStrategy(compression='int8')`" in (line(work=work, at=at) or "")


def test_the_line_is_repeated_at_the_end_of_a_long_training_if_it_still_holds() -> None:
    def last(seconds: float, taken: int = AGAIN) -> str | None:
        began = advices.perf_counter() - taken * seconds
        return Advice("This {}.", 1.0, 0.6, 0.5, num_steps=7, began=began).last_line(7 + taken)

    assert last(1.0, AGAIN - 1) is None
    assert last(1.0) == "The network takes 60% of a step. This would take 2 times fewer seconds."
    assert last(2.0) == "The network takes 30% of a step. This would take 1.3 times fewer seconds."
    assert last(0.8) == "The network takes 50% of a step. This would take 1.6 times fewer seconds."
    assert last(0.5) is None, "what it waits less has made it as fast"
    assert last(6.0) is None, "it computes, or loads, for most of the time"


def test_the_network_is_as_fast_as_steps_and_probes_say() -> None:
    """Of 4 ranks; the codecs' own time comes on top of that of their bytes."""
    alpha, beta = 1e-3, 4e-8
    probes = {codec: 2 * 3 * (alpha + PROBE / 4 * beta / ratio) for codec, ratio in (("none", 1), ("int8", 4))}
    found = cluster_of(4, 1e7, 20, 20 * 3 * alpha + 1e7 * beta, probes)
    assert found is not None
    assert (found.halves.alpha, found.halves.beta) == pytest.approx((alpha, beta))
    assert found.backend.all_reduce(MIB, 4) == found.halves.all_reduce(MIB, 4)
    int8 = found.all_reduces["int8"]
    assert int8.beta > beta / 4
    assert int8.alpha < alpha
    assert cluster_of(4, 1e7, 20, 20 * 3 * alpha, probes) is None, "messages take all the time"
    assert cluster_of(4, 1e3, 20, 1.0, probes) is None, "which are smaller than those of the probes"


# --- to whom ----------------------------------------------------------------------------------------------------------


class ByHand(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class ReadsWeights(Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        """Which must not see weights of which some are missing."""


def usual(**changes: Any) -> Any:
    """A Trainer, whose module has a layer and an AdamW."""
    module = changes.pop("module", LightningModule())
    module.layer = changes.pop("layer", nn.Linear(2, 2))
    plugin = SimpleNamespace(precision="32-true", scaler=changes.pop("scaler", None))
    made = {
        "lightning_module": module,
        "callbacks": [],
        "optimizers": [optimizer_of(AdamW)],
        "precision_plugin": plugin,
    }
    return SimpleNamespace(**{**made, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizers": [optimizer_of(AdamW), optimizer_of(AdamW)]},
        {"optimizers": [optimizer_of(LBFGS)]},
        {"optimizers": [optimizer_of(type("Mine", (AdamW,), {}))]},
        {"module": ByHand()},
        {"layer": nn.Linear(2, 2, dtype=torch.bfloat16)},
        {"layer": nn.Embedding(2, 2, sparse=True)},
        {"layer": torch.compile(nn.Linear(2, 2))},
        {"scaler": torch.amp.GradScaler("cpu")},
        {"callbacks": [ReadsWeights()]},
    ],
)
def test_nothing_is_advised_to_a_training_that_it_may_not_suit(changes: dict[str, Any]) -> None:
    assert is_usual(usual())
    assert not is_usual(usual(**changes))


def method(**changes: Any) -> Any:
    settings = {"num_jobs": None, "injection": None, "partition": "defdp", "ranks_per_replica": 1, "is_arranged": False}
    config = SimpleNamespace(**{name: changes.pop(name, value) for name, value in settings.items()})
    ranks = {"world_size": 2, "job": SimpleNamespace(world_size=2), "device": torch.device("cpu"), "traffic": None}
    transport = SimpleNamespace(**{name: changes.pop(name, value) for name, value in ranks.items()})
    declared = {"makes_passes": False, "in_lockstep": True, "config": config, "transport": transport}
    return SimpleNamespace(**{**declared, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"makes_passes": True, "transport": None},  # a pipeline, perhaps with virtual stages
        {"in_lockstep": False},  # parameter servers
        {"device": torch.device("cuda")},
        {"world_size": 1, "job": SimpleNamespace(world_size=1)},
        {"world_size": 2, "job": SimpleNamespace(world_size=4)},  # replicas in shards
        {"num_jobs": 3},
        {"injection": (0.5, 0.5)},
        {"ranks_per_replica": 2},
        {"partition": "work_queue"},
        {"is_arranged": True},  # on a torus, say, on which a rank sends other bytes to neighbors
    ],
)
def test_which_methods_have_an_advisor(changes: dict[str, Any]) -> None:
    advisor = Advisor.of(usual(), method())
    assert advisor is not None
    advisor.close()
    assert Advisor.of(usual(), method(**changes)) is None


def test_weights_are_needed_in_the_opposite_order_of_their_gradients() -> None:
    """Which is known without hooks of modules, that a copy of a module would copy. Waits are no computation."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    trainer, traffic = usual(module=LightningModule(), layer=module), Traffic()
    with patch.object(advices, "perf_counter", side_effect=count()):  # each look at the clock takes a second
        advisor = Advisor(trainer, method(traffic=traffic))
        for _ in range(3):
            advisor.begin_forward()
            traffic.seconds_waited["all_gather"] = traffic.seconds_waited.get("all_gather", 0) + 0.25
            advisor.begin_backward()
            module(torch.ones(2)).sum().backward()
            traffic.seconds_waited["reduce_scatter"] = traffic.seconds_waited.get("reduce_scatter", 0) + 0.5
            advisor.begin_update()
            assert not advisor.end()
    assert not any(one._forward_pre_hooks for one in module.modules())
    profile = advisor.profile()
    assert (profile.forward, profile.backward, profile.update) == (0.75, 4, 1)
    assert [one.ready for one in profile.tensors] == [1, 2, 3, 4]
    assert [one.needed for one in profile.tensors] == [0.75 * 0.75, 0.75 * 0.5, 0.75 * 0.25, 0]
    advisor.close()
    module(torch.ones(2)).sum().backward()


def test_a_recorder_knows_for_how_long_ddp_waits() -> None:
    module, moments = nn.Linear(2, 2), count()
    clock: Any = SimpleNamespace(now=lambda: float(next(moments)), seconds_between=lambda begin, end: end - begin)
    recorder = StepRecorder(module, clock)
    for _ in range(3):
        recorder.begin_forward()
        loss = module(torch.ones(2)).sum()
        recorder.begin_backward()
        loss.backward()
        next(moments)
        recorder.begin_update()
        assert recorder.end()
    seconds, waited = recorder.pace()
    assert seconds == 9, (
        "a moment of the begin of each of three parts, of two weights, two gradients, the wait, the end"
    )
    assert waited == 2
