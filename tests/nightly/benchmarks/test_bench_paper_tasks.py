"""The papers' tasks: their networks, how they are trained, and data sets that are read from a folder."""

from __future__ import annotations

import math
import os
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam
from torch.utils.data import default_collate

from lightning_pipesync.cli import main
from lightning_pipesync.lab.bench.converge import on_all_ranks, parse_method
from lightning_pipesync.lab.bench.models import TABLES
from lightning_pipesync.lab.bench.models.classifiers import ResidualBlock, alexnet, resnet, vgg
from lightning_pipesync.lab.bench.models.word_transformer import WordTransformer
from lightning_pipesync.lab.bench.tasks import READ_TASKS, RECIPES, build_task
from lightning_pipesync.lab.bench.tasks.imagenet import center, random_part
from lightning_pipesync.lab.bench.tasks.recipes import WINDOW
from tests.nightly.benchmarks.bench_runs import result_of
from tests.support.case_table import launch_cases
from tests.support.tiny_data_sets import CLASSES, LINE, WRITERS, write_cifar10, write_imagenet


@pytest.mark.parametrize(
    ("build", "number"),
    [
        (partial(resnet, 101), 44_549_160),
        (partial(resnet, 50), 25_557_032),
        (partial(resnet, 34), 21_797_672),
        (partial(vgg, 11), 132_863_336),
        (partial(vgg, 16), 138_357_544),
        (alexnet, 61_100_840),
    ],
)
def test_networks_have_the_published_number_of_parameters(build: Any, number: int) -> None:
    """With 1,000 classes, as torchvision lists them."""
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in build(1000).parameters()) == number


def test_sizes_that_the_paper_and_the_emulated_networks_have() -> None:
    with torch.device("meta"):
        assert round(sum(p.numel() for p in vgg(11, 1000).parameters()) * 4 / 2**20) == 507, "SelSync II-A"
        for name, built in (("alexnet", alexnet(1000)), ("resnet50", resnet(50, 1000))):
            shapes = sorted(tuple(p.shape) for p in built.parameters())
            table = TABLES[name]().layers
            assert shapes == sorted(tensor.shape for layer in table for tensor in layer.tensors)


@pytest.mark.parametrize(
    ("network", "size", "num_classes"),
    [(partial(resnet, 34), 32, 100), (alexnet, 224, 3), (partial(resnet, 18, width=4, for_small_images=True), 8, 10)],
)
def test_networks_classify_images(network: Any, size: int, num_classes: int) -> None:
    assert network(num_classes=num_classes)(torch.rand(2, 3, size, size)).shape == (2, num_classes)


def test_a_block_adds_its_input() -> None:
    block = next(layer for layer in resnet(18, 10, width=4) if isinstance(layer, ResidualBlock))
    for parameter in block.branch.parameters():
        nn.init.zeros_(parameter)
    x = torch.rand(2, 4, 8, 8)
    assert torch.equal(block(x), x)


def test_the_transformer_is_causal_and_knows_positions() -> None:
    torch.manual_seed(0)
    module = WordTransformer(50, WINDOW).eval()
    words = torch.randint(50, (2, WINDOW))
    changed = words.clone()
    changed[:, 20] = (words[:, 20] + 1) % 50
    logits, others = module(words), module(changed)
    assert torch.allclose(logits[:, :20], others[:, :20], atol=1e-6)
    assert not torch.allclose(logits[:, 20], others[:, 20], atol=1e-3)
    assert not torch.allclose(module(torch.zeros(1, 2, dtype=torch.long))[0, 0], module(torch.zeros(1, 2).long())[0, 1])
    assert module.positions[7, 4].item() == pytest.approx(math.sin(7 / 10_000 ** (4 / 200)), rel=1e-5)
    assert module.positions[7, 5].item() == pytest.approx(math.cos(7 / 10_000 ** (4 / 200)), rel=1e-5)


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


def test_selsync_resnet101() -> None:
    """ "per-worker batch-size 32 and SGD optimizer with initial lr 0.1, weight decay 0.0004 and momentum 0.9. We
    progressively decay the lr by 10x after 110 and 150 epochs"
    """
    recipe = RECIPES["cifar10"]["resnet101"]
    optimizer = recipe.optimizer(nn.Linear(1, 1))
    assert isinstance(optimizer, SGD)
    assert [optimizer.defaults[name] for name in ("weight_decay", "momentum", "nesterov")] == [0.0004, 0.9, False]
    assert (recipe.batch_size, recipe.epochs, recipe.top, recipe.target) == (
        32,
        round(22_800 * 16 * 32 / 50_000),
        1,
        98.5,
    )
    rates = rates_of("cifar10", "resnet101", recipe.epochs)
    assert rates == pytest.approx([0.1] * 110 + [0.01] * 40 + [0.001] * (recipe.epochs - 150))


