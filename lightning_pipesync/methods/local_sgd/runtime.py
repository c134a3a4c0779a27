"""Local SGD in a training loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.methods.local_sgd.algorithm import number_of_participants
from lightning_pipesync.methods.local_sgd.config import LocalSGDConfig
from lightning_pipesync.methods.local_sgd.optimizer_rounds import OptimizerRounds
from lightning_pipesync.methods.replicas.method import ReplicaMethod

T = TypeVar("T")


class LocalSGD(ReplicaMethod):
    """Steps on each rank's own weights, which are averaged every ``period`` steps.

    With an outer optimizer the average of how far the ranks have moved is the gradient of the agreed weights, from
    which all ranks continue (DiLoCo). With fragments and overlap the average of a part of the model runs under some
    steps, one part after the other (Streaming DiLoCo). Floating-point buffers that changed are averaged at the end of a
    period, other buffers are copied from rank 0. Nothing is sent in between.

    A plain loop::

        sync = LocalSGD(model, optimizer, period=32)    # all ranks now have rank 0's weights
        for epoch in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                loss(model(x), y).backward()
                sync.step()                             # in place of optimizer.step()
            sync.flush()                                # the weights are the average of the replicas
            validate(model)
            sync.resume()                               # each rank's own replica again
        sync.flush()
        sync.detach()

    With ``outer_optimizer="elastic"`` the consolidated weights are the agreed ones, EASGD's center variable.

    Arguments, errors and further calls are those of :class:`SyncMethod`; the settings are in :class:`LocalSGDConfig`.
    Every rank takes as many steps.
    """

    name = "local_sgd"
    config_type = LocalSGDConfig
    shown_metrics = ("rounds", "mib_sent")

    config: LocalSGDConfig

    def _attach(self, parameters: Sequence[NamedParameter]) -> None:
        self._rounds = [
            OptimizerRounds(
                optimizer,
                [parameter for parameter in parameters if parameter.group and parameter.group[0] == i],
                self.config,
                self.transport,
                self.data,
            )
            for i, optimizer in enumerate(self.optimizers)
        ]
        self._attach_replicas(parameters)

    @property
    def _units(self) -> list[OptimizerRounds]:
        return self._rounds

    @property
    def _averages_later(self) -> bool:
        return self.config.overlap_steps > 0

    def _drop_averages(self) -> None:
        for rounds in self._rounds:
            rounds.drop_averages()

    def _unscale(self, index: int, loss_scale: float | None) -> bool:
        """Averages the gradient in the warm-up, or measures it.

        Returns:
            Whether it was averaged with one that is not finite.
        """
        return self._rounds[index].take_gradient()

    def _skip(self, index: int) -> None:
        self._rounds[index].skip_step()

    def _step(self, index: int, update: Callable[[], T] | None) -> T | None:
        """Updates this rank's weights, and averages what is due."""
        result = self._update_replica(index, update)
        if self._rounds[index].end_step() and index == 0:
            self._non_trainable.average()
        self._followers_diverged |= any(replicas.diverged for replicas in self._replicas)
        return result

    def metrics(self) -> dict[str, float]:
        """Returns the number of rounds, the share of local steps, MiB sent and seconds of exposed communication."""
        rounds = self._rounds[0]
        lssr = rounds.num_local_steps / rounds.num_steps if rounds.num_steps else 0.0
        return {"rounds": rounds.num_rounds, "lssr": lssr, **super().metrics()}

    def _problem(self) -> ValueError | None:
        config, world_size = self.config, self.transport.world_size
        if number_of_participants(config.participation, world_size) == 0:
            return ValueError(
                f"participation={config.participation!r} of {world_size} ranks gives no rank to average: set at least "
                f"{1 / world_size:.3g}."
            )
        if world_size * (force := config.force(world_size)) > 1:
            return ValueError(
                f"elastic_force={force!r} moves the agreed weights by {world_size * force:.3g} times their distance to "
                f"{world_size} replicas, beyond them: set {1 / world_size:.3g} at most (EASGD: ranks * alpha <= 1)."
            )
        return None

    def _shape_settings(self) -> dict[str, Any]:
        """Returns the settings that determine the structure of :meth:`state_dict`."""
        config = self.config
        return {
            "compression": str(config.compression),
            "error_feedback": config.uses_error_feedback,
            "bucket_mb": config.bucket_mb,
            "outer_optimizer": config.outer_optimizer,
            "fragments": config.fragments,
            "warmup_steps": config.warmup_steps,
        }
