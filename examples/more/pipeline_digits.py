"""Trains the network of digits.py as a pipeline: each process has some layers, several mini-batches are in flight.

    python examples/more/pipeline_digits.py                           EA-Pipe on two processes of this machine
    python examples/more/pipeline_digits.py --devices 3
    python examples/more/pipeline_digits.py --algorithm pipedream     or weight_stashing, naive, spectrain, gpipe, 1f1b
    torchrun --nproc-per-node 2 examples/more/pipeline_digits.py      as with digits.py

The LightningModule is the same as with data-parallel strategies. All processes load the same batches; rank 0 has the
last layers, computes the loss and logs.
"""

from __future__ import annotations

import argparse
import time

import lightning as L
from digits import DigitClassifier, Digits
from helpers.launching import parse_launch_options, trainer_options

from lightning_pipesync import EAPipeStrategy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="ea_pipe", help="the Trainer's pipeline (default: %(default)s)")
    parser.add_argument("--elastic-force", type=float, default=0.5, help="alpha of EA-Pipe (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=12, help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="images in a mini-batch (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="initial (default: %(default)s)")
    options = parse_launch_options(parser)

    L.seed_everything(0, verbose=False)
    strategy = EAPipeStrategy(algorithm=options.algorithm, elastic_force=options.elastic_force)
    trainer = L.Trainer(
        strategy=strategy, max_epochs=options.epochs, enable_progress_bar=False, **trainer_options(options)
    )
    start = time.monotonic()
    # drop_last: a smaller last batch may not divide into the micro-batches of GPipe and 1F1B.
    trainer.fit(DigitClassifier(options.learning_rate), datamodule=Digits(options.batch_size, drop_last=True))
    if trainer.is_global_zero:
        accuracy = float(trainer.callback_metrics["test_accuracy"])
        print(f"{options.algorithm} on {trainer.world_size} processes, {trainer.global_step} mini-batches")
        print(f"test accuracy  {accuracy:.2%}")
        print(f"seconds        {time.monotonic() - start:.1f}")


if __name__ == "__main__":
    main()
