"""Trainings on the device that does not exist, and what the checker reports of them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipesync.core.buckets import Bucket
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.comm.wire import HostCopies
from tests.conformance import runners
from tests.conformance.methods import METHODS
from tests.conformance.training import Options
from tests.streams import streams
from tests.streams.device import cuda

WIDTH, BATCH = 16, 4
STEPS = 6  # of which the first is unlike the others, as is the one after the weights were consolidated


@dataclass(frozen=True)
class Training:
    """A method with settings, in a plain loop.

    Args:
        optimizer: of torch.optim.
        clips: whether each gradient is clipped.
        side_stream: whether it runs on another stream than that on which the method was attached.
        stream_per_layer: whether each layer runs on a stream of its own.
        flushes: whether the weights are consolidated in between and at the end, before the method is detached.
        dtype: that of the parameters.
        steps: of which the weights are consolidated in the middle.
        fails_in: the pass, ``"forward"`` or ``"backward"``, in which the last step raises an error on all ranks.
        snapshots: whether each step ends with a snapshot, as with replicas that can undo it. The model has no buffers
            then, for whose average the training would wait before.
    """

    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "SGD"
    clips: bool = False
    side_stream: bool = False
    stream_per_layer: bool = False
    flushes: bool = True
    dtype: torch.dtype = torch.float32
    steps: int = STEPS
    fails_in: str | None = None
    snapshots: bool = False


class Fault(Exception):
    """The error of a pass."""


class OnStream(nn.Module):
    """A layer on a stream of its own, on which its backward pass runs, too, as autograd does it.

    The stream waits for the gradient of the layer's output, not for what its stream does after that, such as to add the
    gradient of a weight.
    """

    computed: streams.Event | None = None  # the last gradient that a layer has handed to the one before

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.stream = layer, streams.Stream(streams.own_device(), name="layer's stream")

    def forward(self, x: Tensor) -> Tensor:
        callers = streams.current_stream(streams.own_device())
        self.stream.wait_stream(callers)
        with streams.stream(self.stream):
            y: Tensor = self.layer(x)
        if y.grad_fn is not None:
            y.register_hook(self._begin_backward)
            y.grad_fn.register_hook(self._end_backward)
        callers.wait_stream(self.stream)
        return y

    def _begin_backward(self, _: Tensor) -> None:
        self.stream.wait_event(OnStream.computed or streams.current_stream(self.stream.device).record_event())
        streams.set_stream(self.stream)

    def _end_backward(self, *_: Any) -> None:
        OnStream.computed = self.stream.record_event()


def network(stream_per_layer: bool = False, buffers: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(WIDTH, WIDTH), *([nn.BatchNorm1d(WIDTH)] if buffers else []), nn.Tanh()]
    return nn.Sequential(*(OnStream(layer) if stream_per_layer else layer for layer in layers)).to(streams.own_device())


def optimizer_of(training: Training, model: nn.Module) -> torch.optim.Optimizer:
    settings = {"momentum": 0.9} if training.optimizer == "SGD" else {}
    return getattr(torch.optim, training.optimizer)(model.parameters(), lr=0.01, **settings)


def train(training: Training) -> None:
    torch.manual_seed(0)
    device = streams.own_device()
    model = network(training.stream_per_layer, buffers=not training.snapshots).to(training.dtype)
    sync = METHODS[training.method].plain(model, optimizer_of(training, model), **training.settings)
    stream = streams.current_stream(device)
    if training.side_stream:
        stream = streams.Stream(device, name="training's stream")
        stream.wait_stream(streams.current_stream(device))
    with streams.stream(stream):
        try:
            take_steps(training, sync, model, stream)
            if training.flushes:
                sync.flush()
                sync.state_dict()
            sync.detach()
        except Fault:
            sync.detach()
        del sync
        gc.collect()
        for parameter in model.parameters():
            parameter.detach().square()


def take_steps(training: Training, sync: Any, model: nn.Sequential, stream: streams.Stream) -> None:
    [optimizer] = sync.optimizers
    for step in range(training.steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        x = torch.randn(BATCH, WIDTH, dtype=training.dtype).to(stream.device)
        OnStream.computed = None
        if step == training.steps - 1 and training.fails_in == "forward":
            model[len(model) // 2].register_forward_hook(fail)
        loss = model(x).square().mean()
        if step == training.steps - 1 and training.fails_in == "backward":
            next(model.parameters()).register_hook(fail)
        loss.backward()
        if training.stream_per_layer:  # as autograd does at the end of a backward pass
            for layer in model:
                assert isinstance(layer, OnStream)
                stream.wait_stream(layer.stream)
        if training.clips:
            sync.clip(1.0)
        sync.step()
        if training.snapshots:
            sync.snapshot()
        if training.flushes and step == training.steps // 2:
            sync.flush()
            with torch.no_grad():
                model(x)
            sync.resume()


def fail(*_: Any) -> None:
    raise Fault


def train_as_others(framework: str, method: str, settings: dict[str, Any], options: Options) -> None:
    """Trains as the conformance suite does, in any of its loops."""
    streams.set_device(streams.own_device())
    runners.train(framework, METHODS[method], settings, replace(options, device="cuda"))


def drop_a_handle() -> None:
    """Frees the tensor of a collective that nobody waits for, as after an error."""
    device = streams.own_device()
    transport = Transport(device, timeout_s=60)
    transport.all_reduce(torch.ones(1000, device=device))
    torch.ones(1000, device=device)
    transport.close()


def free_a_bucket() -> None:
    """Frees a bucket that another stream has used, and whose memory was taken on a third."""
    device = streams.own_device()
    bucket = Bucket([torch.ones(1000, device=device)])
    taking, using = streams.Stream(device), streams.Stream(device)
    bucket.release_memory()
    with streams.stream(taking):
        bucket.take_memory()
        bucket.pack([torch.ones(1000, device=device)])
    using.wait_stream(taking)
    with streams.stream(using):
        bucket.flat.add_(1)
    streams.current_stream(device).wait_stream(using)
    bucket.release_memory()
    with streams.stream(taking):
        torch.ones(1000, device=device)


def load_and_train(settings: dict[str, Any]) -> None:
    """Trains with parameter servers before and after weights and optimizer states are saved and loaded."""
    device = streams.own_device()
    model = network()
    sync = METHODS["parameter_server"].plain(model, optimizer_of(Training("", optimizer="AdamW"), model), **settings)
    for _ in range(2):
        for _ in range(2):
            sync.optimizers[0].zero_grad()
            model(torch.randn(BATCH, WIDTH).to(device)).square().mean().backward()
            sync.step()
        sync.flush()
        optimizer_state = sync.optimizer_state_dict()
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
        sync.optimizers[0].load_state_dict(optimizer_state)
    sync.flush()
    sync.detach()


def copy_and_free() -> None:
    """Frees a tensor that is being copied to the host."""
    device = streams.own_device()
    HostCopies(device).start([torch.ones(1000, device=device)])
    torch.ones(1000, device=device)


def receive_from_own_server() -> None:
    """Frees weights that this rank's server has allocated, while the learner copies them."""
    device = streams.own_device()
    model = network()
    sync = METHODS["parameter_server"].plain(model, optimizer_of(Training(""), model), policy="sync", servers=1)
    [bucket], servers = sync._buckets, streams.Stream(device)
    with streams.stream(servers):
        weights = torch.ones_like(bucket.packed)
        servers.synchronize()
    bucket.receive(0, weights)
    del weights
    with streams.stream(servers):
        torch.ones(1, device=device)
    sync.detach()


def receive_ahead() -> None:
    """Rank 1 receives a message while it uses the one before, and then frees that."""
    transport = Transport(streams.own_device(), timeout_s=60, backend="gloo")
    if transport.rank == 0:
        sender = transport.channel_to(1, series=0)
        for _ in range(2):
            sender.send(torch.ones(1000))
            transport.exchange_flags(0).wait()
        sender.finish()
        sender.close(10)
    else:
        receiver = transport.channel_from(0, series=0)
        message = receiver.receive()
        receiver.expect()
        message + 1
        del message
        transport.exchange_flags(0).wait()
        receiver.receive()
        transport.exchange_flags(0).wait()
        receiver.close(10)
    transport.close()


def checked(
    run: Callable[..., None], args: tuple[Any, ...], removed: streams.Wait | None = None
) -> tuple[dict[str, int], int]:
    """Returns the reports of ``run``, without the wait ``removed``, and how often it was reached."""
    streams.reports.clear()
    streams.removed, streams.num_removed = removed, 0
    try:
        with cuda():
            run(*args)
    finally:
        streams.removed = None
    return dict(streams.reports), streams.num_removed
