"""`python -m benchmarks.pipeline`: its models and methods, its arithmetic, and that it runs."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.optim import SGD

from benchmarks.pipeline import Pipeline, choice_of, outcome_of
from benchmarks.pipelines import grid as pipeline_grid
from benchmarks.pipelines import training as pipeline_training
from benchmarks.pipelines.grid import train_at_once
from benchmarks.pipelines.training import MODELS, Data, build_engine, parse_method, train
from lightning_pipesync.core.layers import flattened, numbers_of_parameters, partition
from lightning_pipesync.lab.bench.tasks import RECIPES, build_task
from lightning_pipesync.methods.ea_pipe import EAPipe
from tests.nightly.benchmarks.bench_runs import assert_pictures, result_of, run_command
from tests.support.tiny_data_sets import write_cifar10, write_cifar100


@pytest.mark.parametrize(("name", "stages"), [("resnet", 50), ("vgg", 8), ("cnn", 4), ("mlp", 8)])
def test_models_can_be_cut(name: str, stages: int) -> None:
    """Every stage has a parameter."""
    model = MODELS[name](build_task("digits"))
    assert isinstance(model, nn.Sequential)
    optimizers: list[SGD] = []

    def optimizer_of(parameters: Any) -> SGD:
        optimizers.append(SGD(parameters, lr=0.1))
        return optimizers[-1]

    settings: dict[str, Any] = {"algorithm": "naive", "split": "parameters"}
    engine = EAPipe(model, nn.functional.cross_entropy, optimizer_of, virtual_stages=stages, **settings)
    engine.train_batch((torch.rand(4, 1, 8, 8), torch.arange(4)))
    assert len(optimizers) == stages
    assert engine.forward(torch.rand(4, 1, 8, 8)).shape == (4, 10)


@pytest.mark.parametrize(
    ("task", "model", "num_classes", "most"),
    [("cifar10", "vgg16", 10, 12), ("cifar100", "resnet34", 100, 19), ("imagenet", "resnet50", 1000, 19)],
)
def test_networks_of_the_paper_can_be_cut(task: str, model: str, num_classes: int, most: int) -> None:
    """Into 8 stages, and as many as they have layers or blocks with parameters."""
    with torch.device("meta"):
        layers = flattened(RECIPES[task][model].build(num_classes))  # type: ignore[arg-type]
    numbers = numbers_of_parameters([layer for _, layer in layers])
    for stages in (8, most):
        cuts = [0, *partition(numbers, stages), len(layers)]
        assert len(cuts) == stages + 1
        assert all(sum(numbers[start:end]) > 0 for start, end in pairwise(cuts))


def few_steps(model: nn.Sequential, engine: EAPipe) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    for number in range(11):
        engine.train_batch((torch.rand(8, 1, 8, 8, generator=generator), torch.arange(8)))
        if number in (5, 10):
            engine.flush()
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


@pytest.mark.parametrize("method", ["ea_pipe:elastic_force=0.3", "pipedream"])
def test_replicas_need_no_stages(method: str) -> None:
    """What trains in one stage, because that is faster, has the weights of the whole pipeline, bit for bit."""
    outcomes = []
    for in_one_stage in (True, False):
        torch.manual_seed(0)
        model = MODELS["vgg"](build_task("digits"))
        assert isinstance(model, nn.Sequential)
        make = partial(SGD, lr=0.1, momentum=0.9)
        if in_one_stage:
            engine = build_engine(model, make, method, 0, 4)
        else:
            engine = EAPipe(model, nn.functional.cross_entropy, make, parse_method(method, 0), virtual_stages=4)
        outcomes.append(few_steps(model, engine))
        assert len(engine.cuts) == (0 if in_one_stage else 3)
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))


def settings_of(**changed: Any) -> Pipeline:
    settings = {"task": "digits", "model": "vgg", "stages": 3, "methods": ("sgd",), "seeds": (0,), "validation": 0.0}
    optimizer = {"learning_rates": (0.1,), "momentum": 0.0, "weight_decay": 0.0, "batch_sizes": (100,)}
    return Pipeline(**{**settings, **optimizer, "epochs": 2, "evaluations": 4, **changed})


def test_sgd_is_sgd() -> None:
    """One stage, with the schedule of the learning rate, does what a plain loop does."""
    task = build_task("digits")
    points = train(task, "sgd", 0.1, 100, 3, settings_of())["points"]
    torch.manual_seed(3)
    model = MODELS["vgg"](task)
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [7, 13, 20])  # of 22 steps
    order = torch.Generator().manual_seed(3)
    loader = torch.utils.data.DataLoader(task.train_set, 100, shuffle=True, generator=order, drop_last=True)
    for _ in range(2):
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            scheduler.step()
    model.eval()
    images, labels = map(torch.stack, zip(*task.test_set, strict=True))
    error = 100 * (model(images).argmax(dim=1) != labels.long()).float().mean().item()
    assert [point["epoch"] for point in points] == [pytest.approx(n / 11) for n in (6, 11, 16, 22)]
    assert points[-1]["error"] == pytest.approx(error)


def test_what_diverges_stops_at_once() -> None:
    run = train(build_task("digits"), "sgd", 1e30, 100, 0, settings_of(model="cnn"))
    assert run["diverged"]
    assert run["points"] == []


def test_outcomes() -> None:
    runs = [{"diverged": False, "points": [{"epoch": 1.0, "error": error}]} for error in (1.0, 2.0, 3.0)]
    outcome = outcome_of(runs)
    assert outcome.error == 2.0
    assert outcome.interval == pytest.approx(4.3027 / 3**0.5, rel=1e-4)
    diverged = {"diverged": True, "points": []}
    assert outcome_of([*runs, diverged]).num_diverged == 1
    assert outcome_of([diverged]).error is None


def test_the_validation_set_chooses() -> None:
    """By the mean over the seeds, among settings that never diverge; the test set has no say."""

    def run(method: str, rate: float, size: int, validation: float, error: float) -> dict[str, Any]:
        before = {"epoch": 1.0, "error": error, "validation": max(validation, 3.5)}
        points = [before, {"epoch": 2.0, "error": error, "validation": validation}]
        named = {"method": method, "learning_rate": rate, "batch_size": size, "seed": 0}
        return {**named, "diverged": validation > 100, "points": points}

    runs = [run("a", 0.1, 4, 3.0, 9.0), run("a", 0.1, 4, 5.0, 11.0)]
    runs += [run("a", 0.2, 4, 6.0, 1.0), run("b", 0.1, 4, 4.5, 2.0)]
    choice = choice_of(runs)
    assert choice is not None
    assert (choice.method, choice.learning_rate, choice.validation, choice.outcome.error) == ("a", 0.1, 4.0, 10.0)
    assert choice.lowest_after == 1.5  # 2 epochs, and 1: the first of two that are the same
    runs.append(run("a", 0.1, 4, 101.0, 0.0))
    choice = choice_of(runs)
    assert choice is not None
    assert (choice.method, choice.validation) == ("b", 4.5)
    assert choice_of(runs[-1:]) is None


def test_the_command(tmp_path: Path) -> None:
    """A method that diverges does not stop the others."""
    methods = "--methods sgd weight_stashing ea_pipe:elastic_force=0.3,period=2"
    options = "--model cnn --stages 3 --learning_rates 0.1 1e30 --seeds 0 1"
    size = "--batch_sizes 200 --epochs 1 --evaluations 1"
    result = result_of("pipeline", f"{methods} {options} {size}", tmp_path)
    assert len(result["runs"]) == 3 * 2 * 2
    for run in result["runs"]:
        assert run["diverged"] == (run["learning_rate"] > 1)
        assert len(run["points"]) == 1 or run["diverged"]
    text = (tmp_path / "pipeline.md").read_text()
    assert "| ea_pipe: elastic_force=0.3, period=2 |" in text
    assert "diverged |" in text
    assert_pictures(tmp_path, "pipeline", "pipeline_by_rate")


def test_pictures_without_a_curve_that_can_be_drawn(tmp_path: Path) -> None:
    """Of each method one training or all diverge."""
    settings = settings_of(methods=("sgd", "naive"), learning_rates=(0.1,), output=tmp_path)
    runs = [
        {"method": method, "learning_rate": 0.1, "batch_size": settings.batch_sizes[0], "diverged": True, "points": []}
        for method in settings.methods
    ]
    settings.draw([{"runs": runs}])
    assert_pictures(tmp_path, "pipeline", "pipeline_by_rate")


def test_the_command_for_many_at_once(tmp_path: Path) -> None:
    methods = "--methods sgd weight_stashing ea_pipe:elastic_force=0.3 ea_pipe:elastic_force=0.6"
    options = "--task mnist1d --model mlp --stages 4 --learning_rates 0.01 1e30"
    size = "--batch_sizes 40 80 --seeds 0 1 --epochs 1 --evaluations 2"
    result = result_of("pipeline", f"{methods} {options} {size}", tmp_path)
    assert len(result["runs"]) == 4 * 2 * 2 * 2
    for run in result["runs"]:
        assert run["diverged"] == (run["learning_rate"] > 1)
        assert len(run["points"]) == (0 if run["diverged"] else 2)
    text = (tmp_path / "pipeline.md").read_text()
    assert text.count("| ea_pipe | ") == 2  # one of the forces, for each batch size
    assert text.count("| ea_pipe: elastic_force=0.3 |") == 2


@pytest.mark.parametrize("method", ["sgd", "pipedream", "spectrain", "naive", "ea_pipe:elastic_force=0.3"])
def test_many_at_once_are_the_engine(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights to begin with, mini-batches, stages and learning rates: the same weights to rounding."""
    task = build_task("digits")
    settings = settings_of(
        model="mlp", stages=4, methods=(method,), learning_rates=(0.01, 0.05), validation=0.1, batch_sizes=(53,),
        seeds=(1, 2), evaluations=1, momentum=0.5,
    )  # fmt: skip
    num_weights = sum(p.numel() for p in MODELS["mlp"](task).parameters())
    place = torch.randn(num_weights, generator=torch.Generator().manual_seed(0))

    def place_of(task: Any, model: nn.Module, part: Any) -> float:
        return (parameters_to_vector(model.parameters()) @ place).item()

    with monkeypatch.context() as patched:  # not what they err in, but where they are
        patched.setattr(pipeline_training, "error_of", place_of)
        patched.setattr(pipeline_grid, "_errors", lambda trainings, _: (trainings.master @ place).tolist())
        places = {(run["learning_rate"], run["seed"]): run["points"] for run in train_at_once(task, settings)}
        assert list(places) == [(0.01, 1), (0.01, 2), (0.05, 1), (0.05, 2)]
        [point], [other] = places[0.05, 1], train(task, method, 0.05, 53, 1, settings)["points"]
        assert point == pytest.approx(other, rel=1e-5)
        assert places[0.01, 1] != [pytest.approx(point, rel=1e-4)]
    if method != "spectrain":
        return  # by what a member's error is found does not depend on the method
    errors = {(run["learning_rate"], run["seed"]): run["points"] for run in train_at_once(task, settings)}
    [other] = train(task, method, 0.05, 53, 1, settings)["points"]
    assert errors[0.05, 1] == [pytest.approx(other, abs=0.9)]  # an image of the validation set, of 120


