"""Trains the network of digits.py, saves checkpoints, and resumes from the last one when it is restarted.

    python examples/more/resumable_digits.py                          two processes on this machine
    python examples/more/resumable_digits.py --strategy selsync       or dear, pipe_sgd, ea_pipe, ddp
    torchrun --nproc-per-node 2 --max-restarts 1 \\
        examples/more/resumable_digits.py --die-at-step 50            rank 1 kills itself; all are restarted, and resume

The launch files in integrations/ start this script by default, to try the machines and the launcher before the real
training. All machines must see the same folder of checkpoints.
"""

from __future__ import annotations

import argparse
import os
import signal
import zlib
from pathlib import Path

import lightning as L
import torch.distributed as dist
from digits import DigitClassifier, Digits
from helpers.launching import parse_launch_options, trainer_options
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.utils import parameters_to_vector

import lightning_pipesync  # noqa: F401  registers the strategies


class Report(L.Callback):
    """Prints the first and last step, and at the end whether all processes hold the same weights."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            print(f"{trainer.world_size} processes begin after step {trainer.global_step}", flush=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        weights = parameters_to_vector(pl_module.parameters()).detach().cpu()
        checksums = [0] * trainer.world_size
        dist.all_gather_object(checksums, zlib.crc32(weights.numpy().tobytes()))
        if trainer.is_global_zero:
            same = "the same" if len(set(checksums)) == 1 else "NOT the same"
            print(f"{trainer.world_size} processes end after step {trainer.global_step}")
            print(f"weights {same} on all processes, checksum {checksums[0]:08x}", flush=True)


class DieOnce(L.Callback):
    """Kills the last rank's process after a number of steps, unless the run was resumed from a checkpoint."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
        last = trainer.global_rank == trainer.world_size - 1
        if last and trainer.global_step == self.step and trainer.ckpt_path is None:
            print(f"rank {trainer.global_rank} kills itself after step {self.step}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="dear", help="of the Trainer (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="of the training (default: %(default)s)")
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints (default: %(default)s)")
    parser.add_argument("--die-at-step", type=int, help="kill the last rank once after this step (default: never)")
    parser.add_argument("--batch-size", type=int, default=16, help="images per process and step (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="default: %(default)s")
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/resumable_digits"), help="folder (default: %(default)s)"
    )
    options = parse_launch_options(parser)

    L.seed_everything(0, verbose=False)
    saving = ModelCheckpoint(options.output, save_last=True, save_top_k=0, every_n_train_steps=options.save_every)
    dying = [] if options.die_at_step is None else [DieOnce(options.die_at_step)]
    trainer = L.Trainer(
        strategy=options.strategy,
        max_epochs=-1,
        max_steps=options.steps,
        callbacks=[Report(), saving, *dying],
        enable_progress_bar=False,
        **trainer_options(options) | {"enable_checkpointing": True},
    )
    # "last": the newest checkpoint in the folder, if there is one.
    trainer.fit(
        DigitClassifier(options.learning_rate), datamodule=Digits(options.batch_size, drop_last=True), ckpt_path="last"
    )


if __name__ == "__main__":
    main()
