"""The callback that plans, for ``lightning``."""

from lightning_pipesync.lab.plan.in_run import PlanCallbackMixin
from lightning_pipesync.lightning.distribution import Callback


class PlanCallback(PlanCallbackMixin, Callback):
    __doc__ = PlanCallbackMixin.__doc__
