"""Replicas that are jobs of several ranks, among which FSDP2 shards the model: bit for bit the replicas of one job."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from lightning_pipesync import LocalSGD, PipeSyncAccelerator, PipeSyncPlugin, PipeSyncTrainer
from lightning_pipesync.core.comm.line import Line
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.methods.replicas.membership import Membership
from tests.nightly.jobs.test_replica_jobs_faults import in_flag
from tests.references.lost_rank import simulate
from tests.support.harness import DIED, assert_raised, launch, raised
from tests.support.lost_ranks import die
from tests.support.models import OPTIMIZERS, assert_same, loss, seeded_mlp
from tests.support.replica_jobs import DILOCO, ROUND, TIMEOUT_S, launch_replicas, when_called
from tests.support.shards import fresh_state, fsdp_plugin, whole
from tests.support.transformers_models import OF_EIGHT_STEPS, Words, llama

STEPS, PERIOD, SHARDS = 13, 3, 2
SETTINGS: dict[str, dict[str, Any]] = {
    "FedAvg": {},
    "DiLoCo int4": {**DILOCO, "compression": "int4"},
    "streaming": {**DILOCO, "overlap_steps": 1, "fragments": 2},
}
#: This rank's shards, its own and the average, and its batches.
Outcome = tuple[dict[str, Tensor], dict[str, Tensor], list[list[int]]]


def loader() -> DataLoader[int]:
    return DataLoader(range(240), 2, shuffle=True)  # type: ignore[arg-type]  # an epoch is longer than the training


def shards_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.to_local().detach().clone() for name, parameter in model.named_parameters()}


def train(
    replica: int,
    settings: dict[str, Any],
    mesh: DeviceMesh | None = None,
    joined: Callable[[LocalSGD], object] = lambda _: None,
) -> Outcome:
    """Trains as a job, or in one job with a mesh."""
    in_one_job = mesh is not None
    mesh = mesh or init_device_mesh("cpu", (SHARDS,))
    model = seeded_mlp(0)
    fully_shard(model, mesh=mesh["shards"] if in_one_job else mesh)
    optimizer = OPTIMIZERS["sgd"](model)
    sync = LocalSGD(model, optimizer, period=PERIOD, timeout_s=TIMEOUT_S, **settings)
    sync.join()
    joined(sync)
    data = SHARDS * replica + mesh.get_local_rank("shards" if in_one_job else None)
    batches: list[list[int]] = []
    try:
        for batch in sync.prepare_train_loader(loader(), seed=7):
            batches.append(batch.tolist())
            optimizer.zero_grad()
            loss(model, sync.num_steps, data).backward()
            sync.step()
            if sync.num_steps == STEPS:
                break
        own = shards_of(model)
        sync.end()
        return own, shards_of(model), batches
    finally:
        sync.detach()


def train_in_one_job(settings: dict[str, Any]) -> Outcome:
    mesh = init_device_mesh("cpu", (2, SHARDS), mesh_dim_names=("replicas", "shards"))
    return train(dist.get_rank() // SHARDS, settings, mesh)


def train_as_job(replica: int, settings: dict[str, Any]) -> Outcome:
    dist.init_process_group("gloo")
    outcome = train(replica, settings)
    dist.barrier()
    return outcome


@pytest.mark.parametrize("name", ["DiLoCo int4", "streaming"])
def test_the_same_members_are_the_replicas_of_one_job(name: str) -> None:
    of_jobs = launch_replicas(train_as_job, 2, SETTINGS[name], ranks_per_replica=SHARDS)
    for one, other in zip(of_jobs, launch(train_in_one_job, 4, SETTINGS[name]), strict=True):
        assert_same(one[0], other[0], name)
        assert_same(one[1], other[1], name)
        assert one[2] == other[2]


def lose_a_rank(replica: int, folder: Path) -> dict[str, Any]:
    """Trains; one rank of replica 1 dies in the second average, when all others have all data of it."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def joined(sync: LocalSGD) -> None:
        if (replica, rank) == (1, 1):
            in_flag(die, folder, 3 * SHARDS - 1)
        else:
            when_called(Membership, "commit", ROUND, (folder / f"{replica} {rank}").touch)

    outcome: dict[str, Any] = {}
    outcome["raised"] = raised(lambda: outcome.update(found=train(replica, SETTINGS["FedAvg"], joined=joined)))
    return outcome


