"""Who finds the predicted weights in the module, and who the true ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lightning_pipesync.core.parameters import modules_with_parameters
from lightning_pipesync.methods.module_hook import ModuleHook
from lightning_pipesync.methods.pipe_sgd.pipe import GradientPipe


class LookAhead:
    """Has forward passes that compute gradients begin with the predicted weights; state dicts hold the true ones.

    Args:
        module: the model.
        pipes: of its optimizers.
        is_evaluated: whether the module is being evaluated, so that all ranks shall see the same weights even if
            gradients are enabled.
    """

    def __init__(self, module: nn.Module, pipes: Sequence[GradientPipe], is_evaluated: Callable[[], bool]) -> None:
        self._pipes, self._is_evaluated = pipes, is_evaluated
        self._saved: nn.Module | None = None  # whose state_dict is being made
        self._interrupted: list[GradientPipe] = []
        forward, within = ModuleHook(self._before_forward), ModuleHook(self._before_forward_within)
        # Before the hooks of others, as of weight_norm, which read the weights.
        self._hooks = [module.register_forward_pre_hook(forward, prepend=True)]
        for child in modules_with_parameters(module):
            self._hooks.append(child.register_forward_pre_hook(within, prepend=True))
        saving, saved = ModuleHook(self._before_saving), ModuleHook(self._after_saving)
        loading = ModuleHook(self._before_loading)
        for child in module.modules():
            self._hooks.append(child.register_state_dict_pre_hook(saving))
            self._hooks.append(child.register_state_dict_post_hook(saved))
            self._hooks.append(child.register_load_state_dict_pre_hook(loading))

    def use_predicted_weights(self) -> None:
        """Has the parameters be the predicted weights, if there are any."""
        for pipe in self._pipes:
            pipe.use_predicted_weights()

    def use_true_weights(self) -> None:
        """Has the parameters be the true weights."""
        for pipe in self._pipes:
            pipe.use_true_weights()

    def close(self) -> None:
        """Leaves the module as it would be without."""
        for hook in self._hooks:
            hook.remove()
        self.use_true_weights()

    @torch.compiler.disable
    def _before_forward(self, *_: Any) -> None:
        self._look()

    def _before_forward_within(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():  # a model that is compiled as a whole begins with itself
            self._look()

    def _look(self) -> None:
        if torch.is_grad_enabled() and not self._is_evaluated():
            self.use_predicted_weights()

    def _before_saving(self, module: nn.Module, *_: Any) -> None:
        if self._saved is None:
            self._saved = module
            self._interrupted = [pipe for pipe in self._pipes if pipe.uses_predicted_weights]
            self.use_true_weights()

    def _after_saving(self, module: nn.Module, *_: Any) -> None:
        if self._saved is module:
            self._saved = None
            for pipe in self._interrupted:
                pipe.use_predicted_weights()

    def _before_loading(self, *_: Any) -> None:
        for pipe in self._pipes:
            pipe.forget_prediction()
