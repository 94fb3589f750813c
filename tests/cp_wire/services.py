"""A small inference servicer for tests of the wire."""

import asyncio

from cp_wire.errors import abort
from cp_wire.pb import coordinator_pb2, coordinator_pb2_grpc

INFERENCE = "kvloom.v1.InferenceService"


class Echo(coordinator_pb2_grpc.InferenceServiceServicer):
    """Answers the prompt, waits `max_tokens` milliseconds, finishes; raises `failure` instead if there is one."""

    def __init__(self, failure=None):
        self.failure = failure

    async def Generate(self, request, context):
        if self.failure is not None:
            await abort(context, self.failure)
        yield coordinator_pb2.GenerateResponse(tokens=coordinator_pb2.Tokens(token_ids=request.tokens.ids, text=request.text))
        await asyncio.sleep(request.max_tokens / 1000)
        yield coordinator_pb2.GenerateResponse(finished=coordinator_pb2.Finished(finish_reason="stop"))

    async def Abort(self, request, context):
        if self.failure is not None:
            await abort(context, self.failure)
        return coordinator_pb2.AbortResponse()
