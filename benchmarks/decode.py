"""What a decode step costs, and how much of it is coordinator and wire: `kvloom bench decode`.

One cluster, or two; per context length one warm-up request, then single-request generations in turn (512, 8k, 512, 8k, …), so
that a drift of the machine meets all alike. Overhead of a step = its wall time on the coordinator − that of the slowest rank.
"""

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
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
    flags.add_argument("--against", metavar="FLAGS", help="a second cluster, up at the same time and measured in turn")
    args = flags.parse_args(argv)
    contexts: list[int] = args.contexts
    ups = [args.up] if args.against is None else [args.up, args.against]
    runs: list[dict[int, list[dict[str, float]]]] = [{context: [] for context in contexts} for _ in ups]
    with ExitStack() as clusters:
        clients = [clusters.enter_context(cluster(*up.split())) for up in ups]
        for context in contexts:
            for client in clients:
                measure(client, context, args.new_tokens, salt="runs")
        for _ in range(args.runs):
            for context in contexts:
                # The same salt: the context comes from the prefix cache, so that nearly all steps of a run decode.
                for client, results in zip(clients, runs, strict=True):
                    results[context].append(measure(client, context, args.new_tokens, salt="runs"))
    entries, *others = map(entries_of, runs)
    document = {
        "benchmark": "decode",
        "machine": machine(),
        "up": args.up,
        "new_tokens": args.new_tokens,
        "runs": args.runs,
        "contexts": entries,
    }
    lines = summary(args.up, entries, args)
    for against in others:
        document["against"] = {"up": args.against, "contexts": against, "tpot_ratios": ratios(entries, against)}
        lines += summary(args.against, against, args)
        lines += [f"context {context:>6}: × {ratio:.2f} of its time per token" for context, ratio in ratios(entries, against)]
    report(args, document, lines, lambda path: plot(entries, path))
    return 0


def entries_of(results: Mapping[int, Sequence[Mapping[str, float]]]) -> list[dict[str, Any]]:
    """Spreads of what `measure` gave, by context."""
    return [
        {"context": context, **{key: spread([run[key] for run in runs]) for key in runs[0]}}
        for context, runs in results.items()
    ]


def ratios(entries: Sequence[Mapping[str, Any]], against: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """(context, time per token ÷ that of the other cluster), medians."""
    return [
        (entry["context"], round(entry["tpot_ms"]["median"] / other["tpot_ms"]["median"], 3))
        for entry, other in zip(entries, against, strict=True)
    ]


def summary(up: str, entries: Sequence[Mapping[str, Any]], args: Namespace) -> list[str]:
    """The figures of one cluster for people."""
    lines = [f"kvloom up {up}: {args.runs} × {args.new_tokens} tokens, medians (min–max)"]
    for entry in entries:
        row = "  ".join(
            f"{key} {entry[key]['median']:.2f} ({entry[key]['min']:.2f}–{entry[key]['max']:.2f})"
            for key in ("tpot_ms", "rank_ms", "overhead_ms", "plan_bytes")
        )
        lines.append(f"context {entry['context']:>6}: {row}")
    return lines


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
