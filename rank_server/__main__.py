"""`python -m rank_server`: one rank process."""

import argparse
import asyncio
import os
from collections.abc import Sequence
from functools import partial

import torch

from cp_wire import channels, errors, process
from cp_wire.command_line import ProcessParser
from cp_wire.flags import DEVICES, integer, threads_per_rank
from cp_wire.host import host_identity, is_wildcard
from cp_wire.identity import PROTOCOL_VERSION, new_instance
from cp_wire.logs import configure_logging
from cp_wire.pb import coordinator_pb2, coordinator_pb2_grpc, rank_pb2_grpc
from cp_wire.serve import Server
from kv_transfer.service import SERVICE, KvTransferServicer, add_to_server
from model_files import ModelRefused, open_model
from rank_server.collectives.table import backends
from rank_server.cores import keep_to, own_cores, take_one_each
from rank_server.device import check_device
from rank_server.executor import Executor
from rank_server.service import RankServicer
from rank_server.transfer import Transfers
from rank_server.worker import Worker

REGISTER_TIMEOUT_S = 10.0
LANE_TIMEOUT_S = 60.0
STOP_GRACE_S = 1.0


def build_parser() -> argparse.ArgumentParser:
    """Flags of a rank process."""
    parser = ProcessParser(prog="python -m rank_server", description="One kvloom rank: a KV shard and a slice of the model.")
    parser.add_argument("--rank", type=integer(0), required=True, help="global rank index")
    parser.add_argument("--coordinator", required=True, metavar="HOST:PORT")
    parser.add_argument("--model", required=True, help="Hugging Face directory or GGUF file")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on and to reach the other ranks from (default: 127.0.0.1)"
    )
    parser.add_argument("--port", type=integer(0, 65535), default=0, help="0 = the system chooses (default)")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="default: auto = what the coordinator says")
    parser.add_argument("--threads-per-rank", type=integer(1), default=0, help="default: CPUs ÷ ranks on the host")
    parser.add_argument(
        "--ranks-on-host", type=integer(1), default=1, help="ranks that share this host's memory and CPUs (default: 1)"
    )
    parser.add_argument("--exit-with-stdin", action="store_true", help="exit when standard input closes")
    return parser


async def serve(args: argparse.Namespace) -> int:
    """Runs until the lane closes; the exit status is 0 when it closed after it had been open."""
    if args.device != "auto":
        check_device(args.device)
    if is_wildcard(args.host):
        raise errors.ConfigRefused(f"a rank needs an address that its peers can reach, not the wildcard {args.host!r}")
    model_files = open_model(args.model)
    threads = threads_per_rank(args.threads_per_rank, args.ranks_on_host)
    torch.set_num_threads(threads)
    instance = new_instance()
    worker = Worker(
        partial(_prepare, threads, own_cores(tuple(os.sched_getaffinity(0)), args.rank, args.ranks_on_host, threads))
    )
    executor = Executor(model_files, backends(args.host), worker.touch, args.ranks_on_host, args.device)
    transfers = Transfers(executor, model_files, instance, host_identity())
    servicer = RankServicer(executor, worker, transfers, args.rank, instance)
    server = Server(args.host, args.port, kind="prompt")
    server.add(rank_pb2_grpc.add_RankServiceServicer_to_server, servicer, "kvloom.v1.RankService")
    server.add(add_to_server, KvTransferServicer(transfers), SERVICE)
    address = await server.start()
    if args.exit_with_stdin:
        process.watch_stdin_eof()
    worker.start()
    try:
        await _register(args, address, instance, model_files.hash)
        await _until_open(servicer)
        server.set_serving(True)
        await servicer.lane_closed.wait()
        return 0
    finally:
        # The lane goes first, so that the coordinator gives this process nothing more to do and has the seat filled again.
        servicer.end_lane()
        await transfers.close()
        await server.stop(STOP_GRACE_S)
        executor.close_groups()
        # The worker may sit in a collective that nothing can interrupt; the process goes all the same.
        await asyncio.to_thread(worker.stop, STOP_GRACE_S)


def _prepare(threads: int, cores: Sequence[int]) -> None:
    """Of the thread that computes."""
    keep_to(cores)
    # OpenMP keeps the number for each thread that begins parallel work, and products of oneDNN begin it without asking torch.
    torch.set_num_threads(threads)
    take_one_each(cores)


async def _register(args: argparse.Namespace, address: str, instance: str, model_hash: str) -> None:
    async with channels.open_channel(args.coordinator, "control") as channel:
        stub = coordinator_pb2_grpc.RegistryServiceStub(channel)
        request = coordinator_pb2.RegisterRequest(
            rank=args.rank,
            address=address,
            instance=instance,
            pid=os.getpid(),
            protocol_version=PROTOCOL_VERSION,
            model_hash=model_hash,
            host=host_identity(),
        )
        try:
            await stub.Register(request, timeout=REGISTER_TIMEOUT_S, wait_for_ready=True)
        except errors.RpcError as error:
            raise errors.from_rpc_error(error) from error


async def _until_open(servicer: RankServicer) -> None:
    try:
        await asyncio.wait_for(servicer.lane_opened.wait(), LANE_TIMEOUT_S)
    except TimeoutError:
        raise errors.Unavailable(f"the coordinator did not open a lane within {LANE_TIMEOUT_S:.0f} s") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = build_parser().parse_args(argv)
    configure_logging(f"rank{args.rank}")
    return process.run(lambda: serve(args), refusals=(ModelRefused,))


if __name__ == "__main__":
    # What the interpreter takes apart at its end, torch above all, may take longer than the launcher waits.
    process.leave(main())
