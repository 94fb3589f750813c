"""What a decode step costs, and how much of it is coordinator and wire: `kvloom bench decode`.

One cluster; per context length one warm-up request, then single-request generations in turn (512, 8k, 512, 8k, …), so that a
drift of the machine meets both alike. Overhead of a step = its wall time on the coordinator − the slowest rank's own time.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import cluster, integers, machine, parser, report, run_benchmark, spread
from benchmarks.plot import line_chart
from cp_client import Client
from cp_wire.flags import integer

DEFAULT_CONTEXTS = (512, 8000)


def measure(client: Client, context: int, new_tokens: int, salt: str) -> dict[str, float]:
    """One generation after a context of so many tokens; times in ms per decode step, taken from the coordinator's counters."""
    prompt = [(i * 7919 + context) % 40000 + 100 for i in range(context)]
    options = {"max_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True, "cache_salt": salt}
    done = client.complete(token_ids=prompt, **options)
    times = client.status(last_steps=new_tokens - 2).step_times
    return {
        "tpot_ms": done.timing.tpot_ms or 0.0,
        "ttft_ms": done.timing.ttft_ms or 0.0,
        "step_ms": times.step_ms,
        "rank_ms": times.rank_ms,
        "overhead_ms": times.overhead_ms,
        "plan_bytes": times.last_plan_bytes,
    }


def plot(entries: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Medians of the times of a step, by context."""
    series = {
        name: sorted((entry["context"], entry[key]["median"]) for entry in entries)
        for key, name in {"tpot_ms": "per token", "rank_ms": "slowest rank", "overhead_ms": "overhead"}.items()
    }
    line_chart(path, "A decode step", "tokens of context", "ms", series)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    flags = parser("decode", "cost of a decode step at several context lengths", plot="the times by context")
    flags.add_argument(
        "--contexts", type=integers(1), default=DEFAULT_CONTEXTS, help="tokens, comma-separated (default: 512,8000)"
    )
    flags.add_argument("--new-tokens", type=integer(3), default=64, help="tokens of a generation (default: 64)")
    flags.add_argument("--runs", type=integer(1), default=3, help="generations per context (default: 3)")
    flags.add_argument(
        "--up", default="-pcp 2 -dcp 2 --max-num-batched-tokens 512", help="flags of `kvloom up` (default: %(default)s)"
    )
    args = flags.parse_args(argv)
    contexts = args.contexts
    results: dict[int, list[dict[str, float]]] = {context: [] for context in contexts}
    with cluster(*args.up.split()) as client:
        for context in contexts:
            measure(client, context, args.new_tokens, salt="runs")
        for _ in range(args.runs):
            for context in contexts:
                # The same salt: the context comes from the prefix cache, so that nearly all steps of a run decode.
                results[context].append(measure(client, context, args.new_tokens, salt="runs"))
    entries = [
        {"context": context, **{key: spread([run[key] for run in runs]) for key in runs[0]}}
        for context, runs in results.items()
    ]
    if args.plot is not None:
        plot(entries, args.plot)
    document = {
        "benchmark": "decode",
        "machine": machine(),
        "up": args.up,
        "new_tokens": args.new_tokens,
        "runs": args.runs,
        "contexts": entries,
    }
    lines = [f"kvloom up {args.up}: {args.runs} × {args.new_tokens} tokens, medians (min–max)"]
    for entry in entries:
        row = "  ".join(
            f"{key} {entry[key]['median']:.2f} ({entry[key]['min']:.2f}–{entry[key]['max']:.2f})"
            for key in ("tpot_ms", "rank_ms", "overhead_ms", "plan_bytes")
        )
        lines.append(f"context {entry['context']:>6}: {row}")
    report(args, document, lines)
    return 0


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
