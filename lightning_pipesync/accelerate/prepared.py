"""Everything that was prepared to be trained."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from lightning_pipesync.accelerate.model import SynchronizedModel
from lightning_pipesync.accelerate.optimizer import SynchronizedOptimizer
from lightning_pipesync.accelerate.synchronization import Synchronization, connected
from lightning_pipesync.data import DataInjection
from lightning_pipesync.methods.ea_pipe import EAPipe
from lightning_pipesync.methods.registry import MethodConfig
from lightning_pipesync.methods.selsync import SelSync


@dataclass
class Prepared:
    """Models, optimizers and pipelines, and the methods that look after them.

    Attributes:
        optimizers: in the order in which they were prepared.
        pipelines: likewise.
        synchronizations: the methods that are attached.
    """

    optimizers: list[SynchronizedOptimizer] = field(default_factory=list)
    pipelines: list[EAPipe] = field(default_factory=list)
    synchronizations: list[Synchronization] = field(default_factory=list)
    _models: list[weakref.ref[SynchronizedModel]] = field(default_factory=list)

    @property
    def models(self) -> list[SynchronizedModel]:
        """In the order in which they were prepared, as long as somebody holds them: they may get another optimizer."""
        return [model for reference in self._models if (model := reference()) is not None]

    def add(self, one: SynchronizedModel | SynchronizedOptimizer) -> None:
        """Adds what was prepared, unless it is there."""
        if isinstance(one, SynchronizedOptimizer):
            if not any(one is known for known in self.optimizers):
                self.optimizers.append(one)
        elif not any(one is known for known in self.models):
            self._models.append(weakref.ref(one))

    @property
    def stateful(self) -> list[Synchronization | EAPipe]:
        """What has a state on each rank."""
        return [*self.synchronizations, *self.pipelines]

    @property
    def injection(self) -> DataInjection:
        """What appends other ranks' rows to a batch.

        Raises:
            RuntimeError: there is no model yet.
        """
        for one in self.synchronizations:
            if isinstance(one.method, SelSync) and one.method.data.injection is not None:
                return one.method.data.injection
        raise RuntimeError("Batches are injected from the training of a model: prepare model and optimizer before.")

    def attach(self, config: MethodConfig, backend: str | None) -> None:
        """Gives a method to what has none yet, and is complete; a collective call.

        Raises:
            ValueError: the ranks differ in settings or model, or something cannot be trained so.
        """
        groups = connected(self.models, self.optimizers)
        for one in list(self.synchronizations):
            if (one.models, one.optimizers) in groups:
                groups.remove((one.models, one.optimizers))
            else:  # a further optimizer for its models
                one.method.flush()
                one.method.return_optimizer_states()
                one.detach()
                self.synchronizations.remove(one)
        self.synchronizations += [
            Synchronization.attach(models, optimizers, config, backend=backend) for models, optimizers in groups
        ]

    def detach(self, timeout_s: float = 10.0) -> None:
        """Ends the methods of models and optimizers; their weights stay as they are."""
        for one in self.synchronizations:
            one.detach(timeout_s)
        self.synchronizations.clear()

    def end(self, timeout_s: float = 10.0) -> None:
        """Ends everything, and forgets it; models may be trained again, with an optimizer that is prepared then."""
        self.detach(timeout_s)
        for engine in self.pipelines:
            engine.detach(timeout_s)
        self.optimizers.clear()
        self.pipelines.clear()

    def return_optimizer_states(self) -> None:
        """Gives optimizers their whole state back, of which a rank may have but a part; a collective call."""
        for one in self.synchronizations:
            one.method.return_optimizer_states()

    def consolidate(self) -> None:
        """Makes all weights the consolidated ones; a collective call."""
        for one in self.synchronizations:
            if not one.method.flushed:
                one.method.flush()
        for engine in self.pipelines:
            engine.gather()

    def metrics(self, name: str) -> dict[str, float]:
        """Returns the metrics of all methods under ``name``, and those of further ones under ``name_1`` and so on."""
        found: dict[str, float] = {}
        by_method = [one.method.metrics() for one in self.synchronizations]
        for index, metrics in enumerate([*by_method, *(engine.metrics() for engine in self.pipelines)]):
            prefix = f"{name}_{index}" if index else name
            found |= {f"{prefix}/{key}": value for key, value in metrics.items()}
        return found
