"""KV from rank to rank, against a bare byte stream: `kvloom bench transfer`.

Two pairs of processes. In each, one serves a pool as a rank does and a stream of ready-made messages of the same size, and the
other takes. In turn, in one run: the bare stream (gRPC, no protobuf, no pool), a transfer with I = B, one with I = 1, and one
through shared memory. The transfers run in the pair that keeps freed memory, as ranks do; the bare stream in both, so that what
that setting does for gRPC itself can be told from what the transfer costs. A bare stream sends one megabyte again and again and
drops it; so there is another one that moves data, from as much memory as the payload has to as much. Every transfer is checked
to have moved each byte to its place. Rates count payload bytes; CPU time is that of all threads of the process.
"""

import asyncio
import json
import sys
import time
from argparse import Namespace
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from benchmarks.harness import machine, parser, report, run_benchmark, spread
from benchmarks.plot import line_chart
from benchmarks.transfer_ends import START_S, WAYS, payload_of, serve, take
from cp_client.interpreter import same_code_environment
from cp_wire.flags import integer
from cp_wire.words import counted

NAMES = {
    "bare": "bare gRPC stream",
    "bare_kept": "the same, memory kept",
    "moving": "the same, from memory to memory",
    "whole": "transfer, I = B",
    "single": "transfer, I = 1",
    "shared": "transfer, I = B, shared memory",
}


@dataclass(frozen=True, slots=True)
class Pair:
    """A serving and a taking process."""

    serving: Process
    taking: Process
    addresses: dict[str, str]

    async def run(self, way: str) -> dict[str, Any]:
        """One repetition: `seconds`, `cpu_seconds` of the taking end, `source_cpu_seconds`, and what a transfer reports."""
        assert self.taking.stdin is not None and self.taking.stdout is not None
        before = cpu_seconds(self.serving.pid)
        self.taking.stdin.write(f"{way} {self.addresses[way]}\n".encode())
        line = await asyncio.wait_for(self.taking.stdout.readline(), START_S)
        if not line:
            raise SystemExit(f"{NAMES[way]}: the taking process has ended")
        return json.loads(line) | {"source_cpu_seconds": cpu_seconds(self.serving.pid) - before}


def cpu_seconds(pid: int) -> float:
    """CPU time of another process of this host, by the clock that clock_getcpuclockid(3) would name."""
    return time.clock_gettime(~pid << 3 | 2)


@asynccontextmanager
async def process(*words: str) -> AsyncIterator[Process]:
    """One end; it ends with the context. Ctrl-C is the business of this process alone."""
    pipe = asyncio.subprocess.PIPE
    command, environment = [sys.executable, "-m", "benchmarks.transfer", *words], same_code_environment()
    end = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=environment, process_group=0)
    assert end.stdin is not None
    try:
        yield end
    finally:
        end.stdin.close()
        try:
            await asyncio.wait_for(end.wait(), START_S)
        except TimeoutError:
            end.kill()


async def pair(stack: AsyncExitStack, argv: Sequence[str], *words: str) -> Pair:
    """Both ends, until the stack is left."""
    serving = await stack.enter_async_context(process(*argv, *words, "--end", "serve"))
    taking = await stack.enter_async_context(process(*argv, *words, "--end", "take"))
    assert serving.stdout is not None
    async with asyncio.timeout(START_S):
        return Pair(serving, taking, {way: (await serving.stdout.readline()).decode().strip() for way in WAYS})


async def measure(args: Namespace, argv: Sequence[str]) -> list[dict[str, Any]]:
    """One row per way; the first repetition of each warms up and is not counted."""
    async with AsyncExitStack() as stack:
        plain, kept = await pair(stack, argv), await pair(stack, argv, "--keep")
        ways = {"bare": (plain, "bare"), "bare_kept": (kept, "bare")} | {way: (kept, way) for way in WAYS[1:]}
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
        for _ in range(args.runs + 1):
            for name, (ends, way) in ways.items():
                runs[name].append(await ends.run(way))
    against = [runs[name][1:] for name in ("bare", "bare_kept", "moving")]
    return [row_of(args, name, counted[1:], *against) for name, counted in runs.items()]


def row_of(args: Namespace, name: str, *runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the repetitions of a way say. runs: of the way itself, and of the three bare streams in the order of `NAMES`."""
    own, bare, kept, moving = (median(run["seconds"] for run in each) for each in runs)
    mib = payload_of(args) / (1 << 20)
    row: dict[str, Any] = {
        "way": name,
        "name": NAMES[name],
        "gib_per_s": spread([mib / 1024 / run["seconds"] for run in runs[0]]),
        "runs_gib_per_s": [round(mib / 1024 / run["seconds"], 4) for run in runs[0]],
        "ratio": round(bare / own, 3),
        "ratio_kept": round(kept / own, 3),
        "ratio_moving": round(moving / own, 3),
        "source_cpu_us_per_mib": round(median(run["source_cpu_seconds"] for run in runs[0]) / mib * 1e6),
        "target_cpu_us_per_mib": round(median(run["cpu_seconds"] for run in runs[0]) / mib * 1e6),
    }
    return row | {key: runs[0][-1][key] for key in ("messages", "shared_bytes", "retries") if key in runs[0][-1]}


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Rates of the ways, repetition by repetition."""
    series = {row["name"]: list(enumerate(row["runs_gib_per_s"], 1)) for row in rows}
    line_chart(path, "KV from rank to rank", "repetition", "GiB/s", series)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    flags = parser("transfer", "KV from rank to rank against a bare stream", plot="the rate of every repetition")
    flags.add_argument("--mib", type=integer(1, 4096), default=128, help="MiB of KV to move (default: 128)")
    flags.add_argument("--planes", type=integer(1), default=64, help="layers · 2 (default: 64)")
    flags.add_argument("--kv-heads", type=integer(1), default=8, help="(default: 8)")
    flags.add_argument("--head-bytes", type=integer(1), default=256, help="head size · bytes of the dtype (default: 256)")
    flags.add_argument("--block-size", type=integer(1), default=16, help="tokens per block (default: 16)")
    flags.add_argument("--message-bytes", type=integer(1, 2 << 20), default=1 << 20, help="(default: 1048576)")
    flags.add_argument("--runs", type=integer(1), default=7, help="repetitions of every way (default: 7)")
    flags.add_argument("--end", choices=("serve", "take"), help="what the benchmark gives to the processes it starts")
    flags.add_argument("--keep", action="store_true", help="the same")
    words = list(sys.argv[1:] if argv is None else argv)
    args = flags.parse_args(words)
    if args.end is not None:
        uvloop.run({"serve": serve, "take": take}[args.end](args))
        return 0
    rows = asyncio.run(measure(args, words))  # uvloop gives no process a group of its own
    document = {"benchmark": "transfer", "machine": machine(), "payload_bytes": payload_of(args), "rows": rows}
    lines = [
        f"{payload_of(args)} bytes, {counted(args.runs, 'run')} in turn: median (range) in GiB/s, times the bare stream, "
        "times the same in kept memory, times that from memory to memory; CPU time in µs per MiB, source and target"
    ]
    lines += [
        f"{row['name']:>31} {row['gib_per_s']['median']:>6.2f} ({row['gib_per_s']['min']:.2f}–{row['gib_per_s']['max']:.2f})"
        f"  {row['ratio']:.2f}× {row['ratio_kept']:.2f}× {row['ratio_moving']:.2f}×"
        f"  {row['source_cpu_us_per_mib']} {row['target_cpu_us_per_mib']}"
        for row in rows
    ]
    report(args, document, lines, lambda path: plot(rows, path))
    return 0


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
