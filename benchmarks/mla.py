"""Latent attention: a decode step against `transformers`, the reorganisation of gathered latents, and the two gathers.

`kvloom bench mla`. The model is seeded: 4 layers of 16 heads, dc 512, dr 64, dn and dv 128, hidden size 1024, FFN 1024,
bfloat16, no experts. The gathers are compared as `kvloom bench chooser` does it: three clusters of two ranks of one thread
each, up at the same time and asked in turn; predictions are those of the coordinator's model with the rates of its cluster.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import chooser, seeded
from benchmarks.compare import measure, of_rank, of_transformers
from benchmarks.harness import machine, parser, report, run_benchmark, spread
from cp_layout.interleave import Layout
from cp_layout.reorg import context_pieces, gathered_rows
from cp_wire.flags import integer
from rank_server.attention.context import ContextUse, runs_of

DC, DR, DN, DV, HEADS = 512, 64, 128, 128, 16
VOCABULARY = 1024
POSITIONS = 1 << 17
WORDS = range(1, VOCABULARY)
PARTS = ("decode", "copies", "gathers")
NEW_TOKENS = 8


def write_model(directory: Path) -> Path:
    """The seeded model as a Hugging Face directory."""
    return seeded.write(
        directory,
        "deepseek_v2",
        hidden_size=1024,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=VOCABULARY,
        max_position_embeddings=POSITIONS,
        q_lora_rank=None,
        kv_lora_rank=DC,
        qk_nope_head_dim=DN,
        qk_rope_head_dim=DR,
        v_head_dim=DV,
        first_k_dense_replace=4,
    )


def decode(path: Path, context: int, threads: int, runs: int) -> dict[str, Any]:
    """`compare.measure` of one rank and `transformers` behind a context."""
    torch.set_num_threads(threads)
    sides = {"transformers": of_transformers(path), "kvloom": of_rank(path, context + 2 * NEW_TOKENS, 512)}
    return measure(sides, context, NEW_TOKENS, runs, WORDS)


def reorganisation(context: int, shards: int, interleave: int, runs: int) -> dict[str, Any]:
    """Putting gathered latents of one context together, against copying as many bytes, by one thread: ms, and their ratio.

    The shard that has least lies on the first member, so that padding stands between the keys: without it nothing is copied.
    Each round has memory of its own, as its place decides more than the way does; the ratio is the median of the rounds'.
    """
    torch.set_num_threads(1)
    layout = Layout(shards, interleave, interleave)
    (piece,) = context_pieces([context], layout, 2 * context + shards * interleave)
    keys = gathered_rows(layout, context, piece.segments[0], piece.rows, 1)
    use = ContextUse(0, runs_of(keys))
    rounds = [_round(torch.randn(shards * piece.rows, 1, DC + DR).bfloat16(), use, len(keys)) for _ in range(runs)]
    return {
        "context": context,
        "shards": shards,
        "interleave": interleave,
        "ms": {name: spread([each[name] for each in rounds]) for name in ("reorg", "clone")},
        "ratio": spread([each["reorg"] / each["clone"] for each in rounds]),
    }


def _round(gathered: Tensor, use: ContextUse, count: int) -> dict[str, float]:
    """Best of five, ms."""
    ways = {"reorg": lambda: use.out_of(gathered), "clone": gathered[:count].clone}
    return {name: min(times) for name, times in in_turn(ways, 5).items()}


def in_turn(ways: Mapping[str, Callable[[], object]], runs: int) -> dict[str, list[float]]:
    """Milliseconds of each way, `runs` times in turn after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for run in range(runs + 1):
        for name, way in ways.items():
            begun = time.perf_counter()
            way()
            if run:
                times[name].append((time.perf_counter() - begun) * 1000)
    return times


def gathers(path: Path, cells: Sequence[chooser.Cell], runs: int) -> dict[str, Any]:
    """Chunks behind cached contexts with either gather and as the coordinator chooses."""
    found, predicted, rates = chooser.found_and_predicted(path, cells, runs, WORDS)
    rows = chooser.rows_of(found, predicted)
    return {
        "rates": rates._asdict(),
        "rows": rows,
        "crossovers": chooser.crossovers(found, predicted),
        "right": round(sum(row["right"] for row in rows) / len(rows), 4),
    }


def lines(document: Mapping[str, Any]) -> list[str]:
    """The summary for people."""
    result = []
    if "decode" in document:
        row = document["decode"]
        for name, kind in (("first token", "ttft_ms"), ("a further token", "tpot_ms")):
            ours, theirs = (row[kind][side]["median"] for side in ("kvloom", "transformers"))
            result.append(
                f"{name}, {row['context']} of context: {ours:.1f} ms against {theirs:.1f} (× {row[kind]['ratio']:.3f})"
            )
    for row in document.get("copies", ()):
        shape, ratio = f"{row['context']} latents of {row['shards']} shards, I = {row['interleave']}", row["ratio"]
        result.append(f"{shape}, in order: × {ratio['median']:.2f} of a copy ({ratio['min']:.2f}–{ratio['max']:.2f})")
    return result + (chooser.summary(document["gathers"]) if "gathers" in document else [])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    flags = parser("mla", "latent attention: a decode step against transformers, gathered latents in order, the two gathers")
    flags.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: everything)")
    longest = POSITIONS - NEW_TOKENS
    flags.add_argument(
        "--context", type=integer(1, longest), default=8128, help="tokens before the decode step (default: 8128)"
    )
    flags.add_argument(
        "--grid", type=chooser.grid, default="32,256x128,512,1024,2048,4096", metavar="S_q,…xS_ctx,…",
        help=f"new and cached tokens of the gathers, the latter multiples of {chooser.CONTEXT_UNIT} (default: %(default)s)",
    )  # fmt: skip
    flags.add_argument("--runs", type=integer(1), default=3, help="measurements of each (default: 3)")
    flags.add_argument("--threads", type=integer(1), default=2, help="threads of a lone rank and of transformers (default: 2)")
    args = flags.parse_args(argv)
    document: dict[str, Any] = {"benchmark": "mla", "machine": machine(), "threads": args.threads, "runs": args.runs}
    with tempfile.TemporaryDirectory() as directory:
        path = write_model(Path(directory))
        if "decode" in args.parts:
            document["decode"] = decode(path, args.context, args.threads, args.runs)
        if "copies" in args.parts:
            shapes = [(shards, interleave) for shards in (2, 4) for interleave in (1, 16)]
            document["copies"] = [reorganisation(8185, *shape, 10 * args.runs) for shape in shapes]
        if "gathers" in args.parts:
            document["gathers"] = gathers(path, args.grid, args.runs)
    report(args, document, lines(document))
    return 0


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
