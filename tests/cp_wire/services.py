"""A small inference servicer for tests of the wire."""

import asyncio
from contextlib import asynccontextmanager

from cp_wire.errors import abort
from cp_wire.pb import coordinator_pb2, coordinator_pb2_grpc
from cp_wire.serve import Server

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


@asynccontextmanager
async def serving(servicer, kind="control"):
    """(server, address) of one inference servicer; stopped at the end whatever happens."""
    server = Server("127.0.0.1", 0, kind)
    server.add(coordinator_pb2_grpc.add_InferenceServiceServicer_to_server, servicer, INFERENCE)
    address = await server.start()
    try:
        yield server, address
    finally:
        await server.stop(0)
