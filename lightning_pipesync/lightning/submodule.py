"""Runs a submodule of a LightningModule as a pipeline, without changes to the module's steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lightning_pipesync.core.fingerprints import digest
from lightning_pipesync.core.torch_private import tensors_in
from lightning_pipesync.methods.ea_pipe.layout import Call

#: Number of values of each tensor that identify a batch.
DIGEST_VALUES = 1024

#: What to set for other models.
OTHER_MODELS = (
    "Any other submodule is traced, if split= has the names of those within it with which the later stages begin."
)


class _InputFoundError(Exception):
    """Stops a step at its call of the submodule, and carries the arguments of that call."""


class Submodule:
    """The submodule that a LightningModule's ``training_step``, ``validation_step`` and so on call.

    Without a ``name`` it is the only ``nn.Sequential`` that is not part of another one. If ``traced``, it may be any
    module; then its input is a :class:`Call`, otherwise its only argument.
    """

    def __init__(self, module: nn.Module, name: str | None, traced: bool) -> None:
        if traced and name is None:
            raise ValueError(
                f"split= needs module=: set it to the name of the submodule of {type(module).__name__} that holds the "
                "submodules named in split=."
            )
        self.name = _only_sequential(module) if name is None else name
        found = dict(module.named_modules()).get(self.name) if self.name else None
        if found is None or not (traced or isinstance(found, nn.Sequential)):
            what = "there is no such submodule" if found is None else f"that is a {type(found).__name__}"
            raise ValueError(
                f"module={self.name!r} must name an nn.Sequential of {type(module).__name__}: {what}. {OTHER_MODELS}"
            )
        self.layers = found
        self._module, self._traced = module, traced

    @property
    def others(self) -> list[Tensor]:
        inside = {id(tensor) for tensor in [*self.layers.parameters(), *self.layers.buffers()]}
        outside = [*self._module.parameters(), *self._module.buffers()]
        return [tensor for tensor in outside if id(tensor) not in inside]

    def input_of(self, step: Callable[[], Any]) -> Any:
        """Runs ``step`` until it calls the submodule; returns the submodule's input."""

        def stop(*args: Any, **kwargs: Any) -> None:
            raise _InputFoundError(Call(args, kwargs, hooks=False))

        try:
            self._run(step, stop)
        except _InputFoundError as found:
            [call] = found.args
        else:
            raise RuntimeError(self._not_called())
        if any(tensor.requires_grad for tensor in tensors_in((call.args, call.kwargs))):
            raise RuntimeError(
                f"The input of {self.name} depends on parameters outside of it, which are on the last stage: move the "
                f"modules that come before it into {self.name}."
            )
        return call if self._traced else call.args[0]

    def result_of(self, step: Callable[[], Any], output: Any) -> Any:
        """Runs ``step`` with a submodule that returns ``output`` for any input; returns the result."""
        calls = 0

        def replay(*_: Any, **__: Any) -> Any:
            nonlocal calls
            calls += 1
            return output

        result = self._run(step, replay)
        if calls == 0:
            raise RuntimeError(self._not_called())
        if calls > 1:
            raise RuntimeError(
                f"{self.name} was called {calls} times in a step: a pipeline runs it once for each batch. Call it with "
                "all samples at once."
            )
        return result

    def _run(self, step: Callable[[], Any], forward: Callable[..., Any]) -> Any:
        self.layers.forward = forward
        try:
            return step()
        finally:
            del self.layers.forward

    def _not_called(self) -> str:
        return (
            f"The step ended without a call of {self.name}: set module= to the name of the submodule that it calls, "
            "and call the whole submodule, not its layers one by one."
        )


def _only_sequential(module: nn.Module) -> str:
    names = [name for name, child in module.named_modules() if isinstance(child, nn.Sequential) and name]
    outermost = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
    if len(outermost) == 1:
        return outermost[0]
    found = f"has {len(outermost)}: {', '.join(outermost)}" if outermost else "has none"
    raise ValueError(
        f"A pipeline needs one nn.Sequential, and {type(module).__name__} {found}. Set module= to the name of the one "
        f"that holds the layers. {OTHER_MODELS}"
    )


def digest_of(batch: Any) -> int:
    """Returns a digest of the first :data:`DIGEST_VALUES` values of each tensor of ``batch``."""
    return int(digest([tensor.reshape(-1)[:DIGEST_VALUES] for tensor in tensors_in(batch)])[:15], 16)
