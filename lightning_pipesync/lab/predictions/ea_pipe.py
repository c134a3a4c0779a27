"""What the laboratory knows of EA-Pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, TypeGuard

from torch import nn
from torch.optim import Optimizer

from lightning_pipesync.core.parameters import device_of
from lightning_pipesync.lab.predictions.cluster import Cluster
from lightning_pipesync.lab.predictions.entry import LabEntry, Prediction, StandIn
from lightning_pipesync.lab.predictions.work import LayerWork, MethodWork, Work
from lightning_pipesync.methods.ea_pipe import split as chain


class EAPipeLab(LabEntry):
    """Stages with the layers that EA-Pipe would give them."""

    def predict(self, work: Work, cluster: Cluster) -> Iterator[list[Prediction]]:
        """Yields a prediction if there are enough layers for all ranks."""
        num_stages = cluster.world_size
        if len(work.measured_by(self.name).layers) >= num_stages:
            late = f"{num_stages} mini-batches in stages, up to {num_stages - 1} steps late"
            seconds = self._seconds(work, cluster.bandwidth, num_stages)
            yield [Prediction(self.name, {}, seconds, exact=False, why=late)]

    def stand_in(self, work: Work, cluster: Cluster, num_bytes: int) -> StandIn | None:
        enough = len(work.measured_by(self.name).layers) >= cluster.world_size
        return StandIn({"split": "parameters"}) if enough else None

    def measure(self, module: nn.Module, optimizer: Optimizer, inputs: Callable[[], Any] | None) -> MethodWork:
        """Measures the layers of an ``nn.Sequential``; other models, which EA-Pipe has to trace, are not planned."""
        if inputs is None or not _is_chain(module):
            return MethodWork()
        layers = [layer for _, layer in chain.flattened(module)]
        seconds, num_bytes = chain.measure(layers, inputs(), device_of(module))
        parameters = [sum(parameter.nbytes for parameter in layer.parameters()) for layer in layers]
        measured = zip(seconds, parameters, num_bytes, strict=True)
        return MethodWork(layers=[LayerWork(took, of_layer, int(both) - of_layer) for took, of_layer, both in measured])

    def _seconds(self, work: Work, bandwidth: float, num_stages: int) -> float:
        """Returns the seconds for as many mini-batches as there are stages, in the steady state.

        Communication overlaps with computation, and the slowest stage sets the pace. The time of the passes is divided
        among the layers as measured, and what the method adds is the same for all stages.
        """
        layers, profile = work.measured_by(self.name).layers, work.profile
        parameters, total = sum(layer.parameter_bytes for layer in layers), sum(layer.seconds for layer in layers)
        seconds = [layer.seconds * (profile.forward + profile.backward) / (total or 1.0) for layer in layers]
        num_bytes = [layer.parameter_bytes + layer.output_bytes for layer in layers]
        cuts = chain.balanced(seconds, num_bytes, num_stages)
        slowest = 0.0
        for start, end in pairwise([0, *cuts, len(layers)]):
            share = sum(layer.parameter_bytes for layer in layers[start:end]) / max(1, parameters)
            computes = sum(seconds[start:end]) + profile.update * share
            sent = layers[end - 1].output_bytes if end < len(layers) else 0
            sent += layers[start - 1].output_bytes if start else 0
            slowest = max(slowest, computes, sent / bandwidth)
        return num_stages * slowest + work.added.get(self.name, 0.0)


def _is_chain(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Returns whether a module runs its members one after the other."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
