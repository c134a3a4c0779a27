"""Who finds predicted weights in a module that Pipe-SGD trains, and what predicts them."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.optim import SGD, Optimizer

from lightning_pipesync.methods.pipe_sgd import PipeSGD, prediction
from tests.harness import launch, raised
from tests.models import OPTIMIZERS, batch, loss, seeded_mlp
from tests.test_pipe_sgd import flat


def take_steps(model: nn.Module, sync: PipeSGD, steps: int = 2) -> None:
    for step in range(steps):
        model.zero_grad()
        loss(model, step, dist.get_rank()).backward()
        sync.step()


def look_everywhere() -> dict[str, bool]:
    """Returns where the weights are those after the last update."""
    model = seeded_mlp()
    sync = PipeSGD(model, OPTIMIZERS["adamw"](model))
    take_steps(model, sync)
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
    for found in launch(look_everywhere, 2):
        assert {where for where, are_true in found.items() if not are_true} == predicted


def train(wrap: Callable[[nn.Module], Any], around: Callable[[nn.Module], Any] = lambda model: model) -> Tensor:
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
    counter = CompileCounter()
    model = seeded_mlp()
    sync = PipeSGD(model, OPTIMIZERS["sgd"](model), delay_compensation=compensation)
    within = torch.compile(model[2], backend=counter, fullgraph=True)
    x, _ = batch(0, dist.get_rank())
    torch.compile(model, backend=counter)(x)
    within(model[1](model[0](x)))
    sync.detach()
    return counter.frame_count


def count_all_graphs() -> tuple[int, int]:
    return count_graphs("none"), count_graphs("prediction")


def test_graphs_of_compiled_models_stay_whole() -> None:
    """The model's own, behind the hook on itself, and those of what is within."""
    [(without, with_prediction)] = launch(count_all_graphs, 1)
    assert with_prediction == without == 2


def train_in_all_ways() -> tuple[list[Tensor], Tensor, Tensor]:
    ways = [lambda model: model, lambda model: torch.compile(model, backend="eager"), Recomputed]
    plain = [train(way) for way in ways]
    normed = train(lambda model: model, weight_normed)
    functional = train(lambda model: lambda x: torch.func.functional_call(model, dict(model.named_parameters()), x))
    return plain, normed, functional


def test_compiled_recomputed_and_functional_models() -> None:
    outcomes = launch(train_in_all_ways, 2)
    for plain, normed, functional in outcomes:
        assert all(torch.equal(one, plain[0]) for one in [*plain, functional])
        assert torch.equal(normed, outcomes[0][1]), "the ranks agree"


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


def predict_with(optimizer_class: type[Optimizer], block_mb: float) -> tuple[Tensor, Tensor] | tuple[str, str] | None:
    prediction.BLOCK_MB = block_mb
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
    for p, gradient in zip(trial.parameters(), gradients, strict=True):
        p.grad = gradient
    try:
        if (refused := raised(sync.use_predicted_weights)) is not None:
            return refused
        trial_optimizer.step()
        return flat(model), flat(trial)
    finally:
        sync.detach()


def predict_with_all() -> list[Any]:
    cases = [(SGD, 1.0), (SGD, 1e-5), (Normalized, 1e-5), (Attached, 1.0)]
    return [predict_with(*case) for case in cases]


def test_what_optimizers_predict() -> None:
    """Those of torch in blocks, others as a whole, and one that cannot is named."""
    for *outcomes, refused in launch(predict_with_all, 2):
        for weights, expected in outcomes:
            assert torch.equal(weights, expected)
        assert refused is not None
        assert refused[0] == "RuntimeError"
        assert "Attached failed to step copies" in refused[1]
        assert "delay_compensation='none'" in refused[1]


def guard_against_overflow() -> tuple[list[bool], Tensor]:
    """A loop that leaves out updates that are not finite; rank 1's gradient is not, once."""
    model = seeded_mlp()
    optimizer = OPTIMIZERS["sgd"](model)
    sync = PipeSGD(model, optimizer)
    left_out = []
    for step in range(8):
        model.zero_grad()
        loss(model, step, dist.get_rank()).backward()
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
    for left_out, weights in launch(guard_against_overflow, 2):
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
    for moved, of_ranks, lost, followed in launch(write, 2):
        assert moved, "an update is made with the true weights, whoever has looked at the others"
        assert torch.equal(of_ranks[0], of_ranks[1])
        assert followed, "frozen parameters are left alone"
        assert lost is not None
        assert lost[0] == "RuntimeError"
        assert "student.0.weight was written to" in lost[1]
        assert "true_weights()" in lost[1]


