"""Two ranks as data-, context- or tensor-parallel, under load: `kvloom bench shapes`.

One model of 8 query and 4 KV heads with seeded weights, in bf16; one cluster of two ranks of one thread each per shape, all up
at the same time. A level is so many requests at once, of one prompt length; it is asked of all shapes in turn until each has
had enough requests. Prompts never meet the prefix cache. Times are the clients'; throughput is what all requests of a level
brought, divided by the time from the first one's begin to the last one's end.
"""

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from benchmarks import seeded
from benchmarks.harness import cluster, integers, machine, parser, report, run_benchmark
from benchmarks.load import Level, Taken, at_once, prompts, rounds, times
from cp_client import Client
from cp_client.events import Completion
from cp_wire.flags import integer

SHAPES = {"dp": "-dp 2", "pcp": "-pcp 2 -dcp 2", "tp": "-tp 2"}
SHARE = {"dp": 0.5, "pcp": 0.5, "tp": 1.0}
"""Part of all tokens that a rank holds, whatever part of a token's KV it is."""
VOCABULARY = 4096
METRICS = {"ttft_ms": "TTFT, ms", "tpot_ms": "TPOT, ms", "tokens_per_s": "tokens/s"}
"""Columns, by what they are called in the document."""

Ask = Callable[[Sequence[int], str], Completion]
"""(prompt, salt) → the whole answer."""


def write_model(directory: Path) -> Path:
    """The seeded model as a Hugging Face directory: 26 million parameters, 4 KiB of KV per token."""
    return seeded.write(
        directory,
        "llama",
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=1 << 15,
        tie_word_embeddings=True,
    )


def row_of(level: Level, taken: Taken) -> dict[str, Any]:
    """Spreads over the requests in ms, and tokens per second, those of the prompts included."""
    return {
        **times(taken.answers),
        "tokens_per_s": round(taken.tokens_per_s(level), 1),
        "output_tokens_per_s": round(taken.output_tokens_per_s, 2),
    }


def measure(asks: Mapping[str, Ask], levels: Sequence[Level], requests: int) -> dict[tuple[Level, str], Taken]:
    """All levels, the shapes in turn within each round."""
    random = Random(1)
    found = {(level, shape): Taken() for level in levels for shape in asks}
    for level in levels:
        for each in range(rounds(requests, level.concurrency)):
            batch = list(prompts(level.prompt, level.concurrency, VOCABULARY, random))
            for shape, ask in asks.items():
                answers, seconds = at_once(ask, batch, f"{level.prompt} {level.concurrency} {each}")
                found[level, shape].answers += answers
                found[level, shape].seconds += seconds
    return found


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rows as Markdown, a line per level, a column per metric and shape; the best shape of each metric is bold."""
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    by_level: dict[Level, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        by_level.setdefault(Level(row["prompt"], row["concurrency"]), {})[row["shape"]] = row
    columns = [f"{title}: {shape.upper()}" for title in METRICS.values() for shape in shapes]
    lines = [f"| {' | '.join(['prompt', 'at once', *columns])} |", "|---" * (2 + len(columns)) + "|"]
    for level, of_shape in by_level.items():
        cells = [str(level.prompt), str(level.concurrency)]
        for metric in METRICS:
            values = {shape: _value(of_shape[shape][metric]) for shape in shapes}
            best = max(values.values()) if metric == "tokens_per_s" else min(values.values())
            cells += [
                f"**{_short(value)}**" if value == best and len(shapes) > 1 else _short(value) for value in values.values()
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _value(told: Any) -> float:
    return float(told["median"]) if isinstance(told, Mapping) else float(told)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def up_flags(shape: str, levels: Sequence[Level], new_tokens: int) -> tuple[str, ...]:
    """Flags of `kvloom up`: pools that hold every level at once, and a request more."""
    longest = max(level.prompt for level in levels) + new_tokens
    most = max(level.concurrency for level in levels)
    room = round(SHARE[shape] * longest * (most + 2))
    return (*SHAPES[shape].split(), "--threads-per-rank", "1", "--kv-cache-tokens-per-rank", str(room))


def shape_names(text: str) -> list[str]:
    """Parser of comma-separated names of SHAPES."""
    names = text.split(",")
    unknown = [name for name in names if name not in SHAPES]
    if unknown:
        raise ValueError(unknown[0])
    return names


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    flags = parser(
        "shapes", "a seeded model of 8 heads on two ranks as DP, PCP and TP, under load: TTFT, TPOT and tokens/s of each"
    )
    flags.add_argument("--shapes", type=shape_names, default=list(SHAPES), help="of dp, pcp, tp (default: all)")
    flags.add_argument("--prompts", type=integers(1), default=[2048, 8192], help="tokens of a prompt (default: 2048,8192)")
    flags.add_argument("--concurrency", type=integers(1), default=[1, 4, 16], help="requests at once (default: 1,4,16)")
    flags.add_argument("--requests", type=integer(1), default=3, help="least requests of a level and shape (default: 3)")
    flags.add_argument("--new-tokens", type=integer(2), default=32, help="tokens of an answer (default: 32)")
    args = flags.parse_args(argv)
    levels = [Level(*pair) for pair in product(args.prompts, args.concurrency)]
    options = {"max_tokens": args.new_tokens, "temperature": 0.0, "ignore_eos": True}

    def asking(client: Client) -> Ask:
        return lambda prompt, salt: client.complete(token_ids=prompt, cache_salt=salt, **options)

    with tempfile.TemporaryDirectory() as directory, ExitStack() as clusters:
        model = str(write_model(Path(directory)))
        asks = {
            shape: asking(clusters.enter_context(cluster(model, *up_flags(shape, levels, args.new_tokens))))
            for shape in args.shapes
        }
        for ask in asks.values():
            at_once(ask, list(prompts(min(args.prompts), 2, VOCABULARY, Random(0))), "warm-up")
        found = measure(asks, levels, args.requests)
    rows = [{**level._asdict(), "shape": shape, **row_of(level, taken)} for (level, shape), taken in found.items()]
    document = {
        "benchmark": "shapes",
        "machine": machine(),
        "new_tokens": args.new_tokens,
        "requests": args.requests,
        "rows": rows,
    }
    report(args, document, table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
