"""A replica: a job that is started again after it has failed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from lightning_pipesync.launch.job import Job, Output

#: Maximum seconds until a replica is started again.
_LONGEST_PAUSE_S = 60.0


class Replica:
    """Runs a replica's job until it ends with 0, has failed too often, or is stopped.

    Args:
        name: in the messages.
        words: the program and its arguments.
        environment: all of its variables.
        output: called for each line that it writes.
        say: prints what happens to it.
        max_restarts: how often it is started again.
        backoff_s: seconds before the first restart; twice as many before each further one, up to a minute.
        is_alone: whether there is no other replica any more, so that it is not started again.
    """

    def __init__(
        self,
        name: str,
        words: Sequence[str],
        environment: Mapping[str, str],
        output: Output,
        say: Callable[[str], None],
        max_restarts: int,
        backoff_s: float,
        is_alone: Callable[[Replica], bool],
    ) -> None:
        self.name, self.failures, self.status, self.is_done = name, 0, 0, False
        self._job, self._say = Job(words, environment, output), say
        self._max_restarts, self._backoff_s, self._is_alone = max_restarts, backoff_s, is_alone
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        """Returns when it is not started again; ``status`` is then its last exit status."""
        while not self._stopped.is_set():
            self.status = await self._job.run()
            self.is_done = self.status == 0
            if self.is_done or self._stopped.is_set():
                return
            self.failures += 1
            happened = f"{self.name} {what_happened(self.status)}"
            if self.failures > self._max_restarts:
                return self._say(f"{happened}, and is not started again.")
            pause_s = min(self._backoff_s * 2 ** (self.failures - 1), _LONGEST_PAUSE_S)
            restart = f"restart {self.failures} of {self._max_restarts}"
            if not self._is_alone(self):
                self._say(f"{happened}; it starts again in {pause_s:g} s ({restart}).")
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._stopped.wait(), pause_s)
            if self._is_alone(self):
                return self._say(f"{happened}, and is not started again: all others are done.")

    @property
    def failure(self) -> str:
        """How often it failed, and why the last time, in the user's words."""
        times = "once" if self.failures == 1 else f"{self.failures} times"
        last = f": {self._job.last_error_line}" if self._job.last_error_line else "."
        return f"{self.name} failed {times}; the last time it {what_happened(self.status)}{last}"

    def stop(self) -> None:
        """Asks it to leave; it is not started again."""
        self._stopped.set()
        self._job.terminate()

    def kill(self) -> None:
        """Kills it, and all that it has started."""
        self._stopped.set()
        self._job.kill()


def what_happened(status: int) -> str:
    """Returns what an exit status says, in the user's words."""
    try:
        return f"was killed by {signal.Signals(status - 128).name}"
    except ValueError:
        return f"ended with exit status {status}"
