"""`kvloom generate`: one prompt, its text streamed or its result as JSON."""

import json
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, _SubParsersAction
from pathlib import Path

from cp_client.client import Client, Stream
from cp_client.events import Choice, Completion, Logprobs, join
from cp_client.exit_status import DONE, FAILED, REFUSED
from cp_client.request import GENERATE_TIMEOUT_S, Options
from cp_client.server_args import add_server_arguments, sentence
from cp_wire.errors import InvalidRequest, KvloomError, MessageTooLarge, Unknown

_REFUSALS = (InvalidRequest, Unknown, MessageTooLarge)


def add_generate_parser(subparsers: "_SubParsersAction[ArgumentParser]") -> None:
    """Adds `generate --target HOST:PORT … PROMPT`; sets `func(args) -> exit status`."""
    parser = subparsers.add_parser("generate", help="answer one prompt", allow_abbrev=False)
    add_server_arguments(parser, GENERATE_TIMEOUT_S)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("prompt", nargs="?", metavar="PROMPT")
    source.add_argument("--token-ids", type=_ids, metavar="1,2,3")
    source.add_argument("--file", type=Path, metavar="PATH", help="read the prompt from a file")
    parser.add_argument("--chat", action="store_true", help="wrap the prompt in the model's chat template, as the user")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="tokens to generate at most (default: 256, or what the model leaves)"
    )
    parser.add_argument("--min-tokens", type=int, metavar="N", help="tokens before the answer may end (default: 0)")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 = greedy (default: 1)")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="draw from the likeliest tokens of this total probability (default: 1)"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens (default: 0, off)")
    parser.add_argument(
        "--min-p", type=float, metavar="P", help="drop tokens less likely than P times the likeliest (default: 0, off)"
    )
    parser.add_argument("--seed", type=int, metavar="S", help="from 0 to 2^64 - 1 (default: drawn by the server)")
    parser.add_argument("--repetition-penalty", type=float, metavar="R", help="over prompt and output (default: 1, off)")
    parser.add_argument("--presence-penalty", type=float, metavar="A", help="over the output (default: 0, off)")
    parser.add_argument(
        "--frequency-penalty", type=float, metavar="A", help="over the output, per occurrence (default: 0, off)"
    )
    parser.add_argument(
        "--logit-bias", type=_bias, action="append", metavar="ID=BIAS", help="add to the logit of a token id; may be repeated"
    )
    parser.add_argument("-n", type=int, metavar="N", help="completions of the prompt; more than one needs --json (default: 1)")
    parser.add_argument("--logprobs", action="store_true", help="report log-probabilities of the output; needs --json")
    parser.add_argument("--top-logprobs", type=int, metavar="K", help="the same with K alternatives; needs --json")
    parser.add_argument("--prompt-logprobs", type=int, metavar="K", help="score the prompt, with K alternatives; needs --json")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")
    parser.set_defaults(func=generate)


def generate(args: Namespace) -> int:
    """Exit status 0 with the answer on stdout; 2 for a request that can never be served, 1 for the rest."""
    text: str | None = None
    try:
        _refuse_what_text_cannot_show(args)
        text = _text_of(args)
        prompt, options = _request_of(args, text)
        with Client(args.target) as client, client.generate(prompt, timeout=args.timeout, **options) as stream:
            if args.json:
                print(json.dumps(result_of(join(list(stream), stream.seed))))
            else:
                _print_text(stream)
    except KvloomError as error:
        print(f"kvloom: {_of_empty_prompt(error, args, text) or sentence(error)}", file=sys.stderr)
        return REFUSED if isinstance(error, _REFUSALS) else FAILED
    return DONE


def result_of(answer: Completion) -> dict[str, object]:
    """The JSON document of a completion."""
    usage, timing, route = answer.usage, answer.timing, answer.route
    document: dict[str, object] = {
        "request_id": answer.request_id,
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "seed": answer.seed,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "recomputed_tokens": usage.recomputed_tokens,
        },
        "timing": {"ttft_ms": timing.ttft_ms, "tpot_ms": timing.tpot_ms},
        "route": {
            "ranks": list(route.ranks),
            "cp": route.cp,
            "prefill_group": list(route.prefill_group),
            "decode_group": list(route.decode_group),
            "reason": route.reason,
        },
        "completions": [_choice(choice) for choice in answer.choices],
    }
    if answer.prompt_logprobs:
        document["prompt_logprobs"] = [None if position is None else _logprobs(position) for position in answer.prompt_logprobs]
    return document


def _choice(choice: Choice) -> dict[str, object]:
    document: dict[str, object] = {
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "finish_reason": choice.finish_reason,
    }
    if choice.logprobs:
        document["logprobs"] = [_logprobs(position) for position in choice.logprobs]
    return document


def _logprobs(position: Logprobs) -> dict[str, object]:
    return {"logprob": position.sampled, "top": [{"token_id": token, "logprob": logprob} for token, logprob in position.top]}


def _text_of(args: Namespace) -> str | None:
    """The prompt as text, read once (a pipe has it no second time); None for token ids."""
    if args.file is not None:
        return _read(args.file)
    text: str | None = args.prompt
    return text


def _request_of(args: Namespace, text: str | None) -> tuple[str | None, Options]:
    options: Options = {
        "max_tokens": args.max_tokens,
        "min_tokens": args.min_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "seed": args.seed,
        "stop": args.stop,
        "ignore_eos": args.ignore_eos,
        "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty,
        "presence_penalty": args.presence_penalty,
        "frequency_penalty": args.frequency_penalty,
        "logit_bias": dict(args.logit_bias or ()),
        "n": args.n,
        "logprobs": args.logprobs,
        "top_logprobs": args.top_logprobs,
        "prompt_logprobs": args.prompt_logprobs,
    }
    if args.token_ids is not None:
        if args.chat:
            raise InvalidRequest("--chat", "given with --token-ids", "a chat template needs text")
        return None, {**options, "token_ids": args.token_ids}
    if args.chat and text is not None:
        return None, {**options, "messages": [{"role": "user", "content": text}]}
    return text, options


def _refuse_what_text_cannot_show(args: Namespace) -> None:
    asked = {
        "-n": args.n is not None and args.n > 1,
        "--logprobs": args.logprobs,
        "--top-logprobs": bool(args.top_logprobs),
        "--prompt-logprobs": args.prompt_logprobs is not None,
    }
    for flag, is_asked in asked.items():
        if is_asked and not args.json:
            raise InvalidRequest(flag, "given without --json", "plain text has no place for its answer")


def _of_empty_prompt(error: KvloomError, args: Namespace, text: str | None) -> str | None:
    """The refusal of a prompt without tokens, by the name of the argument that has none."""
    if not isinstance(error, InvalidRequest) or error.field not in ("prompt", "text") or text != "":
        return None
    name = "PROMPT" if args.file is None else f"--file {args.file}"
    return f"{name} is empty: {error.limit}"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest("--file", str(path), (error.strerror or str(error)).lower()) from None
    except UnicodeDecodeError as error:
        raise InvalidRequest("--file", str(path), f"is not UTF-8 (byte {error.start})") from None


def _print_text(stream: Stream) -> None:
    """Text as it comes, and a line end so that the shell's prompt starts a line."""
    started = False
    try:
        for event in stream:
            print(event.text, end="", flush=True)
            started = True
    finally:
        if started:
            print(flush=True)


def _ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 1,2,3") from None


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a token id and a number such as 42=-1.5") from None
