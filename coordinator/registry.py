"""What ranks call: registration."""

from collections.abc import Mapping

import grpc.aio

from coordinator.rank_set import RankSet
from cp_wire.errors import ConfigRefused, InvalidRequest, KvloomError, Unavailable, abort, shorten
from cp_wire.pb import common_pb2, coordinator_pb2, coordinator_pb2_grpc


class RegistryServicer(coordinator_pb2_grpc.RegistryServiceServicer):
    """Checks that a rank fits this cluster and seats it in its set. The coordinator dials back afterwards."""

    def __init__(self, config: common_pb2.ClusterConfig, sets: Mapping[int, RankSet]) -> None:
        """sets: by global rank."""
        self._config = config
        self._sets = sets
        self.open = True

    async def Register(
        self, request: coordinator_pb2.RegisterRequest, context: grpc.aio.ServicerContext
    ) -> coordinator_pb2.RegisterResponse:
        """Refuses a stranger (FAILED_PRECONDITION, naming the field) and a second process for a seat (ALREADY_EXISTS)."""
        try:
            self._seat(request)
        except KvloomError as error:
            await abort(context, error)
        return coordinator_pb2.RegisterResponse()

    def _seat(self, request: coordinator_pb2.RegisterRequest) -> None:
        if not self.open:
            raise Unavailable("the coordinator is stopping")
        if request.rank not in self._sets:
            raise InvalidRequest("rank", request.rank, f"must be below {len(self._sets)}, the number of ranks")
        for field in ("protocol_version", "model_hash"):
            ours, theirs = getattr(self._config, field), getattr(request, field)
            if ours != theirs:
                refusal = ConfigRefused(f"rank {request.rank}: {field} is {shorten(theirs)}, the coordinator has {ours}")
                self._sets[request.rank].refuse(refusal)
                raise refusal
        for field in ("address", "instance"):
            if not getattr(request, field):
                raise InvalidRequest(field, "", "must not be empty")
        self._sets[request.rank].join(request)
