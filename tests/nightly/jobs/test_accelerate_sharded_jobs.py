"""Accelerators as jobs of several ranks, among which FSDP2 shards the model: bit for bit the plain loop."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pipesync import PipeSyncAccelerator, PipeSyncPlugin
from tests.nightly.jobs.test_replica_jobs_sharded import DATA, PERIOD, STEPS, shards_of, train
from tests.nightly.shards.test_accelerate_sharded import ParallelismConfig, fresh_state, fsdp_plugin
from tests.support.harness import assert_raised, raised
from tests.support.models import OPTIMIZERS, assert_same, loss, seeded_mlp
from tests.support.replica_jobs import TIMEOUT_S, launch_replicas

#: FSDP2 shards the model as a whole.
AS_A_WHOLE = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 10**9, "transformer_cls_names_to_wrap": None}


def accelerator_of(**parallelism: int) -> PipeSyncAccelerator:
    return PipeSyncAccelerator(
        PipeSyncPlugin("local_sgd", period=PERIOD, timeout_s=TIMEOUT_S),
        fsdp_plugin=fsdp_plugin(**AS_A_WHOLE),
        parallelism_config=ParallelismConfig(**parallelism),
        dataloader_config=DataLoaderConfiguration(data_seed=7),
    )


def train_in_both(replica: int) -> dict[str, Any]:
    os.environ["LOCAL_RANK"] = os.environ["RANK"]  # in this job
    with fresh_state():
        refused = raised(lambda: PipeSyncAccelerator(PipeSyncPlugin("local_sgd"), fsdp_plugin=fsdp_plugin()))
    with fresh_state():
        accelerator = accelerator_of(dp_shard_size=2)
        model = seeded_mlp(0)
        network, optimizer = accelerator.prepare(model, OPTIMIZERS["sgd"](model))
        train_loader = accelerator.prepare_train_loader(DataLoader(range(DATA.size), DATA.batch_size, shuffle=True))  # type: ignore[arg-type]
        batches: list[list[int]] = []
        for batch in train_loader:
            accelerator.backward(loss(network, len(batches), 2 * replica + dist.get_rank()))
            optimizer.step()
            optimizer.zero_grad()
            batches.append(batch.tolist())
            if len(batches) == STEPS:
                break
        own = shards_of(model)
        accelerator.end()
        average, whole = shards_of(model), accelerator.get_state_dict(network)
        accelerator.free_memory()
    return {"Accelerate": (own, average, batches), "loop": train(replica, {}), "whole": whole, "refused": refused}


def test_a_sharded_model_is_that_of_a_plain_loop() -> None:
    outcomes = launch_replicas(train_in_both, 2, ranks_per_replica=2)
    for outcome in outcomes:
        own, average, batches = outcome["loop"]
        assert outcome["Accelerate"][2] == batches
        assert_same(outcome["Accelerate"][0], own)
        assert_same(outcome["Accelerate"][1], average)
        assert_raised(outcome["refused"], "ValueError", "parallelism_config", "dp_shard_size")
    wholes: list[dict[str, Tensor]] = [outcome["whole"] for outcome in outcomes if outcome["whole"]]
    assert len(wholes) >= 2
    for whole in wholes:
        assert_same(whole, wholes[0])
        assert whole["0.weight"].shape == torch.Size([10, 6])
