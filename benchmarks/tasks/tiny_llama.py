"""The text of Python's documentation, character by character, with a Llama of two layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from benchmarks.tasks.task import Task
from benchmarks.tasks.topics import topics
from lightning_pipesync.core.extras import check_extra

_HIDDEN, _LAYERS, _HEADS = 128, 2, 4
_ALPHABET = 128


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
