"""Every Python snippet of the README and the docs runs as it stands, on real ranks."""

from __future__ import annotations

import ast
import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

from lightning_pipesync.training.registry import METHODS
from tests.nightly.docs.docs_stand_ins import frameworks, stand_ins
from tests.support.docs_pages import PAGES, snippets_of
from tests.support.harness import launch


@dataclass(frozen=True)
class Run:
    """How a snippet is run.

    Attributes:
        before, after: code that its reader has besides.
        continues: whether it needs what the snippet before it has made, which is run first.
        init: whether the process group exists.
    """

    before: str = ""
    after: str = ""
    continues: bool = False
    ranks: int = 2
    init: bool = True


SELSYNC = "from lightning_pipesync import SelSync\nsync = SelSync(model, optimizer)\nx, y = next(iter(loader))"
#: What transformers' Trainer needs, and a training with it.
TRANSFORMERS = Run(
    "from torch import nn\n"
    "from transformers import TrainingArguments\n"
    "class ForTransformers(nn.Module):\n"
    "    def __init__(self):\n"
    "        super().__init__()\n"
    "        self.net = Net()\n"
    "    def forward(self, x, labels):\n"
    "        return {'loss': loss_function(self.net(x), labels)}\n"
    "model, data = ForTransformers(), [{'x': x, 'labels': y} for x, y in dataset]\n"
    "args = TrainingArguments(folder, max_steps=2, use_cpu=True, report_to=[], save_strategy='no')",
    "trainer.train()",
)
#: A lighthouse for a replica that is a job of its own.
LIGHTHOUSE = """
import os
from torch.optim.lr_scheduler import StepLR
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
os.environ["PIPESYNC_LIGHTHOUSE"] = "127.0.0.1:" + server.address().rpartition(":")[2]
scheduler, epochs = StepLR(optimizer, 1), 2
"""
#: Of the snippets that need more than :func:`stand_ins`, by page and the start of the snippet.
RUNS = {
    ("README", "from lightning_pipesync import DeAR"): Run(after="sync.detach()"),
    ("accelerate", "train_loader.set_epoch"): Run(continues=True),
    ("accelerate", "from lightning_pipesync import PipeSyncPlugin, PipeSyncTrainer"): TRANSFORMERS,
    ("diloco_across_sites", "import json"): Run("import sys\nsys.argv = ['sites.py', '{\"epochs\": 1}']", init=False),
    ("diloco_across_sites", "import torch.distributed as dist"): Run(
        "import torch\nfrom lightning_pipesync import LocalSGD\nsync = LocalSGD(model, optimizer)", "sync.detach()"
    ),
    ("ea_pipe", "trainer = Trainer(strategy=EAPipeStrategy(module="): Run(
        "from collections import OrderedDict\n"
        "from torch import nn\n"
        "blocks = nn.Sequential(*[nn.Linear(6, 6) for _ in range(8)])\n"
        "net = nn.Sequential(OrderedDict(blocks=blocks))",
        "engine.detach()",
        ranks=3,
    ),
    ("ea_pipe", "trainer = Trainer(strategy=EAPipeStrategy(num_pipelines="): Run(ranks=4),
    ("ea_pipe", "from torch.utils.data import DataLoader, DistributedSampler"): Run(
        after="engine.flush()\nengine.detach()", ranks=4
    ),
    ("fabric", "from lightning_pipesync.fabric import"): Run(after="fabric.launch()"),
    ("fabric", "with fabric.strategy.consolidated"): Run(continues=True),
    ("fabric", "from torch.utils.data import"): Run(
        "import lightning_pipesync\n"
        "from lightning.fabric import Fabric\n"
        "fabric = Fabric(strategy='selsync')\n"
        "fabric.launch()\n"
        "model, optimizer = fabric.setup(model, optimizer)",
        "next(iter(loader))",
    ),
    ("large_batches", "def configure_optimizers"): Run(
        "from lightning.pytorch import Trainer",
        "Net.configure_optimizers = configure_optimizers\nTrainer(strategy='selsync').fit(Net(), loader)",
    ),
    ("launching", "from lightning_pipesync import LocalSGD"): Run(after="sync.detach()"),
    ("launching", "import os"): Run("import os\nos.environ |= {'LOCAL_WORLD_SIZE': '1', 'GROUP_WORLD_SIZE': '2'}"),
    # A rank that ended at once would reset the connections that another still makes.
    ("netlab", "import torch\n"): Run(init=False, after="torch.distributed.barrier()"),
    ("parameter_server", "sync = ParameterServer(model, optimizer, policy="): Run(after="sync.detach()"),
    ("plain_loop", "loss_function(model(x), y)"): Run(SELSYNC, "sync.detach()"),
    ("plain_loop", "scaler.scale"): Run(
        f"{SELSYNC}\nfrom torch.amp import GradScaler\nscaler, loss = GradScaler('cpu'), loss_function(model(x), y)",
        "sync.detach()",
    ),
    ("plain_loop", "import torch"): Run(SELSYNC, "sync.detach()"),
    ("sharded_models", "import torch.distributed as dist"): Run(
        "from torch.optim import AdamW", "dist.barrier()", ranks=4
    ),
    ("sharded_models", "from lightning.pytorch import Trainer"): Run(ranks=4, init=False),
    ("sharded_models", "from lightning.fabric import Fabric"): Run(
        after="for x, y in fabric.setup_dataloaders(loader):\n"
        "    fabric.backward(loss_function(model(x), y))\n"
        "    optimizer.step()",
        ranks=4,
        init=False,
    ),
    ("sharded_models", "from accelerate import ParallelismConfig"): Run(
        after="for x, y in accelerator.prepare_train_loader(loader):\n"
        "    accelerator.backward(loss_function(model(x), y))\n"
        "    optimizer.step()",
        ranks=4,
        init=False,
    ),
    ("sharded_models", "from torch.distributed.tensor.parallel"): Run(
        "import torch.distributed as dist\n"
        "from lightning_pipesync import DeAR\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "from torch.optim import AdamW\n"
        "hosts, ranks_per_host = 2, 2",
        "for x, y in loader:\n    loss_function(model(x), y).backward()\n    sync.step()\nsync.detach()",
        ranks=4,
    ),
    ("sharded_models", "import torch.distributed.checkpoint"): Run(
        "import torch\nimport torch.distributed as dist", "sync.detach()", continues=True, ranks=4
    ),
    ("plan", "from lightning_pipesync import StepReport"): Run(
        "import json\n"
        "from pathlib import Path\n"
        "Path('outputs/plan').mkdir(parents=True, exist_ok=True)\n"
        "Path('outputs/plan/plan.json').write_text(json.dumps({'results': [{'predictions': []}]}))\n"
        "import torch\n"
        "torch.distributed.barrier()"
    ),
    ("plan", "from torch.distributed.fsdp"): Run(
        after="from torch.distributed.device_mesh import init_device_mesh\n"
        "model, batch, loss = for_plan(init_device_mesh('cpu', (2,)))\nloss(model, batch).backward()",
        ranks=2,
    ),
    ("plan", "def for_plan"): Run(after="model, batch, loss = for_plan()\nloss(model, batch).backward()"),
    ("profiling", "from lightning_pipesync import DeAR, step_report"): Run(after="sync.detach()"),
    ("profiling", "from torch.profiler import"): Run(
        "sync = DeAR(model, optimizer)\nfor x, y in loader:\n    loss_function(model(x), y).backward()\n    break",
        "sync.detach()",
    ),
    ("quick_start", "from lightning_pipesync import SelSync"): Run(after="sync.detach()"),
    ("quick_start", "from lightning_pipesync import PipeSyncPlugin, PipeSyncTrainer"): TRANSFORMERS,
    ("quick_start", "import os"): Run(
        after="model, loader = for_plan()\nmodel.training_step(next(iter(loader)), 0).backward()"
    ),
    ("replicas", "from lightning_pipesync import LocalSGD\n"): Run(LIGHTHOUSE, "server.shutdown()", init=False),
}
IN_SESSION = "starts ranks from a session, as the tests of notebooks in tests/nightly/launch do"
#: Those that cannot run here, with the reason.
NOT_RUN = {
    (
        "netlab",
        "from lightning_pipesync.lab.netlab import",
    ): "needs root, and a script; tests of netlab run both calls",
    ("notebooks", "import lightning_pipesync"): IN_SESSION,
    ("notebooks", "from lightning.fabric"): IN_SESSION,
    ("ray", "import sys"): "is a script that needs Ray; tests/nightly/launch/test_ray.py runs it",
}


