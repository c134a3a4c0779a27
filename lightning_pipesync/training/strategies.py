"""Strategy classes whose arguments are a method's settings: names, types, defaults and docs of the dataclass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import fields
from typing import Any, get_type_hints

from lightning_pipesync.methods.method import Method
from lightning_pipesync.methods.settings import docs_of
from lightning_pipesync.training.registry import METHODS

#: Docs of a strategy's arguments besides the method's settings.
FRAMEWORK_DOCS = {
    "process_group_backend": 'as in DDPStrategy; with ``"gloo"``, CUDA tensors are sent through host memory.',
    "start_method": 'as in DDPStrategy: ``"popen"``, ``"spawn"``, ``"fork"`` or ``"forkserver"``.',
}


class Strategies:
    """The strategy classes of one distribution of a framework, by name, of all registered methods.

    Args:
        module: name of the module that exports them.
        registry: the framework's registry of strategies.
        make: returns the class for a method, or a function that raises if the framework does not support the method.
    """

    def __init__(self, module: str, registry: Any, make: Callable[[type[Method], str], Any]) -> None:
        self._module, self._registry, self._make = module, registry, make
        self._classes: dict[str, Any] = {}
        for method in METHODS.values():
            self.register(method)

    def register(self, method: type[Method]) -> None:
        """Creates the strategy of a method, and registers the method's name with the framework."""
        strategy = self._make(method, self._module)
        self._classes[strategy.__name__] = strategy
        summary = (strategy.__doc__ or "").partition("\n")[0]
        self._registry.register(method.name, strategy, summary, override=True)

    def find(self, name: str) -> Any:
        """Returns the class of that name, for a module's ``__getattr__``.

        Raises:
            AttributeError: there is none.
        """
        if name not in self._classes:
            raise AttributeError(f"module {self._module!r} has no attribute {name!r}")
        return self._classes[name]


def strategy_class(
    suffix: str,
    method: type[Method],
    bases: tuple[type, ...],
    module: str,
    without: Collection[str] = (),
    **attributes: Any,
) -> type[Any]:
    """Creates a strategy class.

    Its ``__init__`` has the signature of the first base's, with the method's settings in place of ``**settings``, and
    passes the arguments on by name.

    Args:
        suffix: appended to the name of the method's class.
        method: the method's class.
        bases: the mixin, and the framework's strategy as the last one.
        module: name of the module that exports the class.
        without: settings that are not arguments.
        attributes: further attributes of the class.
    """
    init = bases[0].__init__  # type: ignore[misc]
    types = {**get_type_hints(init), **get_type_hints(method.config_type)}
    framework = {name: parameter.default for name, parameter in inspect.signature(init).parameters.items()}
    del framework["self"], framework["settings"]
    own = {field.name: field.default for field in fields(method.config_type) if field.name not in without}
    defaults = {**own, **framework}
    names = list(defaults)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, default=defaults[name], annotation=types[name]) for name in names]

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) > len(names):
            raise TypeError(f"{type(self).__name__} takes at most {len(names)} arguments, got {len(args)}.")
        init(self, **dict(zip(names, args, strict=False)), **kwargs)

    # What users and command lines see.
    __init__.__signature__ = inspect.Signature([inspect.Parameter("self", kind), *parameters])  # type: ignore[attr-defined]
    __init__.__annotations__ = {name: types[name] for name in names}
    docs = docs_of(method.config_type)
    described = [f"    {name}: {docs.get(name) or FRAMEWORK_DOCS.get(name, 'as in DDPStrategy.')}" for name in names]
    summary = inspect.cleandoc(method.__doc__ or "").partition("\n\n")[0]
    doc = "\n".join(
        [summary, "", "Args:", *described, "", "Raises:", "    ValueError: a setting is unknown or out of its range."]
    )
    contents = {"__init__": __init__, "__doc__": doc, "__module__": module, "name": method.name, **attributes}
    return type(f"{method.__name__}{suffix}", bases, contents)
