"""Texts word by word: WikiText-103 from its files, and what the standard library says about itself."""

from __future__ import annotations

import ast
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import Dataset

from benchmarks.tasks.layout import Layout
from benchmarks.tasks.recipes import RECIPES, WINDOW, Recipe
from benchmarks.tasks.task import Task

#: The word for words that are not in the vocabulary, and that for the end of a line, as in WikiText.
_UNKNOWN, _END = "<unk>", "<eos>"
_TRAIN, _TEST = "wiki.train.tokens", "wiki.test.tokens"

LAYOUT = Layout("WikiText-103, word level", (_TRAIN, _TEST), f"{_TRAIN} and {_TEST}, as wikitext-103-v1.zip has them")


def wikitext(data: Path, recipe: Recipe) -> Task:
    """Returns the task to predict the next word of WikiText-103, whose files have spaces between words.

    The vocabulary is that of the training text, 267,735 words and the end of a line. Of each window of 35 words the
    next ones are predicted; windows are shuffled.
    """
    LAYOUT.check(data)
    vocabulary: dict[str, int] = defaultdict(lambda: len(vocabulary))
    unknown = vocabulary[_UNKNOWN]
    try:
        train = encoded(_lines(data / _TRAIN), vocabulary.__getitem__)
        test = encoded(_lines(data / _TEST), lambda word: vocabulary.get(word, unknown))
    except UnicodeDecodeError as error:
        raise LAYOUT.wrong(data, str(error)) from error
    for name, text in ((_TRAIN, train), (_TEST, test)):
        if len(text) <= WINDOW:
            raise LAYOUT.wrong(data / name, f"{len(text)} words are less than a window of {WINDOW} and the next one")
    return _task("wikitext", recipe, len(vocabulary), train, test)


def words() -> Task:
    """Returns the task to predict the next word of the standard library's documentation, and its docstrings.

    The model, the batches and the optimizer are those of SelSync's Transformer (Section IV-A). The learning rate decays
    as often in a training as there. Nine tenths of the documents are trained on. Words that are in them less than three
    times are unknown, as in WikiText.
    """
    documents = _documents()
    boundary = len(documents) * 9 // 10
    split = [[re.findall(r"\w+|[^\w\s]", line) for line in document.splitlines()] for document in documents]
    train_lines, test_lines = (
        [line for document in part for line in document if line] for part in (split[:boundary], split[boundary:])
    )
    counts = Counter(word for line in train_lines for word in line)
    kept = [_UNKNOWN, _END, *sorted(word for word, count in counts.items() if count >= 3)]
    vocabulary = {word: number for number, word in enumerate(kept)}

    def number_of(word: str) -> int:
        return vocabulary.get(word, 0)

    recipe = replace(
        RECIPES["wikitext"]["transformer"],
        epochs=6,
        target=100.0,
        scheduler=lambda optimizer, steps: StepLR(optimizer, max(1, steps // 14), 0.8),  # 28,000 steps / 2,000
    )
    return _task("words", recipe, len(vocabulary), encoded(train_lines, number_of), encoded(test_lines, number_of))


class Windows(Dataset[tuple[Tensor]]):
    """The windows of a text of numbers, each of ``length`` with the next number: (length + 1) of int64."""

    def __init__(self, text: Tensor, length: int) -> None:
        self._text, self._length = text, length

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._length

    def __getitem__(self, index: int) -> tuple[Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self._length
        return (self._text[start : start + self._length + 1].long(),)


def encoded(lines: Iterable[list[str]], number_of: Callable[[str], int]) -> Tensor:
    """Returns the numbers of all words, with the end of each line, of int32: 100 million words take 400 MB."""
    numbers = array("i")
    for line in lines:
        numbers.extend(map(number_of, line))
        numbers.append(number_of(_END))
    return torch.frombuffer(numbers, dtype=torch.int32) if numbers else torch.zeros(0, dtype=torch.int32)


def _lines(path: Path) -> Iterable[list[str]]:
    with path.open(encoding="utf-8") as file:
        yield from (line.split() for line in file)


def _task(name: str, recipe: Recipe, num_words: int, train: Tensor, test: Tensor) -> Task:
    return Task.language_model(
        name=name,
        unit="word",
        build_module=lambda: recipe.build(num_words),
        train_set=Windows(train, WINDOW),
        test_set=Windows(test, WINDOW),
        test_batch_size=recipe.batch_size,  # 100 windows of WikiText's words have logits of 3.5 GiB
        **recipe.settings,
    )


@cache
def _documents() -> list[str]:
    """Returns the topics of Python's documentation and the docstrings of the standard library's modules, shuffled."""
    from pydoc_data import topics

    documents = [topics.topics[name] for name in sorted(topics.topics)]
    for path in sorted(Path(ast.__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        documented: tuple[Any, ...] = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
        documents.append("\n".join(filter(None, found)))
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(0))
    return [documents[i] for i in order.tolist()]
