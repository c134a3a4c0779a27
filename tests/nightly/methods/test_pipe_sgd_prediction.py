"""Who finds predicted weights in a module that Pipe-SGD trains, and what predicts them."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.optim import SGD, Optimizer

from lightning_pipesync.methods.pipe_sgd import PipeSGD, prediction
from tests.quick.methods.test_pipe_sgd import flat
from tests.support.harness import assert_raised, on_ranks, raised
from tests.support.models import OPTIMIZERS, Run, batch, loss, seeded_mlp


def look_everywhere() -> dict[str, bool]:
    """Returns where the weights are those after the last update."""
    run = Run(PipeSGD, "adamw")
    model, sync = run.model, run.sync
    run.steps(range(2))
    x, _ = batch(0, dist.get_rank())
    true = flat(model).clone()
    found: dict[str, bool] = {}

    def note(where: str) -> None:
        found[where] = torch.equal(flat(model), true)

    def forward(within: Callable[[Tensor], Tensor] = model) -> None:
        within(x)

    note("after a step")
    with torch.no_grad():
        forward()
    note("after a forward pass without gradients")
    forward(model[0])
    note("after one of a layer")
    saved = torch.cat([value.reshape(-1) for value in list(model.state_dict().values())[::-1]])
    found["in a state_dict"] = torch.equal(saved, true)
    note("after a state_dict in the midst of a step")
    sync.flush()
    note("after flush")
    forward()
    note("after a forward pass of an evaluation that needs gradients")
    sync.resume()
    forward()
    note("when the training goes on")
    sync.flush()
    note("after flush in the midst of a step")
    sync.resume()
    note("when the step goes on")
    with sync.true_weights():
        note("where they are asked for")
    with contextlib.suppress(ZeroDivisionError):
        hook = model.register_state_dict_pre_hook(lambda *_: 1 / 0)
        model.state_dict()
    hook.remove()
    forward()
    saved = torch.cat([value.reshape(-1) for value in list(model.state_dict().values())[::-1]])
    found["in a state_dict after one that has raised"] = torch.equal(saved, true)
    predicted = flat(model)
    of_ranks = sync.transport.gather_objects(predicted)
    found["on all ranks"] = torch.equal(of_ranks[0], of_ranks[1])
    with torch.no_grad():
        model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    found["after loading"] = torch.equal(flat(model), true + 1)
    forward()
    found["from where it was loaded"] = not torch.allclose(flat(model), predicted, atol=0.5)
    sync.detach()
    found["after detach"] = torch.equal(flat(model), true + 1)
    forward()
    found["after detach, and a forward pass"] = torch.equal(flat(model), true + 1)
    return found


def test_who_finds_the_true_weights() -> None:
    predicted = {
        "after one of a layer",
        "after a state_dict in the midst of a step",
        "when the training goes on",
        "when the step goes on",
        "on all ranks",
    }
    for found in on_ranks(look_everywhere, 2):
        assert {where for where, are_true in found.items() if not are_true} == predicted


class Recomputed(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.model, x, use_reentrant=False)


def weight_normed(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(model[0])  # a hook before each forward pass
    return model


def count_graphs(compensation: str) -> int:
    torch._dynamo.reset()
    counter = CompileCounter()
    model = seeded_mlp()
    sync = PipeSGD(model, OPTIMIZERS["sgd"](model), delay_compensation=compensation)
    within = torch.compile(model[2], backend=counter, fullgraph=True)
    x, _ = batch(0, dist.get_rank())
    torch.compile(model, backend=counter)(x)
    within(model[1](model[0](x)))
    sync.detach()
    return counter.frame_count


def test_graphs_of_compiled_models_stay_whole() -> None:
    """The model's own, behind the hook on itself, and those of what is within."""
    assert on_ranks(count_graphs, 1, "none") == on_ranks(count_graphs, 1, "prediction") == [2]


#: By name, what makes a model, and what is called in its place.
WAYS: dict[str, tuple[Callable[[nn.Module], nn.Module], Callable[[nn.Module], Any]]] = {
    "plain": (lambda model: model, lambda model: model),
    "compiled": (lambda model: model, lambda model: torch.compile(model, backend="eager")),
    "recomputed": (lambda model: model, Recomputed),
    "functional": (
        lambda model: model,
        lambda model: lambda x: torch.func.functional_call(model, dict(model.named_parameters()), x),
    ),
    "normed": (weight_normed, lambda model: model),
}


