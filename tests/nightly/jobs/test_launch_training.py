"""Trainings under ``pipesync launch --replicas``: one replica is killed and comes back, and all end the same."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from lightning_pipesync.core.extras import is_installed
from tests.support.commands import environment, run_together

pytestmark = pytest.mark.skipif(not is_installed("torchft"), reason="torchft is not installed")

#: Begins each script. Replica 1 is killed in its sixth step, and comes back; then all train for as many steps more.
BEGIN = """
import os, signal, torch
from tests.support.models import loss, seeded_mlp

PERIOD, KILLED, MORE = 3, 5, 6
name = os.environ["PIPESYNC_REPLICA"]
begun = os.path.join(os.path.dirname(__file__), "begun1")
is_back = os.path.exists(begun)

def kill(step):
    if name == "1" and not is_back and step == KILLED:
        open(begun, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)

def report(model):
    print("weights", *(f"{float(tensor.double().sum()):.17g}" for tensor in model.state_dict().values()))
"""

PLAIN = """
from lightning_pipesync import LocalSGD

model = seeded_mlp(int(name), batch_norm=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
sync = LocalSGD(model, optimizer, period=PERIOD, outer_optimizer="nesterov", timeout_s=100)
sync.join()
left = MORE if is_back else None
while left != 0:
    kill(sync.num_steps)
    optimizer.zero_grad()
    loss(model, sync.num_steps, int(name)).backward()
    sync.step()
    if left is not None:
        left -= 1
    elif sync.num_steps > KILLED and sync.num_steps % PERIOD == 0 and sync.metrics()["replicas"] == 3:
        left = MORE  # the round has taken it in
sync.flush()
report(model)
sync.detach()
"""


TRAINER = """
import lightning.pytorch as pl
from torch.utils.data import DataLoader
from lightning_pipesync import LocalSGDStrategy
from tests.support.lightning_models import Classifier, dataset

class End(pl.Callback):
    left = MORE if is_back else None

    def on_train_batch_start(self, trainer, *args):
        kill(trainer.global_step)

    def on_train_batch_end(self, trainer, *args):
        replicas = trainer.strategy.attached.metrics()["replicas"]
        if self.left is not None:
            self.left -= 1
        elif trainer.global_step > KILLED and trainer.global_step % PERIOD == 0 and replicas == 3:
            self.left = MORE
        trainer.should_stop = self.left == 0

module = Classifier()
pl.Trainer(
    strategy=LocalSGDStrategy(period=PERIOD, partition="defdp", outer_optimizer="nesterov", timeout_s=100),
    accelerator="cpu", devices=1, max_epochs=100_000, callbacks=[End()],
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
).fit(module, DataLoader(dataset(), 4, shuffle=True))
report(module)
"""

ACCELERATE = """
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader
from lightning_pipesync import PipeSyncAccelerator, PipeSyncPlugin

class Counter:
    steps = 0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]

plugin = PipeSyncPlugin("local_sgd", period=PERIOD, outer_optimizer="nesterov", timeout_s=100)
accelerator = PipeSyncAccelerator(plugin, dataloader_config=DataLoaderConfiguration(data_seed=7))
model, counter = seeded_mlp(int(name), batch_norm=True), Counter()
accelerator.register_for_checkpointing(counter)
network, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
train_loader = accelerator.prepare_train_loader(DataLoader(range(60), 4, shuffle=True))
left = MORE if is_back else None
for epoch in range(train_loader.epoch, 100_000):
    for batch in train_loader:
        kill(counter.steps)
        optimizer.zero_grad()
        accelerator.backward(loss(network, counter.steps, int(name)))
        optimizer.step()
        counter.steps += 1
        present, step = accelerator.metrics()["local_sgd/replicas"], counter.steps
        if left is not None:
            left -= 1
        elif step > KILLED and step % PERIOD == 0 and present == 3:
            left = MORE
        if left == 0:
            break
    if left == 0:
        break
accelerator.end()
report(model)
accelerator.end_training()
"""


@pytest.mark.parametrize("loop", [PLAIN, TRAINER, ACCELERATE], ids=["a plain loop", "a Trainer", "Accelerate"])
def test_a_replica_that_is_killed_comes_back(loop: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(BEGIN + loop)
    options = ["--replicas", 3, "--backoff_s", 0.1, "--heartbeat_timeout_s", 5]
    words = [sys.executable, "-m", "lightning_pipesync", "launch", *options, script]
    [result] = run_together((words, environment(CUDA_VISIBLE_DEVICES="")))
    assert result.returncode == 0, result.stdout
    assert "replica 1 was killed by SIGKILL; it starts again in 0.1 s (restart 1 of 3)." in result.stdout
    weights = re.findall(r"\[replica (\d)\] weights (.*)", result.stdout)
    assert sorted(name for name, _ in weights) == ["0", "1", "2"], result.stdout
    assert len({sums for _, sums in weights}) == 1, result.stdout


#: Two ranks a replica. All wait in a step until they are asked to leave, as the launcher is.
LEAVING = """
import os, signal, time, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from lightning_pipesync import LocalSGD
from tests.support.models import loss, seeded_mlp

dist.init_process_group("gloo")
model = seeded_mlp()
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
sync = LocalSGD(model, optimizer, period=3, outer_optimizer="nesterov", timeout_s=100)
sync.join()
first = os.environ["PIPESYNC_REPLICA"] == os.environ["RANK"] == "0"
try:
    while True:
        optimizer.zero_grad()
        loss(model, sync.num_steps, dist.get_rank()).backward()
        if sync.num_steps == 4:
            if first:
                os.kill(int(os.environ["LAUNCHER"]), signal.SIGTERM)
            while sync._departure.notice.deadline is None:
                time.sleep(0.01)
        sync.step()
except SystemExit as error:
    print("left", sync.num_steps, error.code)
    raise
"""


def test_all_leave_after_the_same_round_when_the_launcher_is_asked(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LEAVING)
    start = "import os, sys; os.environ['LAUNCHER'] = str(os.getpid()); from lightning_pipesync.cli import main; "
    options = ["launch", "--replicas", 2, "--ranks_per_replica", 2, script]
    words = [sys.executable, "-c", f"{start}sys.exit(main(sys.argv[1:]))", *options]
    [result] = run_together((words, environment(CUDA_VISIBLE_DEVICES="")))
    assert result.returncode == 143, result.stdout
    left = re.findall(r"\[replica (\d)\] left (.*)", result.stdout)
    assert sorted(left) == [("0", "6 143")] * 2 + [("1", "6 143")] * 2, result.stdout
