"""The models of the benchmarks: the paper's tensors, the time asked for, gradients as in a real backward."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import benchmarks.baselines.networks  # noqa: F401 - adds them to the models
from lightning_pipesync.lab.bench.models import (
    TABLES,
    BenchModel,
    ModelTable,
    build_model,
    computation_seconds,
    model_names,
)
from lightning_pipesync.lab.bench.models.emulated import EmulatedCompute
from tests.support.case_table import launch_cases

# DeAR Table I: layers, tensors; the exact number of values of which it gives millions, and GFLOP of a forward pass, are
# those of timm 1.0 (its convolutions', norms' and classifier's, counted on the meta device) and of transformers.
# AlexNet's are torchvision's.
COUNTS = {
    "alexnet": (8, 16, 61_100_840, 1.42837696),
    "resnet50": (107, 161, 25_557_032, 8.20059648),
    "densenet201": (402, 604, 20_013_928, 8.632142592),
    "inceptionv4": (299, 449, 42_679_816, 12.259325184),
    "bert-base": (105, 206, 110_106_428, None),
    "bert-large": (201, 398, 336_226_108, None),
}


@pytest.mark.parametrize("name", COUNTS)
def test_table_counts_as_the_paper_does(name: str) -> None:
    num_layers, num_tensors, numel, gflop = COUNTS[name]
    table = TABLES[name]()
    assert (table.name, len(table.layers), table.num_tensors, table.numel) == (name, num_layers, num_tensors, numel)
    assert all(layer.forward_flops > 0 for layer in table.layers)
    if gflop is not None:
        assert table.forward_flops == round(gflop * 1e9)


def shapes(table: ModelTable) -> list[tuple[int, ...]]:
    return [tensor.shape for layer in table.layers for tensor in layer.tensors]


@pytest.mark.parametrize(("name", "hidden", "depth"), [("bert-base", 768, 12), ("bert-large", 1024, 24)])
def test_bert_is_that_of_transformers(name: str, hidden: int, depth: int) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(hidden_size=hidden, num_hidden_layers=depth, intermediate_size=4 * hidden)
    config.num_attention_heads = hidden // 64
    with torch.device("meta"):
        bert = transformers.BertForPreTraining(config)
    table = TABLES[name]()
    names = [f"{layer.name}.{tensor.name}" for layer in table.layers for tensor in layer.tensors]
    expected = {name: tuple(parameter.shape) for name, parameter in bert.named_parameters()}
    assert dict(zip(names, shapes(table), strict=True)) == expected
    assert names == list(expected)


def test_resnet_is_that_of_transformers_in_another_order() -> None:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        resnet = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000))
    assert sorted(shapes(TABLES["resnet50"]())) == sorted(tuple(p.shape) for p in resnet.parameters())


def test_true_shapes_at_scale_one() -> None:
    parameters = build_model("emulated-resnet50").module.parameters()
    assert [tuple(parameter.shape) for parameter in parameters] == shapes(TABLES["resnet50"]())


@pytest.mark.parametrize("name", TABLES)
def test_emulated_model_has_the_tensors_of_the_table(name: str) -> None:
    parameters = build_model(f"emulated-{name}", scale=1e-3).module.parameters()
    expected = [max(1, round(1e-3 * math.prod(shape))) for shape in shapes(TABLES[name]())]
    assert [parameter.numel() for parameter in parameters] == expected


def backward_once(model: BenchModel, rank: int = 0) -> torch.Tensor:
    loss = model.loss(model.module, model.make_batch(rank))
    loss.backward()
    return loss


class Clock:
    """Replaces the module ``time``: a sleep takes half as long again as it was asked to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps: list[float] = []

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += 1.5 * seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("lightning_pipesync.lab.bench.models.emulated.time", clock)
    return clock


def test_compute_makes_up_for_sleeps_that_are_too_long(clock: Clock) -> None:
    compute = EmulatedCompute(1.0, 1.0)
    for _ in range(100):
        compute.spend(0.002, since=clock.now)
    assert clock.now == pytest.approx(0.2, abs=0.002)


def test_compute_puts_tiny_shares_together(clock: Clock) -> None:
    compute = EmulatedCompute(1.0, 1.0)
    for _ in range(100):
        compute.spend(0.1e-3, since=clock.now)
    assert clock.now == pytest.approx(0.01, abs=1e-3)
    assert len(clock.sleeps) <= 20


def test_compute_charges_for_work_within_a_layer_but_not_for_waiting_between_two(clock: Clock) -> None:
    compute = EmulatedCompute(1.0, 1.0)
    compute.spend(0.0, since=clock.now)
    clock.now += 5.0  # between two layers
    begin = clock.now
    clock.now += 0.004  # within the layer
    compute.spend(0.010, since=begin)
    assert sum(clock.sleeps) == pytest.approx(0.006, abs=1e-4)


def test_compute_forgives_a_long_stop(clock: Clock) -> None:
    compute = EmulatedCompute(1.0, 1.0)
    begin = clock.now
    clock.now += 10.0
    compute.spend(0.001, since=begin)
    begin = clock.now
    for _ in range(100):
        compute.spend(0.010, since=clock.now)
    assert clock.now - begin == pytest.approx(0.9, abs=0.02)


def test_time_is_that_asked_for(clock: Clock) -> None:
    """With sleeps that are too long, and layers that compute besides."""
    forward, backward = 0.2, 0.4
    model = build_model("emulated-densenet201", scale=1e-3, forward_seconds=forward, backward_seconds=backward)
    batch = model.make_batch(0)
    for _ in range(5):
        model.module.zero_grad()
        begin = clock.now
        loss = model.loss(model.module, batch)
        between = clock.now
        loss.backward()
        assert between - begin == pytest.approx(forward, rel=0.05)
        assert clock.now - between == pytest.approx(backward, rel=0.05)


