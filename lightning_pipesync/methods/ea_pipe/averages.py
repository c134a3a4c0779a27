"""What a stage averages with the same stage of the pipelines beside its own.

[Note: the same order in all pipelines]
All pipelines run the same passes in the same order. So a stage that waits for the same stage of another pipeline waits
for something that no stage of either pipeline needs later: averages cannot make pipelines wait for each other for ever.

[Note: an elastic average needs no result]
The reference attracts a pipeline by what both are when the average starts. What the other pipelines are only changes
the reference, which is needed at the next average: until then it may travel.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipesync.core.buckets import Fusion, buffer_reader, plan_buckets
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.fingerprints import digest
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.torch_private import tensors_in
from lightning_pipesync.methods.ea_pipe.config import EAPipeConfig
from lightning_pipesync.methods.ea_pipe.weights import StageWeights
from lightning_pipesync.methods.gradients.bucket import GradientBuckets
from lightning_pipesync.methods.method import PIECE_MB
from lightning_pipesync.methods.replicas.averages import Averages
from lightning_pipesync.methods.replicas.flags import CONSOLIDATE, LOADED, SAME_STEPS, STEPS, check_flags, check_same
from lightning_pipesync.methods.replicas.non_trainable import NonTrainableTensors
from lightning_pipesync.methods.replicas.settings import MakeOptimizer, ReplicaSettings, attracted, force_of

#: The flag of a stage that lacks the gradient of a parameter.
_MISSING = 1


class StageAverages:
    """The averages of a stage over pipelines, along a ``line`` of one rank of each; None: there is one pipeline.

    All calls are collective along the line. Buffers, such as those of BatchNorm, are consolidated by their mean.
    """

    def __init__(self, weights: StageWeights, read_buffers: Callable[[], list[Tensor]], line: Transport | None) -> None:
        self._weights, self._line = weights, line
        if line is not None:
            read = weights.master_buffers if weights.has_replicas else read_buffers
            self._buffers = NonTrainableTensors([], read, line, PIECE_MB, same_in_replica=False)

    def check_input(self, value: Any) -> None:
        """Warns if the first input of the first stage is the same in all pipelines."""
        if self._line is None:
            return
        of_pipelines = self._line.gather_objects(digest(tensors_in(value)))
        if self._line.rank == 0 and len(set(of_pipelines)) == 1 and tensors_in(value):
            warnings.warn(
                f"All {self._line.world_size} pipelines train on the same batches, as one of them would: give each its "
                "own, by engine.data_part, or by Accelerate's prepare_train_loader().",
                stacklevel=2,
            )

    def average_gradient(self) -> None:
        """Called when ``p.grad`` holds the gradient of a mini-batch, before it is clipped."""

    def end_update(self, step: int) -> None:
        """Called after the update by mini-batch ``step``."""

    def on_any(self, flag: bool) -> bool:
        """Returns whether ``flag`` is set in any pipeline."""
        return flag if self._line is None else any(self._line.exchange_flags(int(flag)).wait())

    def consolidate(self, step: int) -> None:
        """Makes the loaded master that of all pipelines, before mini-batch ``step``."""
        if self._line is not None:
            self._buffers.swap_in_average()

    def leave(self, written: bool) -> None:
        """Returns to this pipeline's master, unless the consolidated one was written to."""
        if self._line is None:
            return
        check_flags(self._line.exchange_flags(LOADED * written).wait(), self._line.ranks)
        if not written:
            self._buffers.swap_back()
            return
        of_pipelines = self._line.gather_objects(digest(self._weights.master_parameters()))
        if len(set(of_pipelines)) > 1:
            raise RuntimeError(
                f"The ranks {', '.join(map(str, self._line.ranks))}, which have the same stage of different pipelines, "
                "have loaded different weights: load the same on all ranks."
            )
        self.reset()

    def reset(self) -> None:
        """Begins anew from the present master, which is the same in all pipelines."""
        if self._line is not None:
            self._buffers.mark_common()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of this rank, after :meth:`consolidate`."""
        return {} if self._line is None else {"buffers": self._buffers.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from what :meth:`state_dict` returned on this rank, with the consolidated master."""
        if self._line is not None:
            self._buffers.load_state_dict(state["buffers"])
            self._buffers.swap_in_average()


