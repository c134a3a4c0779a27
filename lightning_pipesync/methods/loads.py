"""Notes what is loaded into a model and its optimizers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from lightning_pipesync.methods.gradients.module_hook import ModuleHook
from lightning_pipesync.methods.method import parameters_of


class Loads:
    """Notes whether a state was loaded into a model, or a part that is trained, or into one of its optimizers.

    Args:
        module: the model. A part that no optimizer trains is not watched: weights may be loaded into a teacher often.
        optimizers: its optimizers.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._noted = False
        note = ModuleHook(self._note)
        trained = {id(parameter) for optimizer in optimizers for parameter in parameters_of(optimizer)}
        children = [child for child in module.modules() if any(id(one) in trained for one in child.parameters())]
        self._hooks = [child.register_load_state_dict_post_hook(note) for child in children]
        self._hooks += [optimizer.register_load_state_dict_post_hook(note) for optimizer in optimizers]

    def take(self) -> bool:
        """Returns whether something was loaded since the last call."""
        noted, self._noted = self._noted, False
        return noted

    def remove(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _note(self, *_: object) -> None:
        self._noted = True
