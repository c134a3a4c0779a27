"""Pipe-SGD in loops that are not plain: gradients that come and go, several optimizers, states saved and loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, AdamW

from lightning_pipesync.methods.pipe_sgd import PipeSGD
from tests.quick.methods.test_pipe_sgd import CASES, STEPS, TRAINED, assert_follows, expected
from tests.quick.methods.test_pipe_sgd import train as train_case
from tests.references.pipe_sgd import Delayed, flat, flat_of, simulate
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_raised, call_on_hosts, on_ranks, raised
from tests.support.models import Run, assert_same, batch, loss, seeded_mlp

#: Four ranks on two hosts, which compress their sums.
ON_HOSTS = ("k=1", "bf16", "fp8", "int8", "chunked_topk", "int4 without feedback")
OTHERS = [case for case in CASES if case not in TRAINED[3]]


@cache
def others_trained() -> Outcomes:
    return launch_cases({case: partial(train_case, case) for case in OTHERS}, 3)


@pytest.mark.parametrize("case", OTHERS)
def test_follows_algorithm_1(case: str) -> None:
    assert_follows(others_trained()[case], case, 3)


def test_hosts_with_several_ranks_compress_their_sums() -> None:
    """And resume with the residuals of these."""
    cases: dict[Any, Any] = {case: partial(call_on_hosts, 2, train_case, case) for case in ON_HOSTS}
    outcomes = launch_cases({**cases, "resumed": partial(call_on_hosts, 2, train_case, "int8", 4)}, 4)
    for case in ON_HOSTS:
        assert_follows(outcomes[case], case, 4, 1 if case == "k=1" else 2)
        assert case == "k=1" or not torch.equal(expected(case, 4, 2)[-1], expected(case, 4)[-1])
    assert_follows(outcomes["resumed"], "int8", 4, 2)


# --- what the loop does ----------------------------------------------------------------------------------------------


class ComesAndGoes(nn.Module):
    """One layer is used on some ranks and in some steps only; one never is; one is thawed later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.sometimes, self.never = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen, self.head = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 3)

    def loss(self, step: int, rank: int) -> Tensor:
        x, y = batch(step, rank)
        x = torch.tanh(self.frozen(torch.tanh(self.first(x))))
        if step % 4 == 1 or (step % 4 == 2 and rank == 1):
            x = x + self.sometimes(x)
        return nn.functional.cross_entropy(self.head(x), y)

    def thaw(self, optimizer: Any, step: int) -> None:
        if step == 5:
            self.frozen.requires_grad_()
            optimizer.add_param_group({"params": list(self.frozen.parameters()), "lr": 0.02})


def comes_and_goes(kind: type[SGD] | type[AdamW]) -> tuple[ComesAndGoes, Any]:
    torch.manual_seed(0)
    model = ComesAndGoes()
    trained = [p for p in model.parameters() if p.requires_grad]
    settings = {"momentum": 0.9, "weight_decay": 0.1} if kind is SGD else {}
    return model, kind([{"params": trained[:2]}, {"params": trained[2:], "lr": 0.003}], lr=0.01, **settings)


def come_and_go(kind: type[SGD] | type[AdamW], settings: dict[str, Any], resumes: bool = False) -> list[Tensor]:
    model, optimizer = comes_and_goes(kind)
    sync, weights = PipeSGD(model, optimizer, staleness=2, **settings), []
    for step in range(STEPS):
        model.thaw(optimizer, step)
        if step == 6 and resumes:  # after a layer was thawed, with its gradients in flight
            sync.flush()
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), sync.state_dict()))
            sync.detach()
            model, optimizer = comes_and_goes(kind)
            sync = PipeSGD(model, optimizer, staleness=2, **settings)
            model.thaw(optimizer, 5)
            for one, state_of in zip((model, optimizer, sync), saved, strict=True):
                one.load_state_dict(state_of)
        optimizer.zero_grad()
        model.loss(step, dist.get_rank()).backward()
        sync.step()
        weights.append(flat(model))
    sync.detach()
    return weights


