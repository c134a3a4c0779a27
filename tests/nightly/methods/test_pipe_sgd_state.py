"""Pipe-SGD in loops that are not plain: gradients that come and go, several optimizers, states saved and loaded."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from lightning_pipesync.methods.pipe_sgd import PipeSGD
from tests.quick.methods.test_pipe_sgd import flat
from tests.support.harness import assert_raised, call_on_hosts, on_ranks, raised
from tests.support.models import Run, assert_same, average_gradients, batch, loss, seeded_mlp, state

STEPS = 10


class Delayed:
    """The delayed loop on real processes: averages gradients as DDP would, and applies those of k steps before.

    With ``predicts`` a step begins with :meth:`look_ahead`, for the weights that this rank's own gradients lead to.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, staleness: int, predicts: bool) -> None:
        self.model, self.optimizer, self.staleness, self.predicts = model, optimizer, staleness, predicts
        self.in_flight: list[dict[nn.Parameter, Tensor | None]] = []
        self.own: list[dict[str, Tensor | None]] = []
        self.true: list[Tensor] = []

    def look_ahead(self) -> None:
        self.true = [p.detach().clone() for p in self.model.parameters()]
        trial, optimizer = copy.deepcopy((self.model, self.optimizer))
        for group in optimizer.param_groups:
            group["fused"] = True  # as trial steps on a CPU are
        for gradients in self.own if self.predicts else []:
            for name, p in trial.named_parameters():
                p.grad = None if gradients[name] is None else gradients[name].clone()
            optimizer.step()
        set_parameters(self.model, list(trial.parameters()))

    def step(self) -> None:
        set_parameters(self.model, self.true)
        self.own.append({n: None if p.grad is None else p.grad.clone() for n, p in self.model.named_parameters()})
        average_gradients(self.model)
        self.in_flight.append({p: None if p.grad is None else p.grad.clone() for p in self.model.parameters()})
        if len(self.in_flight) > self.staleness:
            oldest = self.in_flight.pop(0)
            self.own.pop(0)
            for p in self.model.parameters():
                p.grad = oldest.get(p)
            self.optimizer.step()


@torch.no_grad()
def set_parameters(model: nn.Module, values: list[Tensor]) -> None:
    for p, value in zip(model.parameters(), values, strict=True):
        p.copy_(value)


class ComesAndGoes(nn.Module):
    """One layer is used on some ranks and in some steps only; one never is; one is thawed later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.sometimes, self.never = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen, self.head = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 3)

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = torch.tanh(self.frozen(torch.tanh(self.first(x))))
        if step % 4 == 1 or (step % 4 == 2 and dist.get_rank() == 1):
            x = x + self.sometimes(x)
        return self.head(x)


def come_and_go(settings: dict[str, Any] | None, predicts: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = ComesAndGoes()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = AdamW([{"params": trained[:2]}, {"params": trained[2:], "lr": 0.003}], lr=0.01)
    compensation = "prediction" if predicts else "none"
    sync = (
        Delayed(model, optimizer, 2, predicts)
        if settings is None
        else PipeSGD(model, optimizer, staleness=2, delay_compensation=compensation, **settings)
    )
    weights = []
    for step in range(STEPS):
        if step == 5:
            model.frozen.requires_grad_()
            optimizer.add_param_group({"params": list(model.frozen.parameters()), "lr": 0.02})
        optimizer.zero_grad()
        if isinstance(sync, Delayed):
            sync.look_ahead()
        x, y = batch(step, dist.get_rank())
        nn.functional.cross_entropy(model(x, step), y).backward()
        sync.step()
        weights.append(flat(model))
    if isinstance(sync, PipeSGD):
        sync.detach()
    return weights


@pytest.mark.parametrize("predicts", [False, True])
@pytest.mark.parametrize("settings", [{}, {"pipeline_level": 2, "segments": 3}, {"bucket_mb": 1e-4}], ids=str)
def test_gradients_that_come_and_go(settings: dict[str, Any], predicts: bool) -> None:
    """A parameter without a gradient on any rank is left alone, as in DDP: momentum and decay, too."""
    reference = on_ranks(come_and_go, 2, None, predicts)[0]
    for outcome in on_ranks(come_and_go, 2, settings, predicts):
        for step, (weights, other) in enumerate(zip(outcome, reference, strict=True)):
            assert torch.equal(weights, other), f"step {step}: off by {(weights - other).abs().max()}"


def alternate(pipelined: bool, predicts: bool) -> list[Tensor]:
    """As a GAN: two optimizers in turns, the second one in every other step only."""
    model = seeded_mlp()
    parts = [model[0], model[2]]
    optimizers = [SGD(part.parameters(), lr=0.1, momentum=0.9) for part in parts]
    sync = PipeSGD(model, optimizers, delay_compensation="prediction" if predicts else "none") if pipelined else None
    loops = [Delayed(part, optimizer, 1, predicts) for part, optimizer in zip(parts, optimizers, strict=True)]
    weights = []
    for step in range(STEPS):
        for index, optimizer in enumerate(optimizers):
            if index == 0 or step % 2:
                model.zero_grad()
                if sync is None:
                    for loop in loops:
                        loop.look_ahead()
                loss(model, step, dist.get_rank()).backward()
                if sync is None:
                    set_parameters(parts[1 - index], loops[1 - index].true)
                    loops[index].step()
                else:
                    sync.step(optimizer=optimizer)
        if sync is not None:
            sync.restore_true_weights()
        weights.append(flat(model))
    if sync is not None:
        assert sync.metrics()["updates"] == STEPS - 1 + STEPS // 2 - 1
        sync.detach()
    return weights


@pytest.mark.parametrize("predicts", [False, True])
def test_two_optimizers(predicts: bool) -> None:
    expected = on_ranks(alternate, 2, False, predicts)[0]
    for outcome in on_ranks(alternate, 2, True, predicts):
        assert all(map(torch.equal, outcome, expected))


class Counting(SGD):
    """Keeps a count among its hyper-parameters, as some optimizers do."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        super().__init__([{"params": list(parameters), "taken": 0, "in_place": torch.zeros(())}], lr)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            group["taken"] += 1
            group["in_place"].add_(1)
        return super().step(closure)


