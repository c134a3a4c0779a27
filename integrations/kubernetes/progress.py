"""Reports to Kubeflow Trainer how far a Lightning training is: copy it beside your script.

    trainer = Trainer(callbacks=[Progress()])

`kubectl get trainjob pipesync -o yaml` then shows it under `status.trainerStatus`. Outside a TrainJob, or in one whose
cluster does not enable the feature gate `TrainJobStatus`, the callback does nothing.
"""

from __future__ import annotations

import json
import math
import os
import ssl
import time
import warnings
from datetime import datetime, timezone
from pathlib import Path
from urllib.request import Request, urlopen

from lightning.pytorch import Callback, Trainer


class Progress(Callback):
    """Rank 0 reports the share of the steps that are done, and the seconds that are left.

    Metrics are not reported: to read some of them all ranks communicate.

    Args:
        every_s: least seconds between two reports.
    """

    def __init__(self, every_s: float = 30.0) -> None:
        self.every_s = every_s
        self._began = self._reported = -math.inf
        self._first_step = 0

    def on_train_start(self, trainer: Trainer, *args: object) -> None:
        self._began, self._first_step = time.monotonic(), trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        if time.monotonic() - self._reported >= self.every_s:
            self._report(trainer)

    def on_train_end(self, trainer: Trainer, *args: object) -> None:
        self._report(trainer)

    def _report(self, trainer: Trainer) -> None:
        self._reported = time.monotonic()
        url = os.environ.get("KUBEFLOW_TRAINER_SERVER_URL")
        if url is None or not trainer.is_global_zero:
            return
        try:
            send(url, self._status(trainer))
        except OSError as error:  # which must not end the training
            warnings.warn(f"The progress was not reported to {url}: {error}", stacklevel=2)

    def _status(self, trainer: Trainer) -> dict[str, object]:
        status: dict[str, object] = {"lastUpdatedTime": datetime.now(timezone.utc).isoformat()}
        steps, all_steps = trainer.global_step, trainer.estimated_stepping_batches
        if steps > self._first_step and math.isfinite(all_steps):  # -1 is endless
            seconds_a_step = (self._reported - self._began) / (steps - self._first_step)
            status["progressPercentage"] = int(100 * steps / all_steps)
            status["estimatedRemainingSeconds"] = round((all_steps - steps) * seconds_a_step)
        return status


def send(url: str, status: dict[str, object]) -> None:
    """Posts a status, as the controller's variables say. The token's file is replaced while the job runs."""
    token = Path(os.environ["KUBEFLOW_TRAINER_SERVER_TOKEN"]).read_text().strip()
    authority = os.environ.get("KUBEFLOW_TRAINER_SERVER_CA_CERT")
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = Request(url, json.dumps({"trainerStatus": status}).encode(), headers)
    with urlopen(request, timeout=5, context=authority and ssl.create_default_context(cafile=authority)):
        pass
