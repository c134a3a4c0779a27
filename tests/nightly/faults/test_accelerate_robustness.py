"""PipeSyncAccelerator in unusual loops, and what it refuses on all ranks."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipesync import PipeSyncAccelerator, PipeSyncPlugin
from lightning_pipesync.accelerate.optimizer import SynchronizedOptimizer
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import launch, raised
from tests.support.lightning_models import dataset, train_loader
from tests.support.models import OPTIMIZERS, batch, seeded_mlp

EXACT = {"dear": {}, "selsync": {"delta": 0, "aggregation": "gradients"}, "pipe_sgd": {"staleness": 0}}


def accelerator_of(method: str, **settings: Any) -> PipeSyncAccelerator:
    return PipeSyncAccelerator(PipeSyncPlugin(method, **settings))


def forward_backward(accelerator: Accelerator, model: nn.Module, step: int) -> None:
    x, y = batch(step, accelerator.process_index)
    accelerator.backward(nn.functional.cross_entropy(model(x), y))


def messages_alone(method: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator_of(method)
    return [str(each.message) for each in caught if "nothing is synchronized" in str(each.message)]


def test_one_process_alone_is_told_so() -> None:
    [[message]] = launch(partial(messages_alone, "dear"), 1, init=False)
    assert message.startswith("DeAR is attached in one process alone")
    assert launch(partial(messages_alone, "dear"), 2, init=False) == [[], []]


def train_adversaries(method: str) -> Tensor:
    """Two models with an optimizer each, and a third and fourth that share one; gradients accumulated by hand."""
    accelerator = Accelerator(cpu=True) if method == "ddp" else accelerator_of(method, **EXACT[method])
    models = [seeded_mlp(seed + accelerator.process_index) for seed in (0, 10, 20, 30)]
    optimizers = [
        OPTIMIZERS["sgd"](models[0]),
        OPTIMIZERS["adamw"](models[1]),
        OPTIMIZERS["sgd"](nn.ModuleList(models[2:])),
    ]
    first, second, *others = accelerator.prepare(*models[:2], *optimizers[:2], *models[2:])
    first_optimizer, second_optimizer, third, fourth = others
    shared = accelerator.prepare(optimizers[2])
    for step in range(4):
        for model, optimizer in ((first, first_optimizer), (second, second_optimizer)):
            with accelerator.no_sync(model):
                forward_backward(accelerator, model, 2 * step)
            forward_backward(accelerator, model, 2 * step + 1)
            optimizer.step()
            optimizer.zero_grad()
        x, y = batch(step, accelerator.process_index)
        accelerator.backward(nn.functional.cross_entropy(third(x) + fourth(x), y))
        shared.step()
        shared.zero_grad()
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    return nn.utils.parameters_to_vector(nn.ModuleList(models).parameters()).detach()


def trained_with_a_loss_scaler(method: str) -> dict[str, Any]:
    """Six steps with a scaler that overflows on one rank in one of them, beside those without."""
    weights, skipped = {}, []
    for scaled in (False, True):
        accelerator = accelerator_of(method, **EXACT[method])
        model = seeded_mlp()
        network, optimizer = accelerator.prepare(model, OPTIMIZERS["sgd"](model))
        assert isinstance(optimizer, SynchronizedOptimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        for step in range(6):
            if step == 2 and not scaled:
                continue
            x, y = batch(step, accelerator.process_index)
            loss = nn.functional.cross_entropy(network(x), y)
            if scaled:
                optimizer.scaler = scaler
                loss = scaler.scale(loss)
                if step == 2 and accelerator.process_index == 1:
                    loss = loss * float("inf")
            loss.backward()
            optimizer.take_gradient()
            accelerator.clip_grad_norm_(network.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(optimizer.step_was_skipped)
        accelerator.consolidate()
        weights[scaled] = nn.utils.parameters_to_vector(model.parameters()).detach()
        accelerator.free_memory()
    return {"weights": weights, "skipped": skipped, "scale": scaler.get_scale()}


def left_out(method: str) -> Tensor:
    """Steps of which one is left out after clipping, and one clips twice, as a gradient is accumulated by hand."""
    accelerator = accelerator_of(method, **EXACT[method])
    model = seeded_mlp()
    network, optimizer = accelerator.prepare(model, OPTIMIZERS["sgd"](model))
    for step in range(6):
        forward_backward(accelerator, network, step)
        accelerator.clip_grad_norm_(network.parameters(), 0.5)
        if step == 4:
            continue
        if step != 2:
            optimizer.step()
        network.zero_grad()
    accelerator.consolidate()
    accelerator.free_memory()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def refusals() -> dict[str, Any]:
    """What raises, by a word of the message; and what it raises."""
    dear = accelerator_of("dear")
    model, other = seeded_mlp(), seeded_mlp()
    network, optimizer = dear.prepare(model, OPTIMIZERS["sgd"](model))
    alone = dear.prepare(other)
    stray = dear.prepare(OPTIMIZERS["sgd"](seeded_mlp()))
    forward_backward(dear, network, 0)
    first, *_ = network.parameters()
    outcomes = {
        "its optimizer was not prepared": raised(lambda: alone(batch(0, 0)[0])),
        "no model that was prepared": raised(stray.step),
        "all parameters of one optimizer": raised(lambda: dear.clip_grad_norm_([first], 1.0)),
        "norm_type=inf": raised(lambda: dear.clip_grad_norm_(network.parameters(), 1.0, float("inf"))),
        "was called directly": raised(optimizer.optimizer.step),
        "even_batches=False": raised(lambda: dear.join_uneven_inputs([network], even_batches=False).__enter__()),
        "prepare_pipeline() needs": raised(
            lambda: dear.prepare_pipeline(model, nn.functional.cross_entropy, lambda _: None)
        ),
    }
    loader = dear.prepare(train_loader())
    outcomes["would be divided twice"] = raised(lambda: dear.prepare_train_loader(loader))
    assert dear.prepare(dear.prepare_train_loader(train_loader())).total_batch_size == loader.total_batch_size
    dear.scaler = torch.amp.GradScaler("cpu")
    fused = torch.optim.AdamW(model.parameters(), fused=True)
    outcomes["a fused AdamW"] = raised(lambda: dear.prepare(fused))
    dear.free_memory()
    hooked = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
    outcomes["comm_hook='bf16'"] = raised(lambda: PipeSyncAccelerator(PipeSyncPlugin("dear"), kwargs_handlers=[hooked]))
    pipeline = accelerator_of("ea_pipe")
    outcomes["accelerator.prepare_pipeline(layers"] = raised(lambda: pipeline.prepare(model, OPTIMIZERS["sgd"](model)))
    pipeline.prepare_pipeline(
        model, nn.functional.cross_entropy, lambda p: OPTIMIZERS["sgd"](nn.ParameterList(p)), virtual_stages=2
    )
    outcomes["start a process for each stage"] = raised(lambda: pipeline.load_state("none"))
    pipeline.free_memory()
    model = seeded_mlp()
    selsync = accelerator_of("selsync", injection=(0.5, 0.5))
    network, optimizer = selsync.prepare(model, OPTIMIZERS["sgd"](model))
    outcomes["prepare_train_loader(train_loader)"] = raised(lambda: forward_backward(selsync, network, 0))
    sampled = DataLoader(dataset(), 8, sampler=torch.utils.data.SubsetRandomSampler(range(64)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = [len(batch[0]) for batch in selsync.prepare_train_loader(sampled)]
    assert max(rows) < 8 + 4, rows  # 4 of 8 / (1 + 0.5 * 0.5 * 2) and those of another rank
    outcomes["a batch_size"] = raised(lambda: selsync.prepare_train_loader(DataLoader(dataset(), batch_size=None)))
    selsync.free_memory()
    selsync = accelerator_of("selsync")
    network, optimizer = selsync.prepare(model, OPTIMIZERS["sgd"](model))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        forward_backward(selsync, network, 0)
    outcomes["partition='seldp' has no effect"] = ("", " ".join(str(one.message) for one in caught))
    selsync.free_memory()
    return outcomes


def evaluate_alone() -> Any:
    """Rank 0 goes to an evaluation that rank 1 does not know of, in SelSync, where that is a collective call."""
    accelerator = accelerator_of("selsync", delta=1e9, timeout_s=5)
    model = seeded_mlp()
    network, optimizer = accelerator.prepare(model, OPTIMIZERS["sgd"](model))
    for step in range(4):
        forward_backward(accelerator, network, step)
        outcome = raised(optimizer.step)
        if outcome is None and accelerator.process_index == 0 and step == 2:
            outcome = raised(network.eval)
        if outcome is not None:
            return outcome
        optimizer.zero_grad()
    return None


@pytest.fixture(scope="module")
def trained() -> Outcomes:
    cases: dict[Any, Any] = {"refusals": refusals}
    cases["ddp"] = partial(train_adversaries, "ddp")
    for how in (train_adversaries, trained_with_a_loss_scaler, left_out):
        cases |= {(how, method): partial(how, method) for method in EXACT}
    return launch_cases({**cases, "evaluation": evaluate_alone}, 2, init=False, launch=launch)


@pytest.mark.parametrize("method", EXACT)
def test_several_models_and_optimizers(method: str, trained: Outcomes) -> None:
    """As with plain Accelerate, bit for bit, whoever shares an optimizer."""
    for rank in (0, 1):
        assert torch.equal(trained[train_adversaries, method][rank], trained["ddp"][rank])


@pytest.mark.parametrize("method", EXACT)
def test_unusual_loops(method: str, trained: Outcomes) -> None:
    """A loss scaler unscales what is applied and skips on all ranks; ranks that leave out a step agree."""
    one, other = trained[left_out, method]
    assert torch.equal(one, other)
    for outcome in trained[trained_with_a_loss_scaler, method]:
        torch.testing.assert_close(outcome["weights"][True], outcome["weights"][False], rtol=1e-5, atol=1e-7)
        assert outcome["skipped"] == [False] * 5 + [False, False, True, False, False, False]
        assert outcome["scale"] == 512


def test_what_cannot_work_says_so_on_all_ranks(trained: Outcomes) -> None:
    for refused in trained["refusals"]:
        for words, outcome in refused.items():
            assert outcome is not None, words
            assert words in outcome[1], outcome


def test_an_evaluation_on_one_rank_is_an_error(trained: Outcomes) -> None:
    """No rank waits for ever, and none goes on with what was meant for another exchange."""
    for outcome in trained["evaluation"]:
        assert outcome is not None
        assert "Rank 0 is about to consolidate the weights" in outcome[1]
