"""The papers' tasks: their networks, how they are trained, and data sets that are read from a folder."""

from __future__ import annotations

import math
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.tasks import READ_TASKS, RECIPES, build_task
from tests.support.bench_runs import result_of, run_command
from tests.support.tiny_data_sets import WRITERS, write_cifar10


def rates_of(task: str, model: str, steps: int) -> list[float]:
    """The learning rates of a training of so many steps."""
    recipe = RECIPES[task][model]
    optimizer = recipe.optimizer(nn.Linear(1, 1))
    scheduler = recipe.scheduler(optimizer, steps)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


#: By task and network, as the papers say: its optimizer, mini-batch, epochs (of SelSync its steps with 16 workers), the
#: label among so many, the quality to reach, and the learning rates, each with the epochs (or steps) that have it.
PAPERS: dict[tuple[str, str], tuple[dict[str, Any], int, float, int, float | None, list[tuple[float, int]]]] = {
    ("cifar10", "resnet101"): (
        {"kind": "SGD", "weight_decay": 0.0004, "momentum": 0.9, "nesterov": False},
        *(32, 22_800 * 16 * 32 / 50_000, 1, 98.5, [(0.1, 110), (0.01, 40), (0.001, 83)]),
    ),
    ("cifar100", "vgg11"): (
        {"kind": "SGD", "weight_decay": 0.0005, "momentum": 0.9},
        *(32, 10_800 * 16 * 32 / 50_000, 1, 90.9, [(0.01, 50), (0.001, 25), (0.0001, 36)]),
    ),
    ("imagenet", "alexnet"): ({"kind": "Adam"}, 128, 106_500 * 16 * 128 / 1_281_167, 5, 85.15, [(0.0001, 50)]),
    ("wikitext", "transformer"): (
        {"kind": "SGD", "weight_decay": 0, "momentum": 0},
        *(20, 28_000 * 16 * 20 * 35 / 103_227_021, 1, 90.02, [(2.0, 2000), (1.6, 2000), (1.28, 1)]),
    ),
    # EA-Pipe: "The number of training epochs was set to 100. Learning rates were reduced to one tenth after every 30"
    ("cifar10", "vgg16"): ({"kind": "SGD"}, 16, 100, 1, 100 - 7.36, [(0.01, 30), (0.001, 30), (1e-4, 30), (1e-5, 10)]),
    ("cifar100", "resnet34"): ({"kind": "SGD"}, 16, 100, 1, None, [(0.01, 30), (0.001, 30), (1e-4, 30), (1e-5, 10)]),
    ("imagenet", "resnet50"): ({"kind": "SGD"}, 64, 100, 1, None, [(0.04, 30), (0.004, 30), (4e-4, 30), (4e-5, 10)]),
}


@pytest.mark.parametrize(("task", "model"), PAPERS)
def test_recipes_are_those_of_the_papers(task: str, model: str) -> None:
    usual, batch_size, epochs, top, target, rates = PAPERS[task, model]
    recipe = RECIPES[task][model]
    optimizer = recipe.optimizer(nn.Linear(1, 1))
    assert {name: optimizer.defaults.get(name, type(optimizer).__name__) for name in usual} == usual
    assert (recipe.batch_size, recipe.epochs) == (batch_size, round(epochs))
    assert (recipe.top, recipe.target) == (top, recipe.target if target is None else target)
    steps = sum(number for _, number in rates)
    assert rates_of(task, model, steps) == pytest.approx([rate for rate, number in rates for _ in range(number)])