def save(settings: dict[str, Any]) -> tuple[list[int], Tensor]:
    """Returns bytes of own gradients in a saved state, by rank, and the weights of a run that goes on from it."""
    model = seeded_mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    sync = PipeSGD(model, optimizer, **settings)
    take_steps(model, sync)
    state = sync.state_dict()
    own = state["pipes"][0]["in_flight"][0]["own"]
    size = sum(gradient.nbytes for gradient in own.values() if gradient is not None)
    sync.load_state_dict(state)
    take_steps(model, sync)
    of_ranks = sync.transport.gather_objects((size, flat(model)))
    sync.detach()
    assert torch.equal(of_ranks[0][1], of_ranks[1][1])
    return [of_rank[0] for of_rank in of_ranks], of_ranks[0][1]


def save_with_and_without() -> list[tuple[list[int], Tensor]]:
    cases = [{}, {"checkpoint_own_gradients": False}, {"delay_compensation": "momentum"}]
    return [save(settings) for settings in cases]


def test_own_gradients_may_be_left_out_of_checkpoints() -> None:
    size = sum(p.nbytes for p in seeded_mlp().parameters())
    for whole, small, momentum in launch(save_with_and_without, 2):
        assert whole[0] == [size, size]
        assert small[0] == momentum[0] == [0, 0]
        assert not torch.equal(whole[1], small[1])
        assert torch.allclose(whole[1], small[1], atol=0.05), "it predicts with the averages"


class Branches(nn.Module):
    """Two layers of which one joins late, or both take turns."""

    def __init__(self, takes_turns: bool) -> None:
        super().__init__()
        self.first, self.second, self.takes_turns = nn.Linear(6, 3), nn.Linear(6, 3), takes_turns

    def used(self, step: int) -> list[nn.Module]:
        if self.takes_turns:
            return [self.first if step % 2 else self.second]
        return [self.first, self.second] if step >= 3 else [self.first]


def train_branches(takes_turns: bool, staleness: int, compensation: str) -> list[Tensor]:
    """Trains with gradients that begin late, which are the same on all ranks; returns all ranks' weights."""
    torch.manual_seed(0)
    model = Branches(takes_turns)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    sync = PipeSGD(model, optimizer, staleness=staleness, delay_compensation=compensation)
    for step in range(8):
        model.zero_grad()
        x, y = batch(step, rank=0)
        nn.functional.cross_entropy(sum(layer(x) for layer in model.used(step)), y).backward()
        sync.step()
    sync.drain()
    sync.flush()
    of_ranks = sync.transport.gather_objects(flat(model))
    sync.detach()
    return of_ranks


def train_all_branches() -> dict[tuple[bool, int, str], list[Tensor]]:
    cases = [(turns, k, how) for turns in (False, True) for k in (1, 2) for how in ("prediction", "momentum")]
    return {case: train_branches(*case) for case in cases}


def synchronous_branches(takes_turns: bool) -> Tensor:
    torch.manual_seed(0)
    model = Branches(takes_turns)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(8):
        model.zero_grad()
        x, y = batch(step, rank=0)
        nn.functional.cross_entropy(sum(layer(x) for layer in model.used(step)), y).backward()
        optimizer.step()
    return flat(model)


def test_a_parameter_may_get_its_first_gradient_late() -> None:
    """With SGD's momentum. As all ranks have the same gradients, predictions by these are synchronous training."""
    for of_rank in launch(train_all_branches, 2):
        for (takes_turns, _, how), (first, second) in of_rank.items():
            assert torch.equal(first, second)
            if how == "prediction":
                torch.testing.assert_close(first, synchronous_branches(takes_turns))


def transform() -> list[tuple[Tensor, Tensor]]:
    """Uses torch.func over the model between steps; returns the results, and what they are by torch.autograd."""
    model = seeded_mlp()
    sync = PipeSGD(model, OPTIMIZERS["sgd"](model))
    take_steps(model, sync)
    x, y = batch(0, dist.get_rank())
    parameters = {name: value.detach().clone() for name, value in model.named_parameters()}

    def loss_at(values: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(torch.func.functional_call(model, values, x), y)

    with sync.true_weights():
        within = torch.func.grad(loss_at)(parameters)
    gradients = torch.func.grad(loss_at)(parameters)
    jacobian = torch.func.jacrev(model)(x[0])
    take_steps(model, sync)
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
    for pairs in launch(transform, 2):
        for actual, expected in pairs:
            torch.testing.assert_close(actual, expected)
