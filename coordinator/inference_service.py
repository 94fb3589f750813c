"""What users call."""

import grpc.aio

from coordinator.admission import Accepted, Admission
from coordinator.request_stats import CANCELLED, RequestStats
from coordinator.route import route_of
from coordinator.stream import Chunk, PromptChunk
from cp_wire.errors import Internal, KvloomError, abort
from cp_wire.logs import get_logger
from cp_wire.pb import coordinator_pb2, coordinator_pb2_grpc

log = get_logger("coordinator.inference")


class InferenceServicer(coordinator_pb2_grpc.InferenceServiceServicer):
    """Streams of events. A client that goes away, at any moment, has its request aborted."""

    def __init__(self, admission: Admission, num_shards: int) -> None:
        self._admission = admission
        self._num_shards = num_shards
        self.stats = RequestStats()

    async def Generate(self, request: coordinator_pb2.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """Accepted, Tokens …, then Finished or a status that is not OK."""
        outcome = CANCELLED
        try:
            outcome = await self._generate(request, context)
        except KvloomError as error:
            outcome = error.code.name.lower()
            await abort(context, error)
        except grpc.aio.BaseError as error:
            # The client has gone in the middle of a write: nobody is there to be told of anything.
            log.info("a client left", during="a write", error=type(error).__name__)
        except Exception as error:
            log.error("a call failed", exc=error)
            outcome = Internal.code.name.lower()
            await abort(context, Internal(f"the call failed ({type(error).__name__})"))
        finally:
            self.stats.outcomes[outcome] += 1

    async def Abort(
        self, request: coordinator_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> coordinator_pb2.AbortResponse:
        """NOT_FOUND when no active request has the id."""
        try:
            self._admission.abort(request.request_id)
        except KvloomError as error:
            await abort(context, error)
        return coordinator_pb2.AbortResponse()

    async def _generate(self, wire: coordinator_pb2.GenerateRequest, context: grpc.aio.ServicerContext) -> str:
        """Why the request ended."""
        accepted = await self._admission.admit(wire)
        try:
            self.stats.prompt_tokens += len(accepted.lives[0].request.prompt) if accepted.lives else 0
            await context.write(coordinator_pb2.GenerateResponse(accepted=_accepted(accepted)))
            while (chunk := await accepted.stream.next()) is not None:
                await context.write(_output(chunk))
                self.stats.output_tokens += len(chunk.token_ids) if isinstance(chunk, Chunk) else 0
            finished = self._finished(accepted)
            await context.write(coordinator_pb2.GenerateResponse(finished=finished))
            return finished.finish_reason
        finally:
            self._admission.release(accepted)

    def _finished(self, accepted: Accepted) -> coordinator_pb2.Finished:
        stream, lives = accepted.stream, accepted.lives
        finished = coordinator_pb2.Finished(
            finish_reason=stream.finish_reason or "",
            completion_tokens=sum(stream.counts),
            completions=[
                coordinator_pb2.CompletionEnd(finish_reason=stream.reasons[index], completion_tokens=count)
                for index, count in enumerate(stream.counts)
            ],
        )
        if lives and accepted.home is not None:
            first = lives[0].request
            finished.prompt_tokens = len(first.prompt)
            finished.cached_tokens = first.num_cached_tokens
            finished.recomputed_tokens = sum(live.request.num_recomputed for live in lives)
            finished.route.CopyFrom(route_of(lives[0], accepted.home.spec.ranks, self._num_shards))
        return finished


def _accepted(accepted: Accepted) -> coordinator_pb2.Accepted:
    event = coordinator_pb2.Accepted(request_id=accepted.request_id)
    if accepted.lives:
        first = accepted.lives[0].request
        event.prompt_tokens = len(first.prompt)
        event.seed = first.sampling.seed
    return event


def _output(chunk: Chunk | PromptChunk) -> coordinator_pb2.GenerateResponse:
    if isinstance(chunk, PromptChunk):
        prompt_logprobs = coordinator_pb2.PromptLogprobs(start=chunk.start, positions=chunk.positions)
        return coordinator_pb2.GenerateResponse(prompt_logprobs=prompt_logprobs)
    tokens = coordinator_pb2.Tokens(token_ids=chunk.token_ids, text=chunk.text, logprobs=chunk.logprobs, index=chunk.index)
    return coordinator_pb2.GenerateResponse(tokens=tokens)