class GradientAverages(StageAverages):
    """Averages the gradient of each mini-batch: all pipelines have the same weights."""

    _line: Transport

    def __init__(self, parameters: Sequence[Tensor], *shared: Any) -> None:
        super().__init__(*shared)
        self._parameters = parameters
        self._trained: list[Tensor] = []

    def average_gradient(self) -> None:
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        if list(map(id, trained)) != list(map(id, self._trained)):  # at first, and when a callback unfreezes layers
            self._trained = trained
            named = [NamedParameter("", parameter, "", None) for parameter in reversed(trained)]
            plan = plan_buckets(named, Fusion(bucket_mb=PIECE_MB))
            self._gradients = GradientBuckets([[named.tensor for named in bucket] for bucket in plan], self._line)
        missing = any(parameter.grad is None for parameter in trained)
        flags = self._line.exchange_flags(_MISSING * missing).wait()
        check_flags(flags, self._line.ranks)
        self._gradients.average(any(flag & _MISSING for flag in flags))

    def consolidate(self, step: int) -> None:
        check_same(self._line.exchange_flags(CONSOLIDATE | step % STEPS).wait(), SAME_STEPS, ranks=self._line.ranks)
        super().consolidate(step)


@dataclass(frozen=True)
class ReferenceSettings(ReplicaSettings):
    """What the engine of replicas needs to know of an elastic average: it arrives before the next one starts."""

    force: float | Literal["auto"] = "auto"
    overlap_steps: int = 1
    mixing_factor: float = 0.0

    def elastic_force_of(self, num_replicas: int) -> float:
        return force_of(self.force, num_replicas)

    def outer_step(self, optimizer: Optimizer, num_replicas: int) -> MakeOptimizer:
        return attracted(num_replicas, self.elastic_force_of(num_replicas))


class ElasticAverages(StageAverages):
    """The master of each pipeline and a reference attract each other from time to time (AvgPipe)."""

    _line: Transport

    def __init__(self, optimizer: Optimizer, config: EAPipeConfig, *shared: Any) -> None:
        super().__init__(*shared)
        self._period = config.average_period
        parameters = [NamedParameter("", tensor, "", None) for tensor in self._weights.master_parameters()]
        settings = ReferenceSettings(force=config.average_force)
        self._masters = Averages(optimizer, parameters, settings, self._line)

    def end_update(self, step: int) -> None:
        self._masters.diverged = True
        number, left = divmod(step + 1, self._period)
        if not left:
            self._masters.apply_due(number)
            self._masters.start(0, number, None)

    def consolidate(self, step: int) -> None:
        self._masters.check_consolidation(step)
        self._masters.swap_in_average()
        super().consolidate(step)

    def leave(self, written: bool) -> None:
        super().leave(written)
        if not written:
            self._masters.swap_back()

    def reset(self) -> None:
        super().reset()
        self._masters.drop()
        self._masters.keep_average()
        self._masters.set_global()
        self._masters.diverged = False

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "reference": self._masters.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._masters.load_state_dict(state["reference"])
        self._masters.swap_in_average()


def averages_of(
    line: Transport | None,
    layers: nn.Module,
    parameters: Sequence[Tensor],
    other_buffers: Sequence[Tensor],
    weights: StageWeights,
    optimizer: Optimizer,
    config: EAPipeConfig,
) -> StageAverages:
    """Returns the averages of a stage; ``line`` connects its ranks in all pipelines; None: there is one pipeline."""
    of_layers = buffer_reader(layers)
    shared = weights, lambda: [*of_layers(), *other_buffers], line
    if line is None:
        return StageAverages(*shared)
    if config.average == "elastic":
        return ElasticAverages(optimizer, config, *shared)
    return GradientAverages(parameters, *shared)