@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize("compensation", ["none", "momentum", "prediction"])
def test_gradients_that_come_and_go(compensation: str, kind: type[SGD] | type[AdamW]) -> None:
    """A parameter without a gradient on any rank is left alone, as in DDP: momentum and decay, too."""
    settings: list[dict[str, Any]] = [{}, {"pipeline_level": 2, "segments": 3}, {"bucket_mb": 1e-4}]
    cases = {str(one): partial(come_and_go, kind, {**one, "delay_compensation": compensation}) for one in settings}
    cases["resumed"] = partial(come_and_go, kind, {"delay_compensation": compensation}, resumes=True)
    model, optimizer = comes_and_goes(kind)
    given: Any = {"staleness": 2, "delay_compensation": compensation, "error_feedback": False}
    given |= {"world_size": 2, "num_steps": STEPS, "before_step": partial(model.thaw, optimizer)}
    reference = simulate(model, optimizer, ComesAndGoes.loss, **given)
    outcomes = launch_cases(cases, 2)
    for case in cases:
        for outcome in outcomes[case]:
            for step, (weights, other) in enumerate(zip(outcome, reference, strict=True)):
                assert torch.equal(weights, other), f"{case}, step {step}: off by {(weights - other).abs().max()}"


def two_optimizers() -> tuple[nn.Module, list[SGD]]:
    model = seeded_mlp()
    return model, [SGD(model[index].parameters(), lr=0.1, momentum=0.9) for index in (0, 2)]


def turns(step: int) -> range:
    """As a GAN: the second optimizer in every other step only."""
    return range(1 + step % 2)


def alternate(compensation: str) -> list[Tensor]:
    model, optimizers = two_optimizers()
    sync, weights = PipeSGD(model, optimizers, delay_compensation=compensation), []
    for step in range(STEPS):
        for index in turns(step):
            model.zero_grad()
            loss(model, step, dist.get_rank()).backward()
            sync.step(optimizer=optimizers[index])
        sync.restore_true_weights()
        weights.append(flat(model))
    assert sync.metrics()["updates"] == STEPS - 1 + STEPS // 2 - 1
    sync.detach()
    return weights


@pytest.mark.parametrize("compensation", ["none", "prediction"])
def test_two_optimizers(compensation: str) -> None:
    model, optimizers = two_optimizers()
    first, second = loops = [Delayed(optimizer, delay_compensation=compensation) for optimizer in optimizers]
    reference = []
    for step in range(STEPS):
        for index in turns(step):
            own = []
            for rank in range(2):
                with first.predicted(rank), second.predicted(rank):
                    model.zero_grad()
                    loss(model, step, rank).backward()
                    own.append([p.grad for p in loops[index].parameters])
            loops[index].step(own)
        reference.append(flat(model))
    for outcome in on_ranks(alternate, 2, compensation):
        assert all(map(torch.equal, outcome, reference))


class Counting(SGD):
    """Keeps counts among its hyper-parameters, as some optimizers do."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__([{"params": list(parameters), "taken": 0, "in_place": torch.zeros(())}], lr=1.0)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            group["taken"] += 1
            group["in_place"].add_(1)
        return super().step(closure)


def count() -> list[tuple[int, float, float]]:
    run, counts = Run(PipeSGD, lambda model: Counting(model.parameters()), staleness=2), []
    [group] = run.optimizer.param_groups
    for step in range(6):
        group["lr"] = 1.0 / (1 + step)
        run.step(step)
        counts.append((group["taken"], float(group["in_place"]), group["lr"]))
    run.sync.detach()
    return counts


def test_what_an_optimizer_changes_itself_goes_on() -> None:
    """Its hyper-parameters are those of the gradient's step, as a schedule has set them; then the present ones."""
    [counts] = on_ranks(count, 1)
    assert counts == [(max(0, step - 1), max(0, step - 1), 1.0 / (1 + step)) for step in range(6)]


# --- checkpoints ------------------------------------------------------------------------------------------------------


#: A case, and the step after which it is resumed.
RESUMED = [
    ("drained", 2),
    ("warm-up", 3),
    ("warm-up", 5),
    ("less by distance", 4),
    ("by momentum", 4),
    ("int8 without feedback", 4),
    ("level 2, k=2", 4),
]


