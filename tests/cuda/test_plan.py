"""What a plan measures on a GPU: a step, and codecs."""

from __future__ import annotations

import torch

from lightning_pipesync.lab.plan.measure import LOSSY, codec_speed
from lightning_pipesync.lab.plan.model import PlanSettings
from lightning_pipesync.lab.plan.work import measure_work
from lightning_pipesync.lab.predictions.work import Work
from tests.cuda.device import DEVICE, launch_on_device, needs_cuda, sleep

pytestmark = needs_cuda


def work_of_a_slow_forward_pass() -> tuple[Work, Work]:
    """Returns the work of a step, and with a long kernel in its forward pass, for which the host does not wait."""
    torch.set_num_threads(1)
    model = PlanSettings("transformer", 1.0, 1.0, 1, 1, "cuda").build()
    usual = measure_work(model)
    model.module.register_forward_pre_hook(lambda *_: sleep())
    return usual, measure_work(model)


def test_kernels_are_timed_and_not_the_host() -> None:
    ((usual, slow),) = launch_on_device(work_of_a_slow_forward_pass, 1)
    assert slow.profile.forward > 3 * usual.profile.forward
    assert slow.profile.backward < slow.profile.forward
    for work in (usual, slow):
        assert all(0 <= tensor.ready <= work.profile.backward for tensor in work.profile.tensors)
        assert all(0 <= tensor.needed <= work.profile.forward for tensor in work.profile.tensors)
        assert work.measured["pipe_sgd"].seconds > 0


def test_codecs_are_timed_on_the_device() -> None:
    for codec in LOSSY:
        assert codec_speed(codec, DEVICE) > 0
