"""Where a request runs."""

from collections.abc import Sequence

from coordinator.text_rows import LiveRequest
from cp_wire.pb import coordinator_pb2


def route_of(live: LiveRequest, ranks: Sequence[int], num_shards: int) -> coordinator_pb2.Route:
    """ranks: of the set that computes the output, with the KV over `num_shards` shards; prompts may have ranks of their own."""
    relay = live.relay
    prompts = ranks if relay is None else relay.prefill_ranks
    return coordinator_pb2.Route(
        ranks=sorted({*prompts, *ranks}),
        cp=num_shards,
        prefill_group=prompts,
        decode_group=ranks,
        reason="static" if relay is None else relay.route_reason,
    )
