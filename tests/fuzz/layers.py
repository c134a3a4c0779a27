"""Layers of which models are drawn. To add one, write a module from [8, 6] to [8, 6] and give it a line in `LAYERS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 6


class Shaped(nn.Module):
    """A module that wants its input in another shape, and may return a tuple."""

    def __init__(self, inner: nn.Module, *shape: int, channels_last: bool = False) -> None:
        super().__init__()
        self.inner, self.shape = inner, shape
        if channels_last:
            self.inner.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x.reshape(-1, *self.shape))
        return (y[0] if isinstance(y, tuple) else y).reshape(x.shape)


class InDtype(nn.Module):
    """A layer whose weights have a dtype of their own."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.to(self.inner.weight.dtype)).to(x.dtype)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).real.to(x.dtype)


class Embedded(nn.Module):
    """Adds an embedding of the signs of the input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner((x > 0).sum(dim=1, keepdim=isinstance(self.inner, nn.EmbeddingBag)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # The gradient of a bias of keys is zero but for rounding, which optimizers such as RMSprop make a step of.
        self.inner = nn.MultiheadAttention(2, 1, bias=False, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, 3, 2)
        return self.inner(tokens, tokens, tokens)[0].reshape(x.shape)


class Tied(nn.Module):
    """Two layers that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(x)))