def test_selsync_vgg11() -> None:
    """ "batch-size 32 and SGD optimizer with momentum 0.9, weight decay 0.0005 and initial lr 0.01 that decays by 10x
    after epoch 50 and 75"
    """
    recipe = RECIPES["cifar100"]["vgg11"]
    optimizer = recipe.optimizer(nn.Linear(1, 1))
    assert isinstance(optimizer, SGD)
    assert [optimizer.defaults[name] for name in ("weight_decay", "momentum")] == [0.0005, 0.9]
    assert (recipe.batch_size, recipe.epochs, recipe.top, recipe.target) == (
        32,
        round(10_800 * 16 * 32 / 50_000),
        1,
        90.9,
    )
    assert rates_of("cifar100", "vgg11", 111) == pytest.approx([0.01] * 50 + [0.001] * 25 + [0.0001] * 36)


def test_selsync_alexnet() -> None:
    """ "top-5 test accuracy with batch-size 128, Adam optimizer and fixed lr of 0.0001" """
    recipe = RECIPES["imagenet"]["alexnet"]
    optimizer = recipe.optimizer(nn.Linear(1, 1))
    assert type(optimizer) is Adam
    assert (recipe.batch_size, recipe.top, recipe.target) == (128, 5, 85.15)
    assert recipe.epochs == round(106_500 * 16 * 128 / 1_281_167)
    assert set(rates_of("imagenet", "alexnet", 50)) == {0.0001}


def test_selsync_transformer() -> None:
    """ "2 hidden layers of dimension 200, 2 heads, an embedding dimension of 200, dropout 0.2 and 35 bptt ...
    batch-size to 20 and use SGD optimizer with initial lr 2.0 that decays by a factor of 0.8 every 2000 iterations"
    """
    recipe = RECIPES["wikitext"]["transformer"]
    module = recipe.build(10)
    assert isinstance(module, WordTransformer)
    layers = [layer for layer in module.modules() if isinstance(layer, nn.TransformerEncoderLayer)]
    assert [(layer.linear1.out_features, layer.self_attn.num_heads) for layer in layers] == [(200, 2)] * 2
    assert module.words.embedding_dim == 200
    assert {part.p for part in module.modules() if isinstance(part, nn.Dropout)} == {0.2}
    assert module.positions.shape == (35, 200)
    optimizer = recipe.optimizer(module)
    assert isinstance(optimizer, SGD)
    assert [optimizer.defaults[name] for name in ("weight_decay", "momentum")] == [0, 0]
    assert (recipe.batch_size, recipe.target) == (20, 90.02)
    assert recipe.epochs == round(28_000 * 16 * 20 * 35 / 103_227_021)
    assert rates_of("wikitext", "transformer", 4001) == pytest.approx([2.0] * 2000 + [1.6] * 2000 + [1.28])


@pytest.mark.parametrize(
    ("task", "model", "batch_size", "rate"),
    [("cifar10", "vgg16", 16, 0.01), ("cifar100", "resnet34", 16, 0.01), ("imagenet", "resnet50", 64, 0.04)],
)
def test_ea_pipe(task: str, model: str, batch_size: int, rate: float) -> None:
    """ "The number of training epochs was set to 100. Learning rates were reduced to one tenth after every 30" """
    recipe = RECIPES[task][model]
    assert (recipe.batch_size, recipe.epochs, recipe.top) == (batch_size, 100, 1)
    assert isinstance(recipe.optimizer(nn.Linear(1, 1)), SGD)
    expected = [rate] * 30 + [rate / 10] * 30 + [rate / 100] * 30 + [rate / 1000] * 10
    assert rates_of(task, model, 100) == pytest.approx(expected)
    assert RECIPES["cifar10"]["vgg16"].target == 100 - 7.36


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
    seen = {tuple(task.train_set[5][0].flatten()[1500:1520].tolist()) for _ in range(30)}
    assert len(seen) > 10, "moved and mirrored at random"
    padded = torch.nn.functional.pad(pixels[1], (4, 4, 4, 4))
    parts = [padded[:, y : y + 32, x : x + 32] for y in range(9) for x in range(9)]
    sample = (task.train_set[5][0] * deviation.view(3, 1, 1) + mean.view(3, 1, 1)) * 255
    assert any(torch.allclose(sample, one.float(), atol=1e-3) for part in parts for one in (part, part.flip(2)))


