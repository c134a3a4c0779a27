"""The files of integrations/ on one machine: other machines and schedulers are emulated, processes are real."""

from __future__ import annotations

import json
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest
import yaml
from kubeflow_trainer_api.models.io_k8s_api_batch_v1_job import IoK8sApiBatchV1Job
from kubeflow_trainer_api.models.io_k8s_api_core_v1_pod_template_spec import IoK8sApiCoreV1PodTemplateSpec
from kubeflow_trainer_api.models.io_k8s_api_core_v1_service import IoK8sApiCoreV1Service
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob
from kubeflow_trainer_api.models.trainer_v1alpha1_update_train_job_status_request import (
    TrainerV1alpha1UpdateTrainJobStatusRequest,
)
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from lightning_pipesync.core.extras import is_installed
from tests.support.commands import ROOT, environment, run_together
from tests.support.harness import default_signals, free_port

INTEGRATIONS = ROOT / "integrations"
REPLICAS = INTEGRATIONS / "kubernetes" / "replicas.yaml"
TRAINJOB = INTEGRATIONS / "kubernetes" / "trainjob.yaml"
SKYPILOT = INTEGRATIONS / "skypilot" / "train.yaml"
needs_torchft = pytest.mark.skipif(not is_installed("torchft"), reason="torchft is not installed")
#: Starts its command once for each task of the job on this machine, as Slurm's srun does on the nodes.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
for ((rank = 0; rank < SLURM_NTASKS; rank++)); do
    SLURM_PROCID=$rank SLURM_STEP_NUM_TASKS=$SLURM_NTASKS SLURM_NODEID=$((rank / SLURM_NTASKS_PER_NODE)) \\
        SLURM_LOCALID=$((rank % SLURM_NTASKS_PER_NODE)) "$@" &
    tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || status=$?; done
exit "${status:-0}"
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1" = show ]; then echo localhost; else echo "$@" > "$REQUEUED"; fi
"""

PLAIN = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(dist.get_rank() + 1)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}, sum {total}, {sys.argv[1]}\\n", end="", flush=True)
dist.destroy_process_group()
"""
#: A replica, whose first rank asks the lighthouse whether its name is known there.
REPLICA = """
import os, sys
from datetime import timedelta
from torchft.coordination import LighthouseClient
name, ranks = os.environ["PIPESYNC_REPLICA"], os.environ.get("WORLD_SIZE", "1")
if os.environ.get("RANK", "0") == "0":
    client = LighthouseClient(f"http://{os.environ['PIPESYNC_LIGHTHOUSE']}", timedelta(seconds=100))
    client.quorum(name, timedelta(seconds=100), address="", store_address="", step=0, world_size=2, shrink_only=False)
    print(f"replica {name} has {ranks} ranks, {sys.argv[1]}\\n", end="", flush=True)
"""
ACCELERATE = """
import sys, torch
from accelerate import Accelerator
accelerator = Accelerator()
rank = accelerator.process_index
total = accelerator.reduce(torch.tensor(rank)).item()
print(
    f"rank {rank} of {accelerator.num_processes}, local rank {accelerator.local_process_index}, "
    f"sum {total}, {sys.argv[2]}\\n", end="", flush=True
)
accelerator.end_training()
"""


def directives(file: Path) -> dict[str, str]:
    """Returns the #SBATCH options of a file that have a value, by name."""
    return dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", file.read_text(), re.MULTILINE))


def sbatch(name: str, folder: Path, *options: object, **variables: object) -> tuple[list[object], Any]:
    """Returns command and environment that run a batch file on this machine as Slurm would on two nodes."""
    file = INTEGRATIONS / "slurm" / name
    for command, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / command).write_text(text)
        (folder / command).chmod(0o755)
    allocation = {
        "SLURM_JOB_ID": 4321,
        "SLURM_JOB_NAME": directives(file)["job-name"],
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NODELIST": "localhost",
        "SLURM_NNODES": 2,
        "SLURM_NTASKS": 2,
        "SLURM_NTASKS_PER_NODE": 1,
        "SLURM_CPUS_PER_TASK": 1,
        "PATH": f"{folder}:{environment()['PATH']}",
    }
    return ["bash", file, *options], environment(**allocation, **variables)


def ranks_in(output: str) -> list[str]:
    """Returns the lines that the ranks printed."""
    return sorted(re.findall(r"rank \d.*", output))


def test_slurm_starts_lightning(tmp_path: Path) -> None:
    options = ["--strategy", "selsync", "--steps", 6, "--accelerator", "cpu", "--output", tmp_path / "checkpoints"]
    [result] = run_together(sbatch("lightning.sbatch", tmp_path, *options, MASTER_PORT=free_port()))
    assert result.returncode == 0, result.stdout
    assert "2 processes end after step 6" in result.stdout
    assert "weights the same on all processes" in result.stdout


