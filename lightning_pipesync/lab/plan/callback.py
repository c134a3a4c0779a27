"""The callback that plans, for ``lightning``."""

from lightning.pytorch import Callback

from lightning_pipesync.lab.plan.in_run import PlanCallbackMixin


class PlanCallback(PlanCallbackMixin, Callback):
    __doc__ = PlanCallbackMixin.__doc__
