"""The papers' baselines: what they train is what DDP trains, and MG-WFBP merges by its rule."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.distributed as dist

from benchmarks.baselines import ByteScheduler
from benchmarks.baselines.grouped import merged
from lightning_pipesync.core.comm.handle import Handle
from lightning_pipesync.core.cost import LinkCost
from lightning_pipesync.lab.bench import training
from lightning_pipesync.lab.bench.candidates import ALTERNATIVES
from lightning_pipesync.lab.bench.models import build_model
from tests.support.harness import on_ranks

#: 1 ms a message, 1 s a MiB on two ranks.
LINK = LinkCost(alpha=1e-3, beta=1 / 2**20)


@pytest.mark.parametrize(
    ("ready", "mib", "groups"),
    [
        ([0.0, 1.0, 5.0], [0.5, 0.5, 0.5], [1, 1, 1]),  # each all-reduce has ended when the next gradient is ready
        ([0.0, 1.0, 1.2, 5.0], [2.0, 0.5, 0.5, 0.5], [1, 2, 1]),  # two are ready while the first is under way
        ([0.0, 0.001, 0.5], [0.1, 0.1, 0.1], [2, 1]),  # the second is ready within the startup time
        ([0.0, 0.1, 0.2], [4.0, 1.0, 1.0], [1, 2]),
    ],
)
def test_tensors_are_merged_where_a_message_costs_more(ready: list[float], mib: list[float], groups: list[int]) -> None:
    assert merged(ready, [round(size * 2**20) for size in mib], LINK, world_size=2) == groups


def train(names: list[str]) -> dict[str, torch.Tensor]:
    """Returns all weights after three steps of each candidate, which begin when it is prepared."""
    weights = {}
    for name in names:
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
        weights[name] = torch.cat([parameter.detach().flatten() for parameter in candidate.model.module.parameters()])
        candidate.close()
    dist.barrier()
    return weights


def test_trains_what_ddp_trains() -> None:
    """Bit for bit on two ranks; MG-WFBP with the tensors merged, Horovod after its search, ByteScheduler in pieces."""
    names = ["ddp", "serial", "wfbp", "mg-wfbp", "horovod", "horovod-bo", "byte-scheduler", "ps"]
    first, second = on_ranks(train, 2, names)
    for name in names:
        assert torch.equal(first[name], second[name])
        assert torch.equal(first[name], first["ddp"]), name


def train_low_rank() -> tuple[torch.Tensor, float, float]:
    """Returns the weights after four steps, and the MiB that were sent before and after the last one."""
    config_type, make = training.ALTERNATIVES["ddp_powersgd"]
    torch.manual_seed(0)
    candidate = make(build_model("cnn"), config_type(rank=1))
    for _ in range(3):
        candidate.step()
    before = candidate.mib_sent
    candidate.step()
    weights = torch.cat([parameter.detach().flatten() for parameter in candidate.model.module.parameters()])
    candidate.close()
    return weights, before, candidate.mib_sent


def test_power_sgd_sends_factors() -> None:
    """All ranks have the same weights; the first two steps send gradients, the others less."""
    (first, before, after), (second, _, _) = on_ranks(train_low_rank, 2)
    assert torch.equal(first, second)
    assert first.isfinite().all()
    assert 0 < 2 * (after - before) < first.nbytes / 2**20
    assert before == pytest.approx(2 * first.nbytes / 2**20 + after - before)


def priorities() -> list[int]:
    """Returns the layers whose pieces ByteScheduler averages, in turn, if none starts before all are ready."""
    torch.manual_seed(0)
    [make] = ALTERNATIVES["byte-scheduler"]([0.01])
    candidate = make(build_model("cnn"))
    assert isinstance(candidate, ByteScheduler)
    chosen: list[int] = []
    start = candidate._start_next
    backward_has_ended = threading.Event()

    def start_next() -> Handle[torch.Tensor]:
        backward_has_ended.wait()
        handle = start()
        chosen.append(candidate._owner[candidate._started[-1]])
        return handle

    candidate._start_next = start_next  # type: ignore[method-assign]
    candidate.step()
    backward_has_ended.set()
    candidate.drain()
    candidate.close()
    return chosen


def test_byte_scheduler_averages_the_first_layers_first() -> None:
    """And splits what is larger than a piece."""
    for chosen in on_ranks(priorities, 2):
        assert chosen == sorted(chosen)
        assert len(chosen) > len(set(chosen))


def takes_steps(names: list[str]) -> None:
    for name in names:
        [make] = ALTERNATIVES[name]([0.01])
        candidate = make(build_model("cnn"))
        for _ in range(3):
            candidate.step()
        candidate.close()


def test_half_an_all_reduce() -> None:
    """Each rank trains by itself: that they end is all there is to see."""
    on_ranks(takes_steps, 3, ["dear-rs", "dear-ag"])
