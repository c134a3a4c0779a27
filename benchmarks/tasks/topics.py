"""The text of Python's documentation, character by character; also with a Llama, and with Muon."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import TensorDataset

from benchmarks.tasks.task import Task
from lightning_pipesync.core.extras import check_extra
from lightning_pipesync.lab.bench.models import TransformerLM

_CONTEXT, _LEARNING_RATE = 64, 3e-3
#: Of the Llama.
_HIDDEN, _LAYERS, _HEADS, _ALPHABET = 128, 2, 4, 128
#: The learning rate of Muon.
_OF_MUON = 0.02


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


class TinyLlama(nn.Module):
    """A Llama of ``transformers``, built from its configuration: rotary positions, RMS norms, gated layers."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=_ALPHABET,
            hidden_size=_HIDDEN,
            intermediate_size=3 * _HIDDEN,
            num_hidden_layers=_LAYERS,
            num_attention_heads=_HEADS,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits (batch, length, vocabulary) for ``tokens`` (batch, length)."""
        output: Any = self.model(input_ids=tokens)
        logits: Tensor = output.logits
        return logits


def tiny_llama() -> Task:
    """Returns the task ``topics`` with another model.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    check_extra("transformers", "The task tiny_llama", "transformers")
    return replace(topics(), name="tiny_llama", build_module=TinyLlama)


class MuonAndAdamW(Optimizer):
    """Muon for the matrices of a Transformer's hidden layers; AdamW for embeddings, output, norms and biases.

    One optimizer, whose groups are those of both.
    """

    def __init__(self, module: nn.Module) -> None:
        named = list(module.named_parameters())
        hidden = {name for name, parameter in named if ".layers." in f".{name}" and parameter.dim() == 2}
        self._parts = (
            Muon([parameter for name, parameter in named if name in hidden], lr=_OF_MUON, weight_decay=0.0),
            AdamW([parameter for name, parameter in named if name not in hidden], lr=_LEARNING_RATE),
        )
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for part in self._parts:
            part.step()
        return loss


def topics_muon() -> Task:
    """Returns the task ``topics`` with another optimizer."""

    def schedule(optimizer: Optimizer, steps: int) -> OneCycleLR:
        rates = [_OF_MUON, _LEARNING_RATE]
        return OneCycleLR(optimizer, rates, total_steps=steps + 1, pct_start=0.1, cycle_momentum=False)

    return replace(topics(), name="topics_muon", optimizer=MuonAndAdamW, scheduler=schedule)
