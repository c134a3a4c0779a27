"""Finds the best bucket size while the training goes on (DeAR, Section IV-B)."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from lightning_pipesync.core.buckets import MIB, Fusion, num_bytes, of_one_kind
from lightning_pipesync.core.handle import Promise, Worker
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.transport import Transport
from lightning_pipesync.methods.dear.config import DeARConfig
from lightning_pipesync.methods.dear.fused import FusedBuckets
from lightning_pipesync.methods.dear.search import SEARCHES, FusionSearch, Trial, fastest
from lightning_pipesync.methods.dear.tuning_file import TuningFile

#: A trial ends after so few steps if they are longer than those of the best one by this factor.
FEW_STEPS, CLEARLY_WORSE = 3, 1.1

log = logging.getLogger(__name__)


class FusionTuner:
    """Tries bucket sizes, one after the other, and stays with the best.

    What counts is the time from one step to the next on rank 0: all ranks keep step. Rank 0 chooses what comes next and
    says so with the flags of a step; all change to it after the next backward pass, under which nothing is sent.

    Args:
        config: the settings.
        buckets: what is to be fused.
        transport: the way to the other ranks.
        file: where rank 0 starts from, and keeps what was measured; None on the other ranks.

    Attributes:
        fusion: how tensors are fused now.
        finished: whether the search is over, or there is none.
        over: whether the buckets are to change after the next backward pass; the same on all ranks.
        trials: what was measured so far.
    """

    def __init__(
        self, config: DeARConfig, buckets: FusedBuckets, transport: Transport, file: TuningFile | None
    ) -> None:
        self._config, self._buckets, self._transport, self._file = config, buckets, transport, file
        self.fusion = config.first_fusion()
        self.finished = True
        self.over = False
        self.trials: list[Trial] = []
        self._search: FusionSearch | None = None  # on rank 0
        self._sizes: list[int] = []  # bytes, of what may travel together
        self._steps: list[float] = []
        self._began: float | None = None
        self._worker: Worker | None = None
        self._decision: Promise[tuple[list[Trial], Fusion, bool]] | None = None

    def begin(self, parameters: Sequence[NamedParameter]) -> None:
        """Starts a search for what is to be fused, unless one for as many bytes has begun; a collective call.

        There is none if all fit into the smallest bucket, or if only deterministic algorithms are wanted: in which
        order numbers are added depends on the buckets.
        """
        sizes = [sum(map(num_bytes, kind)) for kind in of_one_kind(parameters)]
        if self._config.fusion not in SEARCHES or sizes == self._sizes:
            return
        self._sizes, self.fusion, self.trials = sizes, self._config.first_fusion(), []
        smallest, largest = self._config.search_mb[0], min(self._config.search_mb[1], max(sizes) / MIB)
        found = None if self._file is None else self._file.read(self._job())
        everyone = self._transport.gather_objects((found, torch.are_deterministic_algorithms_enabled()))
        deterministic = any(wanted for _, wanted in everyone)
        self.finished = self._transport.world_size == 1 or largest <= smallest or deterministic
        if self.finished:
            return
        if self._transport.rank == 0:
            self._search = SEARCHES[self._config.fusion](self.fusion, smallest, largest, self._config.max_trials)
        self._begin_trial(self.fusion)
        if (state := everyone[0][0]) is not None:
            self.load_state_dict(state)

    def end_of_trial(self) -> bool:
        """Returns whether this rank, if it is rank 0, knows what to try next.

        It thinks about that beside the training, which goes on with the present size meanwhile.
        """
        if self.finished or self._search is None:
            return False
        if self._decision is None and self._seen_enough():
            self._decision = Promise()
            decide = functools.partial(self._decide, self._search, Trial(self.fusion, self._median()))
            self._worker = self._worker or Worker("pipesync-dear-tuner")
            self._worker.submit(functools.partial(self._decision.run, decide))
        return self._decision is not None and self._decision.done

    def note_step(self) -> None:
        """Notes the time, after a step."""
        now = time.perf_counter()
        if self._began is not None:
            self._steps.append(now - self._began)
        self._began = now

    def change(self) -> None:
        """Fuses anew, for the next trial or for good; a collective call, while nothing is under way."""
        decision = (self.trials, self.fusion, self.finished) if self._decision is None else self._decision.wait()
        self.trials, fusion, self.finished = self._transport.gather_objects(decision)[0]
        if self._buckets.is_other(fusion):
            self._buckets.replan(fusion)
        self._begin_trial(fusion)
        if self._transport.rank == 0:
            self._report()
        if self.finished:
            self.close(timeout_s=1.0)

    def state_dict(self) -> dict[str, Any]:
        """Returns what was measured, the same on all ranks."""
        trials = [(trial.fusion.bucket_mb, trial.fusion.edge_mb, trial.seconds) for trial in self.trials]
        return {"trials": trials, "fusion": (self.fusion.bucket_mb, self.fusion.edge_mb), "finished": self.finished}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` returned, if that was a search and one is under way here.

        Otherwise buckets that were loaded, too, and are not those of these settings change in the next step.
        """
        if not self.finished and state["trials"]:
            self.trials = [Trial(Fusion(bucket, edge), seconds) for bucket, edge, seconds in state["trials"]]
            if self._search is not None:
                self._search.trials = self.trials.copy()
            self._begin_trial(Fusion(*state["fusion"]))
            self.finished = state["finished"]
        self.over = bool(self._buckets) and self._buckets.is_other(self.fusion)

    def close(self, timeout_s: float) -> None:
        """Ends the thread, if there is one."""
        if self._worker is not None:
            self._worker.close(timeout_s)
            self._worker = None

    def _seen_enough(self) -> bool:
        if len(self._steps) <= FEW_STEPS:
            return False
        best = fastest(self.trials).seconds if self.trials else math.inf
        clearly_worse = self._median() > CLEARLY_WORSE * best
        return clearly_worse or len(self._steps) >= self._config.trial_steps

    def _decide(self, search: FusionSearch, trial: Trial) -> tuple[list[Trial], Fusion, bool]:
        """Learns from a trial; returns all trials so far, what comes next, and whether that is for good."""
        search.register(trial)
        try:
            measured = {self._buckets.names(known.fusion): known.seconds for known in search.trials}
            while not search.converged:
                fusion = search.suggest()
                if (seconds := measured.get(self._buckets.names(fusion))) is None:
                    return search.trials.copy(), fusion, False
                search.register(Trial(fusion, seconds))  # other sizes, the same buckets
        except Exception as error:  # training goes on without the search
            log.warning(f"The search for DeAR's bucket size ends early: {type(error).__name__}: {error}")
        return search.trials, fastest(search.trials).fusion, True

    def _begin_trial(self, fusion: Fusion) -> None:
        self.fusion, self._steps, self._began, self.over = fusion, [], None, False
        self._decision = None

    def _median(self) -> float:
        """The seconds of a step; the first one of a trial meets new buffers, and does not count."""
        return median(self._steps[1:])

    def _job(self) -> str:
        """Describes what a file must be of to be of use here."""
        config = self._config
        update, codec = config.update or "sharded", config.compression
        return f"{self._transport.world_size} ranks, {sum(self._sizes)} bytes, {update}, {codec}, {config.topology}"

    def _report(self) -> None:
        if self._file is not None:
            try:
                self._file.write(self._job(), self.state_dict())
            except OSError as error:  # training goes on
                log.warning(f"tuning_file={self._config.tuning_file!r} cannot be written: {error}")
                self._file = None
        if self.finished and self.trials:
            first, best = self.trials[0], fastest(self.trials)
            edge_mb = best.fusion.edge_mb or best.fusion.bucket_mb
            log.info(
                f"DeAR fuses up to {best.fusion.bucket_mb:.1f} MiB, at the ends {edge_mb:.1f}: {best.seconds:.3f} s a "
                f"step. It was {first.seconds:.3f} s with {first.fusion.bucket_mb:.1f} MiB; {len(self.trials)} trials."
            )
