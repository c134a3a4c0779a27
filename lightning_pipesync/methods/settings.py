"""The base of all methods' settings, and functions that check settings."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeVar, get_type_hints

from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.faults.lighthouse import ADDRESS
from lightning_pipesync.methods.setting_types import Compression, checked

Config = TypeVar("Config", bound="Settings")

#: How ranks are arranged for all-reduces, see :class:`Transport`.
Topology = Literal["auto", "flat", "torus2d", "tree"]

#: How gradients become factors, see :mod:`lightning_pipesync.methods.gradients.low_rank`.
LowRankMethod = Literal["acp_sgd", "power_sgd"]

#: Orders of the training data.
Partition = Literal["seldp", "defdp"]


@dataclass(frozen=True)
class Not:
    """All values of a setting but these."""

    values: tuple[Any, ...]

    def __contains__(self, value: object) -> bool:
        return value not in self.values


class Settings:
    """Base of the frozen dataclasses that define a method's settings: their types, defaults, docs and checks.

    A dataclass checks the ranges of its settings in its ``__post_init__``, after that of this class.

    The attributes here tell the frameworks how methods differ; a method overrides those that differ for it. What means
    the same in several methods is documented here.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    #: Settings that only the Trainer supports, each with what to do in a plain loop.
    for_trainer: ClassVar[Mapping[str, str]] = {}
    #: Settings that the Trainer replaces by its own arguments, each with that argument.
    set_by_trainer: ClassVar[Mapping[str, str]] = {}
    #: Settings that do not always have an effect, each with the values of others with which it does.
    acts_with: ClassVar[Mapping[str, Mapping[str, tuple[Any, ...] | Not]]] = MappingProxyType(
        {
            "full_pass": {"partition": ("seldp",)},
            "low_rank_method": {"low_rank": Not((None,))},
            "torus_columns": {"topology": ("torus2d",)},
        }
    )
    timeout_s: float = 1800.0
    """Seconds after which a rank that does not answer counts as lost."""

    wait_for_hooks: bool = True
    """Whether a step waits for the weights under a Trainer with hooks of yours, in the module or in a callback, between
    a step and the next forward pass, so that they may read and write weights as with DDP. False, if they do not touch
    weights: communication stays hidden under the next forward pass, where ``overlap`` hides it."""

    # Which data each rank trains on; settings of SelSync.
    partition: str = "defdp"
    full_pass: bool = False
    """With ``seldp``: whether an epoch covers all chunks, instead of one chunk, 1 / ranks of the data."""

    injection: tuple[float, float] | None = None

    compression: Compression = "none"
    error_feedback: bool = False

    low_rank: int | None = None
    """Rank r of the factors P and Q, with P Q^T near the gradient, that are averaged in place of the gradients of
    weights with two dimensions or more, where both together have fewer values. None: gradients are averaged as they
    are."""

    low_rank_method: LowRankMethod = "acp_sgd"
    """With ``low_rank``: ``acp_sgd`` averages one factor in a step, P and Q in turns, in one all-reduce; ``power_sgd``
    averages both, Q once P is known: about twice the bytes and the latency, and a better approximation."""

    topology: Topology = "flat"
    """``flat``: every rank exchanges with every other. ``torus2d``: along rows of neighbors, then across the rows, for
    hosts with several accelerators, or in racks; the codec is used across rows only. ``tree``: reduce and broadcast on
    a double binary tree over Gloo, for many ranks, or small buckets; the codec is used in the broadcast only. ``auto``:
    with a lossy codec, where each of several hosts has the same number of neighboring ranks, two or more, a torus with
    a row for each host; otherwise flat."""

    torus_columns: int | None = None
    """With ``topology="torus2d"``: ranks in a row, such as those of a host or a rack. None: as square as possible; with
    a strategy, the ranks of a host, if there are several."""

    checkpoint_replicas: bool = True
    """Whether a checkpoint holds each rank's weights and optimizer state besides the average. Without them it is
    smaller by a factor of the number of ranks, and a resumed run starts from the average."""

    def __post_init__(self) -> None:
        """Raises a ValueError unless each setting is of its type and has an effect, and those of all are in range."""
        annotations = get_type_hints(type(self), include_extras=True)
        for field in fields(self):
            value = checked(field.name, annotations[field.name], getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        self._check_effects()
        self._check("timeout_s", 0 < self.timeout_s < math.inf, "a positive number of seconds")
        lossless = get_codec(self.compression).lossless
        self._check_least(low_rank=1, torus_columns=1)
        if self.low_rank is not None:
            refused = {"compression": (not lossless, "none", "makes wire formats, which are never summed")}
            self._refuse(f"low_rank={self.low_rank!r} sums factors", "low_rank=None", refused)

    def _check_effects(self) -> None:
        """Raises a ValueError that names a setting which is not at its default, and has no effect with others."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for field in fields(self):
            value, other = values[field.name], self.obstacle(field.name, values)
            if other is not None and value != field.default:
                allowed, present = self.acts_with[field.name][other], getattr(self, other)
                instead = other if present is None else f"another {other}"
                if isinstance(allowed, tuple):
                    instead = f"{other}={' or '.join(map(repr, allowed))}"
                raise ValueError(
                    f"{field.name}={value!r} has no effect with {other}={present!r}: set {instead}, or "
                    f"{field.name}={field.default!r}."
                )

    @classmethod
    def obstacle(cls, name: str, settings: Mapping[str, Any]) -> str | None:
        """Returns the name of a setting with which ``name`` has no effect; what ``settings`` lacks has its default."""
        needed = cls.acts_with.get(name, {})
        return next((other for other in needed if settings.get(other, getattr(cls, other)) not in needed[other]), None)

    def _check(self, name: str, fits: bool, words: str) -> None:
        """Raises a ValueError that says what a setting must be, and its value, unless it ``fits``."""
        if not fits:
            raise ValueError(f"{name} must be {words}, got {getattr(self, name)!r}.")

    def _refuse(self, reason: str, instead: str, refused: Mapping[str, tuple[bool, Any, str]]) -> None:
        """Raises a ValueError that names a setting which does not go with another one.

        Args:
            reason: the other setting with its value, and what it is for.
            instead: what else can be done.
            refused: by name of a setting, whether it is refused, a value that goes, and why its own does not.
        """
        for name, (is_refused, allowed, why) in refused.items():
            if is_refused:
                value = getattr(self, name)
                raise ValueError(f"{reason}, and {name}={value!r} {why}: set {name}={allowed!r}, or {instead}.")

    def _check_least(self, **least: int) -> None:
        """Raises a ValueError that names an integer setting, unless it is None or at least its least value."""
        for name, bound in least.items():
            value = getattr(self, name)
            self._check(name, value is None or value >= bound, f"an integer of at least {bound}")

    def _check_data(self) -> None:
        if self.injection is not None:
            for name, value in zip(("alpha", "beta"), self.injection, strict=True):
                if not 0 <= value <= 1:
                    raise ValueError(f"injection's {name} must be in [0, 1], got {value!r}.")

    @property
    def uses_error_feedback(self) -> bool:
        """Whether the codec is lossy, and its error is added to the next values that it encodes."""
        return self.error_feedback and not get_codec(self.compression).lossless

    @property
    def low_rank_settings(self) -> dict[str, Any]:
        """Those that determine what a checkpoint has of factorized gradients; none without ``low_rank``."""
        if self.low_rank is None:
            return {}
        return {"low_rank": self.low_rank, "low_rank_method": self.low_rank_method}

    @property
    def is_arranged(self) -> bool:
        """Whether ``topology`` asks for averages of all ranks that are arranged on a torus or on trees."""
        return self.topology in ("torus2d", "tree")

    @property
    def arrangement(self) -> dict[str, Any]:
        """The arguments of a :class:`Transport` that say how ranks are arranged for all-reduces."""
        return {"topology": self.topology, "torus_columns": self.torus_columns, "codec": self.compression}

    @property
    def num_jobs(self) -> int | None:
        """The number of jobs, each with one replica, with which a training begins; None: replicas are not jobs."""
        return None

    @property
    def needs_as_many_ranks(self) -> bool:
        """Whether a run can be resumed with the same number of ranks only."""
        return False

    @property
    def lost_with_other_ranks(self) -> str | None:
        """What a run loses if it resumes with another number of ranks; None: nothing."""
        return None

    def for_framework(self: Config) -> Config:
        """Returns the settings for a framework; raises a ValueError if one of them is for plain loops only."""
        return self

    def on_hosts_of(self: Config, num_processes: int, world_size: int) -> Config:
        """Returns the settings for hosts with ``num_processes`` ranks each: rows of a torus are hosts, unless set."""
        if self.topology == "torus2d" and self.torus_columns is None and 1 < num_processes < world_size:
            return replace(self, torus_columns=num_processes)
        return self


def config_from(config_type: type[Config], config: Config | None, settings: Mapping[str, Any]) -> Config:
    """Returns a method's settings, given as a dataclass or as keywords, not both."""
    if config is None:
        return config_type(**settings)
    if not isinstance(config, config_type):
        raise ValueError(f"config must be a {config_type.__name__}, got {config!r}.")
    if settings:
        raise ValueError(f"Pass the settings as config or as keywords ({', '.join(settings)}), not both.")
    return config


def overridden(config_type: type[Settings], settings: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``settings`` with those ``given`` in their place, and without what has no effect with these."""
    found = {**settings, **given}
    while idle := [name for name in found if name not in given and config_type.obstacle(name, found)]:
        for name in idle:
            del found[name]
    return found


def check_for_loop(config_type: type[Settings], settings: Mapping[str, Any]) -> None:
    """Raises a ValueError if a setting of a plain loop is for the Trainer only."""
    for name, instead in config_type.for_trainer.items():
        if name in settings:
            raise ValueError(f"{name}={settings[name]!r} is for the Trainer only; in a plain loop, {instead}.")


def check_saved(saved: Mapping[str, Any], present: Mapping[str, Any], otherwise: str) -> None:
    """Raises a ValueError unless a state was saved with the settings that determine its structure in this run.

    ``otherwise`` is what a run does without the state, such as "to begin with an empty pipeline".
    """
    if saved != present:
        raise ValueError(
            f"The checkpoint was written with {saved}, this run has {present}. Use the same settings, or remove the "
            f"key 'pipesync' from the checkpoint {otherwise}."
        )


def check_launch(method: str, settings: Settings) -> None:
    """Raises a ValueError if a launcher has started replicas that come and go, and the method needs all of them."""
    address = os.environ.get(ADDRESS)
    if address and settings.num_jobs is None:
        raise ValueError(
            f"{ADDRESS}={address} is set, as by `pipesync launch`, for replicas that come and go, and {method} needs "
            "all ranks at each step: use local SGD, or start one job with torchrun."
        )


def warn_of_one_rank(method: str, world_size: int) -> None:
    if world_size == 1:
        warnings.warn(
            f"{method} is attached in one process alone: nothing is synchronized. Start a process for each rank, with "
            "torchrun, accelerate launch, or devices= and num_nodes= of the Trainer.",
            stacklevel=3,
        )
