"""A table of what each rank has spent its time on, which names the slow ones."""

from __future__ import annotations

import io
import time
from contextlib import redirect_stdout, suppress
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn

from lightning_pipesync import DeAR, PipeSyncAccelerator, PipeSyncPlugin, StepReport, step_report
from lightning_pipesync.training.rank_times import RankTimes, as_table
from tests.support.case_table import launch_cases
from tests.support.lightning_models import Classifier, train_loader, trainer

#: Seconds that rank 1 computes for longer in each step, and the others wait.
LATE = 0.3


def text_of(*ranks: RankTimes) -> list[str]:
    console = Console(file=io.StringIO(), width=200, record=True)
    console.print(as_table(ranks))
    return [line for line in console.export_text().splitlines() if "host" in line]


def test_who_computes_for_longer_is_slow() -> None:
    fast, slow = RankTimes(10.0, 6.0, 3.0, "host a"), RankTimes(10.0, 1.0, 2.25, "host b")
    _, first, second, third = text_of(fast, slow, fast)
    assert first.split() == third.replace("2", "0", 1).split()
    for words in ("host a", " 4.0 ", " 6.0 ", " 60 ", " 3.0 "):
        assert words in first
    for words in ("host b", " 9.0 ", " 1.0 ", " 10 ", " 2.2 ", " slow "):
        assert words in second
    assert "slow" not in first + third


def test_of_two_the_slower_one_is_slow_and_what_nobody_counts_is_no_number() -> None:
    _, fast, slow = text_of(RankTimes(1.0, host="host"), RankTimes(1.5, host="host"))
    assert "slow" not in fast
    assert " 1.5 " in slow
    assert " slow " in slow
    assert fast.count(" - ") == 3


def printed_of_loop(fails: bool) -> str:
    """What a plain loop prints."""
    model = nn.Linear(4, 2)
    sync, output = DeAR(model, torch.optim.SGD(model.parameters(), lr=0.1)), io.StringIO()
    with redirect_stdout(output), suppress(ZeroDivisionError), step_report(sync):
        for _ in range(6):
            time.sleep(LATE * dist.get_rank())
            model.zero_grad()
            model(torch.randn(3, 4)).sum().backward()
            sync.step()
        if fails:
            raise ZeroDivisionError
    sync.detach()
    return output.getvalue()


def printed_of_accelerator(plugin: PipeSyncPlugin | None) -> str:
    """What a loop with Accelerate prints."""
    output, accelerator = io.StringIO(), PipeSyncAccelerator(plugin)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with redirect_stdout(output), step_report(accelerator):
        model, optimizer = accelerator.prepare(model, optimizer)
        for _ in range(6):
            time.sleep(LATE * dist.get_rank())
            optimizer.zero_grad()
            accelerator.backward(model(torch.randn(3, 4)).sum())
            optimizer.step()
    accelerator.free_memory()
    return output.getvalue()


class Late(Classifier):
    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        time.sleep(LATE * self.global_rank)
        return super().training_step(batch, batch_idx)


def printed_of_trainer(folder: Path, strategy: str) -> str:
    """What a training prints at its end."""
    output = io.StringIO()
    with redirect_stdout(output), mock.patch.dict("os.environ", COLUMNS="200"):
        run = trainer(strategy, 2, folder, callbacks=[StepReport(table=True)], max_epochs=2)
        run.fit(Late(), train_loader())
    return output.getvalue()


def test_a_plain_loop_prints_it_on_rank_0() -> None:
    outcomes = launch_cases({fails: partial(printed_of_loop, fails) for fails in (False, True)}, 2)
    first, second = outcomes[False]
    assert "Seconds of each rank" in first
    assert "slow" in first
    assert second == ""
    assert outcomes[True] == ["", ""], "an error is not held up by a table"


def rows_of(printed: str) -> list[list[str]]:
    return [line.replace("│", "").split() for line in printed.splitlines() if line.startswith("│")]


def test_a_loop_with_accelerate_prints_it_on_rank_0() -> None:
    plugins = {"dear": PipeSyncPlugin("dear"), "none": None}
    outcomes = launch_cases({name: partial(printed_of_accelerator, plugin) for name, plugin in plugins.items()}, 2)
    [prompt, late], [of_plain, _] = (rows_of(outcomes[name][0]) for name in plugins)
    assert late[-1] == "slow"
    assert float(prompt[4]) > float(late[4]), "the prompt rank waits for longer"
    assert of_plain[4:] == ["-", "-", "-"]
    assert outcomes["dear"][1] == ""


def test_a_trainer_prints_it_on_rank_0(tmp_path: Path) -> None:
    strategies = ("dear", "ddp")
    cases = {strategy: partial(printed_of_trainer, tmp_path / strategy, strategy) for strategy in strategies}
    outcomes = launch_cases(cases, 2, init=False)
    for strategy in strategies:
        first, second = outcomes[strategy]
        prompt, late = rows_of(first)
        assert (prompt[0], late[0], late[-1]) == ("0", "1", "slow")
        assert float(prompt[4]) > float(late[4]), "the prompt rank waits for longer"
        assert "Seconds of each rank" not in second


def test_without_rich_a_report_is_refused_before_the_training() -> None:
    with (
        mock.patch("lightning_pipesync.core.extras.find_spec", return_value=None),
        pytest.raises(ModuleNotFoundError, match=r"The table of ranks needs rich: pip install"),
    ):
        StepReport(table=True)
