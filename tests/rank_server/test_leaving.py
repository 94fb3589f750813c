"""A rank process, seen from a coordinator's side: its lane ends as soon as the process is told to go, and then it goes."""

import asyncio
import signal
import sys
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from cp_wire import channels
from cp_wire.pb import coordinator_pb2, coordinator_pb2_grpc, rank_pb2, rank_pb2_grpc
from cp_wire.serve import Server
from tests.tiny_models import build_tiny_llama

pytestmark = pytest.mark.cluster

DEADLINE_S = 60.0
AFTER_THE_SIGNAL = 20
"""Commands that may still be answered: a busy machine takes a while to deliver a signal."""
PROGRAM = """
import atexit, runpy
atexit.register(print, "taken apart", flush=True)
runpy.run_module("rank_server", run_name="__main__", alter_sys=True)
"""


class Registry(coordinator_pb2_grpc.RegistryServiceServicer):
    """Keeps what registers."""

    def __init__(self):
        self.registered = asyncio.Queue()

    async def Register(self, request, context):
        self.registered.put_nowait(request)
        return coordinator_pb2.RegisterResponse()


class Lane:
    """One open lane; `reset` is a command that any rank can answer."""

    def __init__(self, stub, instance):
        self.stream = stub.Execute(timeout=DEADLINE_S)
        self._instance = instance
        self._sequence = 0

    async def reset(self):
        """True when it was answered, False when the lane has ended."""
        self._sequence += 1
        command = rank_pb2.ExecuteRequest(sequence=self._sequence, instance=self._instance, reset=rank_pb2.Reset())
        try:
            await self.stream.write(command)
            answer = await self.stream.read()
        except (asyncio.InvalidStateError, grpc.RpcError):  # the lane ended before or during the write
            return False
        return answer is not grpc.aio.EOF and answer.WhichOneof("result") == "reset_done"


@asynccontextmanager
async def running_rank(directory):
    """(process, lane) of a rank that has answered one command."""
    registry, server = Registry(), Server("127.0.0.1", 0)
    server.add(coordinator_pb2_grpc.add_RegistryServiceServicer_to_server, registry, "kvloom.v1.RegistryService")
    words = (
        "--rank",
        "0",
        "--coordinator",
        await server.start(),
        "--model",
        str(build_tiny_llama(directory)),
        "--exit-with-stdin",
    )
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, *words, **pipes)
    try:
        async with asyncio.timeout(DEADLINE_S):
            rank = await registry.registered.get()
            async with channels.open_channel(rank.address, "control") as channel:
                lane = Lane(rank_pb2_grpc.RankServiceStub(channel), rank.instance)
                assert await lane.reset()
                yield process, lane
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await server.stop(0)


@pytest.mark.parametrize("told", ["signal", "stdin"])
async def test_k8_a_rank_that_is_told_to_go_ends_its_lane_first(tmp_path, told):
    async with running_rank(tmp_path) as (process, lane):
        if told == "signal":
            process.send_signal(signal.SIGTERM)
        else:
            process.stdin.close()
        answered = 0
        while await lane.reset():
            answered += 1
            assert answered <= AFTER_THE_SIGNAL
        await process.wait()
        assert process.returncode == 0


async def test_m2_a_rank_goes_without_being_taken_apart(tmp_path):
    async with running_rank(tmp_path) as (process, lane):
        lane.stream.cancel()
        out, err = await process.communicate()
        assert (process.returncode, out, err) == (0, b"", b"")
