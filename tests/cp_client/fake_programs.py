"""Stand-ins for the processes of a cluster: `python -m tests.cp_client.fake_programs coordinator|rank|launcher …`.

The coordinator takes registrations and reports them in its status; a rank registers and waits for its end.
"""

import argparse
import asyncio
import os
import signal
import sys

import grpc

from cp_client.launcher import Cluster, ClusterSpec, run_cluster
from cp_wire import process
from cp_wire.channels import open_sync_channel
from cp_wire.pb import coordinator_pb2 as pb
from cp_wire.pb import coordinator_pb2_grpc as rpc
from cp_wire.serve import Server

COMMAND = (sys.executable, "-m", "tests.cp_client.fake_programs")


def spec(ranks=2, coordinator=(), rank=(), **limits):
    """A cluster of fake processes with extra words for the coordinator and for the ranks."""
    return ClusterSpec(
        coordinator=(*COMMAND, "coordinator", "--ranks", str(ranks), *coordinator),
        rank=(*COMMAND, "rank", *rank),
        num_ranks=ranks,
        **{"backoff_s": 0.01, "blame_s": 5.0, **limits},
    )


class Coordinator(rpc.RegistryServiceServicer, rpc.ControlServiceServicer):
    """Ready when all ranks have registered; --fence R declares the first life of rank R lost when `Drain` is called."""

    def __init__(self, args):
        self.args = args
        self.status = pb.GetStatusResponse(state="starting", running=args.running)
        self.changed = asyncio.Condition()
        self.all_here = asyncio.Event()

    async def publish(self):
        async with self.changed:
            self.changed.notify_all()

    async def Register(self, request, context):
        others = [rank for rank in self.status.ranks if rank.rank != request.rank]
        here = pb.RankStatus(
            rank=request.rank, state="ready", pid=request.pid, instance=request.instance, load_fraction=self.args.loaded
        )
        del self.status.ranks[:]
        self.status.ranks.extend(sorted([*others, here], key=lambda rank: rank.rank))
        if len(self.status.ranks) == self.args.ranks:
            self.all_here.set()
        await self.publish()
        return pb.RegisterResponse()

    async def GetStatus(self, request, context):
        return self.status

    async def Drain(self, request, context):
        for rank in self.status.ranks:
            if rank.rank == self.args.fence:
                rank.state, rank.fenced_reason = "lost", "no answer"
        await self.publish()
        return pb.DrainResponse()

    async def WatchStatus(self, request, context):
        async with self.changed:
            while True:
                yield pb.WatchStatusResponse(status=self.status)
                await self.changed.wait()

    async def serve(self):
        server = Server("127.0.0.1", self.args.port)
        server.add(rpc.add_RegistryServiceServicer_to_server, self, "kvloom.v1.RegistryService")
        server.add(rpc.add_ControlServiceServicer_to_server, self, "kvloom.v1.ControlService")
        print(f"listening grpc={await server.start()}", flush=True)
        process.watch_stdin_eof()
        try:
            await self.all_here.wait()
            print("a line that means nothing", flush=True)
            print(f"ready grpc=127.0.0.1:{self.args.port or 7}", flush=True)
            await asyncio.Event().wait()
        finally:
            # A server that is left to the end of the process waits there for what a frozen client owes it.
            await server.stop(0)


def freeze_if_told(args):
    """Stops this process when the file --freeze holds its rank, once."""
    try:
        with open(args.freeze) as file:
            chosen = file.read() == str(args.rank)
    except FileNotFoundError:
        return
    if chosen:
        os.unlink(args.freeze)
        os.kill(os.getpid(), signal.SIGSTOP)


def spared(args):
    """Whether this is the first life that finds no file --spare."""
    try:
        os.close(os.open(args.spare, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    except FileNotFoundError:  # no file was named
        return False
    return True


def rank_main(args):
    freeze_if_told(args)
    if args.also == args.rank:
        print("fatal: too cold", file=sys.stderr, flush=True)
        with open(args.fifo, "w"):
            sys.stdin.read()
        return 1
    if args.fail == args.rank:
        if args.fifo:
            open(args.fifo).close()
        print(f"fatal: {args.message}", file=sys.stderr)
        return args.status
    print(f"rank {args.rank} threads {os.environ['OMP_NUM_THREADS']}", file=sys.stderr, flush=True)
    # Before it registers, which is when a test may kill it.
    lives = args.die_always != args.rank or spared(args)
    with open_sync_channel(args.coordinator, "control") as channel:
        request = pb.RegisterRequest(rank=args.rank, pid=os.getpid(), instance=str(os.getpid()))
        try:
            rpc.RegistryServiceStub(channel).Register(request, timeout=10)
        except grpc.RpcError:
            return 1
    if not lives:
        return 3
    sys.stdin.read()
    return 0


def main(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["coordinator", "rank", "launcher"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--fence", type=int, default=-1)
    parser.add_argument("--stubborn", action="store_true")
    parser.add_argument("--refuse", default="")
    parser.add_argument("--silent", action="store_true")
    parser.add_argument("--freeze", default="")
    parser.add_argument("--spare", default="")
    parser.add_argument("--fifo", help="a rank with --fail waits here for the one with --also")
    parser.add_argument("--running", type=int, default=0, help="requests in the coordinator's status")
    parser.add_argument("--loaded", type=float, default=0.0)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--coordinator")
    for name in ("--fail", "--also", "--die-always"):
        parser.add_argument(name, type=int, default=-1)
    parser.add_argument("--message", default="")
    parser.add_argument("--status", type=int, default=1)
    args = parser.parse_args(argv)
    if args.role == "launcher":
        words = ("--stubborn",) if args.stubborn else ()
        cluster = Cluster(spec(args.ranks, (*words, "--running", str(args.running)), drain_s=30.0, stop_s=1.0))

        async def launch():
            await run_cluster(cluster, lambda address: print(f"ready grpc={address}", flush=True))
            return 0

        return process.run(launch, on_second_signal=cluster.kill)
    if args.refuse:
        print(f"fatal: {args.refuse}", file=sys.stderr)
        return args.status
    if args.silent:
        sys.stdin.read()
        return 0
    if args.role == "rank":
        return rank_main(args)
    if args.stubborn:
        signal.signal(signal.SIGTERM, lambda number, frame: print("deaf", file=sys.stderr, flush=True))
        return asyncio.run(Coordinator(args).serve())
    return process.run(Coordinator(args).serve)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
