"""Small things that people do in a training loop between two steps, in plain PyTorch.

To add a habit, write a function of a loop, and give it a line in `HABITS` where it runs.
"""

from __future__ import annotations

import copy
import gc
import io
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, prune, vector_to_parameters
from torch.optim import SGD, Optimizer

STEPS = 6
#: Before this step do those act that act once.
ONCE = 3


def layers() -> nn.Sequential:
    """A network whose weights are float64, so that a fault is not taken for rounding."""
    torch.manual_seed(0)
    widths = (6, 10, 10, 3)
    modules = [module for pair in pairwise(widths) for module in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*modules[:-1]).double()


class Loop:
    """What a habit finds: the user's model and optimizer, at a step.

    Attributes:
        forward: the model, or what wraps it.
        kept: for what a habit needs at a later step.
    """

    def __init__(self, model: nn.Sequential, optimizer: Optimizer) -> None:
        self.model, self.optimizer, self.number = model, optimizer, 0
        self.forward: nn.Module = model
        self.kept: dict[str, Any] = {"model": copy.deepcopy(model)}

    @property
    def weights(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    @property
    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.weights if p.grad is not None]

    def loss(self, number: int | None = None) -> Tensor:
        number = self.number if number is None else number
        generator = torch.Generator().manual_seed(100 * dist.get_rank() + number)
        x = torch.randn(8, 6, dtype=torch.float64, generator=generator)
        return nn.functional.cross_entropy(self.forward(x), (x.sum(dim=1) > 0).long())

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        loss.backward(**kwargs)

    def optimizer_state(self) -> dict[str, Any]:
        """Returns the state of the optimizer, as the framework's users get it."""
        return self.optimizer.state_dict()

    def synchronize(self) -> None:
        """Waits for the weights."""

    def reduce(self) -> None:
        """Has the gradients averaged, which are about to be used."""

    def step(self) -> None:
        """Takes the step of an optimizer whose gradients are there."""
        self.optimizer.step()


Function = Callable[[Loop], object]


@dataclass(frozen=True)
class Habit:
    """What is done at each step.

    Args:
        after_backward: with the gradients.
        after_step: before the next pass.
        instead: in place of backward pass and step, with the loss.
    """

    after_backward: Function | None = None
    after_step: Function | None = None
    instead: Function | None = None


def once(function: Function, after: Function | None = None) -> Function:
    """Returns what acts before one step only, and ``after`` before the next one."""

    def act(loop: Loop) -> None:
        if loop.number == ONCE:
            function(loop)
        elif after is not None and loop.number == ONCE + 1:
            after(loop)

    return act


# --- weights ----------------------------------------------------------------------------------------------------------
@torch.no_grad()
def clamp(loop: Loop) -> None:
    for weight in loop.weights:
        weight.clamp_(-0.3, 0.3)


@torch.no_grad()
def max_norm(loop: Loop) -> None:
    for weight in loop.weights[::2]:
        weight.copy_(weight.renorm(2, 0, 0.8))


@torch.no_grad()
def add_noise(loop: Loop) -> None:
    generator = torch.Generator().manual_seed(loop.number)
    for weight in loop.weights:
        weight.add_(torch.randn(weight.shape, dtype=weight.dtype, generator=generator), alpha=0.01)


def reinitialize(loop: Loop) -> None:
    torch.manual_seed(7)
    loop.model[2].reset_parameters()  # type: ignore[operator]


def write_through_data(loop: Loop) -> None:
    for weight in loop.weights:
        weight.data.mul_(0.99)


def rebind_data(loop: Loop) -> None:
    for weight in loop.weights:
        weight.data = weight.data * 0.99


def rebind_to_vector(loop: Loop) -> None:
    vector_to_parameters(parameters_to_vector(loop.weights).detach() * 0.99, loop.weights)


def load_initial(loop: Loop) -> None:
    loop.model.load_state_dict(loop.kept["model"].state_dict())


@torch.no_grad()
def go_back_halfway(loop: Loop) -> None:
    for weight, initial in zip(loop.weights, loop.kept["model"].parameters(), strict=True):
        weight.lerp_(initial, 0.5)


@torch.no_grad()
def mask_by_hand(loop: Loop) -> None:
    loop.model[2].weight[:, ::2] = 0


def prune_layer(loop: Loop) -> None:
    prune.l1_unstructured(loop.model[2], "weight", amount=0.3)


def remove_pruning(loop: Loop) -> None:
    prune.remove(loop.model[2], "weight")


