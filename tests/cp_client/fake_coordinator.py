"""The public services with scripted answers, on a server that runs in a thread of its own."""

import asyncio
import socket
import threading
from contextlib import contextmanager, suppress

from cp_wire.errors import Unknown, abort
from cp_wire.pb import common_pb2
from cp_wire.pb import coordinator_pb2 as pb
from cp_wire.pb import coordinator_pb2_grpc as rpc
from cp_wire.serve import Server

DEADLINE_S = 10


class FakeCoordinator(rpc.InferenceServiceServicer, rpc.ControlServiceServicer):
    """Plays `script` to every Generate: a response is sent, an exception aborts, a threading.Event is waited for."""

    def __init__(self, script=()):
        self.script = list(script)
        self.requests = []
        self.aborted = []
        self.drains = []
        self.cancelled = threading.Event()
        self.status = pb.GetStatusResponse()
        self.config = common_pb2.ClusterConfig()

    async def Generate(self, request, context):
        self.requests.append(request)
        try:
            for step in self.script:
                if isinstance(step, Exception):
                    await abort(context, step)
                elif isinstance(step, threading.Event):
                    await asyncio.get_running_loop().run_in_executor(None, step.wait, DEADLINE_S)
                else:
                    yield step
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise

    async def Abort(self, request, context):
        if request.request_id == "nobody":
            await abort(context, Unknown("no active request nobody"))
        self.aborted.append(request.request_id)
        return pb.AbortResponse()

    async def GetStatus(self, request, context):
        return self.status

    async def GetConfig(self, request, context):
        if not self.config.tp:
            await abort(context, Unknown("no configuration"))
        return pb.GetConfigResponse(config=self.config)

    async def Drain(self, request, context):
        self.drains.append(request.deadline_ms)
        return pb.DrainResponse(ended=2)


@contextmanager
def running(servicer):
    """HOST:PORT of a server for `servicer` (None: of one that is no coordinator), in a thread with its own event loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def call(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(DEADLINE_S)

    async def start():
        server = Server("127.0.0.1", 0, "prompt")
        if servicer is not None:
            server.add(rpc.add_InferenceServiceServicer_to_server, servicer, "kvloom.v1.InferenceService")
            server.add(rpc.add_ControlServiceServicer_to_server, servicer, "kvloom.v1.ControlService")
        return server, await server.start()

    server, address = call(start())
    try:
        yield address
    finally:
        call(server.stop(0))
        loop.call_soon_threadsafe(loop.stop)
        thread.join(DEADLINE_S)
        loop.close()


class Cable:
    """HOST:PORT that leads to `address` over connections that can be cut, as when the process behind it is killed."""

    def __init__(self, address):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listener]
        self._threads = [threading.Thread(target=self._accept, args=(address,))]
        self.target = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads[0].start()

    def cut(self):
        """Ends all connections, and takes no more."""
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(DEADLINE_S)
        for each in self._sockets:
            each.close()

    def _accept(self, address):
        host, port = address.split(":")
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection((host, int(port)))
                self._sockets += [near, far]
                for ends in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._pump, args=ends))
                    self._threads[-1].start()

    def _pump(self, source, sink):
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)


def accepted(request_id="r1", seed=7):
    return pb.GenerateResponse(accepted=pb.Accepted(request_id=request_id, prompt_tokens=3, seed=seed))


def tokens(text, *ids, logprobs=(), index=0):
    return pb.GenerateResponse(tokens=pb.Tokens(token_ids=ids, text=text, logprobs=logprobs, index=index))


def finished(reason="stop", completion=3):
    route = pb.Route(ranks=[0, 1], cp=2, prefill_group=[0, 1], decode_group=[0, 1], reason="static")
    return pb.GenerateResponse(
        finished=pb.Finished(
            finish_reason=reason,
            prompt_tokens=3,
            completion_tokens=completion,
            cached_tokens=1,
            recomputed_tokens=0,
            route=route,
        )
    )


WHOLE = (accepted(), tokens("Hel", 5), tokens("", 6), tokens("lo", 7), finished())