def test_held_back_samples_are_not_augmented(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    whole, task = build_task("cifar10", data=tmp_path), build_task("cifar10", "validation", data=tmp_path)
    assert len(task.test_set) == 2
    for number, index in enumerate(task.test_set.indices):
        assert torch.equal(task.test_set[number][0], whole.samples_to_test_on[index][0])
    kept = task.train_set.indices
    assert torch.equal(task.samples_to_test_on[3][0], whole.samples_to_test_on[kept[3]][0])
    assert task.labels is not None
    assert task.labels.tolist() == [int(whole.test_set[i % 4][1]) for i in kept]


def test_images_are_read_when_they_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their labels are known before, which non-IID data need."""
    write_imagenet(tmp_path)
    damaged = tmp_path / "train" / CLASSES[1] / f"{CLASSES[1]}_0.JPEG"
    damaged.write_bytes(b"no image")
    task = build_task("imagenet", data=tmp_path)
    assert task.metric == "top-5 accuracy %"
    assert task.with_label_skew(1).labels is not None
    assert task.labels is not None
    assert task.labels.tolist() == [0, 0, 1, 1, 2, 2]
    with pytest.raises(ValueError, match=rf"{damaged.name} is damaged, or of another format .* train/CLASS/IMAGE"):
        task.train_set[2]
    image, label = task.train_set[3]
    assert (image.shape, label) == ((3, 224, 224), 1)
    grey = image * torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1) + torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    assert torch.allclose(grey[0], grey[2], atol=1e-6), "an image without colors has three channels, too"
    assert not torch.equal(image, task.train_set[3][0])
    assert torch.equal(task.test_set[3][0], task.samples_to_test_on[3][0])


def test_parts_of_images() -> None:
    assert center(512, 256) == (144, 16, 368, 240), "224 of 256 pixels"
    torch.manual_seed(0)
    for _ in range(200):
        left, top, right, bottom = random_part(60, 40)
        assert 0 <= left < right <= 60
        assert 0 <= top < bottom <= 40
        share, ratio = (right - left) * (bottom - top) / 2400, (right - left) / (bottom - top)
        assert 0.08 <= share <= 1
        assert 3 / 4 - 1e-6 <= ratio <= 4 / 3 + 1e-6
    assert random_part(10, 1000) == (0, 495, 10, 505), "no such part fits"


def test_the_label_is_among_the_largest(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    write_imagenet(tmp_path)
    first, fifth = (build_task(name, data=tmp_path) for name in ("cifar10", "imagenet"))
    outputs, labels = torch.tensor([[5.0, 4, 3, 2, 1, 0]] * 3), torch.tensor([0, 4, 5])
    assert [task.score(nn.Identity(), (outputs, labels)) for task in (first, fifth)] == [(1, 3), (2, 3)]


def test_wikitext_is_read(tmp_path: Path) -> None:
    WRITERS["wikitext"](tmp_path)
    task = build_task("wikitext", data=tmp_path)
    assert task.metric == "perplexity per word"
    assert task.test_batch_size == 20, "logits of 267,736 words fill the memory"
    words = [word for line in (LINE * 12).splitlines() for word in [*line.split(), "<eos>"]]
    vocabulary = list(dict.fromkeys(["<unk>", *words]))
    assert len(task.train_set) == (len(words) - 1) // 35
    [window] = task.train_set[1]
    assert window.shape == (36,)
    assert [vocabulary[number] for number in window.tolist()] == words[35:71]
    tested = [number for i in range(len(task.test_set)) for number in task.test_set[i][0].tolist()]
    assert tested.count(0) > task.train_set[0][0].tolist().count(0), "a word that the training text has not"
    assert task.build_module().head.out_features == len(vocabulary)
    with pytest.raises(IndexError):
        task.train_set[len(task.train_set)]


def test_words_of_the_standard_library() -> None:
    """The model and the optimizer are those of the paper; the rate decays as often."""
    task = build_task("words")
    module, paper = task.build_module(), RECIPES["wikitext"]["transformer"]
    assert type(module) is type(paper.build(10))
    optimizer = task.optimizer(module)
    assert (optimizer.defaults["lr"], task.batch_size, task.max_norm) == (2.0, 20, 2.0)
    scheduler = task.scheduler(optimizer, 1400)
    for _ in range(1400):
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(2.0 * 0.8**14)


def refused(folder: Path, words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["bench", "converge", *words.split(), "--output", str(folder / "output")]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", READ_TASKS)
def test_a_folder_without_the_data_set_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any rank is started; the message tells what the folder has to contain."""
    said = refused(tmp_path, f"--task {name} --data {tmp_path}", capsys)
    assert f"data='{tmp_path}' has no " in said
    assert "The folder has to contain " in said
    assert f"task='{name}' needs data=FOLDER. The folder has to contain" in refused(tmp_path, f"--task {name}", capsys)


def test_options_that_do_not_fit_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    WRITERS["cifar10"](tmp_path)
    said = refused(tmp_path, f"--task cifar10 --data {tmp_path} --model vgg11", capsys)
    assert "model='vgg11' is not one of task='cifar10': resnet101, vgg16." in said
    assert "data='x' has no effect on task='digits'" in refused(tmp_path, "--data x", capsys)
    assert "model='vgg16' has no effect on task='topics'" in refused(tmp_path, "--task topics --model vgg16", capsys)
    assert "workers must be at least 0, got -1" in refused(tmp_path, "--workers -1", capsys)
    assert "device='gpu' must be one of cpu, cuda." in refused(tmp_path, "--device gpu", capsys)


def test_models_and_batches_are_on_the_device_of_the_task() -> None:
    task = build_task("digits", device="cpu")
    batch = [torch.zeros(2), torch.ones(2)]
    assert task.batch_there(batch) is batch
    elsewhere = replace(task, device="meta")
    assert {tensor.device.type for tensor in elsewhere.batch_there(batch)} == {"meta"}
    assert {parameter.device.type for parameter in elsewhere.build_module_there().parameters()} == {"meta"}


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


def missing_on_one(folder: Path) -> str:
    """What is raised if the data are on rank 0 alone."""
    with pytest.raises(ValueError, match="has no") as raised:
        on_all_ranks(lambda: build_task("cifar10", data=folder / f"{dist.get_rank()}"))
    return str(raised.value)


def labels_of_batches(folder: Path) -> list[set[int]]:
    """The labels of a rank's batches, that has one of two, with a process that loads them, by method."""
    task = build_task("cifar100", data=folder, workers=1).with_label_skew(4)
    found = []
    for method in ("ddp", "selsync:delta=0.3,partition=defdp"):
        tiny = parse_method(method)(_with_a_small_network(task))
        found.append({label for batch, _ in zip(tiny.loader(0), range(3), strict=False) for label in batch[1].tolist()})
        tiny.close()
    return found


def _with_a_small_network(task: Any) -> Any:
    return replace(task, build_module=lambda: nn.Sequential(nn.Flatten(), nn.Linear(3072, 100)), batch_size=2)


def test_ranks_with_data(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "0")
    WRITERS["cifar100"](tmp_path)
    cases = {"missing": partial(missing_on_one, tmp_path), "labels": partial(labels_of_batches, tmp_path)}
    outcomes = launch_cases(cases, 2)
    first, second = outcomes["missing"]
    assert first == f"Rank 1 cannot train: {second}"
    assert "cifar-10-batches-py/data_batch_1" in second
    assert outcomes["labels"] == [[{90, 91, 92, 93}] * 2, [{94, 95, 96, 97}] * 2]


#: Networks whose weights take no half a GiB.
TRAINED = ["cifar10 --model resnet101", "cifar100 --model resnet34 --workers 1", "imagenet", "wikitext"]


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("words", TRAINED)
def test_the_command_trains(words: str, tmp_path: Path) -> None:
    """With the real network, two methods and two ranks."""
    name = words.partition(" ")[0]
    WRITERS[name](tmp_path)
    options = f"--task {words} --data {tmp_path} --methods ddp selsync:delta=0 --steps 1 --evaluations 1"
    result = result_of("bench converge", options, tmp_path / "output")
    assert [(run["method"], run["points"][-1]["steps"]) for run in result["runs"]] == [
        ("ddp", 1),
        ("selsync:delta=0", 1),
    ]
    ddp, selsync = (run["points"][-1]["quality"] for run in result["runs"])
    assert math.isfinite(ddp)
    assert math.isfinite(selsync)
    assert f"### {name}" in (tmp_path / "output" / "converge.md").read_text()


def test_the_largest_networks_learn() -> None:
    """A step of VGG-11 on a few images lowers their loss."""
    torch.manual_seed(0)
    module = vgg(11, 100).eval()
    optimizer = SGD(module.parameters(), lr=0.1)
    images, labels = default_collate([(torch.rand(3, 32, 32), number) for number in range(2)])
    losses = []
    for _ in range(2):
        loss = nn.functional.cross_entropy(module(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]
