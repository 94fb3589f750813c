"""Latent attention: a decode step against `transformers`, the reorganisation of gathered latents, and the two gathers.

`python -m benchmarks.mla`. The model is seeded: 4 layers of 16 heads, dc 512, dr 64, dn and dv 128, hidden size 1024, FFN 1024,
bfloat16, no experts. The gathers run in two clusters of two ranks of one thread each, up at the same time and asked in turn;
the context is found in the prefix cache, so what is timed is the chunk behind it.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks import seeded
from benchmarks.compare import measure, of_rank, of_transformers
from benchmarks.crossings import crossover
from benchmarks.harness import cluster, integers, machine, parser, report, run_benchmark, spread
from cp_client import Client
from cp_layout.cost import PARTIAL_BYTES
from cp_layout.interleave import Layout
from cp_layout.reorg import context_pieces, gathered_rows
from cp_wire.flags import integer

DC, DR, DN, DV, HEADS = 512, 64, 128, 128, 16
VOCABULARY = 1024
GATHERS = ("q", "kv")


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
        max_position_embeddings=1 << 17,
        q_lora_rank=None,
        kv_lora_rank=DC,
        qk_nope_head_dim=DN,
        qk_rope_head_dim=DR,
        v_head_dim=DV,
        first_k_dense_replace=4,
    )


def reorganisation(context: int, shards: int, interleave: int, runs: int) -> dict[str, Any]:
    """Putting gathered latents of one context together, against copying the same bytes: ms, and the ratio of the medians."""
    layout = Layout(shards, interleave, interleave)
    (piece,) = context_pieces([context], layout, 2 * context + shards * interleave)
    rows = gathered_rows(layout, context, piece.segments[0], piece.rows, 0)
    gathered, keys = torch.randn(shards * piece.rows, 1, DC + DR).bfloat16(), torch.from_numpy(rows)
    ways = {"reorg": lambda: gathered.index_select(0, keys), "clone": gathered.clone}
    times = in_turn(ways, runs)
    ratio = median(times["reorg"]) / median(times["clone"])
    return {
        "context": context,
        "shards": shards,
        "interleave": interleave,
        "ms": {name: spread(values) for name, values in times.items()},
        "ratio": round(ratio, 3),
    }


def in_turn(ways: dict[str, Callable[[], object]], runs: int) -> dict[str, list[float]]:
    """Milliseconds of each way, `runs` times in turn after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for run in range(runs + 1):
        for name, way in ways.items():
            begun = time.perf_counter()
            way()
            if run:
                times[name].append((time.perf_counter() - begun) * 1000)
    return times


def predicted_crossover(new_tokens: int) -> float:
    """By bytes, two replicas, bfloat16: S_ctx at which as much travels either way."""
    per_row = HEADS * ((DC + DR) * 2 + DV * PARTIAL_BYTES + PARTIAL_BYTES)
    return per_row / ((DC + DR) * 2) * new_tokens


def gathers(path: Path, contexts: Sequence[int], chunks: Sequence[int], runs: int) -> list[dict[str, Any]]:
    """Time of a chunk behind each context with either gather, ms."""
    salts, random = count(), np.random.default_rng(1)
    times: dict[tuple[int, int, str], list[float]] = {}

    def timed(client: Client, context: list[int], new: int, salt: str) -> float:
        prompt = context + random.integers(1, VOCABULARY, new).tolist()
        done = client.complete(token_ids=prompt, max_tokens=1, temperature=0.0, ignore_eos=True, cache_salt=salt)
        return done.timing.ttft_ms or 0.0

    with ExitStack() as clusters:
        clients = {
            gather: clusters.enter_context(
                cluster(str(path), "-pcp", "2", "-dcp", "2", "--mla-gather", gather, "--threads-per-rank", "1")
            )
            for gather in GATHERS
        }
        for _ in range(runs):
            salt = f"run {next(salts)}"
            tokens = random.integers(1, VOCABULARY, max(contexts)).tolist()
            for context in contexts:
                for client in clients.values():
                    timed(client, tokens[:context], 1, salt)
                for new in chunks:
                    for gather, client in clients.items():
                        times.setdefault((new, context, gather), []).append(timed(client, tokens[:context], new, salt))
    rows = []
    for new in chunks:
        medians = {gather: [median(times[new, context, gather]) for context in contexts] for gather in GATHERS}
        rows.append(
            {
                "new_tokens": new,
                "contexts": list(contexts),
                "ms": {gather: [spread(times[new, context, gather]) for context in contexts] for gather in GATHERS},
                "crossover": {
                    "measured": crossover(contexts, medians["q"], medians["kv"]),
                    "predicted_by_bytes": predicted_crossover(new),
                },
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    flags = parser("mla", "latent attention")
    flags.add_argument("--context", type=integer(1), default=8128, help="tokens before the decode step (default: 8128)")
    flags.add_argument("--contexts", type=integers(32), default=(512, 2048, 4096), help="of the gathers, multiples of 32")
    flags.add_argument("--chunks", type=integers(1), default=(32, 256), help="new tokens of the gathers")
    flags.add_argument("--runs", type=integer(1), default=3, help="measurements of each (default: 3)")
    flags.add_argument("--threads", type=integer(1), default=2, help="threads of a lone rank and of transformers (default: 2)")
    args = flags.parse_args(argv)
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as directory:
        path = write_model(Path(directory))
        sides = {"transformers": of_transformers(path), "kvloom": of_rank(path, args.context + 16, 512)}
        decode = measure(sides, args.context, 8, args.runs, range(1, VOCABULARY))
        del sides
        copies = [reorganisation(8192, n, i, 5 * args.runs) for n in (2, 4) for i in (1, 16)]
        rows = gathers(path, args.contexts, args.chunks, args.runs)
    document = {
        "benchmark": "mla",
        "machine": machine(),
        "threads": args.threads,
        "runs": args.runs,
        "decode": decode,
        "reorganisation": copies,
        "gathers": rows,
    }
    tpot = decode["tpot_ms"]
    lines = [
        f"decode behind {args.context} tokens: {tpot['kvloom']['median']:.1f} ms against "
        f"{tpot['transformers']['median']:.1f} (× {tpot['ratio']:.3f})"
    ]
    lines += [
        f"{row['context']} latents of {row['shards']} shards, I = {row['interleave']}, in order: × {row['ratio']:.2f} of a copy"
        for row in copies
    ]
    for row in rows:
        q, kv = ([round(each["median"]) for each in row["ms"][gather]] for gather in GATHERS)
        lines.append(f"{row['new_tokens']} tokens behind {row['contexts']}: queries travel {q} ms, latents {kv} ms")
        lines.append(f"  crossover {row['crossover']}")
    report(args, document, lines)
    return 0


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
