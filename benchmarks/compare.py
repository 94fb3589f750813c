"""One rank against `transformers`, both in bfloat16 with the same threads: `python -m benchmarks.compare`.

Both live in this process and take turns, so that a drift of the machine meets both alike. The rank is the executor alone,
without coordinator and wire (`kvloom bench decode` says what those add); `transformers` runs the whole prompt in one pass
and then token by token with its default cache. Ratios are those of the medians.
"""

import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.harness import integers, machine, parser, report, run_benchmark, spread
from benchmarks.one_rank import WORDS, OneRank, prompt_of
from cp_client.default_model import default_model_path
from cp_wire.flags import integer
from cp_wire.words import counted
from model_files import open_model

Generate = Callable[[Sequence[int], int], tuple[float, list[float]]]
"""(prompt, new tokens) → seconds to the first token, seconds of each further one."""


def of_transformers(path: Path) -> Generate:
    """Greedy generation by the reference implementation."""
    if path.suffix == ".gguf":
        import_module("accelerate")  # transformers says by a ValueError, and late, that it lacks it
    from transformers import AutoModelForCausalLM, DynamicCache

    where = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    directory = path.parent if path.suffix == ".gguf" else path
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, **where).eval()

    @torch.inference_mode()
    def generate(prompt: Sequence[int], new_tokens: int) -> tuple[float, list[float]]:
        ids, cache, times = torch.tensor([list(prompt)]), DynamicCache(), []
        for _ in range(new_tokens):
            begun = time.perf_counter()
            # Behind input, mask and positions comes the cache, whose name differs between versions.
            result = model(ids, None, None, cache, use_cache=True, logits_to_keep=1)
            ids = result.logits[:, -1].argmax(-1, keepdim=True)
            times.append(time.perf_counter() - begun)
        return times[0], times[1:]

    return generate


def of_rank(path: Path, max_tokens: int, chunk: int) -> Generate:
    """Greedy generation by one rank."""
    rank = OneRank(open_model(path), max_tokens, chunk=chunk)

    def generate(prompt: Sequence[int], new_tokens: int) -> tuple[float, list[float]]:
        _, first, further = rank.generate(prompt, new_tokens)
        return first, further

    return generate


def measure(sides: dict[str, Generate], context: int, new_tokens: int, runs: int, words: Sequence[int]) -> dict[str, Any]:
    """TTFT and TPOT in ms per side: medians over the runs of each run's own value, and the ratio kvloom ÷ transformers."""
    prompt = prompt_of(context, words)
    first: dict[str, list[float]] = {name: [] for name in sides}
    further: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(runs):
        for name, generate in sides.items():
            ttft, times = generate(prompt, new_tokens)
            first[name].append(ttft * 1000)
            further[name].append(median(times) * 1000)
    row: dict[str, Any] = {"context": context}
    for kind, values in (("ttft_ms", first), ("tpot_ms", further)):
        row[kind] = {name: spread(values[name]) for name in sides}
        row[kind]["ratio"] = round(row[kind]["kvloom"]["median"] / row[kind]["transformers"]["median"], 3)
    return row


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    flags = parser("compare", "one rank against transformers, bfloat16, same threads")
    flags.add_argument("--model", type=Path, help="Hugging Face directory or GGUF file (default: the default model)")
    flags.add_argument(
        "--contexts", type=integers(1), default=(512, 2048, 8128), help="tokens, comma-separated (default: 512,2048,8128)"
    )
    flags.add_argument("--new-tokens", type=integer(2), default=32, help="tokens of a generation (default: 32)")
    flags.add_argument("--runs", type=integer(1), default=3, help="generations per side and context (default: 3)")
    flags.add_argument("--threads", type=integer(1), default=2, help="threads of either side (default: 2)")
    flags.add_argument("--chunk", type=integer(1), default=512, help="tokens of a prefill step of the rank (default: 512)")
    args = flags.parse_args(argv)
    torch.set_num_threads(args.threads)
    path = args.model or default_model_path()
    longest = max(args.contexts) + args.new_tokens
    sides = {"transformers": of_transformers(path), "kvloom": of_rank(path, longest, args.chunk)}
    for generate in sides.values():
        generate(prompt_of(64, WORDS), 4)
    rows = [measure(sides, context, args.new_tokens, args.runs, WORDS) for context in args.contexts]
    document = {
        "benchmark": "compare",
        "machine": machine(),
        "threads": args.threads,
        "runs": args.runs,
        "new_tokens": args.new_tokens,
        "rows": rows,
    }
    lines = [f"bfloat16, {counted(args.threads, 'thread')}, {counted(args.runs, 'run')}, medians in ms"]
    lines += [
        f"context {row['context']:>6}: "
        + "  ".join(
            f"{kind[:4].upper()} {row[kind]['kvloom']['median']:.1f} against {row[kind]['transformers']['median']:.1f} "
            f"(× {row[kind]['ratio']:.2f})"
            for kind in ("ttft_ms", "tpot_ms")
        )
        for row in rows
    ]
    report(args, document, lines)
    return 0


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
