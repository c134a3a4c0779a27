"""Buckets of gradients, and their all-reduce."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_pipesync.core.buckets import Bucket
from lightning_pipesync.core.codecs import Codec, get_codec
from lightning_pipesync.core.comm.collectives import Collectives
from lightning_pipesync.core.comm.comm_queue import CommQueue, Queued
from lightning_pipesync.core.comm.handle import Handle
from lightning_pipesync.core.feedback import ErrorFeedback
from lightning_pipesync.core.profiling import profiled
from lightning_pipesync.core.torch_private import foreach_copy_, version
from lightning_pipesync.methods.gradients.low_rank import LowRankBucket, LowRankGradients, low_rank_bucket


class GradientBucket:
    """The gradients of parameters of one dtype in one buffer, and their average over the ranks.

    The buffer is divided into pieces of ``piece_numel`` values, each of which has its own all-reduce; None: one piece.
    ``number`` is its place in the order of all-reduces, for profilers. With ``low_rank`` factors are averaged in place
    of the gradients, in one all-reduce or in two, each of which counts as a piece.
    """

    kind: ClassVar[str] = "all_reduce"  # under which waiting is counted

    def __init__(
        self,
        parameters: Sequence[Tensor],
        collectives: Collectives,
        codec: str | Codec = "none",
        piece_numel: int | None = None,
        number: int = 0,
        low_rank: LowRankBucket | None = None,
    ) -> None:
        self.parameters, self._low_rank = list(parameters), low_rank
        self._piece_numel, self._number = piece_numel, number
        self.gradients = Bucket(self.parameters, collectives.world_size)
        flat = self.gradients.flat
        self.pieces: Sequence[Tensor] = [flat] if piece_numel is None else flat.split(piece_numel)
        self.feedback: list[ErrorFeedback | None] = [None] * len(self.pieces)  # the residuals of each piece
        self.present = [True] * len(self.parameters)  # whether it had a gradient; on any rank, once that is known
        self._collectives, self._codec = collectives, get_codec(codec)
        self.label = f"bucket {number}" if self._codec.lossless else f"bucket {number} ({self._codec.name})"
        self._idle: Tensor | None = None  # True for values of parameters without a gradient on this rank
        self._noted: list[tuple[Tensor, int] | None] = []
        self._averaged: list[Queued[Tensor]] = []

    def twin(self) -> GradientBucket:
        """Returns a bucket of the same parameters with a buffer of its own, and with these residuals and factors."""
        args = (self._codec, self._piece_numel, self._number, self._low_rank)
        twin = GradientBucket(self.parameters, self._collectives, *args)
        twin.feedback = self.feedback
        return twin

    @property
    def num_gradients(self) -> int:
        return sum(parameter.requires_grad for parameter in self.parameters)

    @property
    def num_pieces(self) -> int:
        return len(self.pieces) if self._low_rank is None else self._low_rank.num_rounds

    def use_error_feedback(self, gathered: bool | None = None) -> None:
        """Adds the error of a lossy codec to what is sent next.

        ``gathered``: as of :meth:`Collectives.feedback`; None: as :meth:`Collectives.all_reduce` needs it.
        """
        if gathered is None:
            gathered = self._collectives.encodes_sums(self._codec)
        self.feedback = [self._collectives.feedback(piece, gathered) for piece in self.pieces]

    def reduce(self, queue: CommQueue, requires: Queued[Any] | None = None) -> None:
        """Packs the gradients, zeros for missing ones, and queues their average, after ``requires``."""
        self.pack()
        low_rank, self._averaged = self._low_rank, []
        for piece in range(self.num_pieces):
            if low_rank is not None:  # which begins with the factors of the all-reduce before
                requires = low_rank.last or requires
            start, after = partial(self.start, piece), partial(self.finish, piece)
            averaged = queue.submit(self.kind, start, after, requires=requires, what=self.label)
            self._averaged.append(averaged)
            if low_rank is not None:
                low_rank.last = averaged

    def pack(self) -> None:
        """Copies the gradients, zeros for missing ones."""
        self.present = self.gradients.pack_gradients(self.parameters)
        if self.feedback[0] is not None:
            self._idle = self.gradients.idle(self.present, self._codec.reach)

    def start(self, piece: int = 0) -> Handle[Tensor]:
        """Starts to average a piece of what :meth:`pack` has copied."""
        if self._low_rank is not None:
            values = self._low_rank.start(piece, self.gradients.views, self.present)
            return self._collectives.all_reduce(values, codec=self._codec, mean=True)
        feedback = self.residuals(piece)
        return self._collectives.all_reduce(self.pieces[piece], codec=self._codec, mean=True, feedback=feedback)

    def residuals(self, piece: int = 0) -> ErrorFeedback | None:
        """Returns the residuals for the exchange of a piece of what :meth:`pack` has copied."""
        feedback, flat = self.feedback[piece], self.gradients.flat
        if feedback is None or self._idle is None:
            return feedback
        begin = self.pieces[piece].storage_offset() - flat.storage_offset()
        return feedback.without(self._idle[begin : begin + self.pieces[piece].numel()])

    def finish(self, piece: int, average: Tensor) -> None:
        """Ends what :meth:`start` has started, once there is its result."""
        if self._low_rank is not None:
            self._low_rank.finish(piece, self.gradients.views)

    def wait(self) -> None:
        """Blocks until what :meth:`reduce` has queued is averaged."""
        for averaged in self._averaged:
            averaged.wait()

    @torch.no_grad()
    def unpack(self) -> None:
        """Replaces the gradients by their average, once it has arrived; a missing one stays None."""
        pairs = zip(self.parameters, self.gradients.views, strict=True)
        present = [(p.grad, view) for p, view in pairs if p.grad is not None]
        foreach_copy_([gradient for gradient, _ in present], [view for _, view in present])

    def drop_residuals(self) -> None:
        """Forgets what was not sent of gradients."""
        for feedback in self.feedback:
            if feedback is not None:
                feedback.decay(0.0)
        if self._low_rank is not None:
            self._low_rank.drop_residuals()

    def note_gradients(self) -> None:
        """Notes which gradients the parameters have, and what was written to them; see :meth:`written`."""
        gradients = [parameter.grad for parameter in self.parameters]
        self._noted = [None if gradient is None else (gradient, version(gradient)) for gradient in gradients]

    def forget_gradients(self) -> None:
        """Releases the gradients that :meth:`note_gradients` has noted."""
        self._noted = []

    def written(self, through_views: bool = True) -> int | None:
        """Returns the index of a parameter whose gradient was replaced or written to since :meth:`note_gradients`.

        None if none was. Torch counts the writes of all views of a buffer together. Without ``through_views`` these do
        not count where the gradient is a view.
        """
        for index, noted in enumerate(self._noted):
            gradient = self.parameters[index].grad
            if gradient is None or noted is None:
                if gradient is not None or noted is not None:
                    return index
                continue
            known, writes = noted
            if gradient is not known and gradient.data_ptr() != known.data_ptr():
                return index
            is_view = gradient.untyped_storage().nbytes() > gradient.nbytes
            if version(gradient) != writes and (through_views or not is_view):
                return index
        return None

    def check_unwritten(self, name_of: Callable[[Tensor], str], why_lost: str, or_else: str = "") -> None:
        """Raises a RuntimeError if a gradient that was sent was :meth:`written` to since, which would be lost.

        ``name_of`` returns the name of a parameter; ``why_lost`` is the reason, ``or_else`` another way out.
        """
        if (index := self.written(through_views=False)) is not None:
            raise RuntimeError(
                f"The gradient of {name_of(self.parameters[index])} was written to after the backward pass, or by a "
                f"further one under no_sync(). {why_lost}: this would be lost. Clip by sync.clip() or "
                "gradient_clip_val, change a gradient in a hook on its parameter (Tensor.register_hook), and make all "
                f"passes but the last under no_sync(){or_else}."
            )


class GradientBuckets:
    """The gradients of an optimizer in buckets of ``parameters``, in the order of their all-reduces.

    ``index_of``: the index of a parameter's bucket, by the parameter's id. ``shard_of_piece``: the bytes that each rank
    sums of a piece of an all-reduce; None: it has one piece.
    """

    def __init__(
        self,
        parameters: Sequence[Sequence[Tensor]],
        collectives: Collectives,
        codec: str | Codec = "none",
        error_feedback: bool = False,
        low_rank: LowRankGradients | None = None,
        shard_of_piece: int | None = None,
    ) -> None:
        self._low_rank = low_rank
        self.buckets: list[GradientBucket] = []
        for number, members in enumerate(parameters):
            numel = None
            if shard_of_piece is not None:
                numel = shard_of_piece * collectives.world_size // members[0].element_size()
            factorized = low_rank_bucket(low_rank, members, collectives.world_size)
            self.buckets.append(GradientBucket(members, collectives, codec, numel, number, factorized))
        self.index_of = {id(tensor): index for index, members in enumerate(parameters) for tensor in members}
        self._collectives = collectives
        if error_feedback:
            for bucket in self.buckets:
                bucket.use_error_feedback()

    def average(self, some_missing: bool) -> None:
        """Averages the gradients, all buckets at the same time (SelSync, Section III-C); a collective call.

        ``some_missing``: whether some rank has a parameter without a gradient, the same on all ranks. A missing
        gradient counts as zero. A gradient that no rank has stays None, as in DDP.
        """
        with profiled("average gradients"):
            for bucket in self.buckets:
                bucket.pack()
            if some_missing:  # once it is noted which gradients this rank has of its own
                self.add_missing()
            for piece in range(max((bucket.num_pieces for bucket in self.buckets), default=0)):
                started = [(bucket, bucket.start(piece)) for bucket in self.buckets if piece < bucket.num_pieces]
                for bucket, handle in started:
                    bucket.finish(piece, handle.wait())
                    if piece == bucket.num_pieces - 1:
                        bucket.unpack()

    def unpack(self) -> None:
        """Replaces all gradients by their average, once it has arrived; a missing one stays None."""
        for bucket in self.buckets:
            bucket.unpack()

    def add_missing(self) -> None:
        """Sets gradients to zero that only other ranks have; a collective call."""
        parameters = [parameter for bucket in self.buckets for parameter in bucket.parameters]
        somewhere = self._collectives.union([parameter.grad is not None for parameter in parameters]).wait()
        for parameter, present in zip(parameters, somewhere, strict=True):
            if present and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"feedback": [feedback.state_dict() for feedback in self._feedback()]}
        return state if self._low_rank is None else {**state, "low_rank": self._low_rank.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for feedback, residuals in zip(self._feedback(), state["feedback"], strict=True):
            feedback.load_state_dict(residuals)
        if self._low_rank is not None:
            self._low_rank.load_state_dict(state["low_rank"])

    def _feedback(self) -> list[ErrorFeedback]:
        return [feedback for bucket in self.buckets for feedback in bucket.feedback if feedback is not None]