def train(way: str) -> Tensor:
    around, wrap = WAYS[way]
    model = around(seeded_mlp())
    sync = PipeSGD(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    called = wrap(model)
    for step in range(4):
        model.zero_grad()
        x, y = batch(step, dist.get_rank())
        nn.functional.cross_entropy(called(x), y).backward()
        sync.step()
    sync.detach()
    return flat(model)


@pytest.mark.parametrize("way", WAYS)
def test_compiled_recomputed_and_functional_models(way: str) -> None:
    outcomes = on_ranks(train, 2, way)
    assert torch.equal(*outcomes), "the ranks agree"
    assert way == "normed" or torch.equal(outcomes[0], on_ranks(train, 2, "plain")[0])


class Normalized(SGD):
    """Its step depends on all gradients, and not on one parameter's alone."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


class Attached(SGD):
    """Looks for what only the user's own parameters have."""

    def step(self, closure: Any = None) -> Any:
        assert [p.label for group in self.param_groups for p in group["params"]]
        return super().step(closure)


def predict_with(optimizer_class: type[Optimizer], block_mb: float) -> tuple[tuple[str, str] | None, Tensor, Tensor]:
    """Returns why nothing was predicted, the predicted weights, and those that they should be."""
    model = seeded_mlp()
    for index, parameter in enumerate(model.parameters()):
        parameter.label = index
    optimizer = optimizer_class(model.parameters(), lr=0.1, momentum=0.9)  # type: ignore[call-arg]
    sync = PipeSGD(model, optimizer)
    model.zero_grad()
    loss(model, 0, dist.get_rank()).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    sync.step()
    trial, trial_optimizer = copy.deepcopy((model, optimizer))
    trial_optimizer._optimizer_step_pre_hooks.clear()
    for index, (p, gradient) in enumerate(zip(trial.parameters(), gradients, strict=True)):
        p.grad, p.label = gradient, index
    with mock.patch.object(prediction, "BLOCK_MB_ON_CPU", block_mb):
        refused = raised(sync.use_predicted_weights)
    trial_optimizer.step()
    outcome = refused, flat(model).clone(), flat(trial)
    sync.detach()
    return outcome


@pytest.mark.parametrize(("optimizer", "block_mb"), [(SGD, 1.0), (SGD, 1e-5), (Normalized, 1e-5)])
def test_what_optimizers_predict(optimizer: type[Optimizer], block_mb: float) -> None:
    """Those of torch in blocks, others as a whole."""
    for refused, weights, expected in on_ranks(predict_with, 2, optimizer, block_mb):
        assert refused is None
        assert torch.equal(weights, expected)


def test_an_optimizer_that_cannot_predict_is_named() -> None:
    for refused, _, _ in on_ranks(predict_with, 2, Attached, 1.0):
        assert_raised(refused, "RuntimeError", "Attached failed to step copies", "delay_compensation='none'")


def guard_against_overflow() -> tuple[list[bool], Tensor]:
    """A loop that leaves out updates that are not finite; rank 1's gradient is not, once."""
    run = Run(PipeSGD)
    model, sync = run.model, run.sync
    left_out = []
    for step in range(8):
        run.backward(step)
        if step == 3 and dist.get_rank() == 1:
            model[0].weight.grad[0, 0] = torch.inf
        sync.reduce()
        left_out.append(not all(p.grad.isfinite().all() for p in model.parameters()))
        if not left_out[-1]:
            sync.step()
    sync.detach()
    return left_out, flat(model)


def test_one_gradient_that_is_not_finite_spoils_one_update() -> None:
    """It is not what the next gradients are computed at."""
    for left_out, weights in on_ranks(guard_against_overflow, 2):
        assert left_out == [step == 4 for step in range(8)]
        assert weights.isfinite().all()


class Teacher(nn.Module):
    """A student and a frozen copy of it, which follows its running average."""

    def __init__(self) -> None:
        super().__init__()
        self.student = seeded_mlp()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            slow.lerp_(fast, 0.5)


def write() -> tuple[bool, list[Tensor], tuple[str, str] | None, bool]:
    """Returns what became of a forward pass before an update, and of what was written in the midst of steps."""
    model = Teacher()
    sync = PipeSGD(model, SGD(model.parameters(), lr=0.1))
    for step in range(3):
        model.zero_grad()
        loss(model.student, step, dist.get_rank()).backward()
        with sync.true_weights():
            model.follow()
        sync.reduce()
        before = flat(model.student).clone()
        if dist.get_rank() == 0:
            loss(model.student, step, 0)  # as who logs what the gradient was clipped for
        sync.step()
    moved = not torch.equal(flat(model.student), before)
    of_ranks = sync.transport.gather_objects(flat(model))
    loss(model.student, 0, 0).backward()
    with torch.no_grad():
        model.student[0].weight.clamp_(-0.01, 0.01)
    lost = raised(sync.step)
    sync.detach()
    return moved, of_ranks, lost, not torch.equal(flat(model.teacher), flat(Teacher().teacher))


def test_nothing_that_is_written_is_lost_without_a_word() -> None:
    for moved, of_ranks, lost, followed in on_ranks(write, 2):
        assert moved, "an update is made with the true weights, whoever has looked at the others"
        assert torch.equal(of_ranks[0], of_ranks[1])
        assert followed, "frozen parameters are left alone"
        assert_raised(lost, "RuntimeError", "student.0.weight was written to", "true_weights()")


def save(settings: dict[str, Any]) -> tuple[int, Tensor]:
    """Returns bytes of own gradients in a saved state, and the weights of a run that goes on from it."""
    run = Run(PipeSGD, lambda model: SGD(model.parameters(), lr=0.1), **settings)
    run.steps(range(2))
    saved = run.sync.state_dict()
    own = saved["pipes"][0]["in_flight"][0]["own"]
    run.sync.load_state_dict(saved)
    run.steps(range(2))
    weights = flat(run.model).clone()
    run.sync.detach()
    return sum(gradient.nbytes for gradient in own.values() if gradient is not None), weights


def test_own_gradients_may_be_left_out_of_checkpoints() -> None:
    size = sum(p.nbytes for p in seeded_mlp().parameters())
    cases: list[dict[str, Any]] = [{}, {"checkpoint_own_gradients": False}, {"delay_compensation": "momentum"}]
    whole, small, momentum = (on_ranks(save, 2, settings) for settings in cases)
    assert [[num_bytes for num_bytes, _ in one] for one in (whole, small, momentum)] == [[size] * 2, [0] * 2, [0] * 2]
    for (_, weights), (_, others) in (whole, small, momentum):
        assert torch.equal(weights, others)
    assert not torch.equal(whole[0][1], small[0][1])
    assert torch.allclose(whole[0][1], small[0][1], atol=0.05), "it predicts with the averages"


class Branches(nn.Module):
    """Two layers of which one joins late, or both take turns."""

    def __init__(self, takes_turns: bool) -> None:
        super().__init__()
        self.first, self.second, self.takes_turns = nn.Linear(6, 3), nn.Linear(6, 3), takes_turns

    def used(self, step: int) -> list[nn.Module]:
        if self.takes_turns:
            return [self.first if step % 2 else self.second]
        return [self.first, self.second] if step >= 3 else [self.first]


def train_branches(takes_turns: bool, staleness: int, compensation: str) -> Tensor:
    """Trains with gradients that begin late, which are the same on all ranks; without staleness, synchronously."""
    torch.manual_seed(0)
    model = Branches(takes_turns)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    sync = PipeSGD(model, optimizer, staleness=staleness, delay_compensation=compensation) if staleness else None
    for step in range(8):
        model.zero_grad()
        x, y = batch(step, rank=0)
        nn.functional.cross_entropy(sum(layer(x) for layer in model.used(step)), y).backward()
        (sync or optimizer).step()
    if sync is not None:
        sync.drain()
        sync.flush()
        sync.detach()
    return flat(model)


@pytest.mark.parametrize("takes_turns", [False, True])
@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("compensation", ["prediction", "momentum"])
def test_a_parameter_may_get_its_first_gradient_late(takes_turns: bool, staleness: int, compensation: str) -> None:
    """With SGD's momentum. As all ranks have the same gradients, predictions by these are synchronous training."""
    first, second = on_ranks(train_branches, 2, takes_turns, staleness, compensation)
    assert torch.equal(first, second)
    if compensation == "prediction":
        torch.testing.assert_close(first, train_branches(takes_turns, 0, "none"))


def transform() -> list[tuple[Tensor, Tensor]]:
    """Uses torch.func over the model between steps; returns the results, and what they are by torch.autograd."""
    run = Run(PipeSGD)
    model, sync = run.model, run.sync
    run.steps(range(2))
    x, y = batch(0, dist.get_rank())
    parameters = {name: value.detach().clone() for name, value in model.named_parameters()}

    def loss_at(values: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(torch.func.functional_call(model, values, x), y)

    with sync.true_weights():
        within = torch.func.grad(loss_at)(parameters)
    gradients = torch.func.grad(loss_at)(parameters)
    jacobian = torch.func.jacrev(model)(x[0])
    run.steps(range(2))
    twin = seeded_mlp()
    twin.load_state_dict(parameters)
    nn.functional.cross_entropy(twin(x), y).backward()
    expected = torch.autograd.functional.jacobian(twin, x[0])
    sync.detach()
    pairs = [(jacobian, expected)]
    for name, parameter in twin.named_parameters():
        assert parameter.grad is not None
        pairs += [(within[name], parameter.grad), (gradients[name], parameter.grad)]
    return pairs


def test_function_transforms_see_the_true_weights() -> None:
    for pairs in on_ranks(transform, 2):
        for actual, expected in pairs:
            torch.testing.assert_close(actual, expected)
