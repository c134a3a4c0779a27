"""Who finds predicted weights in a module that Pipe-SGD trains, and what predicts them."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.optim import SGD, Optimizer

from lightning_pipesync.methods.pipe_sgd import PipeSGD, prediction
from tests.references.pipe_sgd import flat, flat_of
from tests.support.case_table import launch_cases
from tests.support.harness import assert_raised, on_ranks, raised
from tests.support.models import OPTIMIZERS, Run, batch, loss, seeded_mlp


def look_everywhere() -> dict[str, bool]:
    """Returns where the weights are those after the last update."""
    run = Run(PipeSGD, "adamw")
    model, sync = run.model, run.sync
    run.steps(range(2))
    x, _ = batch(0, dist.get_rank())
    true, found = flat(model).clone(), {}

    def note(where: str, weights: Tensor | None = None, expected: Tensor = true) -> None:
        found[where] = torch.equal(flat(model) if weights is None else weights, expected)

    def saved() -> Tensor:
        return flat_of(list(model.state_dict().values()))

    note("after a step")
    with torch.no_grad():
        model(x)
    note("after a forward pass without gradients")
    model[0](x)
    note("after one of a layer")
    note("in a state_dict", saved())
    note("after a state_dict in the midst of a step")
    sync.flush()
    note("after flush")
    model(x)
    note("after a forward pass of an evaluation that needs gradients")
    sync.resume()
    model(x)
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
    model(x)
    note("in a state_dict after one that has raised", saved())
    predicted = flat(model)
    note("on all ranks", *sync.transport.gather_objects(predicted))
    with torch.no_grad():
        model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    note("after loading", expected=true + 1)
    model(x)
    found["from where it was loaded"] = not torch.allclose(flat(model), predicted, atol=0.5)
    sync.detach()
    note("after detach", expected=true + 1)
    model(x)
    note("after detach, and a forward pass", expected=true + 1)
    return found


def test_who_finds_the_true_weights() -> None:
    predicted = {"after one of a layer", "after a state_dict in the midst of a step", "when the training goes on"}
    predicted |= {"when the step goes on", "on all ranks"}
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


def test_compiled_recomputed_and_functional_models() -> None:
    outcomes = launch_cases({way: partial(train, way) for way in WAYS}, 2)
    for way in WAYS:
        assert torch.equal(*outcomes[way]), "the ranks agree"
        assert way == "normed" or torch.equal(outcomes[way][0], outcomes["plain"][0])


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


def test_what_optimizers_predict() -> None:
    """Those of torch in blocks, others as a whole; one that cannot is named."""
    kinds = [(SGD, 1e-5), (Normalized, 1e-5), (Attached, 1.0)]
    outcomes = launch_cases({kind: partial(predict_with, kind, block_mb) for kind, block_mb in kinds}, 2)
    for refused, weights, expected in outcomes[SGD] + outcomes[Normalized]:
        assert refused is None
        assert torch.equal(weights, expected)
    for refused, _, _ in outcomes[Attached]:
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
