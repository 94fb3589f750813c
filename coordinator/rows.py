"""What a step says about one request: its admission, its row, and what a drawn token means for it."""

from coordinator.plan import Admission, Row
from coordinator.request import Request


def admission_of(request: Request) -> Admission:
    """The request as the ranks have to know it before its first row; all it has computed by now is in the cache."""
    cached = request.num_computed
    return Admission(
        handle=request.handle,
        sampling=request.sampling,
        shard_offset=request.shard_offset,
        num_cached_tokens=cached,
        num_prompt_tokens=len(request.prompt),
        owner=request.owner,
        num_prefill_tokens=request.num_prefill_tokens,
        cached_token_ids=request.known(0, cached) if request.sampling.counts_tokens else (),
    )


def row_of(request: Request, count: int, new_blocks: tuple[tuple[int, ...], ...]) -> Row:
    """The next `count` tokens of a request; prompt tokens that are still to be scored are scored with the token before them."""
    start, index = request.num_computed, len(request.output)
    end = start + count
    score_start = max(start + 1, request.num_scored) if request.is_unscored else 0
    return Row(
        handle=request.handle,
        start=start,
        token_ids=request.known(start, end),
        new_blocks=new_blocks,
        sample=end == request.num_known,
        output_index=index,
        ban_stop=index < request.sampling.min_tokens,
        score_start=score_start,
        score_token_ids=tuple(request.prompt[score_start : end + 1]) if request.is_unscored else (),
    )


def finish_reason(request: Request, output_index: int, token: int) -> str | None:
    """Why the request ends with this token; None when it goes on."""
    if token in request.sampling.stop_token_ids and output_index >= request.sampling.min_tokens:
        return "stop"
    return "length" if len(request.output) >= request.sampling.max_tokens else None
