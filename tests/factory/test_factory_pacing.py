"""Run a factory against a rate limit of 40 requests, then 4 per minute, in virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from factory.fake_slurm import FakeSlurm
from factory.toy_batch import Clock, ToyBatch

from stoker.manager.factory import pacing
from stoker.manager.factory.batch import BatchJobStatus, BatchSystemError
from stoker.manager.factory.keeper import BlockKeeper
from stoker.manager.factory.pacing import RequestPacer, SharedListing
from stoker.manager.factory.slurm import SlurmBatch
from stoker.protocol.blocks import ANYWHERE, AllowedNodes, BlockPhase
from stoker.protocol.ids import BlockId
from stoker.site import Provider, ProviderKind, Site

HOUR_S = 3600.0


class Limiter:
    def __init__(self, clock: Clock) -> None:
        self.clock, self.tokens, self.at = clock, 40.0, clock.now
        self.requests, self.refused = 0, 0

    def request(self) -> None:
        self.tokens = min(40.0, self.tokens + (self.clock.now - self.at) * 4 / 60)
        self.at = self.clock.now
        self.requests += 1
        if self.tokens < 1:
            self.refused += 1
            raise BatchSystemError("too many requests")
        self.tokens -= 1


class LimitedBatch(ToyBatch):
    """A batch system that limits requests. The pacer counts its requests as commands; all sources share one listing."""

    def __init__(self, limiter: Limiter, pacer: RequestPacer) -> None:
        super().__init__()
        self.limiter, self.pacer, self.listing = limiter, pacer, pacer.listing

    def submit(self, block: BlockId, allowed: AllowedNodes = ANYWHERE) -> str:
        self._request()
        self.listing.forget()
        return super().submit(block, allowed)

    def query(self, jobs: Sequence[str]) -> Mapping[str, BatchJobStatus]:
        self.listing.read(self._request)
        return super().query(jobs)

    def find(self) -> Mapping[str, BlockId]:
        self.listing.read(self._request)
        return super().find()

    def cancel(self, jobs: Sequence[str]) -> None:
        self._request()
        self.listing.forget()
        super().cancel(jobs)

    def _request(self) -> bool:
        self.pacer.take_token()
        self.limiter.request()
        return True


class World:
    def __init__(self, *, sources: int) -> None:
        self.clock = Clock()
        self.limiter = Limiter(self.clock)
        self.pacer = RequestPacer(clock=self.clock, sleep=self._sleep)
        self.batches = [LimitedBatch(self.limiter, self.pacer) for _ in range(sources)]
        self.keepers = [
            BlockKeeper(
                f"s{n}",
                make=lambda batch=batch: batch,
                owners={},
                lag_s=60.0,
                poll_s=10.0,
                clock=self.clock,
                pacer=self.pacer,
            )  # type: ignore[misc]
            for n, batch in enumerate(self.batches)
        ]
        for keeper in self.keepers:
            keeper.match_manager_blocks([])

    def _sleep(self, seconds: float) -> None:
        self.clock.now += seconds

    def run(self, seconds: float) -> None:
        until = self.clock.now + seconds
        turns = 0
        while self.clock.now < until:
            due = [(keeper.seconds_until_step(), n) for n, keeper in enumerate(self.keepers)]
            waits = [(wait, n) for wait, n in due if wait is not None]
            if not waits:
                self.clock.now = until
                return
            wait, n = heapq.nsmallest(1, waits)[0]
            self.clock.now = min(until, self.clock.now + wait)
            if self.clock.now < until:
                self.keepers[n].run_step()
            turns += 1
            assert turns < 100_000, "the factory never pauses"


@pytest.mark.parametrize("sources", [1, 3])
def test_hundred_blocks_stay_within_the_request_budget(sources: int) -> None:
    world = World(sources=sources)
    blocks = [BlockId(f"b{n}") for n in range(100)]
    for n, keeper in enumerate(world.keepers):
        keeper.add_ordered_blocks(blocks[n::sources])
    world.run(60.0)
    assert sum(len(batch.submitted) for batch in world.batches) >= 20, "the first submissions start at once"
    world.run(HOUR_S)
    assert sum(len(batch.submitted) for batch in world.batches) == 100
    for batch in world.batches:
        for job in batch.statuses:
            batch.statuses[job] = BatchJobStatus(BlockPhase.RUNNING)
    before = world.limiter.requests
    world.run(3 * HOUR_S)
    assert world.limiter.requests - before <= 4.0 * 180
    for batch in world.batches:
        for job in batch.statuses:
            batch.statuses[job] = BatchJobStatus(BlockPhase.ENDED, "preempted by Slurm")
    more = [BlockId(f"b{n}") for n in range(100, 200)]
    for n, keeper in enumerate(world.keepers):
        keeper.add_ordered_blocks(more[n::sources])
    world.run(HOUR_S)
    for keeper in world.keepers:
        keeper.mark_for_cancellation(list(keeper.blocks), "over")
    world.run(HOUR_S)
    assert world.limiter.refused == 0
    assert sum(len(batch.submitted) for batch in world.batches) == 200


def test_cancellations_do_not_wait_behind_many_submissions() -> None:
    world = World(sources=1)
    world.keepers[0].add_ordered_blocks([BlockId(f"b{n}") for n in range(100)])
    world.run(120.0)
    world.keepers[0].mark_for_cancellation([BlockId("b0"), BlockId("b1")], "over")
    world.run(2.0)
    assert world.batches[0].cancelled == ["1", "2"], "both with one command"
    assert world.limiter.refused == 0


def test_slow_batch_system_is_queried_less_often() -> None:
    assert pacing.unlimited_pacer().poll_period_s(10.0, took_s=0.1) == 10.0
    assert pacing.unlimited_pacer().poll_period_s(10.0, took_s=8.0) == 32.0


def test_request_rates_are_described_in_words() -> None:
    assert (
        pacing.describe_request_rate(10.0)
        == "3.4 requests a minute while its jobs run, 3.8 at most, after the first 36"
    )


def test_sites_share_one_status_command_until_a_submission(slurm: FakeSlurm, tmp_path: Path) -> None:
    pacer = RequestPacer(poll_s=10.0, clock=Clock())
    given = {"session": "k3v9", "folder": tmp_path, "pacer": pacer}
    sites = [Site(name=name, provider=Provider(kind=ProviderKind.SLURM)) for name in ("one", "two")]
    one, two = (SlurmBatch(site, command=lambda block: f"echo {block}", **given) for site in sites)  # type: ignore[arg-type]
    job = one.submit(BlockId("b1"))
    assert one.query([job])[job].phase is BlockPhase.PENDING
    two.find()
    two.query([job])
    assert len(slurm.asked("squeue")) == 1
    other = two.submit(BlockId("b2"))
    assert two.query([other])[other].phase is BlockPhase.PENDING
    assert len(slurm.asked("squeue")) == 2


def test_failed_listing_is_requested_again() -> None:
    listing: SharedListing[int] = SharedListing(fresh_s=5.0)

    def fail() -> int:
        raise BatchSystemError("away")

    with pytest.raises(BatchSystemError):
        listing.read(fail)
    assert listing.read(lambda: 7) == 7
    assert listing.read(lambda: 8) == 7
    listing.forget()
    assert listing.read(lambda: 8) == 8
