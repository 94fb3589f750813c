"""Time to the first token when a prompt is computed by one rank and by several: `kvloom bench prefill`.

One cluster per way, all up at the same time and measured in turn (one rank, queries travel, keys travel, one rank, …), so that
a drift of the machine meets all alike. Every rank has one thread. Prompts never meet the prefix cache. Communication is the
share of collectives in the steps of a way and length, by the ranks' own clocks: of each step, the time of the rank that spent
least in them, divided by that of the slowest rank.
"""

import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.harness import cluster, integers, machine, parser, report, run_benchmark, spread
from benchmarks.plot import line_chart
from cp_client import Client
from cp_wire.flags import integer
from cp_wire.words import percent

DEFAULT_PROMPTS = (512, 2048, 4096)
ONE_RANK = "one rank"


def ways(pcp: int) -> dict[str, str]:
    """Flags of `kvloom up` by name. All name sizes: the bundled model has a shape of its own for whoever names none."""
    spread_out = f"-tp 1 -pcp {pcp} -dcp {pcp}"
    return {
        ONE_RANK: "-tp 1 -pcp 1 -dcp 1",
        "gather q": f"{spread_out} --pcp-gather q",
        "gather kv": f"{spread_out} --pcp-gather kv",
        "copies": f"-tp 1 -pcp {pcp} -dcp 1",
    }


@dataclass(slots=True)
class Taken:
    """Measurements of one way and length."""

    ttft_ms: list[float] = field(default_factory=list)
    rank_s: float = 0.0
    collective_s: float = 0.0

    @property
    def communication(self) -> float:
        """Part of the ranks' time; 0 where nothing was measured."""
        return self.collective_s / self.rank_s if self.rank_s > 0 else 0.0

    def take(self, client: Client, tokens: int, salt: int) -> None:
        """One prompt of so many tokens, one token out."""
        before = client.status().step_times
        self.ttft_ms.append(ttft_ms(client, tokens, salt))
        after = client.status().step_times
        self.rank_s += after.total_rank_s - before.total_rank_s
        self.collective_s += after.total_collective_s - before.total_collective_s


def ttft_ms(client: Client, tokens: int, salt: int) -> float:
    """One prompt of so many tokens, one token out."""
    prompt = [(i * 7919 + tokens) % 40000 + 100 for i in range(tokens)]
    done = client.complete(token_ids=prompt, max_tokens=1, temperature=0.0, ignore_eos=True, cache_salt=f"run {salt}")
    return done.timing.ttft_ms or 0.0


def rows_of(taken: dict[tuple[int, str], Taken]) -> list[dict[str, Any]]:
    """The document's rows; speed-ups are ratios of medians."""
    rows = []
    for (tokens, way), each in taken.items():
        ms = spread(each.ttft_ms)
        rows.append(
            {
                "tokens": tokens,
                "way": way,
                "ttft_ms": ms,
                "speedup": round(spread(taken[tokens, ONE_RANK].ttft_ms)["median"] / ms["median"], 3),
                "communication": round(each.communication, 4),
            }
        )
    return rows


def lines(rows: Iterable[dict[str, Any]], args: Namespace) -> list[str]:
    """The summary for people."""
    head = f"one prompt over {args.pcp} ranks of one thread: ms to the first token, medians (min–max) of {args.runs}"
    return [
        head,
        *(
            f"{row['tokens']:>6} tokens, {row['way']:>9}: {row['ttft_ms']['median']:9.1f} "
            f"({row['ttft_ms']['min']:.1f}–{row['ttft_ms']['max']:.1f})  {row['speedup']:.2f}×  "
            f"collectives {percent(row['communication'])}"
            for row in rows
        ),
    ]


def plot(rows: Iterable[dict[str, Any]], pcp: int, path: Path) -> None:
    """How many times faster than one rank, by prompt length."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        series.setdefault(row["way"], []).append((row["tokens"], row["speedup"]))
    title = f"A prompt over {pcp} ranks of one thread"
    line_chart(path, title, "prompt tokens", "× one rank", {way: sorted(points) for way, points in series.items()})


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    flags = parser(
        "prefill", "time to first token of one prompt over one and several ranks, one thread each", plot="the speed-ups"
    )
    flags.add_argument("--prompts", type=integers(1), default=DEFAULT_PROMPTS, help="tokens (default: 512,2048,4096)")
    flags.add_argument("--pcp", type=integer(2), default=2, help="ranks that share a prompt (default: 2)")
    flags.add_argument("--runs", type=integer(1), default=3, help="prompts of each length and way (default: 3)")
    flags.add_argument("--up", default="", help="more flags of `kvloom up`, for all clusters")
    args = flags.parse_args(argv)
    salts = count()
    with ExitStack() as clusters:
        clients = {
            way: clusters.enter_context(cluster(*up.split(), "--threads-per-rank", "1", *args.up.split()))
            for way, up in ways(args.pcp).items()
        }
        taken = {(tokens, way): Taken() for tokens in args.prompts for way in clients}
        for client in clients.values():
            ttft_ms(client, min(args.prompts), next(salts))
        for _ in range(args.runs):
            for (tokens, way), each in taken.items():
                each.take(clients[way], tokens, next(salts))
    rows = rows_of(taken)
    document = {"benchmark": "prefill", "machine": machine(), "pcp": args.pcp, "up": args.up, "runs": args.runs, "rows": rows}
    report(args, document, lines(rows, args), lambda path: plot(rows, args.pcp, path))
    return 0


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
