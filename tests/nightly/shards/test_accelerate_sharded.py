"""Methods between replicas that Accelerate's own FSDP2 has sharded: two replicas of two shards."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_pipesync import METHODS, PipeSyncAccelerator, PipeSyncPlugin
from lightning_pipesync.accelerate.private import use_fsdp_on_cpu
from tests.nightly.shards.test_sharded_replicas import (
    REPLICAS,
    SETTINGS,
    SHARDS,
    adamw,
    batch,
    device_mesh,
    model,
    sharded,
    whole,
)
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_refused, raised

parallelism = pytest.importorskip("accelerate.parallelism_config", reason="Accelerate 1.3 has no ParallelismConfig")
ParallelismConfig = parallelism.ParallelismConfig

NAMES = ("dear", "dear, forward", "pipe_sgd", "selsync", "local_sgd", "diloco", "streaming")
CLIPPED = ("dear", "selsync")
STEPS = 6


class OnCpu(ParallelismConfig):  # type: ignore[misc,valid-type]
    """Accelerate's own configuration, on the CPU, where plain Accelerate does not shard."""

    plugin: Any

    def get_device_mesh(self, device_type: str | None = None) -> Any:
        use_fsdp_on_cpu(self.plugin)
        return super().get_device_mesh(device_type)


def fsdp_plugin(**settings: Any) -> FullyShardedDataParallelPlugin:
    settings = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"], **settings}
    return FullyShardedDataParallelPlugin(fsdp_version=2, **settings)


@contextmanager
def fresh_state() -> Iterator[None]:
    """Context manager in which Accelerate has no state of earlier cases."""
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def accelerator_of(name: str | None, plugin: Any = None, **settings: Any) -> Accelerator:
    """An Accelerator with a method by its name in SETTINGS, or Accelerate's own on both dimensions (HSDP)."""
    sizes = {"dp_replicate_size": REPLICAS, "dp_shard_size": SHARDS}
    settings["fsdp_plugin"] = plugin or fsdp_plugin()
    if name is None:
        config = OnCpu(**sizes)
        config.plugin = settings["fsdp_plugin"]
        return Accelerator(cpu=True, parallelism_config=config, **settings)
    method, of_method = SETTINGS[name]
    pipesync = PipeSyncPlugin(method, timeout_s=60, **of_method)
    return PipeSyncAccelerator(pipesync, parallelism_config=ParallelismConfig(**sizes), **settings)


def train(
    name: str | None,
    max_norm: float | None = None,
    passes: int = 1,
    plugin: dict[str, Any] | None = None,
    **settings: Any,
) -> list[Tensor]:
    """Trains as a user of Accelerate does; returns the weights of this rank's replica."""
    with fresh_state():
        accelerator = accelerator_of(
            name, fsdp_plugin(**(plugin or {})), gradient_accumulation_steps=passes, **settings
        )
        module = model()
        if accelerator.process_index > 0 and plugin == {"cpu_ram_efficient_loading": True}:
            for parameter in module.parameters():
                nn.init.zeros_(parameter)
        network, optimizer = accelerator.prepare(module, adamw(module))
        run(accelerator, network, optimizer, max_norm, passes)
        network.eval()
        weights = whole(module)
        accelerator.free_memory()
        return weights


