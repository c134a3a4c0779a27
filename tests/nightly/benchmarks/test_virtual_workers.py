"""Virtual workers train what real ranks train: decisions alike, weights equal up to the order of sums."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain, islice, repeat
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from benchmarks.converge import parse_method
from benchmarks.learners.host_speed import HostSpeeds
from benchmarks.learners.simulated_learners import SimulatedLearners
from benchmarks.named_settings import parse_named
from benchmarks.tasks import Task
from benchmarks.training import config_types
from benchmarks.virtual_workers.all_reduce import AllReduce
from benchmarks.virtual_workers.batches import Batch
from benchmarks.virtual_workers.methods import virtual_training
from benchmarks.virtual_workers.tasks import build
from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.comm.transport import Transport
from tests.support.case_table import launch_cases

SAMPLES, STEPS, SEED = 240, 24, 3
CODECS = ("none", "bf16", "fp8", "int8", "int4", "int2", "topk", "chunked_topk")

SGD_METHODS = (
    *("ddp", "selsync", "selsync:delta=0.05", "selsync:lssr=0.5,outer_momentum=0.3,partition=defdp"),
    *("selsync:aggregation=gradients,delta=0.03", "selsync:injection=0.5:0.5"),
    *("local_sgd:period=5", "local_sgd:period=6,warmup_steps=4", "local_sgd:period=0.25epoch,partition=seldp"),
    *("local_sgd:period=4,outer_optimizer=nesterov", "local_sgd:period=4,outer_optimizer=elastic"),
    *("local_sgd:period=6,fragments=3", "local_sgd:period=6,fragments=2,overlap_steps=2"),
    "local_sgd:period=6,outer_optimizer=nesterov,fragments=2,overlap_steps=3,mixing_factor=0.5",
    *(
        "local_sgd:period=1,neighbors=ring",
        "local_sgd:period=2,neighbors=random_pairs",
        "local_sgd:period=4,average_optimizer_states=true",
    ),
    *("local_sgd:period=selsync,lssr=0.5", "local_sgd:period=4,participation=0.67"),
    *("pipe_sgd", "pipe_sgd:staleness=2,warmup_steps=3", "pipe_sgd:delay_compensation=none"),
    "pipe_sgd:delay_compensation=momentum",
)
CODEC_METHODS = (
    *("selsync:compression=int8", "local_sgd:period=4,compression=int4", "pipe_sgd:compression=int8"),
    *("local_sgd:period=4,compression=chunked_topk,outer_optimizer=sgd", "pipe_sgd:compression=int2"),
    "local_sgd:period=4,compression=int4,outer_optimizer=nesterov",
)
ADAMW_METHODS = ("ddp", "selsync", "local_sgd:period=4", "pipe_sgd", "local_sgd:period=4,warmup_steps=9")
CASES = [(method, "sgd") for method in SGD_METHODS] + [(method, "one_tensor") for method in CODEC_METHODS]
CASES += [(method, kind) for method in ADAMW_METHODS for kind in ("adamw", "batch_norm")]


def task_of(kind: str) -> Task:
    """Returns a small smooth task, with clipping; its name is that of the optimizer, or of what the model has."""
    task = build("mnist1d", "sgd", 0.1)
    x, y = task.train_set.tensors  # type: ignore[attr-defined]
    rate: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}
    return replace(
        task,
        train_set=TensorDataset(x[:SAMPLES], y[:SAMPLES]),
        labels=None,
        build_module=MODELS[kind],
        max_norm=0.8,
        optimizer=lambda m: AdamW(m.parameters(), 3e-3) if kind == "adamw" else SGD(m.parameters(), **rate),
        scheduler=lambda optimizer, steps: StepLR(optimizer, steps // 3, 0.5),
    )


def _dense() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 32), nn.Tanh(), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 12))


#: A codec's blocks depend on the order of the tensors in a buffer, which is not that of the rows: there is one tensor.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "sgd": _dense,
    "adamw": _dense,
    "batch_norm": lambda: nn.Sequential(nn.Linear(40, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 12)),
    "one_tensor": lambda: nn.Linear(40, 12, bias=False),
}


def of_real_ranks(method: str, kind: str) -> tuple[Tensor, Tensor, float | None]:
    """Returns this rank's consolidated weights and buffers after some steps, and the LSSR."""
    task = task_of(kind)
    torch.manual_seed(SEED)
    training = parse_method(method)(task)
    scheduler = task.scheduler(training.candidate.optimizer, STEPS)
    for batch in islice(chain.from_iterable(repeat(training.loader(SEED))), STEPS):
        training.step(batch)
        scheduler.step()
    with training.consolidated() as module:
        weights = torch.cat([p.detach().flatten() for p in module.parameters()])
        buffers = torch.cat([torch.empty(0), *(b.flatten() for b in module.buffers() if b.is_floating_point())])
    lssr = training.lssr
    training.close()
    return weights, buffers, lssr


def of_virtual_workers(method: str, kind: str, workers: int) -> tuple[Tensor, Tensor, float]:
    """Returns the same of the second of two trainings."""
    task, seeds = task_of(kind), (SEED + 1, SEED)
    training, order = virtual_training(task, method, workers, seeds, STEPS)
    for batches in islice(order, STEPS):
        training.step(batches)
    weights, buffers = training.consolidated()
    return weights[1], buffers[1], training.lssr[1]


def initial_weights(kind: str) -> Tensor:
    torch.manual_seed(SEED)
    return torch.cat([p.detach().flatten() for p in task_of(kind).build_module().parameters()])


