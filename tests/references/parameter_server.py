"""The replay of a run with parameter servers, in one process: all weights that it has had, from its log alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_pipesync.core.buckets import Bucket
from lightning_pipesync.core.codecs import Codec
from lightning_pipesync.methods.servers.messages import Fetch, Gradient, Update
from tests.references.pipe_sgd import through


def replay(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], Optimizer],
    loss: Callable[[nn.Module, int, int], Tensor],
    log: Sequence[Update],
    dc_lambda: float = 0.0,
    distance_bound: float = 0.0,
) -> list[nn.Module]:
    """Returns the model after each update, the first one before any.

    Args:
        loss: of the model in a rank's step, counted from 0.
        dc_lambda: lambda of DC-ASGD.
        distance_bound: C / eta_max, if the learning rate depends on the distance.
    """
    server = copy.deepcopy(model)
    optimizer = make_optimizer(server)
    versions = [copy.deepcopy(server)]
    optimizers = [copy.deepcopy(optimizer.state_dict())]
    for update in log:
        optimizer.zero_grad()
        lr = optimizer.param_groups[0]["lr"]
        total: list[Tensor] = [torch.zeros_like(p) for p in server.parameters()]
        learners = [
            ahead(versions[g.version], make_optimizer, optimizers[g.version], g.ahead) for g in update.gradients
        ]
        weights, lr_factor = update.weights, update.lr_factor
        if distance_bound:  # Dutta et al., Eq. 13, for each gradient
            moved = [[now - p for now, p in both(server, one)] for one in learners]
            squared = [float(sum(difference.square().double().sum() for difference in one)) for one in moved]
            factors = [min(1.0, distance_bound / distance) if distance else 1.0 for distance in squared]
            lr_factor = sum(factors) / len(factors)
            weights = tuple(factor / lr_factor for factor in factors)
        for gradient, weight, learner in zip(update.gradients, weights, learners, strict=True):
            loss(learner, gradient.step - 1, gradient.rank).backward()
            for one, p, now in zip(total, learner.parameters(), server.parameters(), strict=True):
                assert p.grad is not None
                if dc_lambda:  # Zheng et al., Eq. 10
                    p.grad.addcmul_(p.grad * p.grad, now.detach() - p.detach(), value=dc_lambda)
                one.add_(p.grad, alpha=weight)
        for p, one in zip(server.parameters(), total, strict=True):
            p.grad = one / len(update.gradients)
        optimizer.param_groups[0]["lr"] = lr * lr_factor
        optimizer.step()
        optimizers.append(copy.deepcopy(optimizer.state_dict()))
        optimizer.param_groups[0]["lr"] = lr
        versions.append(copy.deepcopy(server))
    return versions


def both(one: nn.Module, other: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """The parameters of two models, without their graphs."""
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        yield p.detach(), q.detach()


def replay_downpour(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], Optimizer],
    loss: Callable[[nn.Module, int, int], Tensor],
    log: Sequence[Update],
) -> list[nn.Module]:
    """Returns the model after each update of Downpour (Dean et al., Algorithm 7.1), the first one before any."""
    everything = {name: slice(0, p.numel()) for name, p in model.named_parameters()}
    versions, _ = versions_of_shards(model, make_optimizer, loss, [log], [everything])
    return versions[0]


def replay_easgd(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], Optimizer],
    loss: Callable[[nn.Module, int, int], Tensor],
    log: Sequence[Update],
    force: float,
) -> list[nn.Module]:
    """Returns the center after each pull of asynchronous EASGD (Zhang et al., Algorithm 1), the first before any."""
    center = copy.deepcopy(model)
    versions, learners = [copy.deepcopy(center)], {}
    for update in log:
        (pull,) = update.gradients
        assert pull.accrued is not None
        if pull.rank not in learners:
            replica = copy.deepcopy(model)
            learners[pull.rank] = replica, make_optimizer(replica)
        replica, optimizer = learners[pull.rank]
        anew = {fetch.step: versions[fetch.version] for fetch in pull.accrued.fetches}
        for step in range(pull.accrued.first_step, pull.step + 1):
            if step in anew:
                replica.load_state_dict(anew[step].state_dict())
            optimizer.zero_grad()
            loss(replica, step - 1, pull.rank).backward()
            optimizer.step()
        with torch.no_grad():
            for x, c in zip(replica.parameters(), center.parameters(), strict=True):
                moved = (x - c) * force
                x.sub_(moved)
                c.add_(moved)
        versions.append(copy.deepcopy(center))
    return versions


def replay_diloco(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], Optimizer],
    loss: Callable[[nn.Module, int, int], Tensor],
    log: Sequence[Update],
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    codec: Codec | None = None,
) -> list[nn.Module]:
    """Returns the servers' model after each update of asynchronous DiLoCo, the first one before any.

    Args:
        codec: of what is pushed to one server, with error feedback.
    """
    server = copy.deepcopy(model)
    outer = SGD(server.parameters(), outer_lr, outer_momentum, nesterov=outer_momentum > 0)
    versions, learners = [copy.deepcopy(server)], {}
    dropped: dict[int, Tensor] = {}
    for update in log:
        total = [torch.zeros_like(p) for p in server.parameters()]
        for pushed, weight in zip(update.gradients, update.weights, strict=True):
            assert pushed.accrued is not None
            if pushed.rank not in learners:
                replica = copy.deepcopy(model)
                learners[pushed.rank] = replica, make_optimizer(replica)
            replica, optimizer = learners[pushed.rank]
            fetched = versions[pushed.version]
            took_at = [fetch.step for fetch in pushed.accrued.fetches]
            at_push = copy.deepcopy(replica)
            if not took_at:  # it had waited for the weights; it keeps its buffers
                replica.load_state_dict({**replica.state_dict(), **dict(fetched.named_parameters())})
            for step in range(pushed.accrued.first_step, pushed.step + 1):
                optimizer.zero_grad()
                loss(replica, step - 1, pushed.rank).backward()
                optimizer.step()
                if step in took_at:
                    parameters = [each.parameters() for each in (replica, fetched, at_push)]
                    with torch.no_grad():
                        for now, new, before in zip(*parameters, strict=True):
                            now.add_(new - before)
            moved = [before - now for before, now in both(fetched, replica)]
            if codec is not None:
                flat = Bucket(moved)
                flat.pack(moved)
                residual = dropped.setdefault(pushed.rank, torch.zeros_like(flat.flat))
                flat.flat.copy_(through(codec, flat.flat, residual))
                flat.unpack(moved)
            for one, movement in zip(total, moved, strict=True):
                one.add_(movement, alpha=weight)
        for p, one in zip(server.parameters(), total, strict=True):
            p.grad = one / len(update.gradients)
        outer.param_groups[0]["lr"] = outer_lr * update.lr_factor
        outer.step()
        versions.append(copy.deepcopy(server))
    return versions


def ahead(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], Optimizer],
    state: dict[str, Any],
    updates: float,
) -> nn.Module:
    """Returns a copy of the model after more updates with gradients of zero, if there has been one; interpolated."""
    model = copy.deepcopy(model)
    if not updates or not state["state"]:
        return model
    optimizer = make_optimizer(model)
    optimizer.load_state_dict(copy.deepcopy(state))

    def step() -> None:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()

    whole, part = divmod(updates, 1)
    for _ in range(int(whole)):
        step()
    before = [p.detach().clone() for p in model.parameters()]
    step()
    with torch.no_grad():
        for p, one in zip(model.parameters(), before, strict=True):
            p.copy_(one.add(p - one, alpha=part))
    model.zero_grad()
    return model


def replay_shards(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], Optimizer],
    loss: Callable[[nn.Module, int, int], Tensor],
    logs: Sequence[Sequence[Update]],
    slices: Sequence[Mapping[str, slice]],
    **settings: float | None,
) -> nn.Module:
    """Returns the model at the end if each server has its own order; see :func:`versions_of_shards`."""
    versions, fetch = versions_of_shards(model, make_optimizer, loss, logs, slices, **settings)
    fetch(model, [len(of_server) - 1 for of_server in versions])
    return model


def versions_of_shards(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], Optimizer],
    loss: Callable[[nn.Module, int, int], Tensor],
    logs: Sequence[Sequence[Update]],
    slices: Sequence[Mapping[str, slice]],
    dc_lambda: float | None = None,
    max_norm: float | None = None,
) -> tuple[list[list[nn.Module]], Callable[[nn.Module, Sequence[int]], None]]:
    """Returns each server's model after each of its updates (Dean et al., Section 4.1), from all logs; and a fetch.

    Args:
        logs: of each server.
        slices: for each server its part of each parameter, flattened, by name. Only these are right in its model.
        max_norm: what each learner clips its gradient to.
    """
    servers = [copy.deepcopy(model) for _ in logs]
    optimizers = [make_optimizer(server) for server in servers]
    lr = optimizers[0].param_groups[0]["lr"]
    versions = [[copy.deepcopy(server)] for server in servers]
    learners: dict[int, nn.Module] = {}
    pushed = {
        (update.gradients[0].rank, update.gradients[0].step): update.gradients[0] for log in logs for update in log
    }
    waiting = [pushed[key] for key in sorted(pushed)]
    gradients: dict[tuple[int, int], tuple[list[Tensor], nn.Module]] = {}  # with what they were computed at

    def numbers(fetched: Gradient | Fetch) -> tuple[int, ...]:
        return fetched.of_shards or (fetched.version,)

    @torch.no_grad()
    def fetch(learner: nn.Module, numbers: Sequence[int]) -> None:
        for number, of_server, parts in zip(numbers, versions, slices, strict=True):
            fetched = dict(of_server[number].named_parameters())
            for name, parameter in learner.named_parameters():
                if name in parts:
                    parameter.view(-1)[parts[name]] = fetched[name].view(-1)[parts[name]]

    def backward(learner: nn.Module, step: int, rank: int) -> None:
        learner.zero_grad()
        loss(learner, step - 1, rank).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(learner.parameters(), max_norm)

    def compute(gradient: Gradient) -> tuple[list[Tensor], nn.Module]:
        """Returns what a learner pushes, and, if it is not accrued, what it is a gradient of."""
        learner = learners.setdefault(gradient.rank, copy.deepcopy(model))
        if gradient.accrued is None:
            fetch(learner, numbers(gradient))
            backward(learner, gradient.step, gradient.rank)
            return [p.grad.clone() for p in learner.parameters()], copy.deepcopy(learner)
        fetches = {(one.step, one.before_pass): numbers(one) for one in gradient.accrued.fetches}
        accrued = [torch.zeros_like(p) for p in learner.parameters()]
        for step in range(gradient.accrued.first_step, gradient.step + 1):
            if (step, True) in fetches:
                fetch(learner, fetches[step, True])
            backward(learner, step, gradient.rank)
            if (step, False) in fetches:
                fetch(learner, fetches[step, False])
            with torch.no_grad():
                for p, total in zip(learner.parameters(), accrued, strict=True):
                    total.add_(p.grad)
                    p.add_(p.grad, alpha=-lr)
        return accrued, learner

    while any(len(log) >= len(of_server) for log, of_server in zip(logs, versions, strict=True)):
        before = sum(map(len, versions)) - len(waiting)
        for gradient in list(waiting):
            is_next = gradient is next(one for one in waiting if one.rank == gradient.rank)
            fetched = [gradient] if gradient.accrued is None else gradient.accrued.fetches
            are_there = all(n < len(there) for one in fetched for n, there in zip(numbers(one), versions, strict=True))
            if is_next and are_there:
                gradients[gradient.rank, gradient.step] = compute(gradient)
                waiting.remove(gradient)
        for log, server, optimizer, of_server in zip(logs, servers, optimizers, versions, strict=True):
            update = log[len(of_server) - 1] if len(of_server) <= len(log) else None
            if update is None or (update.gradients[0].rank, update.gradients[0].step) not in gradients:
                continue
            found, learner = gradients[update.gradients[0].rank, update.gradients[0].step]
            for p, grad, at in zip(server.parameters(), found, learner.parameters(), strict=True):
                p.grad = grad.clone()
                if dc_lambda:
                    p.grad.addcmul_(grad * grad, p.detach() - at.detach(), value=dc_lambda)
            optimizer.param_groups[0]["lr"] = lr * update.lr_factor
            optimizer.step()
            of_server.append(copy.deepcopy(server))
        assert sum(map(len, versions)) - len(waiting) > before, "an update waits for a version that never is"
    return versions, fetch
