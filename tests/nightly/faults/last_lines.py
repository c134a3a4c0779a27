"""A program: forks the ranks of each job, one of which is lost at some place of a training, and keeps what they print.

They end as scripts of users do, with all that happens at an interpreter's shutdown, and their output is a file of each.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which an optimizer would import after the fork, and so would DDP the next two
import torch.distributed as dist
import torch.distributed.algorithms.ddp_comm_hooks
import torch.distributed.optim
from accelerate import InitProcessGroupKwargs
from lightning.fabric import Fabric
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from lightning_pipesync import PipeSyncAccelerator, PipeSyncPlugin, SelSync, SelSyncStrategy
from lightning_pipesync.fabric import SelSyncFabricStrategy
from lightning_pipesync.methods.sync_method import SyncMethod
from lightning_pipesync.transformers import PipeSyncTrainerMixin
from tests.conformance.shards import device_mesh, shard
from tests.conformance.training import Options
from tests.support.harness import free_port
from tests.support.lightning_models import dataset, trainer
from tests.support.lost_ranks import be_patient

#: Seconds after which a method counts a rank as lost, where that is how it is found out; otherwise far longer.
FROZEN_TIMEOUT_S, TIMEOUT_S = 20, 300
#: Of the default process group, where a method has another one: nobody may wait for as long.
GROUP_TIMEOUT = timedelta(seconds=600)
#: Seconds after which a rank that is still there has hung: it prints its stacks, and ends.
HUNG_S = 150
VICTIM = 1
STEPS = 6


@dataclass(frozen=True)
class Job:
    """What befalls rank 1, and where; its name is the words in this order."""

    framework: str
    place: str
    how: str
    ranks: int

    @classmethod
    def of(cls, name: str) -> Job:
        framework, place, how = name.split()
        return cls(framework, place, how, 4 if framework.startswith("sharded") else 2)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def raise_error() -> None:
    raise KeyError("a bug in the loop")


FAULTS: dict[str, Callable[[], None]] = {
    "killed": kill,
    "frozen": freeze,
    "raises": raise_error,
    "exits": partial(sys.exit, 0),
}


class Spots:
    """The places of a training; at one of them rank 1 is lost, in the fourth step if there are several."""

    def __init__(self, job: Job) -> None:
        self.job, self.step = job, 0

    def __call__(self, place: str) -> None:
        if place == self.job.place and int(os.environ["RANK"]) == VICTIM and self.step in (0, 4):
            time.sleep(0.2)  # what it has sent is on its way
            FAULTS[self.job.how]()


class Middle(nn.Tanh):
    """A layer that has a place in the forward and in the backward pass."""

    def __init__(self, spots: Spots) -> None:
        super().__init__()
        self.spots = spots

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.spots.step += 1
            self.spots("forward")
            x.register_hook(self._backward)
        return super().forward(x)

    def _backward(self, gradient: Tensor) -> None:
        self.spots("backward")


def network(spots: Spots) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), Middle(spots), nn.Linear(10, 2))


def optimizer_of(model: nn.Module, spots: Spots) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_pre_hook(lambda *_: spots("step"))
    return optimizer


def loss_of(model: nn.Module) -> Tensor:
    _, x, y = dataset()[:8]
    return nn.functional.cross_entropy(model(x), y)


def attach_at(spots: Spots) -> None:
    """Has an attach pass through a place, in its midst."""
    before = SyncMethod._broadcast_buffers

    def broadcast(self: SyncMethod) -> None:
        spots("attach")
        before(self)

    SyncMethod._broadcast_buffers = broadcast  # type: ignore[method-assign]


def train_plainly(spots: Spots, settings: dict[str, Any], folder: Path, sharded: bool = False) -> None:
    dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
    spots("init")
    model = network(spots)
    if sharded:
        shard(model, device_mesh(Options(ranks=4, ranks_per_replica=2))["shards"])
    optimizer = optimizer_of(model, spots)
    sync = SelSync(model, optimizer, **settings)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model).backward()
        sync.step()
    spots.step = 0
    spots("flush")
    sync.flush()
    spots("barrier")
    dist.barrier()
    sync.detach()


def train_in_fabric(spots: Spots, settings: dict[str, Any], folder: Path, sharded: bool = False) -> None:
    fabric = Fabric(accelerator="cpu", devices=spots.job.ranks, strategy=SelSyncFabricStrategy(**settings))
    fabric.launch()
    spots("init")
    model = network(spots)
    if sharded:
        shard(model, device_mesh(Options(ranks=4, ranks_per_replica=2))["shards"])
    wrapped, optimizer = fabric.setup(model, optimizer_of(model, spots))
    for _ in range(STEPS):
        optimizer.zero_grad()
        fabric.backward(loss_of(wrapped))
        optimizer.step()
    spots.step = 0
    spots("barrier")
    fabric.barrier()
    spots("checkpoint")
    fabric.save(folder / "fabric", {"model": wrapped, "optimizer": optimizer})
    fabric.strategy.teardown()


def train_in_accelerate(spots: Spots, settings: dict[str, Any], folder: Path) -> None:
    accelerator = PipeSyncAccelerator(
        PipeSyncPlugin("selsync", **settings), kwargs_handlers=[InitProcessGroupKwargs(timeout=GROUP_TIMEOUT)]
    )
    spots("init")
    model = network(spots)
    wrapped, optimizer = accelerator.prepare(model, optimizer_of(model, spots))
    for _ in range(STEPS):
        optimizer.zero_grad()
        accelerator.backward(loss_of(wrapped))
        optimizer.step()
    spots.step = 0
    spots("barrier")
    accelerator.wait_for_everyone()
    spots("gather")
    accelerator.gather(torch.ones(1))
    spots("raw")
    accelerator.state.wait_for_everyone()
    spots("checkpoint")
    accelerator.save_state(str(folder / "accelerate"))
    accelerator.end_training()


def train_in_lightning(spots: Spots, settings: dict[str, Any], folder: Path) -> None:
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader

    class Module(pl.LightningModule):
        def configure_model(self) -> None:
            if not hasattr(self, "model"):
                spots("init")
                self.model = network(spots)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.model, spots)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = nn.functional.cross_entropy(self.model(batch[1]), batch[2])
            self.log("loss", loss, sync_dist=True, on_epoch=True)
            return loss

        def on_validation_start(self) -> None:
            spots.step = 0
            spots("flush")

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            spots("validation")
            self.log("val", self.model(batch[1]).sum(), sync_dist=True)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            spots("checkpoint")

        def on_train_end(self) -> None:
            spots("end")

    run = trainer(
        SelSyncStrategy(**settings), 2, folder, max_epochs=1, num_sanity_val_steps=0, enable_checkpointing=True
    )
    run.fit(Module(), DataLoader(dataset(), 4), DataLoader(dataset(), 16))


class Classified(nn.Module):
    """A network as transformers trains it."""

    def __init__(self, spots: Spots) -> None:
        super().__init__()
        self.layers = network(spots)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class PipeSyncTrainer(PipeSyncTrainerMixin, Trainer): ...


def train_in_transformers(spots: Spots, settings: dict[str, Any], folder: Path) -> None:
    class Passing(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            spots("step")

        def on_evaluate(self, *_: Any, **__: Any) -> None:
            spots.step = 0
            spots("validation")

        def on_save(self, *_: Any, **__: Any) -> None:
            spots("checkpoint")

    rows = [{"x": x, "labels": y} for _, x, y in dataset()]
    args = TrainingArguments(
        str(folder / "transformers"),
        max_steps=STEPS,
        eval_strategy="steps",
        eval_steps=5,
        save_steps=5,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=4,
        ddp_timeout=600,
    )
    spots("init")
    run = PipeSyncTrainer(
        model=Classified(spots), args=args, train_dataset=rows, eval_dataset=rows, callbacks=[Passing()],
        pipesync=PipeSyncPlugin("selsync", **settings),
    )  # fmt: skip
    run.train()


TRAININGS: dict[str, Callable[..., None]] = {
    "plain": train_plainly,
    "sharded": partial(train_plainly, sharded=True),
    "fabric": train_in_fabric,
    "sharded-fabric": partial(train_in_fabric, sharded=True),
    "accelerate": train_in_accelerate,
    "lightning": train_in_lightning,
    "transformers": train_in_transformers,
}


def run_rank(name: str, folder: Path) -> None:
    faulthandler.dump_traceback_later(HUNG_S, exit=True)
    job = Job.of(name)
    be_patient()
    spots = Spots(job)
    attach_at(spots)
    settings = {"delta": 0.0, "timeout_s": FROZEN_TIMEOUT_S if job.how == "frozen" else TIMEOUT_S}
    try:
        TRAININGS[job.framework](spots, settings, folder / name)
    except Exception as error:
        (folder / f"{name} {os.environ['RANK']} error").write_text(str(error))
        raise


def fork_rank(rank: int, port: int, name: str, folder: Path) -> int:
    child = os.fork()
    if child == 0:
        output = os.open(folder / f"{name} {rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(Job.of(name).ranks)}
        os.environ.update(of_rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
        os.environ.update(ACCELERATE_USE_CPU="true", LOCAL_WORLD_SIZE=of_rank["WORLD_SIZE"])
        run_rank(name, folder)
        sys.exit()
    return child


def run_jobs(names: list[str], folder: Path) -> dict[str, int]:
    """Returns the exit codes by job and rank; ends a frozen rank once all others of its job have ended."""
    codes: dict[str, int] = {}
    children = {}
    for name in names:
        port = free_port()
        children.update({fork_rank(rank, port, name, folder): (name, rank) for rank in range(Job.of(name).ranks)})
    while children:
        child, status = os.wait()
        name, rank = children.pop(child)
        codes[f"{name} {rank}"] = os.waitstatus_to_exitcode(status)
        left = [other for other, (same, _) in children.items() if same == name]
        if Job.of(name).how == "frozen" and len(left) == 1 and children[left[0]][1] == VICTIM:
            os.kill(left[0], signal.SIGKILL)
    return codes


def main(folder: Path, at_a_time: int, names: list[str]) -> None:
    """Args: where all write; the number of jobs at a time; the jobs."""
    torch.set_num_threads(1)
    gc.freeze()  # or each rank's last garbage collection copies the memory that it shares
    codes: dict[str, int] = {}
    for begin in range(0, len(names), at_a_time):
        codes |= run_jobs(names[begin : begin + at_a_time], folder)
        (folder / "codes").write_text(json.dumps(codes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
