"""What a rank has of the servers: its shards of the weights, and, on rank 0, who decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.methods.servers.config import ParameterServerConfig
from lightning_pipesync.methods.servers.coordinator import Coordinator
from lightning_pipesync.methods.servers.learner import Learner
from lightning_pipesync.methods.servers.optimizer_states import ServedOptimizers
from lightning_pipesync.methods.servers.policies import Policy, Sequencer
from lightning_pipesync.methods.servers.router import MessageRouter
from lightning_pipesync.methods.servers.server import Server
from lightning_pipesync.methods.servers.shards import ServedShard, SharedBucket


class ServerSide:
    """Serves this rank's shards, if it has some, as the coordinator decides; from then on messages are delivered.

    Attributes:
        coordinator: takes the decisions; it does so on rank 0 alone.
        optimizers: the users' optimizers, as the servers have them.

    Args:
        buckets: the parameters.
        optimizers: the user's own.
        policy: when the servers update the weights.
        config: the settings.
        transport: the way to the other ranks.
        messages: of this rank.
        learner: this rank's, which fails if its server does.
    """

    def __init__(
        self,
        buckets: Sequence[SharedBucket],
        optimizers: Sequence[Optimizer],
        policy: Policy,
        config: ParameterServerConfig,
        transport: Transport,
        messages: MessageRouter,
        learner: Learner,
    ) -> None:
        everyone, learners = range(transport.world_size), config.learners(transport.world_size)
        number = config.num_servers(transport.world_size)
        shards: list[ServedShard] = []
        if transport.rank < number:
            shards = [ServedShard(b, transport.rank, optimizers[b.group[0]], config, number) for b in buckets]
        self.optimizers = ServedOptimizers(optimizers, buckets, shards, config, transport, messages.states_of)
        self._server: Server | None = None
        if shards:
            force, sends = config.force(len(learners)), (messages.send_weights, messages.send_sums)
            self._server = Server(shards, number, config, force, *sends, self.optimizers.keep, learner.fail)
        predicts, serving = config.delay_compensation == "momentum", range(learners.start)
        sequencer = Sequencer.of(policy, everyone, config.staleness_lr, predicts, serving)
        followers = everyone if policy.cancels or policy.together else everyone[:number]
        num_telling = number - 1 if config.survives_loss(transport.world_size) else 0
        self.coordinator = Coordinator(sequencer, messages.send, learners, followers, config.keep_log, num_telling)
        messages.start(self.coordinator, self._server, self.optimizers.kept)

    def read_loaded(self) -> None:
        """Queues that the server goes on from the weights and the optimizers' states that were loaded on this rank."""
        if self._server is not None:
            self._server.reload(self.optimizers.read_loaded)

    def load_state_dict(self, state: Mapping[str, Any], version: int) -> None:
        """Resumes from a state of the coordinator, with weights of a version."""
        self.coordinator.load_state_dict(state, version)
        if self._server is not None:
            self._server.version = version

    def close(self, timeout_s: float) -> None:
        """Ends the server's thread."""
        if self._server is not None:
            self._server.close(timeout_s)