@pytest.mark.parametrize("workers", [2, 3])
def test_virtual_workers_train_as_real_ranks(workers: int) -> None:
    """The weights differ by less than a hundred thousandth of their way, and as many steps are local."""
    outcomes = launch_cases({case: partial(of_real_ranks, *case) for case in CASES}, workers)
    differ = []
    for method, kind in CASES:
        real, real_buffers, lssr = outcomes[method, kind][0]
        weights, buffers, virtual_lssr = of_virtual_workers(method, kind, workers)
        away = float((weights - real).norm() / (real - initial_weights(kind)).norm())
        of_buffers = float((buffers - real_buffers).abs().sum())
        if away > 1e-5 or of_buffers > 1e-4 or abs(virtual_lssr - (lssr or 0.0)) > 1e-9:
            differ.append((method, kind, away, of_buffers, virtual_lssr, lssr))
    assert not differ


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("numel", [7434, 3])
def test_all_reduces_are_those_of_real_ranks(workers: int, numel: int) -> None:
    """Bit for bit, with each codec and its residuals."""
    outcomes = launch_cases({name: partial(all_reduced, name, numel) for name in CODECS}, workers)
    for name in CODECS:
        virtual = AllReduce(get_codec(name), True, 1, workers, numel)
        for round_, real in enumerate(outcomes[name][0]):
            values = torch.stack([values_of(rank, round_, numel) for rank in range(workers)])
            assert torch.equal(virtual.mean(values.unsqueeze(0))[0], real), (name, round_)


def all_reduced(name: str, numel: int) -> list[Tensor]:
    """Returns the averages of three rounds."""
    transport, codec = Transport(torch.device("cpu")), get_codec(name)
    residuals = transport.feedback(torch.zeros(numel), gathered=transport.encodes_sums(codec))
    found = []
    for round_ in range(3):
        flat = values_of(dist.get_rank(), round_, numel)
        found.append(transport.all_reduce(flat, codec=codec, mean=True, feedback=residuals).wait().clone())
    transport.close()
    return found


def values_of(rank: int, round_: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(10 * round_ + rank))


def trained_virtually(kind: str, method: str, workers: int) -> Tensor:
    return of_virtual_workers(method, kind, workers)[0]


def test_a_synchronous_server_trains_as_ddp() -> None:
    served = trained_virtually("sgd", "parameter_server:policy=sync", 3)
    torch.testing.assert_close(served, trained_virtually("sgd", "ddp", 3), rtol=1e-5, atol=1e-6)


def test_diloco_with_servers_that_wait_for_all_trains_as_local_sgd() -> None:
    """Both with an outer step of Nesterov momentum; plain SGD, since the learners take other batches each time."""
    settings = "period=1,outer_lr=0.7,outer_momentum=0.9"
    served = trained_virtually("one_tensor", f"parameter_server:policy=diloco,{settings}", 3)
    local = trained_virtually("one_tensor", f"local_sgd:outer_optimizer=nesterov,follow_lr=false,{settings}", 3)
    torch.testing.assert_close(served, local, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["async", "k_async,k=2", "ssp,staleness_bound=2", "k_batch_sync,k=2"])
def test_stale_gradients_are_those_of_the_log(method: str) -> None:
    """Each update as the log says, one after the other, by a module and its optimizer."""
    task, learners = task_of("sgd"), 4
    name = f"parameter_server:policy={method}"
    training, order = virtual_training(task, name, learners, (SEED,), STEPS)
    steps = [batches[0].tensors for batches in islice(order, STEPS)]
    queue = [(x[learner], y[learner]) for x, y in steps for learner in range(learners)]
    for tensors in steps:
        training.step([Batch(torch.arange(learners), tensors)])

    torch.manual_seed(SEED)
    module, config = task.build_module(), parse_named(name, config_types())
    optimizer = task.optimizer(module)
    scheduler = task.scheduler(optimizer, STEPS)
    gradients = config.policy_for(learners).gradients
    optimizer.param_groups[0]["lr"] *= gradients / learners
    scheduler.base_lrs = [optimizer.param_groups[0]["lr"]]
    versions, used = [copy.deepcopy(module.state_dict())], 0
    passes = HostSpeeds(stalling=1.0, stall_s=1.0).of_hosts(learners, SEED)
    for _, update in islice(SimulatedLearners(config, passes).updates(), learners * STEPS // gradients):
        for _ in range((used + gradients - 1) // learners - scheduler.last_epoch):
            scheduler.step()
        total = [torch.zeros_like(p) for p in module.parameters()]
        for gradient in update.gradients:
            seen = task.build_module()
            seen.load_state_dict(versions[gradient.version])
            task.loss(seen, queue[used]).backward()
            used += 1
            for sum_, p in zip(total, seen.parameters(), strict=True):
                sum_ += p.grad / gradients  # type: ignore[operator]
        for sum_, p in zip(total, module.parameters(), strict=True):
            p.grad = sum_
        nn.utils.clip_grad_norm_(module.parameters(), 0.8)
        optimizer.step()
        versions.append(copy.deepcopy(module.state_dict()))
    expected = torch.cat([p.detach().flatten() for p in module.parameters()])
    torch.testing.assert_close(training.consolidated()[0][0], expected, rtol=1e-4, atol=1e-5)


def test_what_is_not_simulated_is_refused() -> None:
    with pytest.raises(ValueError, match=r"low_rank=2 is not simulated"):
        virtual_training(task_of("sgd"), "pipe_sgd:low_rank=2", 2, (0,), STEPS)
    with pytest.raises(ValueError, match="'dear' has no virtual workers"):
        virtual_training(task_of("sgd"), "dear", 2, (0,), STEPS)
    with pytest.raises(ValueError, match="no batch of 8"):
        virtual_training(task_of("sgd"), "ddp", 64, (0,), STEPS)