class Branches(nn.Module):
    """Uses one of two layers: in turns, each replica in its own, or by the rank's own data."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.by, self.step, self.replica = by, 0, 0

    def forward(self, x: Tensor) -> Tensor:
        which = {"step": self.step, "replica": self.step // 2 + self.replica, "data": int(x.sum() > 0)}[self.by] % 2
        return self.branches[which](x)


class WithParameter(nn.Module):
    """A layer beside a parameter, which is used as ``use`` says."""

    def __init__(self, parameter: Tensor, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.parameter, self.use = nn.Linear(WIDTH, WIDTH), nn.Parameter(parameter), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.inner(x), self.parameter)


class Frozen(nn.Module):
    """A layer without gradients, until it thaws, or one that freezes."""

    def __init__(self, until: float, thaws: bool = True) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH).requires_grad_(not thaws)
        self.until, self.thaws, self.step = until, thaws, 0

    def change(self, step: int) -> None:
        if step >= self.until:
            self.inner.requires_grad_(self.thaws)

    def forward(self, x: Tensor) -> Tensor:
        self.change(self.step)
        return self.inner(x)


class Functional(nn.Module):
    """Uses weights of a module that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.inner.weight, self.inner.bias)


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Counting(nn.Module):
    """Replaces its buffers instead of writing to them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = self.mean * 0.9 + x.detach().mean(dim=0) * 0.1
            self.count = self.count + 1
        return self.inner(x - self.mean)


@dataclass(frozen=True)
class Layer:
    """A kind of layer.

    Attributes:
        refused: words of the error by which every method refuses it.
        rounds: whether a method may lay out its weights otherwise, so that kernels round otherwise.
        groups: names of its modules, "" for itself, that FSDP2 can gather by themselves, from the innermost; None: it
            does not support the layer.
        alone: whether it has to be gathered by itself.
        in_low_precision: whether it can be computed in low precision.
    """

    build: Callable[[], nn.Module]
    refused: str = ""
    rounds: bool = False
    groups: tuple[str, ...] | None = None
    alone: bool = False
    in_low_precision: bool = True


_ITSELF, _INNER = ("",), ("inner", "")

LAYERS: dict[str, Layer] = {
    "linear": Layer(lambda: nn.Linear(WIDTH, WIDTH), groups=_ITSELF),
    "wide": Layer(lambda: nn.Sequential(nn.Linear(WIDTH, 40), nn.Tanh(), nn.Linear(40, WIDTH)), groups=("0", "2", "")),
    "conv2d": Layer(lambda: Shaped(nn.Conv2d(2, 2, 3, padding=1), 2, 3, 1), groups=_INNER),
    "channels_last": Layer(lambda: Shaped(nn.Conv2d(2, 2, 3, padding=1), 2, 3, 1, channels_last=True)),
    "conv1d": Layer(lambda: Shaped(nn.Conv1d(2, 2, 3, padding=1), 2, 3), groups=_INNER),
    "conv_transpose": Layer(lambda: Shaped(nn.ConvTranspose2d(2, 2, 3, padding=1), 2, 3, 1), groups=_INNER),
    "batch_norm": Layer(lambda: nn.BatchNorm1d(WIDTH), groups=_ITSELF, in_low_precision=False),
    "batch_norm_2d": Layer(lambda: Shaped(nn.BatchNorm2d(2), 2, 3, 1), groups=_INNER, in_low_precision=False),
    "group_norm": Layer(lambda: nn.GroupNorm(2, WIDTH), groups=_ITSELF),
    "layer_norm": Layer(lambda: nn.LayerNorm(WIDTH), groups=_ITSELF),
    "embedding": Layer(lambda: Embedded(nn.Embedding(7, WIDTH, padding_idx=0)), groups=_INNER),
    "embedding_bag": Layer(lambda: Embedded(nn.EmbeddingBag(7, WIDTH)), groups=_INNER, in_low_precision=False),
    "sparse_embedding": Layer(lambda: Embedded(nn.Embedding(7, WIDTH, sparse=True)), refused="sparse"),
    "lstm": Layer(lambda: Shaped(nn.LSTM(2, 2, batch_first=True), 3, 2)),
    "gru": Layer(lambda: Shaped(nn.GRU(2, 1, batch_first=True, bidirectional=True), 3, 2)),
    "attention": Layer(Attention, groups=_INNER),
    "tied": Layer(Tied, groups=_ITSELF),
    "twice": Layer(Twice, groups=_INNER),
    "alternating": Layer(lambda: Branches("step"), groups=("branches.0", "branches.1", "")),
    "by_replica": Layer(lambda: Branches("replica"), groups=("branches.0", "branches.1", "")),
    "by_data": Layer(lambda: Branches("data")),
    "unused": Layer(lambda: WithParameter(torch.ones(3), lambda x, parameter: x), groups=_INNER),
    "frozen": Layer(lambda: Frozen(until=float("inf")), groups=_INNER),
    "thawed": Layer(lambda: Frozen(until=3), groups=_INNER),
    "freezes": Layer(lambda: Frozen(until=3, thaws=False), groups=_INNER),
    "scalar": Layer(lambda: WithParameter(torch.tensor(0.1), lambda x, scale: x * scale.exp())),
    "one": Layer(lambda: WithParameter(torch.tensor([0.1]), lambda x, scale: x * scale.exp()), groups=_INNER),
    "empty": Layer(lambda: WithParameter(torch.empty(0, 3), lambda x, parameter: x + parameter.sum())),
    "transposed": Layer(lambda: WithParameter(torch.randn(4, 6).t() / 4, lambda x, p: x + x @ p @ p.t())),
    "sliced": Layer(lambda: WithParameter(torch.randn(6, 12)[:, ::2] / 4, lambda x, p: x @ p), rounds=True),
    "bfloat16": Layer(lambda: InDtype(torch.bfloat16), groups=_ITSELF, alone=True, in_low_precision=False),
    "float64": Layer(lambda: InDtype(torch.float64), groups=_ITSELF, alone=True, in_low_precision=False),
    "complex": Layer(Complex, refused="complex"),
    "weight_norm": Layer(lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), groups=()),
    "spectral_norm": Layer(
        lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), groups=(), in_low_precision=False
    ),
    "dropout": Layer(lambda: nn.Sequential(nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH)), groups=("1", "")),
    "prelu": Layer(nn.PReLU, groups=_ITSELF),
    "functional": Layer(Functional, groups=_ITSELF),
    "recomputed": Layer(Recomputed, groups=_INNER, in_low_precision=False),
    "counting": Layer(Counting, groups=_INNER, in_low_precision=False),
}


class StopOnPurpose(Exception):
    """Raised by the user's own code, on all ranks."""


class Model(nn.Module):
    """The drawn layers, with tanh between, and a classifier of three classes.

    Attributes:
        stops: where the next pass raises: "forward", "backward" or nowhere.
        replica: the number of the replica that the model is.
    """

    def __init__(self, layers: Sequence[str]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([LAYERS[name].build() for name in layers])
        self.head = nn.Linear(WIDTH, 3)
        self.stops, self.replica = "", 0

    def forward(self, x: Tensor, step: int) -> Tensor:
        for index, block in enumerate(self.blocks):
            block.step, block.replica = step, self.replica
            x = torch.tanh(block(x))
            if index == len(self.blocks) // 2:
                self._stop(x)
        return self.head(x)

    def _stop(self, x: Tensor) -> None:
        if self.stops == "forward":
            raise StopOnPurpose
        if self.stops == "backward" and x.requires_grad:
            x.register_hook(_stop)


def _stop(gradient: Tensor) -> None:
    raise StopOnPurpose
