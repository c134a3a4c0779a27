"""Trains a small Transformer on Python's documentation, character by character, with any strategy.

    python examples/more/pydoc_transformer.py                                     two processes on this machine
    python examples/more/pydoc_transformer.py --strategy dear                     same results as DDP
    python examples/more/pydoc_transformer.py --strategy pipe_sgd                 each gradient one step late, in 8 bits
    python examples/more/pydoc_transformer.py --strategy ddp                      for comparison
    torchrun --nproc-per-node 2 examples/more/pydoc_transformer.py                as with digits.py

The text is what `help()` shows on language topics, from the standard library: 465,000 characters in Python 3.11. With
the same number of steps, local steps cost a language model some perplexity. In the paper SelSync took 38,600 steps to
reach what 28,000 synchronous steps reached, in less than half the time.
"""

from __future__ import annotations

import argparse
import math
import random
from pydoc_data.topics import topics

import lightning as L
import torch
from helpers.launching import parse_launch_options, trainer_options
from helpers.recording import mib_sent
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_pipesync import DeARStrategy, PipeSGDStrategy, SelSyncStrategy


class TransformerLM(L.LightningModule):
    """A causal Transformer over characters.

    Args:
        num_characters: size of the alphabet.
        context: maximum number of characters that it sees.
        learning_rate: AdamW's peak; the rate rises over the first tenth of the steps, and falls to 0 at the end.
        width: size of the embeddings and layers.
        num_layers: number of encoder layers.
    """

    def __init__(
        self, num_characters: int, context: int, learning_rate: float, width: int = 128, num_layers: int = 2
    ) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.characters = nn.Embedding(num_characters, width)
        self.positions = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=4 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, num_characters, bias=False)
        self.head.weight = self.characters.weight  # tied
        for embedding in (self.characters, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Returns the logits of each next character, shape ``[batch, length, num_characters]``."""
        length = text.shape[1]
        embedded = self.characters(text) + self.positions.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        return self.head(self.encoder(embedded, mask=mask, is_causal=True))

    def loss(self, text: Tensor) -> Tensor:
        return F.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    def training_step(self, text: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(text)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, text: Tensor, batch_idx: int) -> None:
        self.log("validation_loss", self.loss(text), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.learning_rate, total_steps=steps, pct_start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @torch.no_grad()
    def write(self, text: Tensor, num_characters: int) -> Tensor:
        """Returns ``text``, shape ``[length]``, followed by ``num_characters`` generated characters."""
        for _ in range(num_characters):
            logits = self(text[None, -self.positions.num_embeddings :])[0, -1]
            text = torch.cat([text, torch.multinomial(logits.softmax(dim=-1), 1)])
        return text


class Windows(Dataset[Tensor]):
    """A text divided into windows of ``context`` characters, each with the next character."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.context
        return self.text[start : start + self.context + 1]


class PythonTopics(L.LightningDataModule):
    """The topics of Python's documentation in random order; the last tenth of the text is for validation.

    Args:
        context: characters in a window.
        batch_size: windows per process and step.
    """

    def __init__(self, context: int, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        texts = [topics[name] for name in sorted(topics)]
        random.Random(0).shuffle(texts)
        text = "\n".join(texts)
        self.alphabet = sorted(set(text))
        encoded = self.encode(text)
        boundary = len(encoded) * 9 // 10
        self.train_set, self.validation_set = Windows(encoded[:boundary], context), Windows(encoded[boundary:], context)

    def encode(self, text: str) -> Tensor:
        numbers = {character: number for number, character in enumerate(self.alphabet)}
        return torch.tensor([numbers[character] for character in text])

    def decode(self, text: Tensor) -> str:
        return "".join(self.alphabet[number] for number in text.tolist())

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_set, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.validation_set, self.batch_size)


class Communication(L.Callback):
    """Keeps the strategy's LSSR and this rank's MiB, which are gone when ``fit`` returns."""

    lssr = 0.0

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.mib_sent = mib_sent(trainer)
        if isinstance(trainer.strategy, SelSyncStrategy):
            self.lssr = trainer.strategy.method.lssr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--strategy", choices=["selsync", "dear", "pipe_sgd", "ddp"], default="selsync", help="default: %(default)s"
    )
    parser.add_argument("--delta", type=float, default=0.05, help="SelSync's threshold (default: %(default)s)")
    parser.add_argument("--max-steps", type=int, default=600, help="of the training (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="windows per process (default: %(default)s)")
    parser.add_argument("--context", type=int, default=64, help="characters in a window (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="peak (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    options = parse_launch_options(parser)

    L.seed_everything(options.seed, verbose=False)
    data = PythonTopics(options.context, options.batch_size)
    model = TransformerLM(len(data.alphabet), options.context, options.learning_rate)
    communication = Communication()
    strategy = {
        "selsync": SelSyncStrategy(delta=options.delta),
        "dear": DeARStrategy(),
        "pipe_sgd": PipeSGDStrategy(compression="int8"),
        "ddp": "ddp",
    }[options.strategy]
    trainer = L.Trainer(
        strategy=strategy,
        max_steps=options.max_steps,
        gradient_clip_val=1.0,
        callbacks=[communication, TQDMProgressBar(refresh_rate=10)],
        log_every_n_steps=10,
        **trainer_options(options),
    )
    trainer.fit(model, datamodule=data)
    trainer.validate(model, datamodule=data, verbose=False)

    if trainer.is_global_zero:
        perplexity = math.exp(trainer.callback_metrics["validation_loss"].item())
        print(f"\n{options.strategy} on {trainer.world_size} processes, {trainer.global_step} steps")
        print(f"perplexity per character  {perplexity:.3f}")
        print(f"LSSR                      {communication.lssr:.3f}")
        print(f"MiB sent by rank 0        {communication.mib_sent:.1f}")
        sample = model.eval().cpu().write(data.encode("The "), num_characters=300)
        print(f"\nWhat it writes:\n{data.decode(sample)}")


if __name__ == "__main__":
    main()
