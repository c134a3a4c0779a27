"""Local SGD in a training loop."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.methods.local_sgd.clock import BY_GRADIENT, PeriodClock
from lightning_pipesync.methods.local_sgd.config import LocalSGDConfig
from lightning_pipesync.methods.method import MetricInfo, counted
from lightning_pipesync.methods.replicas.groups import replicas_of
from lightning_pipesync.methods.replicas.jobs import ElasticReplicaMethod
from lightning_pipesync.methods.replicas.policy import AveragingPolicy
from lightning_pipesync.methods.replicas.rate_factor import RateFactor
from lightning_pipesync.methods.replicas.replica import Replica
from lightning_pipesync.methods.replicas.settings import check_force, force_of
from lightning_pipesync.methods.replicas.trigger import GradientTrigger

log = logging.getLogger(__name__)


class LocalSGD(ElasticReplicaMethod):
    """Local steps on each rank's weights, which are averaged every ``period`` steps.

    With an outer optimizer the average of how far the ranks have moved is the gradient of the global weights, from
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
            sync.resume()                               # each rank's replica again
        sync.flush()
        sync.detach()

    With ``outer_optimizer="elastic"`` the consolidated weights are the global ones, EASGD's center variable.

    Arguments, errors and further calls are those of :class:`SyncMethod`; the settings are in :class:`LocalSGDConfig`.
    Every rank takes as many steps.
    """

    name = "local_sgd"
    config_type = LocalSGDConfig
    metric_infos = MappingProxyType(
        {
            "rounds": MetricInfo("rounds so far, in each of which all weights were averaged", over_ranks="same"),
            "lssr": MetricInfo("share of the steps so far that stayed local", over_ranks="same"),
            "lr_scale": MetricInfo("factor on the learning rate of local steps"),
            **ElasticReplicaMethod.metric_infos,
        }
    )
    shown_metrics = MappingProxyType({"rounds": "sync_rounds", "mib_sent": "sent_MiB"})

    config: LocalSGDConfig

    def _policy(self, optimizer: Optimizer, parameters: Sequence[NamedParameter]) -> AveragingPolicy:
        config = self.config
        if config.period == BY_GRADIENT:
            return GradientTrigger(optimizer, parameters, config, self.transport)
        follows = config.periods_follow_lr and len(self.optimizers) == 1  # several have rounds at the same steps
        return PeriodClock(config, self.data, self.transport, RateFactor(optimizer if follows else None))

    def _average_others(self, index: int) -> None:
        if index == self._training_steps.first:  # the rounds of all optimizers have the same period
            super()._average_others(index)

    def metrics(self) -> dict[str, float]:
        """Returns, besides :meth:`SyncMethod.metrics`, those of the first optimizer."""
        replica = self._replicas[0]
        lssr = replica.num_local_steps / replica.num_steps if replica.num_steps else 0.0
        return {"rounds": replica.num_rounds, "lssr": lssr, "lr_scale": replica.lr_scale, **super().metrics()}

    def summary(self, num_steps: int, before: Mapping[str, float]) -> str:
        replica = self._replicas[0]
        rounds = replica.num_rounds - before["rounds"]
        why = f", since a round takes period={self.config.period!r}" if not rounds and replica.num_local_steps else ""
        return f"{counted(rounds, 'round')} in {counted(num_steps, 'step')}{why}"

    def _check_support(self) -> None:
        self._check_force(self.config.num_jobs or 1)
        super()._check_support()

    def _check_force(self, at_least: int = 1) -> None:
        """Raises a ValueError if the force is too large for the replicas of the transport, or ``at_least`` so many."""
        if self.config.outer_optimizer == "elastic":
            number = max(at_least, replicas_of(self.transport).world_size)
            check_force("elastic_force", force_of(self.config.elastic_force, number), number)

    def _new_replicas(self) -> list[Replica]:
        try:
            self._check_force()
        except ValueError as error:  # more have come
            if dist.get_rank() == 0:
                log.warning(f"{error} That is what it is until there are fewer.")
        return super()._new_replicas()

    def _shape_settings(self) -> dict[str, Any]:
        return {**super()._shape_settings(), "outer_optimizer": self.config.outer_optimizer}
