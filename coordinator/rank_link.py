"""One life of one rank process, as the coordinator holds it."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from grpc.aio import UsageError

from coordinator.lane import Lane
from coordinator.tasks import Background
from cp_wire.channels import open_channel
from cp_wire.errors import Unavailable, from_rpc_error
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

    async def lease(self, request: rank_pb2.LeaseRequest, deadline_s: float) -> None:
        """Opens, extends or prolongs a session on this rank; raises KvloomError."""
        await self._beside(self._stub.Lease, request, deadline_s)

    async def end_lease(self, request: rank_pb2.EndLeaseRequest, deadline_s: float) -> None:
        """Ends a session: nothing of it is read afterwards; raises KvloomError."""
        await self._beside(self._stub.EndLease, request, deadline_s)

    async def pull(self, request: rank_pb2.PullRequest, deadline_s: float) -> rank_pb2.PullResponse:
        """Has this rank take a range over; raises KvloomError."""
        response: rank_pb2.PullResponse = await self._beside(self._stub.Pull, request, deadline_s)
        return response

    async def end_pull(self, request: rank_pb2.EndPullRequest, deadline_s: float) -> None:
        """Has this rank write nothing of a session any more; raises KvloomError."""
        await self._beside(self._stub.EndPull, request, deadline_s)

    async def _beside(self, method: Any, request: Any, deadline_s: float) -> Any:
        """A call beside the lane to this life of the rank; it names its epoch itself."""
        request.instance = self.instance
        try:
            return await method(request, timeout=deadline_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        except (asyncio.CancelledError, UsageError) as error:
            # A channel that is closed cancels its calls, and takes no more.
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            raise Unavailable(f"rank {self.rank} is not spoken to any more") from error

    async def close(self, reason: str) -> None:
        """Closes lane and channel, and ends the tasks of `background`."""
        self.lane.close(reason)
        await self.background.cancel()
        await self._channel.close()
