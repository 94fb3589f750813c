"""Time to the first token when a prompt is computed by one rank and by several: `kvloom bench prefill`.

One cluster per way, all up at the same time and measured in turn (one rank, queries travel, keys travel, one rank, …), so that
a drift of the machine meets all alike. Every rank has one thread. Prompts never meet the prefix cache.
"""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count

from benchmarks.harness import cluster, integers, machine, parser, report, spread
from cp_client import Client
from cp_client.guard import guarded
from cp_wire.flags import integer

DEFAULT_PROMPTS = (512, 2048, 4096)


def ways(pcp: int) -> dict[str, str]:
    """Flags of `kvloom up` by name; the first one is what the others are compared with."""
    spread_out = f"-pcp {pcp} -dcp {pcp}"
    return {
        "one rank": "",
        "gather q": f"{spread_out} --pcp-gather q",
        "gather kv": f"{spread_out} --pcp-gather kv",
        "copies": f"-pcp {pcp}",
    }


def ttft_ms(client: Client, tokens: int, salt: int) -> float:
    """One prompt of so many tokens, one token out."""
    prompt = [(i * 7919 + tokens) % 40000 + 100 for i in range(tokens)]
    done = client.complete(token_ids=prompt, max_tokens=1, temperature=0.0, ignore_eos=True, cache_salt=f"run {salt}")
    return done.timing.ttft_ms or 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    flags = parser("prefill", "time to first token of one prompt over one and several ranks, one thread each")
    flags.add_argument("--prompts", type=integers(1), default=DEFAULT_PROMPTS, help="tokens (default: 512,2048,4096)")
    flags.add_argument("--pcp", type=integer(2), default=2, help="ranks that share a prompt (default: 2)")
    flags.add_argument("--runs", type=integer(1), default=3, help="prompts of each length and way (default: 3)")
    flags.add_argument("--up", default="", help="more flags of `kvloom up`, for all clusters")
    args = flags.parse_args(argv)
    times: dict[tuple[int, str], list[float]] = {}
    salts = count()
    with ExitStack() as clusters:
        clients = {
            way: clusters.enter_context(cluster(*up.split(), "--threads-per-rank", "1", *args.up.split()))
            for way, up in ways(args.pcp).items()
        }
        for client in clients.values():
            ttft_ms(client, min(args.prompts), next(salts))
        for _ in range(args.runs):
            for tokens in args.prompts:
                for way, client in clients.items():
                    times.setdefault((tokens, way), []).append(ttft_ms(client, tokens, next(salts)))
    document = {
        "benchmark": "prefill",
        "machine": machine(),
        "pcp": args.pcp,
        "up": args.up,
        "runs": args.runs,
        "rows": [
            {"tokens": tokens, "way": way, "ttft_ms": spread(taken), "speedup": round(_speedup(times, tokens, way), 3)}
            for (tokens, way), taken in times.items()
        ],
    }
    lines = [f"one prompt over {args.pcp} ranks of one thread: ms to the first token, medians (min–max) of {args.runs}"]
    for row in document["rows"]:
        taken = row["ttft_ms"]
        lines.append(
            f"{row['tokens']:>6} tokens, {row['way']:>9}: {taken['median']:9.1f} ({taken['min']:.1f}–{taken['max']:.1f})"
            f"  {row['speedup']:.2f}×"
        )
    report(args, document, lines)
    return 0


def _speedup(times: dict[tuple[int, str], list[float]], tokens: int, way: str) -> float:
    one = next(iter(ways(2)))
    return spread(times[tokens, one])["median"] / spread(times[tokens, way])["median"]


if __name__ == "__main__":
    sys.exit(guarded(main))