def scheduled(step: int) -> float:
    return 10.0**-step


def count() -> tuple[list[float], list[int], float]:
    """Returns the learning rates that the updates used, the count after each step, and the learning rate in the end."""
    run = Run(PipeSGD, lambda model: Counting(model.parameters(), lr=1.0), staleness=2)
    used: list[float] = []
    counts = []
    run.optimizer.register_step_post_hook(lambda one, *_: used.append(one.param_groups[0]["lr"]))
    [group] = run.optimizer.param_groups
    for step in range(6):
        group["lr"] = scheduled(step)
        run.step(step)
        assert group["in_place"] == group["taken"]
        counts.append(group["taken"])
    run.sync.detach()
    return used, counts, group["lr"]


def test_an_update_uses_the_learning_rate_of_its_gradient() -> None:
    """What a schedule changes is that of the gradient's step; what the optimizer itself changes goes on."""
    [(used, counts, last)] = on_ranks(count, 1)
    assert used == [scheduled(step) for step in range(4)]
    assert counts == [0, 0, 1, 2, 3, 4]
    assert last == scheduled(5)


def interrupted(settings: dict[str, Any], at: int | None) -> tuple[list[Tensor], dict[str, float]]:
    """Trains; with ``at``, goes on in a new object after so many steps, from what the old one has saved."""

    def begin() -> Run:
        return Run(PipeSGD, "adamw", seeded_mlp(batch_norm=True), **settings)

    run = begin()
    weights = []
    for step in range(STEPS):
        if step in (4, 6):
            run.sync.flush()
            run.sync.resume()
            if step == at:
                saved, whole, kept = run.sync.state_dict(), state(run.model), run.optimizer.state_dict()
                run.sync.detach()
                run = begin()
                run.model.load_state_dict(whole)
                run.optimizer.load_state_dict(kept)
                run.sync.load_state_dict(saved)
        for group in run.optimizer.param_groups:
            group["lr"] = 0.01 * 0.9**step
        run.step(step)
        weights.append(flat(run.model))
    run.sync.drain()
    metrics = run.sync.metrics()
    run.sync.detach()
    return [*weights, flat(run.model)], metrics


@pytest.mark.parametrize(
    "settings",
    [
        {"staleness": 3},
        {"staleness": 0},
        {"compression": "int8", "error_feedback": False},
        {"staleness": 2, "delay_compensation": "distance", "distance_constant": 1e-4},
        {"delay_compensation": "none"},
        {"delay_compensation": "momentum"},
        {"staleness": 2, "warmup_steps": 5, "pipeline_level": 2},
    ],
    ids=str,
)
def test_a_resumed_run_is_the_uninterrupted_one(settings: dict[str, Any]) -> None:
    """The defaults, and a codec with its residuals, are cases of the conformance suite."""
    whole, *resumed = (on_ranks(interrupted, 3, settings, at) for at in (None, 4, 6))
    for outcomes in resumed:
        for (weights, metrics), (expected, of_whole) in zip(outcomes, whole, strict=True):
            assert all(map(torch.equal, weights, expected))
            assert metrics["updates"] == of_whole["updates"]
            assert metrics["staleness"] == of_whole["staleness"]


