"""What the settings of all methods have in common, and what is read off them: names, defaults, docs."""

from __future__ import annotations

import ast
import inspect
import textwrap
import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, TypeVar

Config = TypeVar("Config", bound="Settings")


class Settings:
    """Base of the frozen dataclasses that state each setting of a method, its default, its doc and its check.

    The properties here tell the frameworks what differs between methods; a method overrides what is not so.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    #: Settings that only the Trainer can follow, and what to do in a loop of one's own.
    for_trainer: ClassVar[Mapping[str, str]] = {}
    #: Settings that a Trainer has itself, and where.
    set_by_trainer: ClassVar[Mapping[str, str]] = {}

    timeout_s: float

    # Which data each rank trains on; SelSync makes settings of them.
    partition: str = "defdp"
    full_pass: bool = False
    injection: tuple[float, float] | None = None

    checkpoint_replicas: bool = True

    @property
    def needs_as_many_ranks(self) -> bool:
        """Whether a run resumes with as many ranks as before only."""
        return False

    @property
    def lost_with_other_ranks(self) -> str | None:
        """What a run that resumes with another number of ranks loses; None: nothing."""
        return None

    def without_effect(self) -> dict[str, str]:
        """Returns the settings that have no effect with the others as they are, by name, and why."""
        return {}

    def on_hosts_of(self: Config, num_processes: int, world_size: int) -> Config:
        """Returns these settings for hosts of ``num_processes`` ranks each."""
        return self


def config_from(config_type: type[Config], config: Config | None, settings: Mapping[str, Any]) -> Config:
    """Returns a method's settings, given as a whole or as keywords.

    Raises:
        ValueError: they were given in both ways, or one is out of its range.
    """
    if config is not None and settings:
        raise ValueError(f"Give the settings as config or as keywords ({', '.join(settings)}), not both.")
    return config or config_type(**settings)


def check_for_loop(config_type: type[Settings], settings: Mapping[str, Any]) -> None:
    """Checks the settings of a method in a loop of the user's own.

    Raises:
        ValueError: one of them is for the Trainer.
    """
    for name, instead in config_type.for_trainer.items():
        if name in settings:
            raise ValueError(f"{name}={settings[name]!r} is for the Trainer; in a loop of your own, {instead}.")


def warn_of_ignored(settings: Settings, rank: int) -> None:
    """Warns, on rank 0, of each setting that the user has changed and that has no effect."""
    defaults = {field.name: field.default for field in fields(settings)}
    for name, why in settings.without_effect().items():
        value = getattr(settings, name)
        if rank == 0 and value != defaults[name]:
            warnings.warn(f"{name}={value!r} has no effect {why}.", stacklevel=3)


def docs_of(config_type: type[Settings]) -> dict[str, str]:
    """Returns the docstring under each field, as one paragraph, by the field's name."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(config_type))).body
    assert isinstance(definition, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, doc in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            docs[field.target.id] = " ".join(str(doc.value.value).split())
    return docs
