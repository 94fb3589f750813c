"""Where a request runs."""

from collections.abc import Sequence

from cp_wire.pb import coordinator_pb2


def static_route(ranks: Sequence[int], num_shards: int) -> coordinator_pb2.Route:
    """All ranks of the set prefill and decode together, with the KV over `num_shards` shards."""
    return coordinator_pb2.Route(ranks=ranks, cp=num_shards, prefill_group=ranks, decode_group=ranks, reason="static")
