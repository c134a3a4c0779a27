"""Who finds the predicted weights in the module, and who the true ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lightning_pipesync.core.parameters import modules_with_parameters
from lightning_pipesync.methods.module_hook import EagerHook, ModuleHook
from lightning_pipesync.methods.pipe_sgd.pipe import GradientPipe


class LookAhead:
    """Has forward passes that compute gradients begin with the predicted weights; state dicts hold the true ones.

    Args:
        module: the model.
        pipes: of its optimizers.
        is_flushed: whether all ranks shall see the same weights, even if gradients are enabled.
    """

    def __init__(self, module: nn.Module, pipes: Sequence[GradientPipe], is_flushed: Callable[[], bool]) -> None:
        self._pipes, self._is_flushed = pipes, is_flushed
        self._saved: nn.Module | None = None  # whose state_dict is being made
        self._paused: list[GradientPipe] = []
        # Before the hooks of others, as of weight_norm, which read the weights. A model that is compiled as a whole
        # begins with itself: what is within would break up its graph.
        self._hooks = [module.register_forward_pre_hook(ModuleHook(self._before_forward), prepend=True)]
        before_child = EagerHook(self._before_forward)
        for child in modules_with_parameters(module):
            if child is not module:
                self._hooks.append(child.register_forward_pre_hook(before_child, prepend=True))
        saving, saved = ModuleHook(self._before_saving), ModuleHook(self._after_saving)
        loading = ModuleHook(self._before_loading)
        for child in module.modules():
            self._hooks.append(child.register_state_dict_pre_hook(saving))
            self._hooks.append(child.register_state_dict_post_hook(saved))
            self._hooks.append(child.register_load_state_dict_pre_hook(loading))

    def use(self) -> None:
        """Swaps the predicted weights in, if there are any."""
        self._saved = None
        for pipe in self._pipes:
            pipe.use_predicted_weights()

    def pause(self) -> list[GradientPipe]:
        """Restores the true weights; returns the pipes whose predicted ones were in use."""
        in_use = [pipe for pipe in self._pipes if pipe.looks_ahead]
        for pipe in in_use:
            pipe.restore_true_weights()
        return in_use

    def close(self) -> None:
        """Leaves the module as it would be without."""
        for hook in self._hooks:
            hook.remove()
        for pipe in self._pipes:
            pipe.restore_true_weights(check=False)

    def _before_forward(self, *_: Any) -> None:
        if torch.is_grad_enabled() and not self._is_flushed():
            self.use()

    def _before_saving(self, module: nn.Module, *_: Any) -> None:
        if self._saved is None or self._saved is module:  # one that has raised had no end
            self._saved = module
            self._paused = self.pause()

    def _after_saving(self, module: nn.Module, *_: Any) -> None:
        if self._saved is module:
            self._saved = None
            for pipe in self._paused:
                pipe.use_predicted_weights()

    def _before_loading(self, *_: Any) -> None:
        for pipe in self._pipes:
            pipe.forget_prediction()
