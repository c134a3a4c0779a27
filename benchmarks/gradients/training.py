"""A training in which the gradient and the Hessian are measured, with the mini-batches of several workers."""

from __future__ import annotations

from itertools import chain, islice, repeat
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, default_collate

from benchmarks.gradients.curvature import flat, top_eigenvalue
from benchmarks.gradients.densities import LAYERS, density_of
from benchmarks.pipelines.training import quality_of
from benchmarks.tasks import Task, build_task, evaluations
from lightning_pipesync.methods.replicas.gradient_change import GradientChangeTracker

if TYPE_CHECKING:
    from benchmarks.sensitivity import Sensitivity

#: The number of mini-batches among which the variance of the gradient is measured.
NUM_PARTS = 8


def train(name: str, seed: int, settings: Sensitivity) -> dict[str, Any]:
    """Trains once.

    Returns:
        ``points``, at each evaluation: ``steps``; the ``quality``; the mean relative ``change`` of the gradient (Eq. 2)
        since the last one; its smoothed ``squared_norm``; its ``variance`` among mini-batches; and the largest
        ``eigenvalue`` of the Hessian. Of the gradient of one ``layer``, in all steps of the first ``epoch``,
        the middle one and the last, ``densities`` on a common ``grid``, each with the standard ``deviation`` and the
        share of values ``near_zero``, within a tenth of the first deviation.
    """
    task = build_task(name)
    torch.manual_seed(seed)
    module = task.build_module()
    optimizer = task.optimizer(module)
    order = torch.Generator().manual_seed(seed)
    loader = DataLoader(
        task.train_set, settings.workers * task.batch_size, shuffle=True, generator=order, drop_last=True
    )
    num_epochs = settings.epochs or task.epochs
    num_steps = num_epochs * len(loader)
    scheduler = task.scheduler(optimizer, num_steps)
    tracker = GradientChangeTracker(settings.window, settings.smoothing)
    probe = Probe(task, module, settings.samples)
    evaluated = evaluations(num_steps, settings.evaluations)
    gradients: dict[int, list[Tensor]] = {epoch: [] for epoch in sorted({1, (num_epochs + 1) // 2, num_epochs})}
    points, since = [], list[float]()
    batches = islice(chain.from_iterable(repeat(loader)), num_steps)
    for step, batch in enumerate(batches, start=1):
        optimizer.zero_grad()
        task.loss(module, batch).backward()
        change = tracker.update(squared_norm_of(module))
        if step > 1:  # the first one has none
            since.append(change)
        if (epoch := -(-step // len(loader))) in gradients:
            gradient = module.get_parameter(LAYERS[name]).grad
            assert gradient is not None
            gradients[epoch].append(gradient.flatten().clone())
        if task.max_norm is not None:
            clip_grad_norm_(module.parameters(), task.max_norm)
        optimizer.step()
        scheduler.step()
        if step in evaluated:
            measured = {"quality": quality_of(task, module, task.test_set), **probe.measure()}
            measured["change"] = sum(since) / max(1, len(since))
            measured["squared_norm"] = tracker.state_dict()["average"]
            points.append({"steps": step, **{key: _short(value) for key, value in measured.items()}})
            since.clear()
    of_epochs = [torch.cat(own) for own in gradients.values()]
    first = of_epochs[0].std().item()
    grid, densities = density_of(of_epochs)
    return {
        "task": name,
        "seed": seed,
        "metric": f"test {task.metric}",
        "layer": LAYERS[name],
        "points": points,
        "grid": grid,
        "densities": [
            {
                "epoch": epoch,
                "density": density,
                "deviation": _short(gradient.std().item()),
                "near_zero": _short((gradient.abs() < first / 10).float().mean().item()),
            }
            for epoch, gradient, density in zip(gradients, of_epochs, densities, strict=True)
        ],
    }


class Probe:
    """Measures the loss of a module around its weights, always on the same samples, without dropout."""

    def __init__(self, task: Task, module: nn.Module, num_samples: int) -> None:
        self._task, self._module = task, module
        indices, _ = task.divided(1.0)
        samples = [task.train_set[index] for index in indices[:num_samples].tolist()]
        self._batch = default_collate(samples)
        self._parts = [default_collate(samples[part::NUM_PARTS]) for part in range(NUM_PARTS)]
        self._parameters = list(module.parameters())
        generator = torch.Generator().manual_seed(0)
        size = sum(parameter.numel() for parameter in self._parameters)
        self._start = torch.randn(size, generator=generator).numpy().astype(np.float32)

    def measure(self) -> dict[str, float]:
        """Returns the largest ``eigenvalue`` of the Hessian, and the ``variance`` of the gradient of a mini-batch."""
        training = self._module.training
        self._module.eval()
        gradients = torch.stack([self._gradient(part) for part in self._parts])
        loss = self._task.loss
        value, self._start = top_eigenvalue(lambda: loss(self._module, self._batch), self._parameters, self._start)
        self._module.train(training)
        return {"eigenvalue": value, "variance": gradients.var(dim=0).sum().item()}

    def _gradient(self, batch: Any) -> Tensor:
        loss = self._task.loss(self._module, batch)
        return flat(torch.autograd.grad(loss, self._parameters, materialize_grads=True))


def squared_norm_of(module: nn.Module) -> float:
    """Returns the squared L2 norm of the gradient."""
    norms = torch._foreach_norm([parameter.grad for parameter in module.parameters() if parameter.grad is not None])
    return torch.stack(norms).square().sum().item()


def _short(value: float) -> float:
    """Returns a number with five digits, which is what a picture shows."""
    return float(f"{value:.5g}")
