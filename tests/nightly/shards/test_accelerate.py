"""Replicas that Accelerate's own FSDP2 has sharded: the options of its plugin, loss scalers, its configuration."""

from __future__ import annotations

import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import Trainer, TrainingArguments

from lightning_pipesync import PipeSyncAccelerator, PipeSyncPlugin, PipeSyncTrainer
from tests.support.case_table import Outcomes
from tests.support.shards import (
    RANKS,
    REPLICAS,
    SHARDS,
    OnCpu,
    accelerator_of,
    adamw,
    attach,
    batch,
    device_mesh,
    end,
    equal,
    fresh_state,
    fsdp_plugin,
    launch_sharded,
    model,
    run,
    sharded,
    whole,
)
from tests.support.transformers_models import OF_EIGHT_STEPS, Words, llama

STEPS = 6


def train_in(accelerator: Any, network: Any, optimizer: Any) -> None:
    for step in range(STEPS):
        inputs, targets = batch(dist.get_rank(), step)
        accelerator.backward((network(inputs) - targets).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def train(name: str | None, plugin: dict[str, Any] | None = None, **settings: Any) -> list[Tensor]:
    """Trains as a user of Accelerate does; returns the weights of this rank's replica."""
    with fresh_state():
        accelerator = accelerator_of(name, fsdp_plugin(**(plugin or {})), **settings)
        module = model()
        if accelerator.process_index > 0 and plugin == {"cpu_ram_efficient_loading": True}:
            for parameter in module.parameters():
                nn.init.zeros_(parameter)
        network, optimizer = accelerator.prepare(module, adamw(module))
        train_in(accelerator, network, optimizer)
        network.eval()
        weights = whole(module)
        accelerator.free_memory()
        return weights


def train_in_a_loop(**sharding: Any) -> list[Tensor]:
    """The same in a plain loop."""
    mesh = device_mesh()
    module = sharded(mesh["shards"], **sharding)
    optimizer = adamw(module)
    sync = attach("dear", module, optimizer, mesh)
    run(module, optimizer, sync, range(STEPS))
    return end(module, sync)


def train_by_environment() -> list[Tensor]:
    """As ``accelerate launch`` sets it up from a configuration file."""
    environment = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": str(REPLICAS),
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": str(SHARDS),
        "PIPESYNC_METHOD": "dear",
        "PIPESYNC_BUCKET_MB": "0.001",
    }
    with fresh_state(), mock.patch.dict(os.environ, environment):
        accelerator, module = PipeSyncAccelerator(), model()
        train_in(accelerator, *accelerator.prepare(module, adamw(module)))
        accelerator.wait_for_everyone()
        accelerator.free_memory()
        return whole(module)


def prepare_again() -> tuple[list[Tensor], list[bool]]:
    """A model and its optimizer are prepared again, without an effect, and later the model with another optimizer."""
    with fresh_state():
        accelerator, module = accelerator_of("dear"), model()
        first = accelerator.prepare(module, adamw(module))
        second = accelerator.prepare(*first)
        train_in(accelerator, *second)
        accelerator.wait_for_everyone()
        weights = whole(module)
        accelerator.free_memory()
        network, other = accelerator.prepare(first[0], adamw(module))
        train_in(accelerator, network, other)
        network.eval()
        changed = not torch.equal(whole(module)[0], weights[0])
        accelerator.free_memory()
        return weights, [*(one is two for one, two in zip(first, second, strict=True)), changed]


