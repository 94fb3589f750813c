"""Registered ranks become a set that can run steps: one shape of weights, one pool size, open groups."""

from collections.abc import Mapping, Sequence

from coordinator.cluster import PREFILL, SchedulingSet
from coordinator.faults import BadAnswer
from coordinator.rank_link import RankLink
from coordinator.tasks import all_or_first_error
from coordinator.timings import Timings
from cp_wire.errors import ConfigRefused
from cp_wire.logs import get_logger
from cp_wire.pb import common_pb2, rank_pb2
from cp_wire.words import counted

log = get_logger("coordinator.set")


def first_difference(ours: common_pb2.ClusterConfig, theirs: common_pb2.ClusterConfig) -> str | None:
    """Name and both values of the first field that differs."""
    for field in common_pb2.ClusterConfig.DESCRIPTOR.fields:
        mine, other = getattr(ours, field.name), getattr(theirs, field.name)
        if mine != other:
            return f"{field.name} is {mine} here and {other} there"
    return None


async def configure(
    link: RankLink, spec: SchedulingSet, config: common_pb2.ClusterConfig, pool_is_settled: bool, timings: Timings
) -> None:
    """Has the rank load its weights and checks that it took over every setting; raises RankFault.

    pool_is_settled: config states the size of pools that the set's other ranks have already.
    """
    command = rank_pb2.Configure(
        config=config,
        rank=link.rank,
        pool_is_settled=pool_is_settled,
        first_rank=spec.first_rank,
        pool_is_shared=spec.role == PREFILL,
    )
    response = await link.lane.send("configure", command, timings.configure_s)
    difference = first_difference(config, response.configured.config)
    if difference is not None:
        raise BadAnswer(link.rank, f"took over another configuration: {difference}")
    link.configured = response.configured


def pool_blocks(config: common_pb2.ClusterConfig, room: Mapping[int, int]) -> int:
    """Blocks of every pool of a set. room: blocks each rank can hold, by rank. `ConfigRefused` when a rank has too little."""
    rank, least = min(room.items(), key=lambda item: item[1])
    wanted = config.kv_cache_tokens_per_rank // config.block_size or least
    if wanted > least:
        raise ConfigRefused(
            f"rank {rank}: room for {counted(least, 'KV block')} of {counted(config.block_size, 'token')}, "
            f"but kv_cache_tokens_per_rank {config.kv_cache_tokens_per_rank} needs {wanted}"
        )
    if wanted < 1:
        raise ConfigRefused(f"rank {rank}: no room for even one KV block of {counted(config.block_size, 'token')}")
    asked, taken = config.kv_cache_tokens_per_rank, wanted * config.block_size
    if asked and asked != taken:
        log.warning("pool rounded down to whole blocks", asked_tokens=asked, tokens=taken, block_size=config.block_size)
    return wanted


async def allocate(links: Sequence[RankLink], num_blocks: int, timings: Timings) -> None:
    """Gives a pool to every rank that has none; raises RankFault."""

    async def one(link: RankLink) -> None:
        response = await link.lane.send("allocate_pool", rank_pb2.AllocatePool(num_blocks=num_blocks), timings.command_s)
        if response.pool_allocated.num_blocks != num_blocks:
            raise BadAnswer(link.rank, f"allocated {response.pool_allocated.num_blocks} KV blocks instead of {num_blocks}")
        link.pool_blocks = num_blocks

    await all_or_first_error(one(link) for link in links if not link.pool_blocks)


async def reset(links: Sequence[RankLink], timings: Timings) -> None:
    """Starts the lanes' epoch on every rank: requests and groups are gone; raises RankFault."""
    await all_or_first_error(link.lane.send("reset", rank_pb2.Reset(), timings.command_s) for link in links)


async def open_groups(groups: Mapping[str, Sequence[int]], links: Mapping[int, RankLink], timings: Timings) -> None:
    """Opens the groups one after another, all members of one at the same time; raises RankFault.

    groups: ranks in group order, by name. A single order for all keeps members from waiting in different groups.
    """
    for name, ranks in groups.items():
        first = links[ranks[0]].lane
        prepared = await first.send("prepare_group", rank_pb2.PrepareGroup(group=name, ranks=ranks), timings.command_s)
        command = rank_pb2.OpenGroup(
            group=name,
            ranks=ranks,
            bootstrap=prepared.group_prepared.bootstrap,
            timeout_ms=round(1000 * timings.open_group_s),
        )
        deadline_s = timings.open_group_s + timings.step_margin_s
        await all_or_first_error(links[rank].lane.send("open_group", command, deadline_s) for rank in ranks)