def test_a_run_on_hosts_of_several_ranks_resumes() -> None:
    settings = {"compression": "int8"}
    whole, resumed = (on_ranks(call_on_hosts, 4, 2, interrupted, settings, at) for at in (None, 4))
    for (weights, _), (expected, _) in zip(resumed, whole, strict=True):
        assert all(map(torch.equal, weights, expected))
        assert all(map(torch.equal, weights, whole[0][0]))


def load_elsewhere() -> list[tuple[str, str] | None]:
    """Loads the residuals of a flat exchange where hosts have several ranks; in a former state these have no name."""
    run = Run(PipeSGD, compression="int8", topology="flat")
    run.step(0)
    run.sync.flush()
    saved = run.sync.state_dict()
    run.sync.detach()
    outcomes = []
    for topology in ("flat", "auto"):
        for form in (saved, {**saved, "settings": {k: v for k, v in saved["settings"].items() if k != "topology"}}):
            other = PipeSGD(run.model, run.optimizer, compression="int8", topology=topology)
            outcomes.append(raised(lambda other=other, form=form: other.load_state_dict(form)))
            other.detach()
    return outcomes


def test_residuals_of_another_topology_are_refused() -> None:
    for flat_again, former, *refused in on_ranks(call_on_hosts, 4, 2, load_elsewhere):
        assert flat_again is former is None
        for outcome in refused:
            assert_raised(outcome, "ValueError", "'topology': 'flat'", "'topology': 'torus2d with rows of 2 ranks'")


def load_another() -> tuple[str, str] | None:
    run = Run(PipeSGD)
    saved = run.sync.state_dict()
    run.sync.detach()
    other = PipeSGD(run.model, run.optimizer, staleness=2)
    refused = raised(lambda: other.load_state_dict(saved))
    other.detach()
    return refused


def test_a_state_of_other_settings_is_refused() -> None:
    for refused in on_ranks(load_another, 2):
        assert_raised(refused, "ValueError", "'staleness': 1", "'staleness': 2")


def scale_losses() -> tuple[list[Tensor], list[float], list[Tensor]]:
    """With a loss scale that overflows on one rank only; and without any, where it did not."""
    model = seeded_mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    sync = PipeSGD(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    weights, scales = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss(model, step, dist.get_rank())).backward()
        if step == 4 and dist.get_rank() == 1:
            model[0].weight.grad[0, 0] = torch.inf
        sync.reduce(scaler=scaler)
        sync.step(lambda: scaler.step(optimizer))
        scaler.update()
        weights.append(flat(model))
        scales.append(scaler.get_scale())
    sync.detach()
    model = seeded_mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    plain = Delayed(model, optimizer, 1, predicts=True)
    reference = []
    for step in range(5):
        optimizer.zero_grad()
        plain.look_ahead()
        loss(model, step, dist.get_rank()).backward()
        plain.step()
        reference.append(flat(model))
    return weights, scales, reference


def test_loss_scaling() -> None:
    """A gradient is unscaled by its own step's scale, and one that overflows on one rank is skipped by all."""
    outcomes = on_ranks(scale_losses, 2)
    for weights, scales, reference in outcomes:
        assert scales == outcomes[0][1]
        assert all(map(torch.equal, weights, outcomes[0][0]))
        for one, other in zip(weights[:5], reference, strict=True):
            torch.testing.assert_close(one, other)
        assert torch.equal(weights[5], weights[4]), "the update that is due in the step after the overflow is skipped"
        assert not torch.equal(weights[6], weights[5])
        assert scales[2] == 2 * scales[0], "it grows in the meantime"
        assert scales[5] == scales[4] / 2
        assert all(torch.isfinite(one).all() for one in weights)


