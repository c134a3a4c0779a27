"""The callback of integrations/kubernetes that reports the progress to Kubeflow Trainer, here to a stand-in."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest
from kubeflow_trainer_api.models.trainer_v1alpha1_update_train_job_status_request import (
    TrainerV1alpha1UpdateTrainJobStatusRequest,
)
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from tests.support.commands import ROOT
from tests.support.harness import free_port


class StatusServer(BaseHTTPRequestHandler):
    """Keeps what is posted to it, in place of Kubeflow Trainer's controller."""

    posted: ClassVar[list[tuple[str, str]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.posted.append((self.headers["Authorization"], body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def status_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """What a training that is told of the server has posted to it."""
    monkeypatch.setattr(StatusServer, "posted", [])
    (tmp_path / "token").write_text("secret\n")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
    with ThreadingHTTPServer(("127.0.0.1", 0), StatusServer) as server:
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"http://127.0.0.1:{server.server_port}/status")
        Thread(target=server.serve_forever).start()
        yield StatusServer.posted
        server.shutdown()


def fit_with_progress(batches: int) -> None:
    progress = runpy.run_path(str(ROOT / "integrations" / "kubernetes" / "progress.py"))["Progress"](every_s=0)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, limit_val_batches=0, callbacks=[progress], **quiet)
    trainer.fit(BoringModel(), DataLoader(RandomDataset(32, batches)))


def test_progress_is_reported_as_kubeflow_trainer_expects_it(status_server: list[tuple[str, str]]) -> None:
    fit_with_progress(5)
    assert [token for token, _ in status_server] == ["Bearer secret"] * 6  # after each batch, and at the end
    for _, body in status_server:
        assert TrainerV1alpha1UpdateTrainJobStatusRequest.from_json(body).to_dict().keys() == json.loads(body).keys()
    reports = [json.loads(body)["trainerStatus"] for _, body in status_server]
    assert [report["progressPercentage"] for report in reports] == [20, 40, 60, 80, 100, 100]
    assert reports[-1]["estimatedRemainingSeconds"] == 0


def test_progress_that_nobody_takes_does_not_end_a_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"http://127.0.0.1:{free_port()}/status")
    with pytest.warns(UserWarning, match="The progress was not reported to"):
        fit_with_progress(1)
