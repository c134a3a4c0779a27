"""What the benchmarks train is what the methods train: as DDP where they are exact, on the labels of each rank."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import benchmarks.baselines  # noqa: F401 - adds them to the alternatives
from benchmarks.converge import Converge, parse_method, train
from benchmarks.tasks import build_task
from lightning_pipesync.lab.bench.candidates import ALTERNATIVES
from lightning_pipesync.lab.bench.models import build_model
from tests.support.case_table import Outcomes, launch_cases

WITHOUT_DELAY = ["ddp", "selsync:delta=0,aggregation=gradients,partition=defdp", "pipe_sgd:staleness=0"]
SERVED = "parameter_server:policy=sync,servers=1"
BASELINES = ["ddp", "serial", "wfbp", "mg-wfbp", "horovod", "horovod-bo", "byte-scheduler", "ps"]
SKEWED = ["ddp", "local_sgd:period=0.5epoch", "selsync:delta=1,partition=defdp,injection=1:0.5"]


@pytest.mark.parametrize("name", ["digits", "topics"])
def test_validation_holds_back_a_tenth_of_the_training_data(name: str) -> None:
    task, whole, again = build_task(name, "validation"), build_task(name), build_task(name, "validation")
    kept, held_back = task.train_set.indices, task.test_set.indices
    assert sorted(kept + held_back) == list(range(len(whole.train_set))), "each sample once, none of the test set"
    assert len(held_back) == round(len(whole.train_set) / 10)
    assert again.test_set.indices == held_back, "always the same"


def points_of(method: str) -> list[dict[str, Any]]:
    settings = Converge(methods=(method,), epochs=1, evaluations=2)
    points: list[dict[str, Any]] = train(build_task("digits"), method, 0, settings, lambda text: None)["points"]
    return points


def labels_of(method: str) -> tuple[list[torch.Tensor], int]:
    """Returns the labels of two batches, and the steps of a training of one epoch, of ranks with 5 labels each."""
    task = build_task("digits").with_label_skew(5)
    training = parse_method(method)(task)
    labels = [batch[1] for batch, _ in zip(training.loader(0), range(2), strict=False)]
    training.close()
    settings = Converge(methods=(method,), epochs=1, evaluations=1, labels_per_worker=5)
    return labels, train(task, method, 0, settings, lambda text: None)["points"][-1]["steps"]


def with_clipping(method: str) -> tuple[torch.Tensor, float]:
    """Returns the weights after 3 steps on unlike batches, clipped, and MiB."""
    torch.manual_seed(0 if method == "ddp" else dist.get_rank())  # rank 0's weights must win
    training = parse_method(method)(replace(build_task("digits"), max_norm=0.1))
    training.module.eval()  # no dropout
    for step in range(3):
        images = torch.full((4, 1, 8, 8), 0.1 * step + 0.3 * dist.get_rank())
        training.step([images, torch.arange(4)])
    with training.consolidated():  # whatever is under way has been counted then
        pass
    weights = torch.cat([parameter.detach().flatten() for parameter in training.module.parameters()])
    outcome = weights, training.mib_sent
    training.close()
    return outcome


def trained_by(name: str) -> torch.Tensor:
    """Returns all weights after three steps of a baseline, which begin when it is prepared."""
    [make] = ALTERNATIVES[name]([0.01])
    torch.manual_seed(0)
    candidate = make(build_model("cnn"))
    initial = copy.deepcopy(candidate.model.module.state_dict())
    candidate.prepare()
    candidate.model.module.load_state_dict(initial)
    candidate.optimizer.state.clear()
    for _ in range(3):
        candidate.step()
    candidate.drain()
    weights = torch.cat([parameter.detach().flatten() for parameter in candidate.model.module.parameters()])
    candidate.close()
    dist.barrier()
    return weights


@pytest.fixture(scope="module")
def found() -> Outcomes:
    cases: dict[Any, Any] = {method: partial(points_of, method) for method in WITHOUT_DELAY}
    cases |= {("clipped", method): partial(with_clipping, method) for method in ("ddp", SERVED)}
    cases |= {("baseline", name): partial(trained_by, name) for name in BASELINES}
    return launch_cases({**cases, **{("skewed", method): partial(labels_of, method) for method in SKEWED}}, 2)


def test_methods_without_delay_train_as_ddp_does(found: Outcomes) -> None:
    ddp, selsync, pipe_sgd = (found[method][0] for method in WITHOUT_DELAY)
    assert [point["steps"] for point in ddp] == [19, 38]
    for other in (selsync, pipe_sgd):
        assert [point["quality"] for point in ddp] == [point["quality"] for point in other]
    assert [point["spread"] for point in ddp + selsync] == [0] * 4
    assert selsync[0]["mib"] == pytest.approx(ddp[0]["mib"], rel=0.01)


def test_a_synchronous_parameter_server_trains_as_ddp_does(found: Outcomes) -> None:
    (ddp, _), _ = found["clipped", "ddp"]
    (server, from_server), (learner, from_learner) = found["clipped", SERVED]
    assert torch.equal(server, learner)
    torch.testing.assert_close(server, ddp, rtol=1e-5, atol=1e-6)
    size = ddp.nbytes / 2**20
    assert from_learner == pytest.approx(3 * size, rel=0.01), "a gradient a step"
    assert from_server == pytest.approx(3 * size, rel=0.01), "the weights to the other, a step"


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_train_what_ddp_trains(name: str, found: Outcomes) -> None:
    """Bit for bit on two ranks; MG-WFBP with the tensors merged, Horovod after its search, ByteScheduler in pieces."""
    for weights in found["baseline", name]:
        assert torch.equal(weights, found["baseline", "ddp"][0])


def test_label_skew_and_injection(found: Outcomes) -> None:
    """Each of two ranks holds five labels; injection adds the other's, and the number of steps stays."""
    assert len({steps for method in SKEWED for _, steps in found["skewed", method]}) == 1
    for rank in range(2):
        own = set(range(5 * rank, 5 * rank + 5))
        for method in SKEWED[:-1]:
            assert all(set(batch.tolist()) <= own and len(batch) == 16 for batch in found["skewed", method][rank][0])
        mine, others = (found["skewed", SKEWED[-1]][one][0] for one in (rank, 1 - rank))
        for labels, other in zip(mine, others, strict=True):
            assert len(labels) == 8 + 4, "Eq. 3 leaves 8 of 16, half of which the other one gets"
            assert set(labels[:8].tolist()) <= own
            assert labels[8:].tolist() == other[:4].tolist()
