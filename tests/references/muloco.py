"""MuLoCo (Thérien et al., arXiv 2505.23725) in one process, with plain tensors: Muon inside, 2 bits in between."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer

from lightning_pipesync.core.buckets import shard_of
from lightning_pipesync.core.codecs import get_codec
from tests.references.pipe_sgd import assign, fused, reduce_scatter, through


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    """Muon for the matrices, AdamW for the rest."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    rest = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    return [Muon(matrices, lr=0.02, momentum=0.9, weight_decay=1e-4), AdamW(rest, lr=0.01, betas=(0.9, 0.99))]


def simulate(
    model: nn.Module,
    loss: Callable[[nn.Module, int, int], Tensor],
    *,
    world_size: int,
    num_steps: int,
    period: int,
    outer_lr: float = 0.8,
    outer_momentum: float = 0.9,
    decay: float = 0.9,
) -> list[nn.Module]:
    """Returns the replicas.

    What an optimizer updates is one vector, theta. A rank sends each owner of a shard its part of what it has moved,
    quantized; the owner takes the outer step by their mean, and sends all what that has moved its shard, quantized.
    """
    codec = get_codec("int2")
    replicas = [copy.deepcopy(model) for _ in range(world_size)]
    optimizers = [muon_and_adamw(replica) for replica in replicas]
    names = [[name for name, p in model.named_parameters() if (p.dim() == 2) == matrices] for matrices in (True, False)]
    thetas = [fused([model.get_parameter(name) for name in group]) for group in names]
    ahead = [nn.Parameter(theta.clone()) for theta in thetas]  # where the outer step leads, before it is quantized
    outer = [SGD([each], lr=outer_lr, momentum=outer_momentum, nesterov=True) for each in ahead]
    errors = [[torch.zeros_like(theta) for _ in replicas] for theta in thetas]
    empty = [torch.zeros_like(theta) for theta in thetas]
    of_shards = [[shard_of(flat.clone(), rank, world_size) for rank in range(world_size)] for flat in empty]
    for step in range(1, num_steps + 1):
        for rank, replica in enumerate(replicas):
            replica.zero_grad()
            loss(replica, step - 1, rank).backward()
            for optimizer in optimizers[rank]:
                optimizer.step()
        for g, group in enumerate(names) if step % period == 0 else ():
            for error in (*errors[g], *of_shards[g]):
                error.mul_(decay)
            moves = [fused([replica.get_parameter(name) for name in group]) - thetas[g] for replica in replicas]
            ahead[g].data.copy_(thetas[g])
            ahead[g].grad = -torch.cat(reduce_scatter(moves, codec, errors[g]))
            outer[g].step()
            moved = [shard_of(ahead[g].detach() - thetas[g], owner, world_size) for owner in range(world_size)]
            sent = [through(codec, shard, error) for shard, error in zip(moved, of_shards[g], strict=True)]
            thetas[g] = thetas[g] + torch.cat(sent)
            for replica in replicas:
                assign(replica, group, thetas[g])
    return replicas