def test_last_layer_is_ready_first(clock: Clock) -> None:
    model = build_model("emulated-resnet50", scale=1e-3, forward_seconds=0.01, backward_seconds=0.1)
    ready: list[tuple[str, float]] = []
    for name, parameter in model.module.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda parameter, name=name: ready.append((name.rpartition(".")[0], clock.now))
        )
    backward_once(model)
    layers = [name.rpartition(".")[0] for name, _ in model.module.named_parameters()]
    assert [layer for layer, _ in ready] == layers[::-1]
    # Spread over the backward pass, not all at its end.
    first, middle, last = (ready[i][1] for i in (0, len(ready) // 2, -1))
    assert min(middle - first, last - middle) > 0.02


def test_gradients_accumulate_and_are_not_copied() -> None:
    model = build_model("emulated-bert-base", scale=1e-4)
    for _ in range(3):
        backward_once(model, rank=1)
    assert all(bool((parameter.grad == 6).all()) for parameter in model.module.parameters())
    places = [parameter.grad.data_ptr() for parameter in model.module.parameters()]
    model.module.zero_grad()
    backward_once(model, rank=1)
    assert all(bool((parameter.grad == 2).all()) for parameter in model.module.parameters())
    assert [parameter.grad.data_ptr() for parameter in model.module.parameters()] == places


def test_time_can_be_changed_between_steps() -> None:
    model = build_model("emulated-resnet50", scale=1e-3)
    model.module.compute.forward_seconds = 0.2  # by the machine's own clock
    begin = time.perf_counter()
    with torch.no_grad():
        model.module(model.make_batch(0))
    assert time.perf_counter() - begin > 0.15


@pytest.mark.parametrize("name", ["transformer", "cnn", "resnet50", "bert-base", "emulated-resnet50"])
def test_every_parameter_has_a_gradient(name: str) -> None:
    if name in ("resnet50", "bert-base"):
        pytest.importorskip("transformers")
    settings: dict[str, Any] = {"scale": 1e-3} if name.startswith("emulated-") else {"batch_size": 2}
    model = build_model(name, **settings)
    loss = backward_once(model)
    assert loss.shape == ()
    assert all(parameter.grad is not None for parameter in model.module.parameters())
    assert {id(layer) for layer in model.layers} <= {id(module) for module in model.module.modules()}
    assert repr(model.make_batch(1)) == repr(model.make_batch(1))
    assert repr(model.make_batch(1)) != repr(model.make_batch(2))


def with_ddp(model: BenchModel) -> nn.Module:
    return DistributedDataParallel(model.module, static_graph=True, gradient_as_bucket_view=True, bucket_cap_mb=1)


def with_fsdp2(model: BenchModel) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(model.module, mesh=mesh, reshard_after_forward=False)
    return model.module


def train(name: str, settings: dict[str, Any], wrap: Callable[[BenchModel], nn.Module]) -> list[torch.Tensor]:
    """Two steps; returns this rank's gradients, averaged over the ranks, whole."""
    torch.manual_seed(0)
    model = build_model(name, **settings)
    module = wrap(model)
    optimizer = SGD(module.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        model.loss(module, model.make_batch(dist.get_rank())).backward()
        optimizer.step()
    gradients = [parameter.grad for parameter in module.parameters()]
    # Of a gradient that is a view of its bucket the whole bucket would be sent.
    return [g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for g in gradients if g is not None]


@pytest.mark.parametrize("wrap", [with_ddp, with_fsdp2])
def test_models_under(wrap: Callable[[BenchModel], nn.Module]) -> None:
    timed = {"scale": 0.01, "forward_seconds": 0.02, "backward_seconds": 0.04}
    models = {"emulated-resnet50": timed, "transformer": {"batch_size": 2}, "cnn": {"batch_size": 2}}
    outcomes = launch_cases({name: partial(train, name, settings, wrap) for name, settings in models.items()}, 2)
    for gradients in outcomes["emulated-resnet50"]:
        assert len(gradients) == 161
        assert all(bool((gradient == 1.5).all()) for gradient in gradients)  # the mean of what ranks 0 and 1 computed
    for name in ("transformer", "cnn"):
        first, second = outcomes[name]
        assert len(first) == len(list(build_model(name).module.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_missing_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match="bert-base needs transformers: pip install"):
        build_model("bert-base")


def test_computation_seconds() -> None:
    # Four ranks send 1.5 times 100 MB at 100 MB/s: 1.5 s of communication, twice that of computation.
    assert computation_seconds(100_000_000, 4, 1e8, ratio=0.5) == pytest.approx((1.0, 2.0))


@pytest.mark.parametrize("arguments", [(1, 1, 1.0, 1.0), (0, 2, 1.0, 1.0), (1, 2, 0.0, 1.0), (1, 2, 1.0, -1.0)])
def test_computation_seconds_out_of_range(arguments: tuple[int, int, float, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        computation_seconds(*arguments)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="model='vgg16' is not known") as error:
        build_model("vgg16")
    assert all(name in str(error.value) for name in model_names())


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("emulated-resnet50", "scale", 0.0),
        ("emulated-resnet50", "scale", float("nan")),
        ("emulated-resnet50", "forward_seconds", -1.0),
        ("emulated-resnet50", "backward_seconds", float("nan")),
        ("emulated-resnet50", "batch_size", 8),  # of real models only
        ("transformer", "batch_size", 0),
        ("transformer", "scale", 0.5),  # of emulated models only
        ("cnn", "backward_seconds", 1.0),
    ],
)
def test_setting_out_of_range(name: str, setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=setting):
        build_model(name, **{setting: value})  # type: ignore[arg-type]