def run(accelerator: Any, network: Any, optimizer: Any, max_norm: float | None = None, passes: int = 1) -> None:
    for step in range(STEPS * passes):
        inputs, targets = batch(dist.get_rank(), step)
        with accelerator.accumulate(network):
            accelerator.backward((network(inputs) - targets).square().mean())
            if max_norm is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(network.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()


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
        network, optimizer = accelerator.prepare(module, adamw(module))
        run(accelerator, network, optimizer)
        accelerator.wait_for_everyone()
        accelerator.free_memory()
        return whole(module)


def prepare_again() -> dict[str, Any]:
    """A model and its optimizer are prepared again, without an effect, and later the model with another optimizer."""
    with fresh_state():
        accelerator, module = accelerator_of("dear"), model()
        first = accelerator.prepare(module, adamw(module))
        second = accelerator.prepare(*first)
        run(accelerator, *second)
        accelerator.wait_for_everyone()
        weights = whole(module)
        accelerator.free_memory()
        network, other = accelerator.prepare(first[0], adamw(module))
        run(accelerator, network, other)
        network.eval()
        found = {"same": [one is two for one, two in zip(first, second, strict=True)], "weights": weights}
        accelerator.free_memory()
        return {**found, "changed": not torch.equal(whole(module)[0], weights[0])}


def train_one_replica() -> dict[str, Any]:
    """All ranks are shards of one replica: there is nothing between replicas, and Accelerate trains alone."""
    with fresh_state(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = ParallelismConfig(dp_replicate_size=1, dp_shard_size=REPLICAS * SHARDS)
        accelerator = PipeSyncAccelerator(PipeSyncPlugin("dear"), parallelism_config=config, fsdp_plugin=fsdp_plugin())
        module = model()
        network, optimizer = accelerator.prepare(module, adamw(module))
        run(accelerator, network, optimizer)
        return {"weights": whole(module), "messages": [str(one.message) for one in caught]}


def train_with_a_loss_scaler(name: str, scaled: bool) -> dict[str, Any]:
    """One step leaves the weights as they are: a gradient of one shard overflows, or nobody steps."""
    with fresh_state():
        accelerator, module = accelerator_of(name), model()
        network, optimizer = accelerator.prepare(module, adamw(module))
        if scaled:
            optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        skipped = []
        for step in range(STEPS):
            if step == 3 and not scaled:
                continue
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
        return {"weights": whole(module), "skipped": skipped}


def refuse(method: str = "dear", plugin: Any = None, **settings: Any) -> Any:
    sizes = {"dp_replicate_size": REPLICAS, "dp_shard_size": SHARDS}

    def prepare() -> None:
        config = settings.pop("parallelism_config", ParallelismConfig(**sizes))
        shards = fsdp_plugin() if plugin is None else FullyShardedDataParallelPlugin(**plugin)
        of_method = PipeSyncPlugin(method, timeout_s=60)
        accelerator = PipeSyncAccelerator(of_method, fsdp_plugin=shards, parallelism_config=config, **settings)
        module = model()
        accelerator.prepare(module, adamw(module))

    with fresh_state():
        return raised(prepare)


def refuse_a_second_accelerator() -> Any:
    """Accelerate's own was there first, and shards on both dimensions."""
    with fresh_state():
        accelerator_of(None)
        return raised(lambda: PipeSyncAccelerator(PipeSyncPlugin("dear")))


#: By its name what DeAR is given, and FSDP2 on both dimensions of the mesh, which trains the same.
EXACT: dict[str, dict[str, Any]] = {
    "plain": {},
    "two passes": {"passes": 2},
    "activation checkpointing": {"plugin": {"activation_checkpointing": True}},
    "loaded by rank 0": {"plugin": {"cpu_ram_efficient_loading": True}},
    "stays whole": {"plugin": {"reshard_after_forward": False}},
}

#: Accelerate's policy with mixed_precision="bf16".
BF16 = MixedPrecisionPolicy(*3 * [torch.bfloat16])

#: By what each says, what is refused.
REFUSED: dict[str, Any] = {
    "fsdp_version=1 is not supported with method='dear'": partial(refuse, plugin={"fsdp_version": 1}),
    "fsdp_plugin without parallelism_config shards the model over all": partial(refuse, parallelism_config=None),
    "cpu_offload=True is not supported": partial(refuse, plugin={"fsdp_version": 2, "cpu_offload": True}),
    "tp_size=2 in parallelism_config is not supported": partial(
        refuse, parallelism_config=ParallelismConfig(dp_shard_size=2, tp_size=2)
    ),
    "cp_size=2 in parallelism_config is not supported": partial(
        refuse, parallelism_config=ParallelismConfig(dp_shard_size=2, cp_size=2)
    ),
    "method='ea_pipe' divides the model among the ranks itself": partial(refuse, "ea_pipe"),
    "A parameter server answers each rank by itself": partial(refuse, "parameter_server"),
    "use MULTI_GPU, FSDP with fsdp_version=2 and a parallelism_config": refuse_a_second_accelerator,
}


def train_in_a_loop(name: str, max_norm: float | None = None, **sharding: Any) -> list[Tensor]:
    """The same in a plain loop."""
    mesh = device_mesh()
    module = sharded(mesh["shards"], **sharding)
    optimizer = adamw(module)
    method, settings = SETTINGS[name]
    sync = METHODS[method](module, optimizer, replicas=mesh["replicas"], timeout_s=60, **settings)
    for step in range(STEPS):
        inputs, targets = batch(dist.get_rank(), step)
        optimizer.zero_grad()
        (module(inputs) - targets).square().mean().backward()
        if max_norm is not None:
            sync.clip(max_norm)
        sync.step()
    sync.flush()
    weights = whole(module)
    sync.detach()
    return weights


@pytest.fixture(scope="module")
def trained() -> Outcomes:
    cases: dict[Any, Any] = {}
    for name in NAMES:
        cases[name, "accelerate"] = partial(train, name)
        cases[name, "loop"] = partial(train_in_a_loop, name)
    for name in CLIPPED:
        cases[name, "accelerate", "clipped"] = partial(train, name, max_norm=0.1)
        cases[name, "loop", "clipped"] = partial(train_in_a_loop, name, max_norm=0.1)
    cases["bf16", "accelerate"] = partial(train, "dear", mixed_precision="bf16")
    cases["bf16", "loop"] = partial(train_in_a_loop, "dear", mp_policy=BF16)
    for what, settings in EXACT.items():
        cases[what, "dear"] = partial(train, "dear", **settings)
        cases[what, "hsdp"] = partial(train, None, **settings)
    for name, scaled in (("dear", False), ("dear", True), ("local_sgd", True)):
        cases[name, "scaled", scaled] = partial(train_with_a_loss_scaler, name, scaled)
    cases |= {how: how for how in (train_by_environment, prepare_again, train_one_replica)}
    cases |= REFUSED
    return launch_cases(cases, REPLICAS * SHARDS, init=False)


def assert_same(found: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    for own, others in zip(found, expected, strict=True):
        assert all(map(torch.equal, own, others))


@pytest.mark.parametrize("name", NAMES)
def test_accelerate_trains_what_a_loop_does(name: str, trained: Outcomes) -> None:
    """Bit for bit."""
    assert_same(trained[name, "accelerate"], trained[name, "loop"])
    if name in CLIPPED:
        assert_same(trained[name, "accelerate", "clipped"], trained[name, "loop", "clipped"])
        assert not torch.equal(trained[name, "loop", "clipped"][0][0], trained[name, "loop"][0][0])


@pytest.mark.parametrize("what", EXACT)
def test_dear_is_what_accelerate_trains_on_both_dimensions(what: str, trained: Outcomes) -> None:
    """Bit for bit with two replicas, whose sums have one order."""
    assert_same(trained[what, "dear"], trained[what, "hsdp"])


def test_a_loss_scaler_skips_on_all_ranks(trained: Outcomes) -> None:
    """Bit for bit what is trained without the step in which one shard overflows; with local SGD a replica skips it."""
    scaled = trained["dear", "scaled", True]
    assert_same(*([found["weights"] for found in run] for run in (scaled, trained["dear", "scaled", False])))
    for name, ranks in (("dear", range(REPLICAS * SHARDS)), ("local_sgd", range(SHARDS))):
        for rank, found in enumerate(trained[name, "scaled", True]):
            assert found["skipped"] == [step == 3 and rank in ranks for step in range(STEPS)]


def test_bf16(trained: Outcomes) -> None:
    """Bit for bit a loop with Accelerate's policy; on both dimensions FSDP2 sums in bf16 between replicas, too."""
    assert_same(trained["bf16", "accelerate"], trained["bf16", "loop"])
    assert not torch.equal(trained["bf16", "loop"][0][0], trained["dear", "loop"][0][0])


def test_a_configuration_file(trained: Outcomes) -> None:
    assert_same(trained[train_by_environment], trained["plain", "hsdp"])


def test_what_is_prepared_again(trained: Outcomes) -> None:
    for found in trained[prepare_again]:
        assert found["same"] == [True, True]
        assert found["changed"]
    assert_same([found["weights"] for found in trained[prepare_again]], trained["plain", "hsdp"])


def test_one_replica_is_left_to_accelerate(trained: Outcomes) -> None:
    for found, expected in zip(trained[train_one_replica], trained["plain", "hsdp"], strict=True):
        torch.testing.assert_close(found["weights"], expected)
        assert any("dp_replicate_size=1: there is one replica" in message for message in found["messages"])


@pytest.mark.parametrize("says", REFUSED)
def test_refused_on_all_ranks(says: str, trained: Outcomes) -> None:
    for outcome in trained[says]:
        assert_refused({says: outcome})