def test_slurm_starts_accelerate(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ACCELERATE)
    settings = {"NPROC_PER_NODE": 2, "MAIN_PORT": free_port(), "ACCELERATE_USE_CPU": "true"}
    [result] = run_together(sbatch("accelerate.sbatch", tmp_path, script, "--option", "a b", **settings), ranks=4)
    assert result.returncode == 0, result.stdout
    assert ranks_in(result.stdout) == [f"rank {rank} of 4, local rank {rank % 2}, sum 6, a b" for rank in range(4)]


def replicas_in(output: str) -> list[str]:
    """Returns the lines that the first ranks of replicas printed, without what the launcher writes before them."""
    return sorted(re.findall(r"replica \d has .*", output))


@needs_torchft
def test_slurm_starts_replicas_and_their_lighthouse(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(REPLICA)
    (tmp_path / "hostname").write_text("#!/bin/sh\necho 127.0.0.1\n")
    (tmp_path / "hostname").chmod(0o755)
    settings = {"SCRIPT": tmp_path / "train.py", "RANKS_PER_REPLICA": 1, "LIGHTHOUSE_PORT": free_port()}
    [result] = run_together(sbatch("replicas.sbatch", tmp_path, "a b", **settings))
    assert result.returncode == 0, result.stdout
    assert replicas_in(result.stdout) == [f"replica {number} has 1 ranks, a b" for number in range(2)]


@needs_torchft
def test_jobs_of_an_array_torchruns_and_pods_are_replicas(tmp_path: Path) -> None:
    """The lighthouse is that of Kubernetes."""
    _, pods, job = yaml.safe_load_all(REPLICAS.read_text())
    [server], [replica] = (each["spec"]["template"]["spec"]["containers"] for each in (pods, job))
    (tmp_path / "train.py").write_text(REPLICA)
    port = free_port()
    process = subprocess.Popen([*server["command"][:-1], str(port)], env=environment(), preexec_fn=default_signals)
    try:
        there = {"LIGHTHOUSE": f"127.0.0.1:{port}", "SCRIPT": tmp_path / "train.py"}
        given = {entry["name"]: entry["value"] for entry in replica["env"]}
        given |= {**there, "RANKS_PER_REPLICA": 1, "GLOO_SOCKET_IFNAME": "lo", "JOB_COMPLETION_INDEX": 2}
        array = {**there, "SLURM_ARRAY_TASK_ID": 3, "RANKS_PER_REPLICA": 1}
        command, variables = sbatch("replica_array.sbatch", tmp_path, "a b", **array)
        alone = {"SLURM_NNODES": "1", "SLURM_NTASKS": "1"}
        shell = [INTEGRATIONS / "torchrun" / "replica.sh", tmp_path / "train.py", "a b"]
        results = run_together(
            ([*replica["command"], tmp_path / "train.py", "a b"], environment(**given)),
            (command, variables | alone),
            (shell, environment(REPLICA=4, NPROC_PER_NODE=2, **there)),
            ranks=4,
        )
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    for result, number, ranks in zip(results, (2, 3, 4), (1, 1, 2), strict=True):
        assert result.returncode == 0, result.stdout
        assert replicas_in(result.stdout) == [f"replica {number} has {ranks} ranks, a b"]


def test_submitit_starts_a_script_that_finds_its_ranks(tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="submitit is not installed")
    (tmp_path / "helper.py").write_text("")
    script = tmp_path / "train.py"
    script.write_text("import helper  # of the script's folder\n" + PLAIN)
    submit = [sys.executable, INTEGRATIONS / "slurm" / "submit.py", "--cluster", "local", "--tasks", 2]
    [result] = run_together(([*submit, "--folder", tmp_path / "jobs", script, "a b"], environment()))
    assert result.returncode == 0, result.stdout
    said = "".join(output.read_text() for output in (tmp_path / "jobs").glob("*.out"))
    assert ranks_in(said) == [f"rank {rank} of 2, sum 3, a b" for rank in range(2)]


def test_slurm_requeues_a_job_whose_time_is_up(tmp_path: Path) -> None:
    requeued = tmp_path / "requeued"
    script = tmp_path / "wait.py"
    script.write_text("import sys, time; print('waits', flush=True); time.sleep(100)")
    command, variables = sbatch("lightning.sbatch", tmp_path, SCRIPT=script, REQUEUED=requeued)
    process = subprocess.Popen(
        list(map(str, command)),
        env=variables,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=default_signals,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("waits")  # the trap is set
        process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + 90
        while not requeued.exists() or not requeued.read_text():
            assert time.monotonic() < deadline, "it was not requeued"
            time.sleep(0.02)
        assert requeued.read_text() == "requeue 4321\n"
        assert process.poll() is None  # Slurm ends it
    finally:
        subprocess.run(["kill", "-KILL", "--", f"-{process.pid}"], check=True)
        process.wait()


def test_slurm_files_ask_for_what_they_use() -> None:
    lightning = directives(INTEGRATIONS / "slurm" / "lightning.sbatch")
    assert lightning["ntasks-per-node"] == lightning["gpus-per-node"]  # a process for each GPU
    assert lightning["signal"].startswith("B:")  # for the batch file, not for the processes
    file = INTEGRATIONS / "slurm" / "accelerate.sbatch"
    assert directives(file)["ntasks-per-node"] == "1"
    assert f"NPROC_PER_NODE=${{NPROC_PER_NODE:-{directives(file)['gpus-per-node']}}}" in file.read_text()
    for file in sorted((INTEGRATIONS / "slurm").glob("replica*.sbatch")):
        assert directives(file)["ntasks-per-node"] == "1"
        assert f"RANKS_PER_REPLICA=${{RANKS_PER_REPLICA:-{directives(file)['gpus-per-node']}}}" in file.read_text()


def test_train_job_follows_its_schema() -> None:
    job = yaml.safe_load(TRAINJOB.read_text())
    assert TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job
    job["spec"]["trainer"]["numNode"] = 2  # what the schema does not know is dropped
    assert TrainerV1alpha1TrainJob.from_dict(job).to_dict() != job
    trainer = job["spec"]["trainer"]
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == str(trainer["numProcPerNode"])
    [patch] = job["spec"]["runtimePatches"]
    [node] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == volumes


def test_train_job_runs_with_what_its_runtime_sets(tmp_path: Path) -> None:
    trainer = yaml.safe_load(TRAINJOB.read_text())["spec"]["trainer"]
    assert (ROOT / trainer["args"][0]).exists()
    (tmp_path / "train.py").write_text(PLAIN)
    command = [*trainer["command"], tmp_path / "train.py", "a b"]  # args, with another script
    given = {entry["name"]: entry["value"] for entry in trainer["env"] if "value" in entry}
    runtime = given | {
        "POD_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PET_NNODES": 2,
        "PET_NPROC_PER_NODE": 1,
        "PET_MASTER_ADDR": "localhost",
        "PET_MASTER_PORT": free_port(),
    }
    pods = run_together(*[(command, environment(**runtime, PET_NODE_RANK=rank)) for rank in range(2)])
    for pod in pods:
        assert pod.returncode == 0, pod.stdout
    assert ranks_in("".join(pod.stdout for pod in pods)) == [f"rank {rank} of 2, sum 3, a b" for rank in range(2)]


def test_replicas_on_kubernetes_follow_their_schemas() -> None:
    service, lighthouse, job = yaml.safe_load_all(REPLICAS.read_text())
    assert IoK8sApiCoreV1Service.from_dict(service).to_dict() == service
    assert IoK8sApiBatchV1Job.from_dict(job).to_dict() == job
    pods = lighthouse["spec"]["template"]
    assert IoK8sApiCoreV1PodTemplateSpec.from_dict(pods).to_dict() == pods
    assert lighthouse["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == pods["metadata"]["labels"]
    [container], [replica] = pods["spec"]["containers"], job["spec"]["template"]["spec"]["containers"]
    variables = {entry["name"]: entry["value"] for entry in replica["env"]}
    [port] = {entry["port"] for entry in service["spec"]["ports"]}
    assert variables["LIGHTHOUSE"] == f"{service['metadata']['name']}:{port}"
    assert container["command"][-1] == str(port)
    assert replica["resources"]["limits"]["nvidia.com/gpu"] == variables["RANKS_PER_REPLICA"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == job["spec"]["maxFailedIndexes"]
    volumes = {volume["name"] for volume in job["spec"]["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in replica["volumeMounts"]} == volumes


def test_a_skypilot_task_runs_with_what_skypilot_sets(tmp_path: Path) -> None:
    task: dict[str, Any] = yaml.safe_load(SKYPILOT.read_text())
    script, *options = task["envs"]["SCRIPT"].split()
    assert (ROOT / script).exists()
    assert any(option.startswith(mount) for option in options for mount in task["file_mounts"])
    (tmp_path / "train.py").write_text(PLAIN)
    port = free_port()
    runs = task["run"].replace(":29500", f":{port}")
    assert runs != task["run"]
    set_by_skypilot = {
        "SKYPILOT_NUM_NODES": task["num_nodes"],
        "SKYPILOT_NUM_GPUS_PER_NODE": 1,
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
        "SKYPILOT_TASK_ID": "sky-managed-pipesync-1-0",
        "SCRIPT": f"{tmp_path / 'train.py'} a-b",
        "INTERFACE": "lo",
    }
    machines = run_together(
        *[(["bash", "-c", runs], environment(**set_by_skypilot, SKYPILOT_NODE_RANK=rank)) for rank in range(2)]
    )
    for machine in machines:
        assert machine.returncode == 0, machine.stdout
    said = ranks_in("".join(machine.stdout for machine in machines))
    assert said == [f"rank {rank} of 2, sum 3, a-b" for rank in range(2)]


# --- the callback that reports the progress to Kubeflow Trainer, here to a stand-in -----------------------------------


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