@torch.no_grad()
def swap_and_back(loop: Loop) -> None:
    """Evaluates with an average of the weights, in their place."""
    average = loop.kept.setdefault("average", [weight.clone() for weight in loop.weights])
    for mean, weight in zip(average, loop.weights, strict=True):
        mean.lerp_(weight, 0.1)
        kept = weight.clone()
        weight.copy_(mean)
        weight.copy_(kept)


@torch.no_grad()
def follow_with_target(loop: Loop) -> None:
    """A target network, which is trained by nobody, and from which the first layer is taken at last."""
    target = loop.kept.setdefault("target", copy.deepcopy(loop.model))
    for mean, weight in zip(target.parameters(), loop.weights, strict=True):
        mean.lerp_(weight.detach(), 0.5)
    if loop.number == ONCE:
        loop.model[0].load_state_dict(target[0].state_dict())


def read_in_thread(loop: Loop) -> None:
    thread = threading.Thread(target=lambda: loop.kept.update(norm=sum(w.detach().norm() for w in loop.weights)))
    thread.start()
    thread.join()
    with torch.no_grad():
        loop.weights[0].mul_(1 + 1e-3 * loop.kept["norm"])


def save_and_load(loop: Loop) -> None:
    file = io.BytesIO()
    torch.save(loop.model.state_dict(), file)
    file.seek(0)
    loop.model.load_state_dict(torch.load(file, weights_only=True))


@torch.no_grad()
def deep_copy(loop: Loop) -> None:
    copied = copy.deepcopy(loop.model)
    loop.weights[0].copy_(copied[0].weight * 0.9)


def change_memory_format(loop: Loop) -> None:
    loop.weights[0].data = loop.weights[0].data.t().contiguous().t()


def load_in_other_memory_format(loop: Loop) -> None:
    change_memory_format(loop)
    load_initial(loop)


def move(loop: Loop) -> None:
    loop.model.to("cpu", torch.float64)
    loop.model.double()
    loop.model.zero_grad()
    gc.collect()


# --- gradients --------------------------------------------------------------------------------------------------------
def scale_gradients(loop: Loop) -> None:
    for gradient in loop.gradients:
        gradient.mul_(0.5)


def clip_by_hand(loop: Loop) -> None:
    clip_grad_norm_(loop.weights, 0.1)


def mask_gradient(loop: Loop) -> None:
    loop.gradients[2][0] = 0


def replace_gradients(loop: Loop) -> None:
    for weight in loop.weights:
        weight.grad = weight.grad * 0.5 if weight.grad is not None else None


def drop_gradient(loop: Loop) -> None:
    loop.weights[2].grad = None


def add_decay(loop: Loop) -> None:
    for weight in loop.weights:
        assert weight.grad is not None
        weight.grad.add_(weight.detach(), alpha=0.1)


def skip_step(loop: Loop) -> None:
    if loop.number != ONCE:
        loop.backward(loop.loss())
        loop.step()
    loop.optimizer.zero_grad()


def skip_after_backward(loop: Loop) -> None:
    loop.backward(loop.loss())
    if loop.number != ONCE:
        loop.step()
    loop.optimizer.zero_grad()


def step_twice(loop: Loop) -> None:
    loop.backward(loop.loss())
    loop.step()
    loop.step()
    loop.optimizer.zero_grad()


def zero_every_second_step(loop: Loop) -> None:
    loop.backward(loop.loss())
    loop.step()
    if loop.number % 2:
        loop.optimizer.zero_grad()


def zero_in_place(loop: Loop) -> None:
    loop.backward(loop.loss())
    loop.step()
    loop.optimizer.zero_grad(set_to_none=False)


def backward_twice(loop: Loop) -> None:
    loss = loop.loss()
    loop.backward(0.5 * loss, retain_graph=True)
    loop.backward(0.5 * loss)
    loop.step()
    loop.optimizer.zero_grad()


def hook_on_parameter(loop: Loop) -> None:
    loop.weights[0].register_hook(lambda gradient: gradient * 0.5)


def hook_on_module(loop: Loop) -> None:
    loop.model[2].register_forward_hook(lambda module, given, output: output * 0.5)


def look_at_other_data(loop: Loop) -> None:
    with torch.no_grad():
        norm = loop.loss(50)
    loop.model.eval()
    with torch.inference_mode():
        loop.loss(51)
    loop.model.train()
    assert norm > 0


