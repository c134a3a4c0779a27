"""What methods refuse, by their own rules, before anything is planned with it."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from lightning_pipesync.lab.bench.models import stand_in
from lightning_pipesync.lab.plan.candidates import candidate_of
from lightning_pipesync.lab.plan.cluster import Cluster
from lightning_pipesync.lab.plan.predictions import Prediction, predict
from lightning_pipesync.lab.plan.ranks import gathered
from lightning_pipesync.lab.plan.work import Work


def with_refusals(work: Work, cluster: Cluster, module: nn.Module) -> Work:
    """Returns the work with what methods refuse of all that would be predicted, until they refuse no more of it.

    Each prediction's method is attached, with its settings, to a stand-in with as many layers and tensors; a collective
    call.

    Args:
        work: a step without communication, the same on all ranks.
        cluster: the costs of communication, the same on all ranks.
        module: the model.
    """
    reasons: dict[str, str | None] = {}
    while new := [one for one in predict(work, cluster) if one.name not in reasons]:
        reasons |= {one.name: _refusal(one, module) for one in new}
        work = replace(work, refused={name: reason for name, reason in reasons.items() if reason is not None})
    return work


def _refusal(one: Prediction, module: nn.Module) -> str | None:
    """Returns why a method refuses a model, the same on all ranks; None: it does not."""
    candidate, reason = None, None
    try:
        candidate = candidate_of(one, stand_in(module))
    except ValueError as error:
        reason = str(error)
    first = next(filter(None, gathered(reason)), None)
    if candidate is not None:
        candidate.close()
    return first
