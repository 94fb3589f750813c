"""`kvloom up`: a cluster on this host, in the foreground."""

import os
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, _SubParsersAction
from pathlib import Path

from cp_client.default_model import default_model_path
from cp_client.devices import local_device
from cp_client.exit_status import DONE
from cp_client.launcher import REGISTER_S, Cluster, ClusterFailed, ClusterSpec, run_cluster
from cp_client.refusals import unless_refused
from cp_layout.errors import LayoutError
from cp_layout.grid import Grid
from cp_wire import process
from cp_wire.effective import settle
from cp_wire.flags import SIZES, add_cluster_flags, add_metrics_flag, check_ports, cluster_argv, integer, threads_per_rank
from cp_wire.host import host_identity, local_host
from cp_wire.host_memory import available_bytes, max_kv_blocks
from cp_wire.logs import configure_logging
from cp_wire.side_flags import ROLES, has_sides, naming, sides_of
from cp_wire.sides import sides_from
from model_files import open_model

DEFAULT_SIZES = {"pcp": 2, "dcp": 2}
"""Shape of a cluster for the bundled model when no size is given."""

CPU_S_TO_REGISTER = 10.0
"""Time of one CPU that a rank may need from its start until it registers; most of it goes into imports."""

MAX_RANKS = 1024
"""Processes that one host is asked to start."""


def add_up_parser(subparsers: "_SubParsersAction[ArgumentParser]") -> None:
    """Adds `up [MODEL] …`; sets `func(args) -> exit status`."""
    parser = subparsers.add_parser("up", help="start a cluster on this host", allow_abbrev=False)
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="Hugging Face directory or GGUF file (default: the bundled one)"
    )
    add_cluster_flags(parser)
    add_metrics_flag(parser)
    parser.add_argument("--port", type=integer(0, 65535), default=0, help="0 = the system chooses (default)")
    parser.add_argument(
        "--http-port", type=_no_gateway, metavar="0", help="0 = no HTTP gateway (default); this version has none"
    )
    # Absent and 1 must be told apart: the bundled model has a default shape of its own.
    parser.set_defaults(func=up, **dict.fromkeys(SIZES))


def _no_gateway(text: str) -> int:
    if text != "0":
        raise ArgumentTypeError(f"{text!r} asks for an HTTP gateway, there is no HTTP gateway in this version: leave it at 0")
    return 0


def up(args: Namespace) -> int:
    """Runs until SIGINT or SIGTERM; exit status 0 then, 2 for a refused configuration, 1 for a failure."""
    configure_logging("launcher")
    return unless_refused(lambda: _run(Cluster(cluster_spec(args))))


def _run(cluster: Cluster) -> int:
    async def main() -> int:
        try:
            await run_cluster(cluster, lambda address: print(f"ready grpc={address}", flush=True))
        except ClusterFailed as failure:
            print(f"kvloom: {failure}", file=sys.stderr)
            return failure.status
        return DONE

    return process.run(main, on_second_signal=cluster.kill)


def _give_default_sizes(args: Namespace) -> None:
    """Those of the bundled model, to whoever has room for them and no size of its own: the cluster, or a side of it."""
    if not has_sides(args):
        vars(args).update(DEFAULT_SIZES)
        return
    for role in ROLES:
        sizes = {f"{role}_{name}": size for name, size in DEFAULT_SIZES.items()}
        bare = all(getattr(args, f"{role}_{name}") is None for name in SIZES)
        if bare and getattr(args, f"{role}_ranks") == DEFAULT_SIZES["pcp"]:
            vars(args).update(sizes)


def cluster_spec(args: Namespace) -> ClusterSpec:
    """The commands behind the flags, after everything that can be judged from here has been: nothing has been started yet.

    `ConfigRefused`, `LayoutError` or `ModelRefused` names the law or the setting that stands against it.
    """
    check_ports(args)
    if args.model is None and all(getattr(args, name) is None for name in SIZES):
        _give_default_sizes(args)
    for name in SIZES:
        setattr(args, name, getattr(args, name) or 1)
    model = default_model_path() if args.model is None else Path(args.model)
    shapes = sides_of(args)
    ranks = 0
    for role, side in shapes.items():
        with naming(role):
            ranks += Grid(tp=side.tp, pcp=side.pcp, dcp=side.dcp, dp=side.dp).world_size
    if ranks > MAX_RANKS:
        raise LayoutError(f"{ranks} ranks (dp·pcp·tp) are more than one host starts, {MAX_RANKS}")
    args.device = local_device(args.device, ranks)
    shape = open_model(model).shape
    configs = [side.config for side in sides_from(args, lambda asked: settle(asked, shape))]
    if configs[0].device == "cpu":
        for config in configs:
            bytes_per_block = shape.kv_bytes_per_token(config.tp, config.kv_cache_dtype) * config.block_size
            max_kv_blocks(config, bytes_per_block, available_bytes(), ranks)
        if args.collectives == "auto" and host_identity():
            args.collectives = "shm"  # all ranks run here, as children of one process
    threads = threads_per_rank(args.threads_per_rank, ranks)
    common = ("--model", os.fspath(model), "--exit-with-stdin")
    ports = ("--port", str(args.port), "--metrics-port", str(args.metrics_port))
    # Everybody may be let in at the coordinator's door; the ranks talk to one another at an address they can dial.
    rank_flags = ("--host", local_host(args.host), "--device", args.device, "--threads-per-rank", str(threads))
    return ClusterSpec(
        coordinator=(sys.executable, "-m", "coordinator", *common, *ports, *cluster_argv(args)),
        rank=(sys.executable, "-m", "rank_server", *common, *rank_flags, "--ranks-on-host", str(ranks)),
        num_ranks=ranks,
        threads_per_rank=threads,
        register_s=max(REGISTER_S, CPU_S_TO_REGISTER * ranks / len(os.sched_getaffinity(0))),
    )
