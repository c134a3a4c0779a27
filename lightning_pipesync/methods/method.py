"""What all methods have in common: the calls that a training loop, or an adapter to a framework, makes."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipesync.core.transport import Transport

T = TypeVar("T")
Config = TypeVar("Config")


class SyncMethod(ABC):
    """Takes over gradient synchronization and the optimizer step of one module on every rank.

    Constructing it attaches it. A plain loop calls :meth:`step` in place of ``optimizer.step()``; a framework whose
    own code sits between the gradient and the update calls :meth:`after_backward` itself. With several optimizers
    each call names the one that it is about.

    Attributes:
        transport: the way to the other ranks.
        flushed: whether the weights are the consolidated ones, since :meth:`flush`.
        applies_grad: whether ``p.grad`` is what is about to be applied, after :meth:`after_backward`.
    """

    applies_grad = True

    transport: Transport
    flushed: bool

    @abstractmethod
    def after_backward(self, optimizer: Optimizer | None = None) -> bool:
        """Tells the method that the gradient of this step is complete, accumulated and unscaled, not yet clipped.

        Returns:
            Whether the gradient has become one that is not finite, since some rank's was not: a loss scaler, which has
            looked at this rank's alone, has to skip the update. The same on all ranks.
        """

    def before_unscaling(self, optimizer: Optimizer | None = None, loss_scale: float | None = None) -> None:  # noqa: B027
        """Called by a framework when the backward passes of a step are over, before its loss scaler sees ``p.grad``.

        Most methods wait until the gradient is unscaled.

        Args:
            optimizer: whose gradient is complete; may be left out if there is but one.
            loss_scale: by which the gradient is too large; None without a loss scaler.
        """

    def after_unscaling(self, optimizer: Optimizer | None = None, loss_scale: float | None = None) -> bool:
        """Called by a framework after :meth:`before_unscaling`, when ``p.grad`` is unscaled, and not yet clipped.

        Returns:
            As :meth:`after_backward`.
        """
        return self.after_backward(optimizer)

    def measured(self, optimizer: Optimizer | None = None) -> bool:
        """Returns whether :meth:`after_backward` was called in this step, and is not to be called again."""
        return False

    @abstractmethod
    def clip(self, max_norm: float, optimizer: Optimizer | None = None) -> Tensor:
        """Clips the gradient that is about to be applied by its global L2 norm; returns the norm before (0-dim)."""

    def clipped_along(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Returns tensors that are to be clipped as ``parameters`` are, which hold gradients in ``grad`` as they do."""
        return []

    @abstractmethod
    def step(self, update: Callable[[], T] | None = None, optimizer: Optimizer | None = None) -> T | None:
        """Takes the optimizer step, and whatever communication belongs to it.

        Args:
            update: what updates the weights; ``optimizer.step`` if None. If it computes the gradient first (a closure)
                or unscales it, it has to call :meth:`after_backward` at the right moment.
            optimizer: whose step; may be left out if there is but one.

        Returns:
            What ``update`` returned.
        """

    @abstractmethod
    def flush(self) -> None:
        """Makes the module's weights the method's consolidated ones, the same on all ranks; a collective call.

        A step that is taken without :meth:`resume` goes on from them.
        """

    def synchronize(self) -> None:  # noqa: B027 - most methods bring the weights up to date within a step
        """Waits until this rank's weights are those after the last step; not a collective call."""

    @abstractmethod
    def resume(self) -> None:
        """Undoes :meth:`flush`, but for what was written to the weights since; does nothing if not flushed.

        Not a collective call.
        """

    def follow(self, module: nn.Module) -> None:  # noqa: B027 - most methods have nothing to do
        """Has :meth:`flush` consolidate ``module``, too, which follows this rank's weights: their running average."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Returns what the method did so far, by name."""

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns what ``optimizer.state_dict()`` would be without the method, on every rank; a collective call."""
        return optimizer.state_dict()

    def return_optimizer_states(self) -> None:  # noqa: B027 - most methods leave it to the optimizers
        """Gives the optimizers their whole state back, which :meth:`detach` would drop; a collective call."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns what this rank needs, besides the consolidated weights, to go on bit for bit."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` returned on this rank."""

    @abstractmethod
    def detach(self, timeout_s: float = 10.0) -> None:
        """Ends the method's threads and process groups. The weights stay as they are."""


class AveragingMethod(SyncMethod):
    """A method that averages every gradient over the ranks.

    Attributes:
        syncing: whether this is outside :meth:`no_sync`.
    """

    syncing = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward passes add to this rank's gradients and communicate nothing."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    @abstractmethod
    def clip_value(self, max_value: float, optimizer: Optimizer | None = None) -> None:
        """Clips every value of the gradient that is about to be applied to ``[-max_value, max_value]``."""


def one_config(config_type: type[Config], config: Config | None, settings: dict[str, Any]) -> Config:
    """Returns a method's settings, which were given as a whole or as keywords.

    Raises:
        ValueError: they were given in both ways, or one is out of its range.
    """
    if config is not None and settings:
        raise ValueError(f"Give the settings as config or as keywords ({', '.join(settings)}), not both.")
    return config or config_type(**settings)


class Settings(Protocol):
    """A dataclass of settings, some of which may make others ineffective."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def without_effect(self) -> Mapping[str, str]:
        """Returns the settings that have no effect with the others as they are, by name, and why."""


def warn_of_ignored(settings: Settings, rank: int) -> None:
    """Warns, on rank 0, of each setting that the user has changed and that has no effect."""
    defaults = {field.name: field.default for field in fields(settings)}
    for name, why in settings.without_effect().items():
        value = getattr(settings, name)
        if rank == 0 and value != defaults[name]:
            warnings.warn(f"{name}={value!r} has no effect {why}.", stacklevel=3)


def device_of(module: nn.Module) -> torch.device:
    """Returns where the module's parameters are."""
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def index_of(optimizer: Optimizer | None, optimizers: Sequence[Optimizer], method: str) -> int:
    """Returns which of a method's optimizers is meant; None means the only one.

    Raises:
        ValueError: there are several and none is named, or ``method`` was not given this one.
    """
    if optimizer is None and len(optimizers) > 1:
        raise ValueError(f"There are {len(optimizers)} optimizers: say whose step it is with optimizer=.")
    for index, known in enumerate(optimizers):
        if optimizer is None or known is optimizer:
            return index
    raise ValueError(f"{type(optimizer).__name__} is not an optimizer that was given to {method}.")


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Returns the parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def group_members(optimizers: Sequence[Optimizer]) -> list[list[list[int]]]:
    """Returns the ids of the parameters in each group of each optimizer: they change when a callback thaws layers."""
    return [[[id(p) for p in group["params"]] for group in optimizer.param_groups] for optimizer in optimizers]
