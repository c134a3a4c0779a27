"""What ranks import: the process that they are forked from has done so once, and they start in milliseconds."""

import gc
import os
from importlib import import_module

gc.disable()  # what is imported stays
os.environ["OMP_NUM_THREADS"] = "1"  # or libraries start threads when they are imported

# The optimizers of torch.distributed compile TorchScript on import, which takes longer than most tests train.
for _name in (
    "bayes_opt",
    "pytest",
    "sklearn.datasets",
    "tests.conformance.runners",
    "torch._dynamo",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
):
    import_module(_name)

# A rank's garbage collections go over its own objects only; over all they would copy the memory that it shares.
gc.freeze()
gc.enable()