def loss_of_replica(model: nn.Module, step: int, replica: int) -> Tensor:
    return (loss(model, step, SHARDS * replica) + loss(model, step, SHARDS * replica + 1)) / SHARDS


def test_the_others_go_on_without_a_replica_that_has_lost_a_rank(tmp_path: Path) -> None:
    outcomes = launch_replicas(lose_a_rank, 3, tmp_path, ranks_per_replica=SHARDS, may_die=(3,))
    assert outcomes[3] == DIED
    assert outcomes[2]["raised"] is not None, "it has not trained on with a part of the model"
    settings: dict[str, Any] = {"world_size": 3, "num_steps": STEPS, "period": PERIOD, "lost": {1: 9}}
    replicas = simulate(seeded_mlp(), OPTIMIZERS["sgd"], loss_of_replica, **settings)
    samples: list[int] = []
    for replica in (0, 2):
        for rank in range(SHARDS):
            found = outcomes[SHARDS * replica + rank]
            assert found["raised"] is None
            own, _, batches = found["found"]
            shards = {name: each.detach().chunk(SHARDS)[rank] for name, each in replicas[replica].named_parameters()}
            assert_same(own, shards, (replica, rank))
            samples += [sample for batch in batches for sample in batch]
    assert len(set(samples)) == len(samples), "the data are divided among all ranks that are left"


def fail_once(owner: Any, name: str) -> None:
    """Has a function's first call fail as on a busy machine, where Gloo drops connections that are being made."""
    function = getattr(owner, name)

    def wrapped(self: Any, *args: Any) -> None:
        setattr(owner, name, function)
        function(self, *args)
        (self if isinstance(self, Line) else self.shards).end_waits()
        raise RuntimeError("[/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")

    setattr(owner, name, wrapped)


#: What fails on one rank of a replica, and has been made on the other.
CONNECTIONS = {"to the other replicas": (Line, "__init__"), "within the replica": (Transport, "exchange_with")}


def train_where_a_connection_fails(replica: int, connection: str) -> Outcome:
    dist.init_process_group("gloo")
    if (replica, dist.get_rank()) == (1, 1):
        fail_once(*CONNECTIONS[connection])
    outcome = train(replica, SETTINGS["FedAvg"])
    dist.barrier()
    return outcome


@pytest.mark.parametrize("connection", CONNECTIONS)
def test_a_connection_that_one_rank_does_not_get_is_made_again(connection: str) -> None:
    """No rank waits for the timeout, and all train as if nothing had been."""
    outcomes = launch_replicas(train_where_a_connection_fails, 2, connection, ranks_per_replica=SHARDS)
    for found, expected in zip(outcomes, launch(train_in_one_job, 4, SETTINGS["FedAvg"]), strict=True):
        assert_same(found[0], expected[0], connection)
        assert_same(found[1], expected[1], connection)


def leave(replica: int) -> tuple[Any, int]:
    """Trains; one rank alone of replica 0 is asked to leave, in the fifth step."""
    dist.init_process_group("gloo")
    methods: list[LocalSGD] = []

    def joined(sync: LocalSGD) -> None:
        methods.append(sync)
        if (replica, dist.get_rank()) == (0, 1):
            sync._module.register_forward_pre_hook(
                lambda *_: os.kill(os.getpid(), signal.SIGTERM) if sync.num_steps == 4 else None
            )

    status: Any = 0
    try:
        train(replica, dict(DILOCO), joined=joined)
    except SystemExit as left:
        status = left.code
    dist.barrier()
    return status, methods[0].num_steps


def test_all_ranks_of_a_job_leave_after_the_same_step() -> None:
    """Whichever of them is asked."""
    outcomes = launch_replicas(leave, 2, ranks_per_replica=SHARDS)
    assert outcomes == [(143, 6)] * 2 + [(0, STEPS)] * 2


