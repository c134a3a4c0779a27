"""Base of the methods that train a model as a pipeline, and what they exchange with a training loop."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipesync.methods.method import Method
from lightning_pipesync.methods.settings import Settings

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
#: Returns the input of the model: its only argument, or a :class:`Call`.
Source = Callable[[], Any]
#: Returns the loss, 0-dim, for an output of the model and a function that returns the output's part of a batch.
Loss = Callable[[Any, Callable[[Any], Any]], Tensor]


@dataclass(frozen=True)
class Call:
    """The arguments of a call of a model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hooks: bool = True
    """Whether to run the model's forward hooks, which may have run already."""


class PipelineSettings(Settings):
    """What the settings of all pipelines have."""

    module: str | None
    """Name of the submodule of a LightningModule that is divided; None: its only ``nn.Sequential``."""
    clip_norm: float | None
    seed: int

    @property
    def split_names(self) -> tuple[str, ...] | None:
        """The submodules with which later stages begin; None if the model is an ``nn.Sequential``."""
        return None

    def data_part(self, rank: int, world_size: int) -> tuple[int, int]:
        """Returns which part of the training data a rank's pipeline trains on, from 0 on, and the number of parts."""
        return 0, 1


class PipelineMethod(Method):
    """A method that trains a model as a pipeline, and makes the passes itself: each rank has some of the layers.

    All ranks make the same calls. A step is :meth:`feed`, :meth:`backward`, and :meth:`step` if that returned True.
    """

    makes_passes = True
    config: PipelineSettings  #: the settings

    @abstractmethod
    def __init__(
        self,
        layers: nn.Module,
        loss: Callable[[Any, Any], Tensor] | None,
        optimizer_factory: OptimizerFactory | None,
        config: Any = None,
        *,
        others: Sequence[Tensor] = (),
        virtual_stages: int | None = None,
        device: torch.device | str | None = None,
        backend: str | None = None,
        **settings: Any,
    ) -> None: ...

    @abstractmethod
    def train_batch(self, batch: tuple[Any, Any], *, completes: bool = True) -> Tensor | None:
        """Runs the next passes of the pipeline for a mini-batch, or a part of one, and the updates that are due.

        Args:
            batch: input and target. Only the first stage uses the input, only the last one the target.
            completes: whether this is the last part of the mini-batch.

        Returns:
            The loss, 0-dim and detached, on the rank of the last stage; None on others.
        """

    @abstractmethod
    def feed(self, source: Source, loss: Loss, *, completes: bool = True, digest: int | None = None) -> Tensor | None:
        """Runs the forward pass of the next mini-batch, or of a part of one; returns as :meth:`train_batch`.

        ``source`` is called on the rank of the first stage, ``loss`` on that of the last one. If ``digest`` is that of
        the batch, it is compared between these.

        Raises:
            RuntimeError: the first and the last stage have different batches, or a peer is lost.
        """

    @abstractmethod
    def backward(self) -> bool:
        """Runs the backward passes that are due after :meth:`feed`.

        Returns:
            Whether the gradient of a mini-batch is complete, in ``p.grad``: then call :meth:`step`.

        Raises:
            RuntimeError: the loss depends on another stage's layers, or a peer is lost.
        """

    @abstractmethod
    def step(self, optimizer_step: Callable[[], object] | None = None) -> None:
        """Applies the complete gradient by ``optimizer_step``, maybe later; None: the step of the stage's optimizer."""

    @abstractmethod
    def flush(self, step: Callable[[], object] | None = None) -> None:
        """Empties the pipeline, and loads the consolidated weights into the layers of this rank's stage.

        ``step`` is called in place of :meth:`step`, which it calls, when the gradient of a mini-batch is complete.
        """

    def forward(self, inputs: Any) -> Any:
        """Runs the consolidated model as :meth:`infer` does, on ``inputs``."""
        return self.infer(lambda: inputs)

    @abstractmethod
    def infer(self, source: Source) -> Any:
        """Runs the consolidated model without gradients; returns its output on the rank of the last stage."""

    @abstractmethod
    def gather(self) -> None:
        """Copies the consolidated layers of all ranks to all ranks, after :meth:`flush`; a collective call."""

    @property
    def data_part(self) -> tuple[int, int]:
        """Which part of the training data this rank's pipeline trains on, from 0 on, and the number of parts."""
        job = None if self.transport is None else self.transport.job
        return (0, 1) if job is None else self.config.data_part(job.rank, job.world_size)

    @abstractmethod
    def describe(self) -> str:
        """Returns a line per stage that names its layers; an empty text before the first batch."""

    @abstractmethod
    def optimizer_state(self) -> dict[int, Any]:
        """Returns the state of this rank's optimizer by the index of the parameter; a collective call.

        Of several pipelines, the ranks of the first one get it, the others nothing.
        """
