"""The seconds of a step with a method and its settings, by simulation of its schedule."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch

from lightning_pipesync.core.buckets import Fusion, num_bytes, plan_buckets
from lightning_pipesync.core.comm.torus import Torus
from lightning_pipesync.core.layers import balanced
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.schedule import BucketTimes, simulate_step
from lightning_pipesync.lab.bench.profile import Profile
from lightning_pipesync.lab.plan.cluster import Cluster
from lightning_pipesync.lab.plan.work import Work
from lightning_pipesync.methods.dear.eager import plan_early_gathers


def dear_step(
    profile: Profile, cluster: Cluster, bucket_mb: float, torus: Torus | None = None, eager: bool = True
) -> float:
    """Returns the seconds of a step of DeAR.

    Args:
        profile: a step without communication.
        cluster: the costs of communication.
        bucket_mb: size of the buckets, in MiB.
        torus: the ranks in rows and columns; None: in a ring.
        eager: whether buckets are gathered early, as DeAR would plan it, on a torus as a whole.
    """
    # Tensors without memory, of so many bytes, in the order in which their gradients become ready.
    tensors = [torch.empty(tensor.num_bytes, dtype=torch.uint8, device="meta") for tensor in profile.tensors]
    parameters = [NamedParameter(str(i), tensor, str(i), (0, 0)) for i, tensor in enumerate(tensors)]
    link, world_size = cluster.halves, cluster.world_size

    def half(num_bytes: float) -> float:
        if torus is None:
            return link.reduce_scatter(num_bytes, world_size)
        if cluster.torus is not None:
            return cluster.torus.reduce_scatter(num_bytes, world_size)
        return link.torus_half(num_bytes, torus.columns, torus.rows)

    buckets = []
    for members in plan_buckets(parameters, Fusion(bucket_mb=bucket_mb)):
        times = [profile.tensors[int(member.name)] for member in members]
        size = sum(map(num_bytes, members))
        buckets.append(
            BucketTimes(
                ready=max(one.ready for one in times),
                needed=min(one.needed for one in times),
                reduce_scatter=half(size),
                all_gather=half(size),
                latency=half(0),
            )
        )
    early = plan_early_gathers(buckets, divisible=torus is None) if eager else None
    return simulate_step(buckets, profile.forward, profile.backward, early).seconds + profile.update


def local_sgd_step(compute: float, average: float, on_wire: float, settings: Mapping[str, Any]) -> float:
    """Returns the seconds of a step of local SGD, on average over a period.

    The average of a fragment runs under ``overlap_steps`` steps, and what is left of it is waited for.

    Args:
        compute: seconds of a step without communication.
        average: seconds in which all weights are averaged.
        on_wire: seconds of these that the network takes; the processor is busy for the others, and they are not hidden.
        settings: ``period``, ``fragments`` and ``overlap_steps``.
    """
    period, fragments, overlap = settings["period"], settings.get("fragments", 1), settings.get("overlap_steps", 0)
    waited = max(0.0, average / fragments - overlap * compute) * fragments
    works = max(0.0, average - on_wire)
    return max(compute + max(waited, works) / period, average / period)


def pipeline_step(work: Work, bandwidth: float, num_stages: int) -> float:
    """Returns the seconds in which a pipeline takes as many mini-batches as it has stages, in the steady state.

    A stage sends activations on and gradients back under its passes; the slowest stage sets the pace. Layers take the
    share of the passes that they have of the time of all layers, and all stages the same of what the method adds.

    Args:
        work: of a step; it has at least as many layers as stages.
        bandwidth: bytes per second that a host can send.
        num_stages: the number of hosts.
    """
    layers, profile = work.layers, work.profile
    parameters, total = sum(layer.parameter_bytes for layer in layers), sum(layer.seconds for layer in layers)
    seconds = [layer.seconds * (profile.forward + profile.backward) / (total or 1.0) for layer in layers]
    cuts = balanced(seconds, [layer.parameter_bytes + layer.output_bytes for layer in layers], num_stages)
    slowest = 0.0
    for start, end in pairwise([0, *cuts, len(layers)]):
        share = sum(layer.parameter_bytes for layer in layers[start:end]) / max(1, parameters)
        computes = sum(seconds[start:end]) + profile.update * share
        sent = (layers[end - 1].output_bytes if end < len(layers) else 0) + (
            layers[start - 1].output_bytes if start else 0
        )
        slowest = max(slowest, computes, sent / bandwidth)
    return num_stages * slowest + work.own.get("ea_pipe", 0.0)
