"""How a fake rank takes steps by itself, as `rank_server.runs` does."""

from collections.abc import AsyncIterator

import grpc.aio

from cp_wire.pb import rank_pb2
from tests.coordinator.room import PeerGone


class FakeRuns:
    """Part of `FakeRank`."""

    async def _run(self, request: rank_pb2.ExecuteRequest) -> AsyncIterator[rank_pb2.ExecuteResponse]:
        """The answer to a command, and before it those to the steps of a run."""
        response = await self._answer(request)
        for index in range(1, request.step.ahead + 1):
            try:
                if response.WhichOneof("result") == "error" or await self._is_over(request.step, index):
                    break
            except PeerGone as gone:
                response.error.CopyFrom(rank_pb2.CommandError(reason="COLLECTIVE_FAILED", message=str(gone)))
                break
            if response.step.sampled:
                response.more = True
                yield response
            request = self._moved_on(request)
            response = await self._answer(request)
            if response.WhichOneof("result") == "step":
                response.step.index = index
        yield response

    async def _is_over(self, plan: rank_pb2.StepPlan, index: int) -> bool:
        """Whether any rank of the set ends the run before its step `index`."""
        ends = self.run_to_end >= plan.ticket or any(self.failed_row or self._ends(row) for row in plan.rows)
        first = self.role_first
        ranks = [first + rank for rank in self._grid.wide_groups()[self.set_index]]
        return await self.room.agree(f"run {plan.ticket} {index}", self.rank, ranks, plan.timeout_ms / 1000, ends)

    def _ends(self, row: rank_pb2.StepRow) -> bool:
        """Whether the row's draw ends its request."""
        return not row.ban_stop and self._drawn(row) in self.sequences[row.handle].stop

    def _drawn(self, row: rank_pb2.StepRow) -> int:
        return self.draw(self.sequences[row.handle].tokens)

    def _moved_on(self, request: rank_pb2.ExecuteRequest) -> rank_pb2.ExecuteRequest:
        following = rank_pb2.ExecuteRequest()
        following.CopyFrom(request)
        del following.step.released[:], following.step.admitted[:]
        for row in following.step.rows:
            row.token_ids[:] = [self._drawn(row)]
            row.start += 1
            row.output_index += 1
            del row.new_block_ids[:], row.new_block_counts[:]
        return following

    async def EndRun(self, request: rank_pb2.EndRunRequest, context: grpc.aio.ServicerContext) -> rank_pb2.EndRunResponse:
        self.run_to_end = max(self.run_to_end, request.ticket)
        return rank_pb2.EndRunResponse()
