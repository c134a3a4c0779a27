"""The task with Muon: which optimizer updates what."""

from __future__ import annotations

import torch
from torch.optim import AdamW, Muon

from benchmarks.tasks.topics_muon import topics_muon
from lightning_pipesync.lab.bench.tasks import build_task


def test_muon_updates_hidden_matrices_and_adamw_the_rest() -> None:
    """Bit for bit as both by themselves, at rates that follow the schedule."""
    task = topics_muon()
    torch.manual_seed(0)
    one, other = task.build_module(), task.build_module()
    other.load_state_dict(one.state_dict())
    optimizer = task.optimizer(one)
    scheduler = task.scheduler(optimizer, 40)
    hidden = [p for p in other.layers.parameters() if p.dim() == 2]  # type: ignore[union-attr]
    rest = [p for p in other.parameters() if all(p is not each for each in hidden)]
    assert len(hidden) == 8, "two layers with four matrices each"
    parts = Muon(hidden, weight_decay=0.0), AdamW(rest)
    [batch] = task.train_set[:8]
    rates = []
    for _ in range(3):
        for part, group in zip(parts, optimizer.param_groups, strict=True):
            part.param_groups[0]["lr"] = group["lr"]
        rates.append([group["lr"] for group in optimizer.param_groups])
        for module in (one, other):
            module.zero_grad()
            task.loss(module, [batch]).backward()
        optimizer.step()
        for part in parts:
            part.step()
        scheduler.step()
    assert rates[0][0] < rates[1][0] < rates[2][0]
    for parameter, expected in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=0, atol=0)


def test_it_is_the_same_task_otherwise() -> None:
    task, plain = topics_muon(), build_task("topics")
    assert (task.batch_size, task.epochs, task.target) == (plain.batch_size, plain.epochs, plain.target)