def test_data_of_the_paper(tmp_path: Path) -> None:
    """A few images in the format of the data set, and the paper's network, in as many stages as the paper has."""
    write_cifar100(tmp_path)
    options = f"--task cifar100 --data {tmp_path} --model resnet34 --stages 8 --batch_sizes 6 --workers 1"
    rest = "--methods spectrain ea_pipe:elastic_force=0.3 --learning_rates 0.01 --momentum 0.9 --seeds 0 --epochs 1"
    result = result_of("pipeline", f"{options} {rest} --evaluations 1", tmp_path / "output")
    assert [run["method"] for run in result["runs"]] == ["spectrain", "ea_pipe:elastic_force=0.3"]
    for run in result["runs"]:
        assert not run["diverged"]
        assert 0 <= run["points"][-1]["error"] <= 100


def test_options_for_data_of_the_paper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = {
        "--task cifar10 --model vgg16": "task='cifar10' needs data=FOLDER. The folder has to contain cifar-10-batches",
        f"--task cifar10 --data {tmp_path}": "model='resnet' is not one of task='cifar10': resnet101, vgg16.",
        f"--task cifar10 --model vgg16 --data {tmp_path}": f"data='{tmp_path}' has no cifar-10-batches-py/data_batch_1",
        "--model vgg16": "model='vgg16' is not known; there are resnet, vgg, cnn, mlp, residual_mlp.",
        "--task wikitext": "task='wikitext' is not known",
        "--model mlp --device cuda": "device='cuda' with model='mlp': its trainings are made at once here.",
        "--data x": "data='x' has no effect on task='digits'",
    }
    for words, message in said.items():
        assert run_command("pipeline", f"{words} --output {tmp_path / 'output'}") == 2
        assert message in capsys.readouterr().err
    write_cifar10(tmp_path)
    words = f"--task cifar10 --data {tmp_path} --model vgg16 --batch_sizes 64 --output {tmp_path / 'output'}"
    assert run_command("pipeline", words) == 2
    assert "batch_sizes: the 16 samples are less than one of 64" in capsys.readouterr().err


def test_validation_is_held_out() -> None:
    task = build_task("digits")
    data = Data.of(task, 0.25)
    assert data.validation is not None
    held_out = {tuple(x.flatten().tolist()) for x, _ in data.validation}
    assert len(data.validation) == 299
    assert len(data.train) == 1197 - 299
    assert held_out.isdisjoint(tuple(x.flatten().tolist()) for x, _ in data.train)
