"""The text of Python's documentation, from the standard library, character by character."""

from __future__ import annotations

import random

import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import TensorDataset

from benchmarks.tasks.task import Task
from lightning_pipesync.lab.bench.models import TransformerLM

_CONTEXT, _LEARNING_RATE = 64, 3e-3


def topics() -> Task:
    """Returns the task to predict the next character, with nine tenths of the text to train on."""
    from pydoc_data import topics as documentation

    texts = [documentation.topics[name] for name in sorted(documentation.topics)]
    random.Random(0).shuffle(texts)
    text = "\n".join(texts)
    alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
    encoded = torch.tensor([alphabet[character] for character in text])
    # Each window of _CONTEXT characters, with the next character.
    windows = encoded.unfold(0, _CONTEXT + 1, _CONTEXT)
    boundary = len(windows) * 9 // 10
    return Task.language_model(
        name="topics",
        unit="character",
        build_module=lambda: TransformerLM(hidden=128, depth=2, heads=4, vocabulary=len(alphabet), length=_CONTEXT),
        train_set=TensorDataset(windows[:boundary]),
        test_set=TensorDataset(windows[boundary:]),
        batch_size=16,
        epochs=3,
        target=5.0,
        optimizer=lambda module: AdamW(module.parameters(), lr=_LEARNING_RATE),
        scheduler=lambda optimizer, steps: OneCycleLR(optimizer, _LEARNING_RATE, total_steps=steps + 1, pct_start=0.1),
        max_norm=1.0,
    )