# --- optimizers -------------------------------------------------------------------------------------------------------
def lower_rate(loop: Loop) -> None:
    for group in loop.optimizer.param_groups:
        group["lr"] *= 0.5


def change_momentum(loop: Loop) -> None:
    for group in loop.optimizer.param_groups:
        group["momentum"] = 0.5
        group["weight_decay"] = 0.01


def clear_state(loop: Loop) -> None:
    loop.optimizer.state.clear()


def reset_moment(loop: Loop) -> None:
    loop.optimizer.state[loop.weights[0]]["momentum_buffer"].zero_()


def log_moments(loop: Loop) -> None:
    loop.kept["norms"] = [state["momentum_buffer"].norm() for state in loop.optimizer.state.values()]


def log_saved_moments(loop: Loop) -> None:
    loop.kept["norms"] = [state["momentum_buffer"].norm() for state in loop.optimizer_state()["state"].values()]


def reset_saved_moment(loop: Loop) -> None:
    state = copy.deepcopy(loop.optimizer_state())
    state["state"][0]["momentum_buffer"].zero_()
    loop.optimizer.load_state_dict(state)


def clear_saved_state(loop: Loop) -> None:
    loop.optimizer.load_state_dict({**loop.optimizer_state(), "state": {}})


def replace_optimizer(loop: Loop) -> None:
    loop.optimizer = SGD(loop.model.parameters(), lr=0.1)


def freeze(loop: Loop) -> None:
    loop.model[2].requires_grad_(False)


def thaw(loop: Loop) -> None:
    loop.model[2].requires_grad_(True)


HABITS: dict[str, Habit] = {
    "nothing": Habit(),
    "clamp weights": Habit(after_step=clamp),
    "bound norms of rows": Habit(after_step=max_norm),
    "add noise": Habit(after_step=add_noise),
    "initialize a layer anew": Habit(after_step=once(reinitialize)),
    "write through data": Habit(after_step=write_through_data),
    "rebind data": Habit(after_step=once(rebind_data)),
    "rebind data to a vector": Habit(after_step=once(rebind_to_vector)),
    "load the initial weights": Habit(after_step=once(load_initial)),
    "go back halfway": Habit(after_step=once(go_back_halfway)),
    "mask weights": Habit(after_step=mask_by_hand),
    "prune": Habit(after_step=once(prune_layer)),
    "prune, and make it permanent": Habit(after_step=once(prune_layer, remove_pruning)),
    "swap weights and back": Habit(after_step=swap_and_back),
    "follow with a target network": Habit(after_step=follow_with_target),
    "read weights in a thread": Habit(after_step=read_in_thread),
    "save and load weights": Habit(after_step=save_and_load),
    "copy the model": Habit(after_step=deep_copy),
    "change the memory format": Habit(after_step=once(change_memory_format)),
    "load in another memory format": Habit(after_step=once(load_in_other_memory_format)),
    "move to where it is": Habit(after_step=move),
    "scale gradients": Habit(after_backward=scale_gradients),
    "clip by hand": Habit(after_backward=clip_by_hand),
    "mask a gradient": Habit(after_backward=mask_gradient),
    "replace gradients": Habit(after_backward=replace_gradients),
    "drop a gradient": Habit(after_backward=once(drop_gradient)),
    "add weight decay": Habit(after_backward=add_decay),
    "skip a step": Habit(instead=skip_step),
    "skip after backward": Habit(instead=skip_after_backward),
    "step twice": Habit(instead=step_twice),
    "zero every second step": Habit(instead=zero_every_second_step),
    "zero in place": Habit(instead=zero_in_place),
    "backward twice": Habit(instead=backward_twice),
    "hook on a parameter": Habit(after_step=once(hook_on_parameter)),
    "hook on a module": Habit(after_step=once(hook_on_module)),
    "look at other data": Habit(after_step=look_at_other_data),
    "lower the rate": Habit(after_step=lower_rate),
    "change the momentum": Habit(after_step=once(change_momentum)),
    "clear the state": Habit(after_step=once(clear_state)),
    "reset a moment": Habit(after_step=once(reset_moment)),
    "log moments": Habit(after_step=log_moments),
    "log saved moments": Habit(after_step=log_saved_moments),
    "reset a saved moment": Habit(after_step=once(reset_saved_moment)),
    "clear a saved state": Habit(after_step=once(clear_saved_state)),
    "replace the optimizer": Habit(after_step=once(replace_optimizer)),
    "freeze": Habit(after_step=once(freeze)),
    "freeze and thaw": Habit(after_step=once(freeze, thaw)),
}
