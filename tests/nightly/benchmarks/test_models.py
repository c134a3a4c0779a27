"""The models of the benchmarks: the paper's tensors, the time asked for, gradients as in a real backward."""

from __future__ import annotations

import math
import sys

import pytest

import benchmarks.baselines  # noqa: F401 - adds its networks to the models
from lightning_pipesync.lab.bench.models import (
    TABLES,
    build_model,
)

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
    "gpt2": (75, 148, 124_439_808, None),
}


@pytest.mark.parametrize("name", COUNTS)
def test_table_counts_as_the_paper_does(name: str) -> None:
    num_layers, num_tensors, numel, gflop = COUNTS[name]
    table = TABLES[name]()
    assert (table.name, len(table.layers), table.num_tensors, table.numel) == (name, num_layers, num_tensors, numel)
    assert all(layer.forward_flops > 0 for layer in table.layers)
    if gflop is not None:
        assert table.forward_flops == round(gflop * 1e9)


class Clock:
    """Replaces the module ``time``: a sleep takes half as long again as it was asked to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += 1.5 * seconds


def test_an_emulated_model_has_the_tensors_and_takes_the_time_that_were_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With sleeps that are too long, and layers that compute besides; the last layer's gradients are ready first."""
    clock = Clock()
    monkeypatch.setattr("lightning_pipesync.lab.bench.emulated.time", clock)
    forward, backward = 0.2, 0.4
    model = build_model("emulated-resnet50", scale=1e-3, forward_seconds=forward, backward_seconds=backward)
    parameters = dict(model.module.named_parameters())
    shapes = [shape for layer in TABLES["resnet50"]().layers for shape in layer.tensors.values()]
    assert [one.numel() for one in parameters.values()] == [max(1, round(1e-3 * math.prod(shape))) for shape in shapes]
    ready: list[str] = []
    for name, parameter in parameters.items():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name.rpartition(".")[0]))
    for _ in range(5):
        model.module.zero_grad()
        begin = clock.now
        loss = model.loss(model.module, model.make_batch(0))
        between = clock.now
        loss.backward()
        assert between - begin == pytest.approx(forward, rel=0.05)
        assert clock.now - between == pytest.approx(backward, rel=0.05)
    assert ready == [name.rpartition(".")[0] for name in parameters][::-1] * 5


def test_missing_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match="bert-base needs transformers: pip install"):
        build_model("bert-base")


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
