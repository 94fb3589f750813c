"""What a rank holds beside weights and pool: `python -m benchmarks.memory`.

One rank in this process, which imports nothing else that is large; RssAnon + RssShmem after each stage. Weights and pool are
counted by their sizes; pages of the pool are touched as they are written, so the prompt should fill it.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.harness import machine, parser, report, run_benchmark
from benchmarks.one_rank import WORDS, OneRank, prompt_of
from cp_client.default_model import default_model_path
from cp_wire.flags import integer
from cp_wire.words import counted
from model_files import open_model


def resident_bytes() -> int:
    """RssAnon + RssShmem of this process."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * sum(int(words[1]) for words in lines if words[0] in ("RssAnon:", "RssShmem:"))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the measurement; returns the exit status."""
    flags = parser("memory", "memory of a rank beside weights and pool")
    flags.add_argument("--model", type=Path, help="Hugging Face directory or GGUF file (default: the default model)")
    flags.add_argument("--context", type=integer(1), default=8000, help="tokens of the prompt (default: 8000)")
    flags.add_argument("--dtype", default="bfloat16", help="default: bfloat16")
    flags.add_argument("--threads", type=integer(1), default=2, help="default: 2")
    args = flags.parse_args(argv)
    torch.set_num_threads(args.threads)
    stages = {"imported": resident_bytes()}
    rank = OneRank(open_model(args.model or default_model_path()), args.context + 16, args.dtype)
    stages["loaded"] = resident_bytes()
    rank.generate(prompt_of(args.context, WORDS), 16)
    stages["first request"] = resident_bytes()
    beside = stages["first request"] - rank.weight_bytes - rank.pool_bytes
    document = {
        "benchmark": "memory",
        "machine": machine(),
        "dtype": args.dtype,
        "context": args.context,
        "weight_bytes": rank.weight_bytes,
        "pool_bytes": rank.pool_bytes,
        "resident_bytes": stages,
        "beside_bytes": beside,
    }
    lines = [f"{args.dtype}, prompt of {counted(args.context, 'token')}, MB of RssAnon + RssShmem"]
    lines += [f"{stage:>14}: {size / 1e6:.0f}" for stage, size in stages.items()]
    lines += [f"weights {rank.weight_bytes / 1e6:.0f}, pool {rank.pool_bytes / 1e6:.0f}, beside them {beside / 1e6:.0f}"]
    report(args, document, lines)
    return 0


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
