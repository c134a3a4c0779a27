"""SparseLoCo (Sarfi et al., arXiv 2508.15706, Algorithm 1) in one process, with plain tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.references.pipe_sgd import assign, fused, mean

CHUNK = 4096


def simulate(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], Optimizer],
    loss: Callable[[nn.Module, int, int], Tensor],
    fragments: Sequence[Sequence[str]],
    *,
    world_size: int,
    num_steps: int,
    period: int,
    outer_lr: float = 1.0,
    decay: float = 0.95,
    k: int = 64,
) -> tuple[list[nn.Module], list[list[Tensor]]]:
    """Returns the replicas, and the residual of each fragment on each rank.

    `fragments` are the names of the parameters of each, which are one vector: theta, of which all have the same.
    """
    replicas = [copy.deepcopy(model) for _ in range(world_size)]
    optimizers = [make_optimizer(replica) for replica in replicas]
    thetas = [fused([model.get_parameter(name) for name in names]) for names in fragments]
    errors = [[torch.zeros_like(theta) for theta in thetas] for _ in replicas]
    for step in range(1, num_steps + 1):
        for rank, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            replica.zero_grad()
            loss(replica, step - 1, rank).backward()
            optimizer.step()
        for f, names in enumerate(fragments):
            if step % period != (f + 1) * period // len(fragments) % period:
                continue
            sent = []
            for replica, error in zip(replicas, errors, strict=True):
                delta = thetas[f] - fused([replica.get_parameter(name) for name in names])  # the pseudo-gradient
                error[f] = decay * error[f] + delta
                sent.append(quantized_top_k(error[f], k))
                error[f] = error[f] - sent[-1]
            thetas[f] = thetas[f].sub(mean(sent), alpha=outer_lr)
            for replica in replicas:
                assign(replica, names, thetas[f])
    return replicas, errors


def quantized_top_k(values: Tensor, k: int) -> Tensor:
    """Q(TopK(values)): of each chunk the k largest magnitudes; the mean of those above their mean, or of the others.

    If some of them are zero, they stay so, and the mean is that of all others.
    """
    sent = []
    for chunk in values.split(CHUNK):
        whole = nn.functional.pad(chunk, (0, CHUNK - chunk.numel()))
        kept = whole.abs().topk(k).indices
        magnitudes = whole[kept].abs().double()
        has_zeros = (magnitudes > 0).sum() < min(k, chunk.numel())
        is_high = magnitudes > 0 if has_zeros else magnitudes >= magnitudes.mean()
        levels = torch.zeros(k)
        for level in (is_high, ~is_high):
            if level.any():
                levels[level] = magnitudes[level].mean().float()
        quantized = torch.zeros_like(whole)
        quantized[kept] = torch.where(whole[kept] < 0, -levels, levels)
        sent.append(quantized[: chunk.numel()])
    return torch.cat(sent)
