"""The simulations run as the ranks do: on one thread, so that sums are made in the same order."""

import torch

torch.set_num_threads(1)
