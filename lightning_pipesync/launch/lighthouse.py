"""``pipesync lighthouse``: torchft's server, which tells replicas who is there."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lightning_pipesync.core.faults.lighthouse import SILENCE_S

#: Milliseconds between two looks at who is there.
_TICK_MS = 100


@dataclass
class Lighthouse:
    """Runs the lighthouse of replicas on several machines, at which they meet, until it is interrupted.

    They are told its address by pipesync launch --lighthouse HOST:PORT, by the setting lighthouse, or by
    PIPESYNC_LIGHTHOUSE. It keeps nothing: see --min_replicas before it is started again.

    Attributes:
        port: At which it listens; 0 is a free one.
        host: The address at which it listens. The default is that of all interfaces.
        min_replicas: How many replicas there must be for a round, at any time.
        heartbeat_timeout_s: Seconds without a sign of life after which a replica counts as lost.
        join_timeout_s: Seconds that the others wait for a replica that is alive, and does not come to a round. More
            than the longest round.
    """

    port: int = 29510
    host: str = "0.0.0.0"
    min_replicas: int = 1
    heartbeat_timeout_s: float = SILENCE_S
    join_timeout_s: float = 600.0

    def run(self) -> None:
        """Serves until SIGTERM or SIGINT."""
        signals = {signal.SIGTERM, signal.SIGINT}
        # First, so that one that comes while it starts is waited for below.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            with self.serving() as port:
                print(f"pipesync lighthouse: listens at {self._host}:{port}.", flush=True)
                signal.sigwait(signals)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def check(self) -> None:
        """Raises ValueError if an option is out of range."""
        if self.min_replicas < 1:
            raise ValueError(f"--min_replicas must be at least 1, got {self.min_replicas}.")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"--port must be between 0 and 65535, got {self.port}.")
        for name in ("heartbeat_timeout_s", "join_timeout_s"):
            if not 0.001 <= (seconds := getattr(self, name)) <= 1e6:
                raise ValueError(f"--{name} must be between 0.001 and 1000000 seconds, got {seconds:g}.")

    @contextmanager
    def serving(self) -> Iterator[int]:
        """Serves in threads of this process while the block runs; gives the port.

        Raises:
            ValueError: an option that is out of range, or an address at which it cannot listen.
        """
        self.check()
        os.environ.setdefault("RUST_LOG", "warn")  # Otherwise it reports each round.
        from torchft.coordination import LighthouseServer

        address = f"{self._host}:{self.port}"
        try:
            server = LighthouseServer(
                bind=address,
                min_replicas=self.min_replicas,
                join_timeout_ms=round(1000 * self.join_timeout_s),
                quorum_tick_ms=_TICK_MS,
                heartbeat_timeout_ms=round(1000 * self.heartbeat_timeout_s),
            )
        except RuntimeError as error:
            raise ValueError(f"The lighthouse cannot listen at {address}: {error}.") from error
        try:
            yield int(server.address().rpartition(":")[2])
        finally:
            server.shutdown()

    @property
    def _host(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host
