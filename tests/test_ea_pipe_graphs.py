"""What EA-Pipe's graphs of traced models keep of them, and what is refused since they cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_pipesync import EAPipe
from tests.harness import assert_refused, raised
from tests.models import batch
from tests.test_ea_pipe import OPTIMIZERS

X, Y = batch(0, 0, size=6)  # six features, three classes


class Net(nn.Module):
    """Two layers, and what a test has it do.

    Args:
        forward: takes the model and what it is called with.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.extra, self.b = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.function = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def plain(net: Net, x: Tensor) -> Tensor:
    return net.b(torch.relu(net.a(x)))


def engine_of(net: nn.Module, loss: Any = F.cross_entropy, **settings: Any) -> EAPipe:
    settings = {"split": ("b",), "virtual_stages": 2, "method": "naive", **settings}
    return EAPipe(net, loss, OPTIMIZERS["sgd"], **settings)


# --- gradients --------------------------------------------------------------------------------------------------------


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -gradient


def watched(net: Net, x: Tensor) -> Tensor:
    hidden = net.a(x)
    hidden.register_hook(lambda gradient: gradient * 10)
    return net.b(hidden)


@torch.library.custom_op("pipesync_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, gradient: gradient * 7)


def refused(net: nn.Module, inputs: Any = X, **settings: Any) -> tuple[str, str] | None:
    return raised(lambda: engine_of(net, **settings).train_batch((inputs, Y)))


def test_gradients_that_no_graph_has_are_refused() -> None:
    """Those of an operator with a backward of its own stay."""
    hooked = Net(plain)
    hooked.a.register_full_backward_hook(lambda *_: None)
    assert_refused(
        {
            "the autograd.Function Reverse": refused(Net(lambda net, x: net.b(Reverse.apply(net.a(x))))),
            "Tensor.register_hook": refused(Net(watched)),
            "the backward hooks of a.": refused(hooked),
            "set use_reentrant=False": refused(Net(lambda net, x: net.b(checkpoint(net.a, x, use_reentrant=True)))),
        }
    )
    assert_same_step(Net(lambda net, x: net.b(twice(net.a(x)))))
    assert_same_step(Net(lambda net, x: net.b(checkpoint(net.a, x, use_reentrant=False))))


def assert_same_step(net: Net, x: Tensor = X) -> None:
    """Compares a step of training, bit for bit, to one without a pipeline."""
    eager = Net(net.function)
    optimizer = OPTIMIZERS["sgd"](eager.parameters())
    loss = F.cross_entropy(eager(x), Y)
    loss.backward()
    optimizer.step()
    engine = engine_of(net)
    assert torch.equal(engine.train_batch((x, Y)), loss)
    engine.flush()
    for name, value in eager.state_dict().items():
        assert torch.equal(net.state_dict()[name], value), name
