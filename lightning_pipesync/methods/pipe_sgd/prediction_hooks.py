"""Module hooks that swap in the predicted weights for a forward pass, and the true ones for a state dict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_pipesync.core.parameters import modules_with_parameters
from lightning_pipesync.core.torch_private import in_function_transform
from lightning_pipesync.methods.module_hook import EagerHook, ModuleHook
from lightning_pipesync.methods.pipe_sgd.pipe import GradientPipe


class PredictionHooks:
    """Forward passes with gradients enabled run at the predicted weights; state dicts hold the true ones.

    Within a transform of ``torch.func`` the weights stay what they are.
    """

    def __init__(
        self, module: nn.Module, pipes: Sequence[GradientPipe], predicts: bool, is_flushed: Callable[[], bool]
    ) -> None:
        self._pipes, self._is_flushed = pipes, is_flushed
        self._saved: nn.Module | None = None  # whose state_dict is being made
        self._restored: list[GradientPipe] = []
        self._hooks: list[RemovableHandle] = []
        if predicts:
            self._register_hooks(module)

    def use_predicted_weights(self) -> None:
        self._saved = None
        for pipe in self._pipes:
            pipe.use_predicted_weights()

    def restore_true_weights(self) -> list[GradientPipe]:
        """Restores the true weights; returns the pipes whose predicted weights were in use."""
        in_use = [pipe for pipe in self._pipes if pipe.predicted.in_use]
        for pipe in in_use:
            pipe.predicted.restore()
        return in_use

    def remove(self) -> None:
        """Removes the hooks, and restores the true weights."""
        for hook in self._hooks:
            hook.remove()
        for pipe in self._pipes:
            pipe.predicted.restore(check=False)

    def _register_hooks(self, module: nn.Module) -> None:
        # Before the hooks of others, such as those of weight_norm, which read the weights. A model that is compiled as
        # a whole needs the hook of the whole model only: those of its submodules would break its graph.
        self._hooks.append(module.register_forward_pre_hook(ModuleHook(self._before_forward), prepend=True))
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

    def _before_forward(self, *_: Any) -> None:
        if torch.is_grad_enabled() and not self._is_flushed() and not in_function_transform():
            self.use_predicted_weights()

    def _before_saving(self, module: nn.Module, *_: Any) -> None:
        if self._saved is None or self._saved is module:  # an earlier state_dict of it may have raised
            self._saved = module
            self._restored = self.restore_true_weights()

    def _after_saving(self, module: nn.Module, *_: Any) -> None:
        if self._saved is module:
            self._saved = None
            for pipe in self._restored:
                pipe.use_predicted_weights()

    def _before_loading(self, *_: Any) -> None:
        for pipe in self._pipes:
            pipe.predicted.forget()
