"""What EA-Pipe's graphs of traced models keep of them, and what is refused since they cannot."""

from __future__ import annotations

import dataclasses
import random
from collections import UserDict
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_pipesync import EAPipe
from lightning_pipesync.lightning.submodule import Submodule
from lightning_pipesync.methods.ea_pipe.layout import Call
from tests.support.ea_pipe_runs import OPTIMIZERS
from tests.support.harness import assert_raised, assert_refused, on_ranks, raised
from tests.support.models import assert_same, batch

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
    settings = {"split": ("b",), "virtual_stages": 2, "algorithm": "naive", **settings}
    return EAPipe(net, loss, OPTIMIZERS["sgd"], **settings)


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


def refused(net: nn.Module, *inputs: Any, **settings: Any) -> tuple[str, str] | None:
    """What a training on ``inputs`` raises, one after the other, by default :data:`X`."""

    def begin() -> None:
        engine = engine_of(net, **settings)
        try:
            for x in inputs or (X,):
                engine.train_batch((x, Y[: len(x)] if isinstance(x, Tensor) else Y))
        finally:
            engine.detach(timeout_s=1.0)

    return raised(begin)


def test_gradients_that_no_graph_has_are_refused() -> None:
    """Those of an operator with a backward of its own stay."""
    hooked, before = Net(plain), (vars(torch.autograd.Function)["apply"], Tensor.register_hook)
    hooked.a.register_full_backward_hook(lambda *_: None)
    assert_refused(
        {
            "the autograd.Function Reverse": refused(Net(lambda net, x: net.b(Reverse.apply(net.a(x))))),
            "Tensor.register_hook": refused(Net(watched)),
            "the backward hooks of a.": refused(hooked),
            "set use_reentrant=False": refused(Net(lambda net, x: net.b(checkpoint(net.a, x, use_reentrant=True)))),
        }
    )
    assert (vars(torch.autograd.Function)["apply"], Tensor.register_hook) == before, "calls afterwards are as before"
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
    assert_same(eager.state_dict(), net.state_dict())


def drawn(net: Net, x: Tensor) -> Tensor:
    hidden = net.a(x)
    for draw in (random.random, np.random.random):
        hidden = net.extra(hidden) if draw() < 0.5 else hidden * 2
    return net.b(hidden)


def differing(net: Net, x: Tensor) -> Tensor:
    if torch.distributed.get_rank() == 1:
        return net.b(net.extra(net.a(x)))
    return net.extra(F.pad(net.b(net.a(x)), (0, 3)))[:, :3]


def tied() -> Net:
    net = Net(lambda net, x: net.b(net.extra(net.a(x))))
    net.extra.weight = net.a.weight
    return net


def by_values(net: Net, x: Tensor) -> Tensor:
    return plain(net, x if x.sum() > 0 else -x)


def by_values_of_small_batches(net: Net, x: Tensor) -> Tensor:
    return plain(net, x) if len(x) > 3 else by_values(net, x)


#: What the refusal on every rank says, and the settings.
UNFIT_SETTINGS: dict[str, dict[str, Any]] = {
    "a has: none": {"split": ("a.x",)},
    "It has: a, extra, b": {"split": ("x",)},
    "after the first begin, 1 of": {"split": ("a", "b")},
    "Net is not an nn.Sequential": {"split": "balanced"},
    "algorithm='gpipe' takes": {"algorithm": "gpipe"},
}


def draw_and_differ() -> dict[str, Any]:
    rank, net = torch.distributed.get_rank(), Net(drawn)
    random.seed(rank)  # the first numbers are above and below 0.5
    np.random.seed(3 * rank)
    before = random.getstate(), torch.get_rng_state()
    engine = engine_of(net, virtual_stages=None)
    engine.train_batch((X, Y))
    same = before[0] == random.getstate() and torch.equal(before[1], torch.get_rng_state())
    engine.gather()
    engine.detach()
    refusals = {"differ in the stage of extra.weight": refused(Net(differing), virtual_stages=None)}
    refusals.update({words: refused(Net(by_type), call, virtual_stages=None) for words, call in UNFIT.items()})
    refusals["share a parameter"] = refused(tied(), virtual_stages=None, split=("extra",))
    refusals["Net cannot be divided"] = refused(Net(by_values), virtual_stages=None)
    for words, settings in UNFIT_SETTINGS.items():
        refusals[words] = refused(Net(plain), virtual_stages=None, **settings)
    late = refused(Net(by_values_of_small_batches), X, X, X[:3], virtual_stages=None, timeout_s=60)
    return {"state": net.state_dict(), "same numbers afterwards": same, "refusals": refusals, "late": late}


def test_ranks_trace_the_same_or_are_refused() -> None:
    """Their own random numbers do not count, and stay as they are."""
    outcomes = on_ranks(draw_and_differ, 2)
    net = Net(drawn)
    engine = engine_of(net)
    engine.train_batch((X, Y))
    engine.flush()
    for outcome in outcomes:
        assert outcome["same numbers afterwards"]
        assert_refused(outcome["refusals"])
    assert_refused({"Net cannot be divided": outcomes[1]["late"]})  # the first stage sees first
    assert_raised(outcomes[0]["late"], "RuntimeError", "rank 1")  # a batch of that size; this rank times out
    for outcome in outcomes:
        for name, value in net.state_dict().items():
            assert torch.equal(outcome["state"][name], value), name