def flush_after_different_segments() -> dict[str, Tensor]:
    """At level 2 a rank has begun more segments than another when it is to wait: each uses a layer of its own."""
    torch.manual_seed(0)
    layers = {"first": nn.Linear(6, 6), "0": nn.Linear(6, 6), "1": nn.Linear(6, 6), "head": nn.Linear(6, 3)}
    model = nn.ModuleDict(layers)
    optimizer = SGD(model.parameters(), lr=0.1)
    rank = dist.get_rank()
    sync = PipeSGD(model, optimizer, pipeline_level=2, segments=3, timeout_s=10)
    for i in range(4):
        x, y = batch(i, rank)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model["head"](model[str(rank)](model["first"](x))), y).backward()
        if i == 2:
            sync.flush()
            sync.resume()
        sync.step()
    sync.flush()
    sync.detach()
    return state(model)


def test_ranks_that_have_begun_different_segments_do_not_wait_for_each_other() -> None:
    weights, others = on_ranks(flush_after_different_segments, 2)
    assert_same(weights, others)


def thawed_and_saved(resumes: bool, settings: dict[str, Any]) -> dict[str, Tensor]:
    """The first layer joins after three steps, as with a callback that thaws layers, and a checkpoint comes later."""

    def begin(seed: int) -> tuple[nn.Module, SGD, PipeSGD]:
        model = seeded_mlp(seed)
        optimizer = SGD(model[2].parameters(), lr=0.05, momentum=0.9)
        return model, optimizer, PipeSGD(model, optimizer, **settings)

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss(model, number, dist.get_rank()).backward()
        sync.step()

    model, optimizer, sync = begin(0)
    for number in range(3):
        step(number)
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.02})
    for number in range(3, 7):
        step(number)
    sync.flush()
    if resumes:
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), sync.state_dict()))
        sync.detach()
        model, optimizer, sync = begin(1)
        optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.02})
        for one, state_of in zip((model, optimizer, sync), saved, strict=True):
            one.load_state_dict(state_of)
    else:
        sync.state_dict()
        sync.resume()
    for number in range(7, 12):
        step(number)
    sync.flush()
    sync.detach()
    return state(model)


@pytest.mark.parametrize("settings", [{}, {"staleness": 2, "compression": "int8"}, {"low_rank": 1}], ids=str)
def test_layers_that_were_thawed_are_resumed(settings: dict[str, Any]) -> None:
    """With their gradients in flight, and residuals."""
    for whole, resumed in zip(*(on_ranks(thawed_and_saved, 2, one, settings) for one in (False, True)), strict=True):
        assert_same(resumed, whole)


def train_more_on_one_rank(when: str) -> tuple[tuple[str, str] | None, float]:
    """Rank 0 alone adds the first layer to the optimizer, before a step or before a state is loaded."""
    model = seeded_mlp()
    optimizer = SGD(model[2].parameters(), lr=0.05)
    sync = PipeSGD(model, optimizer, timeout_s=30)

    def train_on() -> None:
        for number in range(6):
            optimizer.zero_grad()
            loss(model, number, dist.get_rank()).backward()
            if number == 3 and dist.get_rank() == 0:
                optimizer.add_param_group({"params": list(model[0].parameters())})
            if number == 3 and when == "load":
                sync.load_state_dict(saved)
            sync.step()

    saved, began = sync.state_dict(), time.monotonic()
    error = raised(train_on)
    sync.detach(timeout_s=0)
    return error, time.monotonic() - began


@pytest.mark.parametrize("when", ["step", "load"])
def test_parameters_that_one_rank_alone_adds_are_named_at_once(when: str) -> None:
    (error, seconds), (of_other, also_seconds) = on_ranks(train_more_on_one_rank, 2, when)
    assert_raised(error, "ValueError", "rank 0", "not on rank 1")
    assert_raised(of_other, "ValueError", "rank 0", "not on rank 1")
    assert max(seconds, also_seconds) < 25


def skip_and_leave_out_a_pass(settings: dict[str, Any]) -> tuple[str, str] | None:
    """All ranks skip a step that has begun; rank 1 has no backward pass for the next one."""
    run = Run(PipeSGD, timeout_s=30, **settings)

    def train_on() -> None:
        run.steps(range(3))
        run.backward(3)
        run.sync.clip(1.0)
        if dist.get_rank() == 0:
            run.backward(4)
        run.sync.step()
        run.steps(range(5, 9))
        run.sync.flush()

    error = raised(train_on)
    run.sync.detach(timeout_s=1)
    return error


@pytest.mark.parametrize("settings", [{}, {"staleness": 2}, {"pipeline_level": 2}], ids=str)
def test_a_rank_that_takes_a_step_which_others_have_skipped_is_refused(settings: dict[str, Any]) -> None:
    for error in on_ranks(skip_and_leave_out_a_pass, 2, settings):
        assert_raised(error, "RuntimeError", "have not skipped the same steps of SGD")