def entry_of(page: Path, snippet: str, table: dict[tuple[str, str], object]) -> object:
    found = [entry for (name, start), entry in table.items() if name == page.stem and snippet.startswith(start)]
    assert len(found) <= 1, snippet
    return found[0] if found else None


SNIPPETS = [(page, number) for page in PAGES for number in range(len([*snippets_of(page)]))]


def test_the_tables_name_snippets_that_exist() -> None:
    for name, start in RUNS.keys() | NOT_RUN.keys():
        [page] = [page for page in PAGES if page.stem == name]
        assert sum(snippet.startswith(start) for _, snippet in snippets_of(page)) == 1, (name, start)


@pytest.mark.parametrize(("page", "number"), SNIPPETS, ids=[f"{page.stem}-{number}" for page, number in SNIPPETS])
def test_a_snippet_runs(page: Path, number: int, tmp_path: Path) -> None:
    [*snippets] = snippets_of(page)
    if reason := entry_of(page, snippets[number][1], NOT_RUN):
        pytest.skip(str(reason))
    run = entry_of(page, snippets[number][1], RUNS) or Run()
    assert isinstance(run, Run)
    launch(run_snippet, run.ranks, page, number, tmp_path, init=run.init)


def run_snippet(page: Path, number: int, folder: Path) -> None:
    """Runs a snippet, after those that it continues, with what the page has imported before."""
    [*snippets] = snippets_of(page)
    first = number
    while isinstance(run := entry_of(page, snippets[first][1], RUNS), Run) and run.continues:
        first -= 1
    module = ModuleType("snippet")  # where dataclasses look for the types of their fields
    sys.modules[module.__name__] = module
    with ExitStack() as stack:
        stack.callback(os.chdir, os.getcwd())
        os.chdir(folder)
        for context in (mock.patch.dict(METHODS), *frameworks()):
            stack.enter_context(context)
        for line, snippet in snippets[:first]:
            imports = [node for node in ast.parse(snippet).body if isinstance(node, (ast.Import, ast.ImportFrom))]
            exec(compile(ast.Module(imports, []), f"{page}:{line}", "exec"), vars(module))
        vars(module).update(stand_ins(str(folder)))
        for line, snippet in snippets[first : number + 1]:
            run = entry_of(page, snippet, RUNS) or Run()
            assert isinstance(run, Run)
            for code in (run.before, "\n" * line + snippet, run.after):
                exec(compile(code, str(page), "exec"), vars(module))
