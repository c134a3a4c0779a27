"""Trains on handwritten digits with replicas that come and go, each a job of its own under Lightning's Trainer.

    pipesync launch --replicas 2 examples/replicas_digits.py

Kill one of the two processes: the other one trains on, and the launcher starts the first again, which gets the weights.
"""

import lightning as L
from lightning_digits import DigitClassifier, loader

from lightning_pipesync import LocalSGDStrategy

trainer = L.Trainer(strategy=LocalSGDStrategy(period=10), accelerator="cpu", devices=1, max_epochs=20, logger=False)
trainer.fit(DigitClassifier(), loader)
