"""The end that reads: takes a range of tokens from all its source ranks at once and writes it into this rank's blocks."""

import asyncio
from itertools import count

import grpc.aio

from cp_layout.errors import LayoutError
from cp_layout.reshard import Link, Reshard, reshard
from cp_wire import errors
from cp_wire.pb import kv_transfer_pb2 as pb
from cp_wire.pb import kv_transfer_pb2_grpc
from kv_transfer.budget import Budget
from kv_transfer.channels import Channels
from kv_transfer.facts import Place
from kv_transfer.generations import Generations
from kv_transfer.link_pull import LinkPull, Target
from kv_transfer.open_pools import OpenPools
from kv_transfer.pull import Limits, Peer, Pull, Report, TransferFailed
from kv_transfer.store import Store
from kv_transfer.tasks import together


class Puller:
    """Pulls for one rank; any number of pulls at a time. Belongs to one event loop.

    A pull that has returned, raised or been cancelled writes nothing afterwards. `close` closes the channels and mappings.
    """

    def __init__(
        self, place: Place, facts: pb.KvFacts, store: Store, generations: Generations, limits: Limits | None = None
    ) -> None:
        limits = limits or Limits()
        self._place = place
        self._target = Target(facts, store, generations, limits, Budget(limits.bytes_in_flight), OpenPools(), count(1))
        self._channels = Channels()

    async def pull(self, pull: Pull, deadline_s: float | None = None) -> Report:
        """Every token of the range is in the pool when this returns, and nothing else was written; else `TransferFailed`.

        deadline_s: from now, instead of that of the limits.
        The session stays leased: further ranges of it may follow, then `release`.
        """
        report, deadline_s = Report(), self._target.limits.deadline_s if deadline_s is None else deadline_s
        plan = self._plan(pull, report)

        async def run(link: Link) -> None:
            with self._channels.use(pull.peers[link.src].address) as channel:
                await LinkPull(self._target, pull, link, plan.runs_of(link), channel, report).run()

        try:
            async with asyncio.timeout(deadline_s):
                await together(run(link) for link in self._links(plan, pull, report))
        except TimeoutError as error:
            reason = errors.DeadlineExceeded.reason
            raise TransferFailed(reason, pull, f"not done after {deadline_s} s", report) from error
        return report

    async def release(self, pull: Pull) -> None:
        """Tells all peers that this rank needs the session no longer. One that is not reached frees the blocks when its lease
        ends."""
        await together(self._release(pull, peer) for peer in pull.peers.values())

    async def close(self) -> None:
        """Closes channels and mappings; running pulls fail."""
        await self._channels.close()
        await self._target.pools.close()

    def _links(self, plan: Reshard, pull: Pull, report: Report) -> list[Link]:
        """Those to this rank; `TransferFailed` for a source without an address."""
        links = [link for link in plan.links if link.dst == self._place.rank]
        for link in links:
            if link.src not in pull.peers:
                raise TransferFailed("PEER_UNKNOWN", pull, f"source rank {link.src} has no address", report)
        return links

    def _plan(self, pull: Pull, report: Report) -> Reshard:
        """`TransferFailed` when the pull does not fit this rank."""
        own = self._place.side
        if (pull.target.grid, pull.target.layout, pull.target.kv_heads) != (own.grid, own.layout, own.kv_heads):
            raise TransferFailed(errors.ConfigRefused.reason, pull, f"{pull.target} is not this rank's side {own}", report)
        try:
            return reshard(pull.source, pull.target, pull.start, pull.end)
        except LayoutError as refusal:
            raise TransferFailed(errors.ConfigRefused.reason, pull, str(refusal), report) from refusal

    async def _release(self, pull: Pull, peer: Peer) -> None:
        request = pb.ReleaseRequest(
            session=pull.session, epoch=pull.epoch, instance=peer.instance, target_rank=self._place.rank
        )
        with self._channels.use(peer.address) as channel:
            try:
                await kv_transfer_pb2_grpc.KvTransferServiceStub(channel).Release(request, timeout=self._target.limits.call_s)
            except grpc.aio.AioRpcError:
                return
