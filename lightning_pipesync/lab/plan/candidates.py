"""What is run of a plan: a candidate for each prediction."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_pipesync.lab.bench.candidate import Candidate, sgd
from lightning_pipesync.lab.bench.candidates import makers
from lightning_pipesync.lab.bench.models import BenchModel
from lightning_pipesync.lab.bench.with_method import WithMethod
from lightning_pipesync.lab.plan.layers import inputs_of, is_chain
from lightning_pipesync.lab.plan.predictions import Prediction
from lightning_pipesync.methods.ea_pipe import EAPipe, EAPipeConfig
from lightning_pipesync.methods.selsync import SelSync, SelSyncConfig

#: Seconds after which a rank that does not answer counts as lost, so that no trial lasts for ever.
TIMEOUT_S = 120.0


def candidate_of(prediction: Prediction, model: BenchModel) -> Candidate:
    """Returns a candidate with the settings of a prediction; a collective call.

    Raises:
        ValueError: the method cannot train this model.
        RuntimeError: a peer is lost.
    """
    settings = {**prediction.settings, "timeout_s": TIMEOUT_S}
    if prediction.method == "ea_pipe":
        return InStages(model, EAPipeConfig(**settings))
    if prediction.method == "selsync":
        return WithShareOfLocalSteps(model, SelSyncConfig(**settings))
    settings.pop("partition", None)  # a batch of its own for each rank, again and again
    if prediction.method == "ddp":
        (make,) = makers(["ddp"], [settings["bucket_mb"]])
    else:
        (make,) = makers([replace(prediction, settings=settings).name], [])
    return make(model)


class WithShareOfLocalSteps(WithMethod):
    """SelSync that synchronizes as many steps as it is to, whatever the gradients, which are the same in all steps.

    Args:
        model: the model that it trains.
        config: the settings; ``lssr`` is the share of local steps.
    """

    def __init__(self, model: BenchModel, config: SelSyncConfig) -> None:
        forced = replace(config, delta=0.0, lssr=SelSyncConfig.lssr)
        super().__init__(model, "SelSync", SelSync, forced, "compute")
        self.sync: SelSync
        self.period = Fraction(1 - config.lssr).limit_denominator(100).denominator
        self._synchronized = round((1 - config.lssr) * self.period)
        self._taken = 0

    def step(self) -> None:
        """Takes a step; the synchronized ones are evenly distributed."""
        self._taken += 1
        due = self._taken * self._synchronized % self.period < self._synchronized
        for unit in self.sync._units:
            unit.trigger.algorithm.threshold.delta = 0.0 if due else math.inf
        super().step()


class InStages(Candidate):
    """EA-Pipe with a stage on each rank; a step is as many mini-batches as there are stages.

    Args:
        model: an ``nn.Sequential``, see :class:`EAPipe`.
        config: the settings.
    """

    def __init__(self, model: BenchModel, config: EAPipeConfig) -> None:
        super().__init__("EA-Pipe", model)
        if not is_chain(model.module):
            raise ValueError(f"{model.name} is no nn.Sequential, whose layers are divided among stages.")
        batches = [self.batch]
        dist.broadcast_object_list(batches)  # the first stage uses the input, the last one the target
        self.batch = batches[0]
        self._inputs = inputs_of(model, self.batch)
        self._engine = EAPipe(model.module, None, sgd, config)

    def step(self) -> None:
        for _ in range(self._engine.num_stages):
            self._engine.feed(lambda: self._inputs, self._loss)
            if self._engine.backward():
                self._engine.step()

    def begin(self) -> None:
        for _ in range(3):  # until the steady state
            self.step()

    def drain(self) -> None:
        self._engine.flush()

    def close(self) -> None:
        self._engine.detach()

    def _loss(self, output: Any, part: Callable[[Any], Any]) -> Tensor:
        module: Any = self.model.module
        module.forward = lambda *_, **__: output  # it is there already
        try:
            return self.model.loss(module, self.batch)
        finally:
            del module.forward