# --- in Accelerate, and in the Trainer of transformers ----------------------------------------------------------------


def train_in_accelerate(replica: int) -> dict[str, Any]:
    plugin = partial(fsdp_plugin, auto_wrap_policy="size_based_wrap", min_num_params=10**9)  # as a whole
    plugin = partial(plugin, transformer_cls_names_to_wrap=None)
    with fresh_state():
        refused = raised(lambda: PipeSyncAccelerator(PipeSyncPlugin("local_sgd"), fsdp_plugin=fsdp_plugin()))
    with fresh_state():
        accelerator = PipeSyncAccelerator(
            PipeSyncPlugin("local_sgd", period=PERIOD, timeout_s=TIMEOUT_S),
            fsdp_plugin=plugin(),
            parallelism_config=ParallelismConfig(dp_shard_size=SHARDS),
            dataloader_config=DataLoaderConfiguration(data_seed=7),
        )
        model = seeded_mlp(0)
        network, optimizer = accelerator.prepare(model, OPTIMIZERS["sgd"](model))
        batches: list[list[int]] = []
        for batch in accelerator.prepare_train_loader(loader()):
            accelerator.backward(loss(network, len(batches), SHARDS * replica + dist.get_rank()))
            optimizer.step()
            optimizer.zero_grad()
            batches.append(batch.tolist())
            if len(batches) == STEPS:
                break
        own = shards_of(model)
        accelerator.end()
        found, weights = (own, shards_of(model), batches), accelerator.get_state_dict(network)
        accelerator.free_memory()
    return {"found": found, "loop": train(replica, {}), "whole": weights, "refused": refused}


def test_in_accelerate_it_is_that_of_a_plain_loop() -> None:
    outcomes = launch_replicas(train_in_accelerate, 2, ranks_per_replica=SHARDS)
    for outcome in outcomes:
        for found, expected in zip(outcome["found"][:2], outcome["loop"][:2], strict=True):
            assert_same(found, expected)
        assert outcome["found"][2] == outcome["loop"][2]
        assert_raised(outcome["refused"], "ValueError", "parallelism_config", "dp_shard_size")
    wholes: list[dict[str, Tensor]] = [outcome["whole"] for outcome in outcomes if outcome["whole"]]
    assert len(wholes) >= 2
    for weights in wholes:
        assert_same(weights, wholes[0])
        assert weights["0.weight"].shape == torch.Size([10, 6])


def train_in_transformers(replica: int, directory: Path) -> list[tuple[Tensor, list[float]]]:
    """Trains a small Llama for eight steps, and resumes it; returns the weights and the losses of both."""
    folder, found = directory / str(replica), []
    layers = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    for checkpoint in (None, str(folder / "checkpoint-4")):
        with fresh_state():
            arguments = TrainingArguments(
                output_dir=str(folder),
                fsdp=True,
                fsdp_config={**layers, "state_dict_type": "FULL_STATE_DICT"},
                parallelism_config=ParallelismConfig(dp_shard_size=SHARDS),
                **OF_EIGHT_STEPS,
            )
            plugin = PipeSyncPlugin("local_sgd", period=2, timeout_s=TIMEOUT_S, **DILOCO)
            data = {"train_dataset": Words(), "eval_dataset": Words()}
            trainer = PipeSyncTrainer(model=llama(), args=arguments, pipesync=plugin, **data)
            trainer.train(resume_from_checkpoint=checkpoint)
            losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
            found.append((torch.cat([tensor.flatten() for tensor in whole(trainer.model)]), losses))
            trainer.accelerator.free_memory()
    return found


def test_in_transformers_replicas_agree_and_resume_bit_for_bit(tmp_path: Path) -> None:
    outcomes = launch_replicas(train_in_transformers, 2, tmp_path, ranks_per_replica=SHARDS)
    first, losses = outcomes[0][0]
    assert len(losses) == 2
    for of_rank in outcomes:
        for weights, evaluated in of_rank:
            assert torch.equal(weights, first)
            assert evaluated == losses