def train_one_replica() -> tuple[list[Tensor], list[str]]:
    """All ranks are shards of one replica: there is nothing between replicas, and Accelerate trains alone."""
    with fresh_state(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = ParallelismConfig(dp_replicate_size=1, dp_shard_size=RANKS)
        accelerator = PipeSyncAccelerator(PipeSyncPlugin("dear"), parallelism_config=config, fsdp_plugin=fsdp_plugin())
        module = model()
        train_in(accelerator, *accelerator.prepare(module, adamw(module)))
        return whole(module), [str(one.message) for one in caught]


def train_with_a_loss_scaler(name: str, scaled: bool) -> tuple[list[Tensor], list[bool]]:
    """One step leaves the weights as they are: a gradient of one shard overflows, or nobody steps."""
    with fresh_state():
        accelerator, module = accelerator_of(name), model()
        network, optimizer = accelerator.prepare(module, adamw(module))
        if scaled:
            optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        skipped = []
        for step in [step for step in range(STEPS) if scaled or step != 3]:
            inputs, targets = batch(dist.get_rank(), step)
            if step == 3 and dist.get_rank() == 1:
                inputs = inputs * torch.inf
            loss = (network(inputs) - targets).square().mean()
            (optimizer.scaler.scale(loss) if scaled else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(optimizer.step_was_skipped)
        accelerator.wait_for_everyone()
        accelerator.free_memory()
        return whole(module), skipped


#: By its name what DeAR's plugin is given, and FSDP2's on both dimensions of the mesh, which trains the same.
EXACT: dict[str, dict[str, Any]] = {
    "plain": {},
    "activation checkpointing": {"activation_checkpointing": True},
    "loaded by rank 0": {"cpu_ram_efficient_loading": True},
    "stays whole": {"reshard_after_forward": False},
}

#: Accelerate's policy with mixed_precision="bf16".
BF16 = MixedPrecisionPolicy(*3 * [torch.bfloat16])


@pytest.fixture(scope="module")
def trained() -> Outcomes:
    cases: dict[Any, Any] = {
        "bf16": partial(train, "dear", mixed_precision="bf16"),
        "bf16 loop": partial(train_in_a_loop, mp_policy=BF16),
        "environment": train_by_environment,
        "again": prepare_again,
        "one replica": train_one_replica,
    }
    for what, plugin in EXACT.items():
        cases |= {(what, name): partial(train, name, plugin) for name in ("dear", None)}
    for name, scaled in (("dear", False), ("dear", True), ("local_sgd", True)):
        cases[name, scaled] = partial(train_with_a_loss_scaler, name, scaled)
    return launch_sharded(cases, RANKS, init=False)


def assert_same(found: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    assert all(equal(*both) for both in zip(found, expected, strict=True))


@pytest.mark.parametrize("what", EXACT)
def test_dear_is_what_accelerate_trains_on_both_dimensions(what: str, trained: Outcomes) -> None:
    """Bit for bit with two replicas, whose sums have one order."""
    assert_same(trained[what, "dear"], trained[what, None])


def test_a_loss_scaler_skips_on_all_ranks(trained: Outcomes) -> None:
    """Bit for bit what is trained without the step in which one shard overflows; with local SGD a replica skips it."""
    scaled, without = ([weights for weights, _ in trained["dear", scaled]] for scaled in (True, False))
    assert_same(scaled, without)
    for name, ranks in (("dear", range(RANKS)), ("local_sgd", range(SHARDS))):
        for rank, (_, skipped) in enumerate(trained[name, True]):
            assert skipped == [step == 3 and rank in ranks for step in range(STEPS)]


def test_bf16(trained: Outcomes) -> None:
    """Bit for bit a loop with Accelerate's policy; on both dimensions FSDP2 sums in bf16 between replicas, too."""
    assert_same(trained["bf16"], trained["bf16 loop"])
    assert not torch.equal(trained["bf16"][0][0], trained["plain", "dear"][0][0])


def test_a_configuration_file_and_what_is_prepared_again(trained: Outcomes) -> None:
    assert_same(trained["environment"], trained["plain", None])
    assert_same([weights for weights, _ in trained["again"]], trained["plain", None])
    assert all(found == [True, True, True] for _, found in trained["again"])


def test_one_replica_is_left_to_accelerate(trained: Outcomes) -> None:
    for (weights, messages), expected in zip(trained["one replica"], trained["plain", None], strict=True):
        torch.testing.assert_close(weights, expected)
        assert any("dp_replicate_size=1: there is one replica" in message for message in messages)


# --- transformers' Trainer, by its `fsdp` ---

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "dear": ("FULL_STATE_DICT", {"bucket_mb": 0.01}),
    "selsync": ("SHARDED_STATE_DICT", {"delta": 0.05, "window": 3}),
}


def train_llama(trainer_class: Any, folder: Path, kind: str, resume: bool = False, **kwargs: Any) -> dict[str, Any]:
    """Eight steps of two accumulated batches, evaluated and saved after four and eight; the best one is loaded."""
    config_type = OnCpu if trainer_class is Trainer else ParallelismConfig
    with fresh_state():
        arguments = TrainingArguments(
            output_dir=str(folder),
            fsdp=True,
            fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "state_dict_type": kind},
            parallelism_config=config_type(dp_replicate_size=REPLICAS, dp_shard_size=SHARDS),
            **OF_EIGHT_STEPS,
            load_best_model_at_end=True,
        )
        if trainer_class is Trainer:
            arguments.parallelism_config.plugin = FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args)
        trainer = trainer_class(model=llama(), args=arguments, train_dataset=Words(), eval_dataset=Words(), **kwargs)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4") if resume else None)
        found = {"weights": whole(trainer.model), "history": trainer.state.log_history}
        found["best"] = trainer.state.best_model_checkpoint
        trainer.save_model(str(folder / "final"))
        if trainer_class is not Trainer:  # for which Accelerate cannot prepare a sharded model again
            trainer.args.output_dir = str(folder / "again")
            trainer.train()  # with the same model and optimizer
            found["further"] = whole(trainer.model)
        trainer.accelerator.free_memory()
        return found


@pytest.fixture(scope="module")
def llamas(folder: Path) -> Outcomes:
    cases: dict[Any, Any] = {"hsdp": partial(train_llama, Trainer, folder / "hsdp", "FULL_STATE_DICT")}
    for method, (kind, settings) in METHODS.items():
        plugin = PipeSyncPlugin(method, timeout_s=60, **settings)
        for resumed in (False, True):
            cases[method, resumed] = partial(
                train_llama, PipeSyncTrainer, folder / method, kind, resumed, pipesync=plugin
            )
    return launch_sharded(cases, RANKS, init=False)


@pytest.mark.parametrize("method", METHODS)
def test_transformers_trainer(method: str, llamas: Outcomes, folder: Path) -> None:
    """DeAR trains what the Trainer does with FSDP2 on both dimensions; ranks agree; a resumed run is the whole one."""
    runs = llamas[method, False]
    for found, resumed, hsdp in zip(runs, llamas[method, True], llamas["hsdp"], strict=True):
        for moment in ("weights", "further"):
            assert equal(found[moment], runs[0][moment])
            assert equal(found[moment], resumed[moment])
        if method == "dear":  # bit for bit, but for the norm by which it clips
            torch.testing.assert_close(found["weights"], hsdp["weights"])
        assert found["best"] is not None
        losses = [entry["eval_loss"] for entry in found["history"] if "eval_loss" in entry]
        assert len(losses) >= 2
        assert losses == [entry["eval_loss"] for entry in runs[0]["history"] if "eval_loss" in entry]
        assert all(f"{method}/mib_sent" in entry for entry in found["history"] if "loss" in entry)
    assert (folder / method / "checkpoint-4" / "pipesync_3.bin").exists()
    if METHODS[method][0] == "FULL_STATE_DICT":
        plain = llama()
        plain.load_state_dict(load_file(folder / method / "final" / "model.safetensors"))
        assert equal(plain.parameters(), runs[0]["weights"])
