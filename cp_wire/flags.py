"""Flags of a cluster: one definition for every process and for the launcher."""

import argparse
import os

from cp_layout.laws import GATHERS
from cp_layout.model_shape import DTYPE_BYTES
from cp_wire.errors import ConfigRefused
from cp_wire.numbers import integer as integer
from cp_wire.pb import common_pb2
from cp_wire.side_flags import add_side_flags

DTYPES = ("auto", *DTYPE_BYTES)
DEVICES = ("auto", "cpu", "cuda")
COLLECTIVES = ("auto", "gloo", "shm", "nccl")
MERGES = {"a2a": common_pb2.MERGE_A2A, "ag_rs": common_pb2.MERGE_AG_RS}
BATCHED_TOKENS = {"auto": 512, "cpu": 512, "cuda": 8192}
"""Default token budget of a step, by device."""

_UNITS = {
    "": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_UINT64_MAX = 2**64 - 1


def byte_count(text: str) -> int:
    """Bytes from `1073741824`, `512MiB`, `1.5GiB` or `2GB`."""
    number = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = _UNITS.get(text[len(number) :].strip().lower())
    try:
        value = float(number) * unit if unit is not None else 0.0
    except ValueError:
        value = 0.0
    if not 1 <= value <= _UINT64_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes such as 1073741824, 512MiB or 1.5GiB")
    return int(value)


SIZES = {
    "tp": ("--tensor-parallel-size", "ranks that together hold one copy of the weights (default: 1)"),
    "pcp": ("--prefill-context-parallel-size", "replicas of the weights (default: 1; kvloom up without MODEL: 2)"),
    "dcp": ("--decode-context-parallel-size", "KV shards, on ranks of PCP and TP (default: 1; kvloom up without MODEL: 2)"),
    "dp": ("--data-parallel-size", "independent sets of ranks (default: 1)"),
}
"""Parallel sizes: short name (-tp and --tp), long name and meaning."""


def add_cluster_flags(parser: argparse.ArgumentParser) -> None:
    """All flags that describe a cluster; `cluster_config_from` reads them, `cluster_argv` writes them again."""
    for short, (long, meaning) in SIZES.items():
        parser.add_argument(f"-{short}", long, f"--{short}", dest=short, type=integer(1), default=1, metavar="N", help=meaning)
    parser.add_argument(
        "--cp-kv-cache-interleave-size",
        dest="interleave",
        type=integer(1),
        metavar="I",
        help="consecutive tokens on one KV shard (default: the block size)",
    )
    parser.add_argument("--block-size", type=integer(1), default=16, metavar="B", help="tokens per KV block (default: 16)")
    pool = parser.add_mutually_exclusive_group()
    pool.add_argument(
        "--kv-cache-tokens-per-rank",
        type=integer(1, _UINT64_MAX),
        default=0,
        metavar="N",
        help="KV pool of a rank (default: what 1 GiB or a quarter of its share of free memory holds)",
    )
    pool.add_argument(
        "--kv-cache-memory-bytes",
        type=byte_count,
        default=0,
        metavar="X",
        help="KV pool of a rank, e.g. 2GiB",
    )
    parser.add_argument("--kv-cache-dtype", choices=DTYPES, default="auto", help="default: the model's dtype")
    parser.add_argument("--max-model-len", type=integer(1), default=0, metavar="L", help="default: what the model allows")
    parser.add_argument(
        "--max-num-seqs", type=integer(1), default=64, metavar="S", help="requests running at once (default: 64)"
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        type=integer(1),
        metavar="T",
        help="tokens computed in one step (default: 512, on a GPU 8192)",
    )
    parser.add_argument(
        "--dcp-comm-backend", choices=sorted(MERGES), default="a2a", help="merge of partial attention (default: a2a)"
    )
    parser.add_argument(
        "--pcp-gather",
        choices=GATHERS,
        default="auto",
        help="what prefill rows gather over the replicas (default: auto, whatever is cheaper)",
    )
    parser.add_argument(
        "--mla-gather",
        choices=GATHERS,
        default="auto",
        help="what all rows gather of a sharded cache of latents, decode rows too (default: auto, whatever is cheaper)",
    )
    parser.add_argument(
        "--collectives",
        choices=COLLECTIVES,
        default="auto",
        help="how ranks exchange tensors: gloo over TCP, shm through the memory of one host, nccl between GPUs "
        "(default: gloo, kvloom up: shm; with --device cuda: nccl)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="default: the checkpoint's (bfloat16 for GGUF)")
    parser.add_argument(
        "--device", choices=DEVICES, default="auto", help="default: auto = cpu; kvloom up: cuda where every rank can have a GPU"
    )
    parser.add_argument("--threads-per-rank", type=integer(1), default=0, metavar="T", help="default: CPUs ÷ ranks on the host")
    parser.add_argument(
        "--seed",
        type=integer(0, _UINT64_MAX),
        help="makes the seeds drawn for requests without one repeatable (default: drawn)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add_side_flags(parser)


def add_metrics_flag(parser: argparse.ArgumentParser) -> None:
    """`--metrics-port`: of the coordinator, and of whoever starts one."""
    parser.add_argument(
        "--metrics-port",
        type=integer(0, 65535),
        default=0,
        metavar="PORT",
        help="serve metrics for Prometheus over HTTP, at /metrics on this port of --host; 0 = don't (default)",
    )


def check_ports(args: argparse.Namespace) -> None:
    """Raises ConfigRefused where `--port` and `--metrics-port` are the same one; 0 names none."""
    if args.port and args.port == args.metrics_port:
        raise ConfigRefused(f"--port and --metrics-port are both {args.port}: calls and metrics need a port each")


def cluster_config_from(args: argparse.Namespace) -> common_pb2.ClusterConfig:
    """The configuration the flags ask for, or those of one side (`side_flags.sides_of`).

    `auto` dtypes and collectives, and an `interleave` and a `max_model_len` of 0, are left for `cp_wire.effective.settle`; the
    model's name and hash are the coordinator's to add. No law is checked here.
    """
    return common_pb2.ClusterConfig(
        tp=args.tp,
        pcp=args.pcp,
        dcp=args.dcp,
        dp=args.dp,
        interleave=args.interleave,
        block_size=args.block_size,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens or BATCHED_TOKENS[args.device],
        merge=MERGES[args.dcp_comm_backend],
        pcp_gather=args.pcp_gather,
        mla_gather=args.mla_gather,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        collectives=args.collectives,
        device=args.device,
        kv_cache_tokens_per_rank=args.kv_cache_tokens_per_rank,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
    )


def cluster_argv(args: argparse.Namespace) -> list[str]:
    """The words that make `add_cluster_flags` parse to the same values: what a launcher hands to the coordinator."""
    parser = argparse.ArgumentParser()
    add_cluster_flags(parser)
    words = []
    for action in parser._actions:
        value = getattr(args, action.dest, None)
        if value != action.default and value is not None:
            words += [action.option_strings[-1], str(value)]
    return words


def threads_per_rank(asked: int, ranks_on_host: int) -> int:
    """Compute threads of one rank: what was asked for, else an equal share of the CPUs this process may use, at least 1."""
    return asked or max(1, len(os.sched_getaffinity(0)) // ranks_on_host)