def test_a_resumed_run_is_the_uninterrupted_one() -> None:
    """The defaults, and a codec with its residuals, are cases of the conformance suite."""
    outcomes = launch_cases({case: partial(train_case, *case) for case in RESUMED}, 3)
    for case in RESUMED:
        assert_follows(outcomes[case], case[0], 3)


def load_elsewhere(saved_by: dict[str, Any], loaded_by: dict[str, Any]) -> tuple[str, str] | None:
    run = Run(PipeSGD, **saved_by)
    run.step(0)
    run.sync.flush()
    saved = run.sync.state_dict()
    run.sync.detach()
    other = PipeSGD(run.model, run.optimizer, **loaded_by)
    refused = raised(lambda: other.load_state_dict(saved))
    other.detach()
    return refused


def test_a_state_of_other_settings_is_refused() -> None:
    """Such as the residuals of a flat exchange where hosts have several ranks."""
    flat_exchange = {"compression": "int8", "topology": "flat"}
    cases = {
        "staleness": partial(load_elsewhere, {}, {"staleness": 2}),
        "topology": partial(call_on_hosts, 2, load_elsewhere, flat_exchange, {"compression": "int8"}),
        "same": partial(call_on_hosts, 2, load_elsewhere, flat_exchange, flat_exchange),
    }
    outcomes = launch_cases(cases, 4)
    assert outcomes["same"] == [None] * 4
    for staleness, topology in zip(outcomes["staleness"], outcomes["topology"], strict=True):
        assert_raised(staleness, "ValueError", "'staleness': 1", "'staleness': 2")
        assert_raised(topology, "ValueError", "'topology': 'flat'", "'topology': 'torus2d with rows of 2 ranks'")


def save_own(settings: dict[str, Any]) -> tuple[int, Tensor]:
    """Returns bytes of own gradients in a saved state, and the weights of a run that goes on from it."""
    run = Run(PipeSGD, lambda model: SGD(model.parameters(), lr=0.1), **settings)
    run.steps(range(2))
    saved = run.sync.state_dict()
    own = saved["pipes"][0]["in_flight"][0]["own"]
    run.sync.load_state_dict(saved)
    run.steps(range(2))
    return sum(gradient.nbytes for gradient in own.values() if gradient is not None), flat_of(list(run.end().values()))


def test_own_gradients_may_be_left_out_of_checkpoints() -> None:
    size = sum(p.nbytes for p in seeded_mlp().parameters())
    kinds: list[dict[str, Any]] = [{}, {"checkpoint_own_gradients": False}, {"delay_compensation": "momentum"}]
    outcomes = launch_cases({index: partial(save_own, settings) for index, settings in enumerate(kinds)}, 2)
    for index, num_bytes in enumerate((size, 0, 0)):
        (first, weights), (second, others) = outcomes[index]
        assert first == second == num_bytes
        assert torch.equal(weights, others)
    assert not torch.equal(outcomes[0][0][1], outcomes[1][0][1])
    assert torch.allclose(outcomes[0][0][1], outcomes[1][0][1], atol=0.05), "it predicts with the averages"


# --- loss scaling -----------------------------------------------------------------------------------------------------


def drain_with_a_scaler(completes: bool) -> dict[str, Tensor]:
    """A framework's hooks before an update call ``reduce`` with its scaler, also for gradients that are drained."""
    run = Run(PipeSGD, staleness=2, delay_compensation="none")
    scaler = GradScaler("cpu", init_scale=1024.0)
    for number in range(5):
        run.optimizer.zero_grad()
        scaler.scale(loss(run.model, number, dist.get_rank())).backward()
        run.sync.reduce(scaler=scaler)
        run.sync.step(lambda: scaler.step(run.optimizer))
        scaler.update()
    run.sync.drain(lambda optimizer: run.sync.reduce(optimizer, scaler) if completes else None)
    return run.end()


def test_drained_gradients_have_no_loss_scale() -> None:
    for without, completed in zip(*(on_ranks(drain_with_a_scaler, 2, one) for one in (False, True)), strict=True):
        assert_same(completed, without)