def turned(x: Tensor) -> Tensor:
    return x.view(-1, 2, 3).transpose(1, 2)


def changed_copy(net: Net, x: Tensor) -> Tensor:
    turn = turned(net.a(x)) * 1  # keeps the strides
    output = net.b(x)
    return output + turn.contiguous().mul_(2).sum((1, 2)).unsqueeze(1) + turn.sum((1, 2)).unsqueeze(1).square()


def as_strided(net: Net, x: Tensor) -> Tensor:
    turn = turned(net.a(x))
    return net.b(x) + turn.as_strided((6, 3), (6, 1))


def changed_copy_of_input(net: Net, x: Tensor) -> Tensor:
    copy = x.contiguous().mul_(2)
    return net.b(net.a(x) + copy)


def changed_without_gradients(net: Net, x: Tensor) -> Tensor:
    hidden = net.a(x)
    flat, same = hidden.detach().view(-1), hidden.detach()
    output = net.b(x)
    with torch.no_grad():
        flat.mul_(2)
    return output * (1 + same.sum(dim=1, keepdim=True))


def unfolded(net: Net, x: Tensor) -> Tensor:
    windows = net.a(x).unfold(1, 4, 1)
    return net.b(x) + windows.sum(dim=2)


def test_views_and_copies_are_those_of_the_model() -> None:
    """What depends on strides comes out as without a pipeline; the input is left alone."""
    for forward in (changed_copy, as_strided, unfolded):
        assert_same_step(Net(forward))
    for x in (X.t().contiguous().t(), X[:, :1].expand(-1, 6)):
        before = x.clone()
        assert_same_step(Net(changed_copy_of_input), x)
        assert torch.equal(x, before)
    assert_refused({"shares its memory": refused(Net(changed_without_gradients))})


@dataclasses.dataclass
class Output:
    logits: Any


@dataclasses.dataclass
class Known:
    logits: Any


torch.export.register_dataclass(Known)


def by_type(net: Net, x: Tensor, how: Any) -> Known:
    return Known(plain(net, x) * len(repr(how)) * (2 if how is True else 1))


def test_values_among_tensors_are_told_apart() -> None:
    net = Net(by_type)
    engine = engine_of(net, lambda output, y: F.cross_entropy(output.logits, y))
    net.eval()
    for how in (1, True, 1.0, 0.0, -0.0, float("nan"), float("nan"), "a", None, torch.float32, F.relu):
        with torch.no_grad():
            expected = net(X, how).logits
        assert torch.equal(engine.forward(Call((X, how), {})).logits, expected)


UNFIT = {
    "holds a Output": Call((X, Output(X)), {}),
    "holds a ndarray": Call((X,), {"how": np.ones(3)}),
    "holds a UserDict": Call((UserDict(x=X),), {}),
    "holds a function": Call((X, lambda: 3), {}),
    "layout is torch.sparse_coo": Call((X.to_sparse(), 1), {}),
}


def test_other_values_are_refused() -> None:
    assert_refused({words: refused(Net(by_type), call) for words, call in UNFIT.items()})
    assert_refused({"The output of Net holds a Output": refused(Net(lambda net, x: Output(plain(net, x))))})


def test_hooks_of_a_submodule_of_a_step_run_once() -> None:
    module = nn.Module()
    module.net = Net(plain)
    module.net.register_forward_hook(lambda net, args, output: output * 3)
    module.net.register_forward_pre_hook(lambda net, args: (args[0] + 1,))
    submodule, engine = Submodule(module, "net", traced=True), engine_of(module.net)
    module.eval()

    def step() -> Tensor:
        return module.net(X)

    output = submodule.result_of(step, engine.infer(lambda: submodule.input_of(step)))
    with torch.no_grad():
        assert torch.equal(output, step())
        assert torch.equal(engine.forward(X), step())  # a loop without steps


@cache
def ones(count: int) -> Tensor:
    return torch.ones(count, 1)


def replaces_buffer(net: Net, x: Tensor) -> Tensor:
    net.a.seen = net.a.seen + x.detach().mean(dim=0)
    return plain(net, x + net.a.seen)


def without_gradients(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        hidden = net.b(net.a(x))
    return net.extra(F.pad(hidden, (0, 3)))[:, :3]


def test_refusals_say_what_to_do() -> None:
    buffered = Net(replaces_buffer)
    buffered.a.register_buffer("seen", torch.zeros(6))
    chain = Net(lambda net, x: net.b(net.extra(net.a(x))))
    assert_refused(
        {
            "as lru_cache does": refused(Net(lambda net, x: plain(net, x) * ones(len(x)))),
            "torch.where": refused(Net(by_values)),
            "Change the model, or make it": refused(Net(lambda net, x: plain(net, x) * x.numpy())),
            "and this is evaluation": refused(Net(lambda net, x: (plain if net.training else by_values)(net, x))),
            "calls b 2 times": refused(Net(lambda net, x: net.b(F.pad(plain(net, x), (0, 3))))),
            "calls extra 0 times": refused(Net(plain), split=("extra",)),
            "in the order": refused(chain, split=("b", "extra"), virtual_stages=3),
            "replaces its buffer a.seen": refused(buffered),
            "within torch.no_grad()": refused(Net(without_gradients)),
            "nothing to compute": refused(Net(plain), split=("a",)),
            "or a tuple of names of submodules": refused(Net(plain), split=("b", 2)),
            "names of submodules, each once": refused(Net(plain), split=("b", "b")),
        }
    )
