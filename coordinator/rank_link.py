"""One life of one rank process, as the coordinator holds it."""

from collections.abc import Callable

from coordinator.lane import Lane
from coordinator.tasks import Background
from cp_wire.channels import open_channel
from cp_wire.pb import coordinator_pb2, rank_pb2, rank_pb2_grpc


class RankLink:
    """Channel and lane to a registered rank. Dialled at once; `on_lost(link, reason)` is called once when the lane ends."""

    def __init__(
        self, registration: coordinator_pb2.RegisterRequest, epoch: int, on_lost: Callable[["RankLink", str], None]
    ) -> None:
        self.rank = registration.rank
        self.instance = registration.instance
        self.pid = registration.pid
        self.address = registration.address
        self.host = registration.host
        self.configured: rank_pb2.Configured | None = None
        self.pool_blocks = 0
        self.last_progress_ms = 0
        self.load_fraction = 0.0
        self.background = Background(lambda name, error: on_lost(self, f"{name} failed ({type(error).__name__})"))
        """What looks after this life of the rank; ends with it."""
        # A plan may carry a whole prompt's token ids.
        self._channel = open_channel(registration.address, "prompt")
        self._stub = rank_pb2_grpc.RankServiceStub(self._channel)
        self.lane = Lane(self.rank, self.instance, self._stub, lambda reason: on_lost(self, reason))
        self.lane.epoch = epoch

    async def progress(self, deadline_s: float) -> rank_pb2.GetProgressResponse:
        """Asks the rank's event loop; raises grpc.RpcError."""
        return await self._stub.GetProgress(rank_pb2.GetProgressRequest(), timeout=deadline_s)

    async def close(self, reason: str) -> None:
        """Closes lane and channel, and ends the tasks of `background`."""
        self.lane.close(reason)
        await self.background.cancel()
        await self._channel.close()