def test_cifar10_is_read(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    task = build_task("cifar10", data=tmp_path, model="vgg16")
    assert (task.name, task.metric, task.batch_size) == ("cifar10", "accuracy %", 16)
    assert task.labels is not None
    assert task.labels.tolist() == [0, 1, 2, 3] * 5
    with (tmp_path / "cifar-10-batches-py" / "data_batch_2").open("rb") as file:
        pixels = torch.from_numpy(pickle.load(file, encoding="bytes")[b"data"]).view(4, 3, 32, 32)
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    expected = (pixels[1].permute(1, 2, 0) / 255 - mean) / deviation
    plain, label = task.samples_to_test_on[5]
    assert torch.allclose(plain.permute(1, 2, 0), expected, atol=1e-6)
    assert label == 1
    assert torch.equal(task.test_set[0][0], task.test_set[0][0]), "nothing is random"
    padded = torch.nn.functional.pad(pixels[1], (4, 4, 4, 4))
    parts = [padded[:, y : y + 32, x : x + 32] for y in range(9) for x in range(9)]
    sample = (task.train_set[5][0] * deviation.view(3, 1, 1) + mean.view(3, 1, 1)) * 255
    assert any(torch.allclose(sample, one.float(), atol=1e-3) for part in parts for one in (part, part.flip(2)))


def test_options_that_do_not_fit_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before any rank is started; of data sets the message tells what the folder has to contain."""
    said = {f"--task {name}": f"task='{name}' needs data=FOLDER. The folder has to contain" for name in READ_TASKS}
    said |= {f"--task {name} --data {tmp_path}": f"data='{tmp_path}' has no " for name in READ_TASKS}
    said["--task cifar10 --data . --model vgg11"] = "model='vgg11' is not one of task='cifar10': resnet101, vgg16."
    said["--data x"] = "data='x' has no effect on task='digits'"
    said["--task topics --model vgg16"] = "model='vgg16' has no effect on task='topics'"
    said |= {"--workers -1": "workers must be at least 0, got -1", "--device gpu": "device='gpu' must be one of cpu,"}
    for words, message in said.items():
        assert run_command("converge", f"{words} --output {tmp_path / 'output'}") == 2
        assert message in capsys.readouterr().err


class Harmful:
    """Runs code when it is read."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


def test_damaged_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, write in WRITERS.items():
        write(tmp_path / name)
    batch = tmp_path / "cifar10" / "cifar-10-batches-py" / "data_batch_3"
    contents: list[bytes] = [
        b"",
        batch.read_bytes()[:1000],
        pickle.dumps({b"data": Harmful()}),
        pickle.dumps({b"data": torch.zeros(4, 3072).numpy(), b"labels": [0] * 4}),
        batch.read_bytes().replace(b"labels", b"labelz"),
    ]
    for content in contents:
        batch.write_bytes(content)
        with pytest.raises(ValueError, match=r"data_batch_3 is damaged, or of another format .* The folder has to"):
            build_task("cifar10", data=tmp_path / "cifar10")
    assert not (tmp_path / "harm").exists(), "it has not run"
    (tmp_path / "imagenet" / "val" / "n02000000").mkdir()
    with pytest.raises(ValueError, match="n02000000 has no images"):
        build_task("imagenet", data=tmp_path / "imagenet")
    (tmp_path / "imagenet" / "val" / "n02000000" / "a.JPEG").touch()
    with pytest.raises(ValueError, match="n02000000 in one of train and val alone"):
        build_task("imagenet", data=tmp_path / "imagenet")
    (tmp_path / "wikitext" / "wiki.test.tokens").write_text("too short")
    with pytest.raises(ValueError, match=r"wiki.test.tokens is damaged, or of another format .3 words"):
        build_task("wikitext", data=tmp_path / "wikitext")


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("words", ["cifar100 --model resnet34 --workers 1", "wikitext"])
def test_the_command_trains(words: str, tmp_path: Path) -> None:
    """With the real network, two methods and two ranks."""
    name = words.partition(" ")[0]
    WRITERS[name](tmp_path)
    options = f"--task {words} --data {tmp_path} --methods ddp selsync:delta=0 --steps 1 --evaluations 1"
    result = result_of("converge", options, tmp_path / "output")
    assert [(run["method"], run["points"][-1]["steps"]) for run in result["runs"]] == [
        ("ddp", 1),
        ("selsync:delta=0", 1),
    ]
    assert all(math.isfinite(run["points"][-1]["quality"]) for run in result["runs"])
    assert f"### {name}" in (tmp_path / "output" / "converge.md").read_text()
