"""The Transformer of SelSync Section IV-A, which predicts the next word."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class WordTransformer(nn.Module):
    """A causal Transformer encoder (post-norm) with sinusoidal positions (Vaswani et al.).

    The defaults are SelSync's: 2 layers with 2 heads and a feed-forward part of 200, embeddings of 200, dropout 0.2.

    Args:
        vocabulary: number of words.
        length: maximum number of words of a sequence.
    """

    positions: Tensor

    def __init__(
        self,
        vocabulary: int,
        length: int,
        hidden: int = 200,
        feedforward: int = 200,
        depth: int = 2,
        heads: int = 2,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden)
        self.register_buffer("positions", sinusoids(length, hidden), persistent=False)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(hidden, heads, feedforward, dropout, batch_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(hidden, vocabulary)
        nn.init.uniform_(self.words.weight, -0.1, 0.1)
        nn.init.uniform_(self.head.weight, -0.1, 0.1)
        nn.init.zeros_(self.head.bias)

    def forward(self, words: Tensor) -> Tensor:
        """Returns logits (batch, length, vocabulary) for ``words`` (batch, length)."""
        length = words.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=words.device)
        scaled = self.words(words) * math.sqrt(self.words.embedding_dim)
        x = self.dropout(scaled + self.positions[:length])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(x)
        return logits


def sinusoids(length: int, hidden: int) -> Tensor:
    """Returns the encodings of positions, of shape (length, hidden): sines and cosines in turns."""
    wavelengths = 10_000 ** (torch.arange(0, hidden, 2) / hidden)
    angles = torch.arange(length).unsqueeze(1) / wavelengths
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)
