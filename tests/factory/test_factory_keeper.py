"""A keeper submits each block once, forgets no block, and reports all changes. The batch system is in memory."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import pytest
from factory.toy_batch import Clock, ToyBatch

from stoker.errors import ConfigError
from stoker.manager.factory.batch import BatchJobStatus, BatchSystem
from stoker.manager.factory.keeper import MAX_UNANSWERED_SUBMISSIONS, BlockKeeper, FactoryUpdate
from stoker.protocol.blocks import BlockPhase, KnownBlock, LossReason
from stoker.protocol.ids import BlockId
from stoker.protocol.to_manager import BlockUpdate, SourceTrouble

ASKED, PENDING, RUNNING = BlockPhase.ASKED, BlockPhase.PENDING, BlockPhase.RUNNING
ENDED, REFUSED = BlockPhase.ENDED, BlockPhase.REFUSED
B0, B1, B2 = (BlockId(f"b{n}") for n in range(3))


class KeeperHarness:
    """A keeper, its parts, and its messages."""

    def __init__(self) -> None:
        self.batch = ToyBatch()
        self.clock = Clock()
        self.owners: dict[BlockId, str] = {}
        self.said: list[FactoryUpdate] = []
        self.keeper = self.another()

    def another(self, *, was_tried: Container[BlockId] = ()) -> BlockKeeper:
        """Make a new keeper, as after the kill of a factory."""
        self.keeper = BlockKeeper(
            "lab", make=lambda: self.batch, owners=self.owners, poll_s=10, lag_s=60, was_tried=was_tried.__contains__,
            clock=self.clock,
        )  # fmt: skip
        self.keeper.match_manager_blocks([])
        return self.keeper

    def settle(self) -> list[FactoryUpdate]:
        """Step the keeper until no work is due; return the new updates."""
        fresh: list[FactoryUpdate] = []
        for _ in range(50):
            if self.keeper.seconds_until_step() != 0:
                break
            fresh += self.keeper.run_step()
        else:
            raise AssertionError("it never comes to rest")
        self.said += fresh
        return fresh

    def later(self, seconds: float) -> list[FactoryUpdate]:
        self.clock.now += seconds
        return self.settle()

    def see(self, seconds: float, *facts: Any, **more: Any) -> list[FactoryUpdate]:
        self.batch.statuses["1"] = BatchJobStatus(*facts, **more)
        return self.later(seconds)

    def order(self, *blocks: BlockId) -> list[FactoryUpdate]:
        self.keeper.add_ordered_blocks(blocks)
        return self.settle()


@pytest.fixture
def desk() -> KeeperHarness:
    return KeeperHarness()


def told(news: list[FactoryUpdate]) -> list[tuple[str, BlockPhase, str]]:
    return [(each.block, each.phase, each.reason) for each in news if isinstance(each, BlockUpdate)]


def test_ordered_block_is_followed_until_its_end(desk: KeeperHarness) -> None:
    assert told(desk.order(B0)) == [(B0, PENDING, "")]
    assert desk.see(1, PENDING, "Priority", 600) == [BlockUpdate(B0, PENDING, "1", "Priority", 600)]
    assert told(desk.see(10, RUNNING, "on n1")) == [(B0, RUNNING, "on n1")]
    assert told(desk.see(10, ENDED, "preempted by Slurm")) == [(B0, ENDED, "preempted by Slurm")]
    assert desk.keeper.seconds_until_step() is None


def test_unchanged_state_is_not_reported_again(desk: KeeperHarness) -> None:
    desk.order(B0)
    desk.see(1, PENDING, "Priority", 600)
    assert desk.see(10, PENDING, "Priority", 590) == []
    assert [
        each.expected_in_s for each in desk.see(10, PENDING, "Priority", 4000) if isinstance(each, BlockUpdate)
    ] == [4000]


def test_manager_receives_the_reason_why_a_job_ended(desk: KeeperHarness) -> None:
    desk.order(B0)
    desk.see(1, RUNNING, "on n1")
    again = "queued again, because the job was preempted or its node failed: BeginTime"
    assert told(desk.see(10, PENDING, "BeginTime")) == [(B0, PENDING, again)]
    desk.see(10, RUNNING, "on n1")
    assert desk.see(10, PENDING, "BeginTime", requeue_reason="queued again by Slurm") == [
        BlockUpdate(B0, PENDING, "1", "queued again by Slurm: BeginTime")
    ]
    assert desk.see(10, PENDING, "BeginTime", loss=LossReason.PREEMPTED, requeue_reason="preempted by Slurm") == [
        BlockUpdate(B0, PENDING, "1", "preempted by Slurm: BeginTime", loss=LossReason.PREEMPTED)
    ]
    assert desk.see(10, RUNNING, "on n2") == [BlockUpdate(B0, RUNNING, "1", "on n2")]
    assert desk.see(10, ENDED, "cancelled", loss=LossReason.CANCELLED) == [
        BlockUpdate(B0, ENDED, "1", "cancelled", loss=LossReason.CANCELLED)
    ]


def test_repeated_order_is_carried_out_once(desk: KeeperHarness) -> None:
    desk.order(B0, B0)
    desk.order(B0)
    desk.see(1, ENDED, "done")
    desk.order(B0)
    desk.keeper.match_manager_blocks([KnownBlock(B0, "lab", ASKED)])
    desk.settle()
    assert desk.batch.submitted == [B0]


def test_refused_block_is_reported(desk: KeeperHarness) -> None:
    desk.batch.refuses = "Invalid account"
    assert told(desk.order(B0, B1)) == [(B0, REFUSED, "Invalid account"), (B1, REFUSED, "Invalid account")]
    assert not [each for each in desk.said if isinstance(each, SourceTrouble)]


def test_start_and_end_of_an_outage_are_reported_once(desk: KeeperHarness) -> None:
    desk.batch.down = "squeue has not answered for 30 s"
    assert desk.order(B0) == [SourceTrouble("lab", "squeue has not answered for 30 s")]
    for _ in range(5):
        assert desk.later(10) == []
    desk.batch.down = ""
    assert desk.later(10) == [BlockUpdate(B0, PENDING, "1"), SourceTrouble("lab", "")]


def test_queries_are_less_frequent_during_trouble(desk: KeeperHarness) -> None:
    desk.batch.down = "away"
    desk.order(B0)
    waits = []
    for _ in range(6):
        waits.append(desk.keeper.seconds_until_step() or 0)
        desk.later(waits[-1])
    assert waits == [1, 2, 4, 8, 16, 32]


def test_submission_that_arrived_without_answer_is_not_repeated(desk: KeeperHarness) -> None:
    desk.batch.lossy = True
    desk.order(B0)
    assert [each for each in desk.said if isinstance(each, SourceTrouble)]
    desk.batch.lossy = False
    assert told(desk.later(5)) == [(B0, PENDING, "")]
    assert desk.batch.submitted == [B0]


def test_job_with_an_uncertain_id_is_found_by_name(desk: KeeperHarness) -> None:
    desk.batch.noisy = True
    assert desk.order(B0) == [BlockUpdate(B0, PENDING, "1")]
    desk.later(600)
    assert desk.batch.submitted == [B0]


def test_job_that_listings_show_20_seconds_late_is_found(desk: KeeperHarness) -> None:
    desk.batch.lossy = desk.batch.hides = True
    desk.order(B0, B1)
    for _ in range(4):
        desk.later(5)
    assert told(desk.said) == []
    desk.batch.lossy = desk.batch.hides = False
    desk.later(10)
    assert told(desk.said) == [(B0, PENDING, ""), (B1, PENDING, "")]
    assert desk.batch.submitted == [B0, B1]


def test_new_factory_does_not_resubmit_a_job_that_is_listed_late(desk: KeeperHarness) -> None:
    desk.batch.put(B0)
    desk.batch.hides = True
    desk.another(was_tried={B0}).match_manager_blocks([KnownBlock(B0, "lab", ASKED), KnownBlock(B1, "lab", ASKED)])
    for _ in range(4):
        desk.later(5)
    desk.batch.hides = False
    desk.later(10)
    assert (B0, PENDING, "") in told(desk.said)
    assert desk.batch.submitted == [B1]


def test_new_factory_submits_a_block_that_has_no_job(desk: KeeperHarness) -> None:
    desk.another(was_tried={B0}).match_manager_blocks([KnownBlock(B0, "lab", ASKED)])
    [pause] = until_submitted(desk, times=1)
    assert 60 <= pause <= 80
    assert desk.batch.submitted == [B0]


ABSENT = BatchJobStatus(ENDED, "no longer in the queue: killed", is_unlisted=True)


def test_job_missing_from_listings_for_20_seconds_is_not_lost(desk: KeeperHarness) -> None:
    desk.order(B0)
    desk.see(1, RUNNING, "on n1")
    for _ in range(10):  # the job is missing for 20 s at a time, which is less than a minute
        desk.batch.statuses["1"] = ABSENT
        for _ in range(20):
            desk.later(1)
        desk.batch.statuses["1"] = BatchJobStatus(RUNNING, "on n1")
        desk.later(10)
    assert told(desk.said) == [(B0, PENDING, ""), (B0, RUNNING, "on n1")]


def test_job_missing_from_listings_for_a_minute_is_lost(desk: KeeperHarness) -> None:
    desk.order(B0)
    desk.batch.statuses["1"] = ABSENT
    for _ in range(6):
        assert told(desk.later(10)) == []
    assert told(desk.later(10)) == [(B0, ENDED, "no longer in the queue: killed")]
    desk.batch.statuses.clear()
    assert desk.keeper.cancel_all_jobs(until=desk.clock.now) == []
    assert desk.batch.cancelled == ["1"], "the job may still exist"


def test_job_missing_from_only_two_listings_is_not_lost(desk: KeeperHarness) -> None:
    desk.order(B0)
    desk.batch.statuses["1"] = ABSENT
    desk.later(10)
    assert told(desk.later(600)) == []
    assert told(desk.later(10))[0][:2] == (B0, ENDED)


def test_cancelled_job_has_ended_if_a_listing_lacks_it(desk: KeeperHarness) -> None:
    desk.order(B0)
    desk.batch.statuses["1"] = ABSENT
    desk.later(1)
    desk.keeper.mark_for_cancellation([B0], "idle")
    desk.settle()
    assert told(desk.later(1)) == [(B0, ENDED, "cancelled: idle")]


@pytest.mark.parametrize("hides", [False, True])
def test_shutdown_cancels_jobs_that_no_listing_shows(desk: KeeperHarness, hides: bool) -> None:
    desk.order(B0)
    desk.batch.lossy = desk.batch.hides = hides
    desk.order(B1)
    desk.batch.hides, desk.batch.statuses = True, dict.fromkeys(("1", "2"), ABSENT)
    assert desk.keeper.cancel_all_jobs(until=desk.clock.now) == []
    assert "1" in desk.batch.cancelled
    assert ("2" in desk.batch.cancelled) or desk.batch.cancelled_names == [B1]


def test_block_with_an_uncertain_job_is_cancelled_by_name_and_id(desk: KeeperHarness) -> None:
    desk.batch.lossy = desk.batch.hides = True
    desk.order(B0)
    desk.keeper.mark_for_cancellation([B0], "idle")
    assert told(desk.later(10)) == [(B0, ENDED, "cancelled before it was submitted: idle")]
    assert desk.batch.cancelled_names == [B0]
    desk.batch.hides = False
    desk.later(20)
    assert desk.batch.cancelled == ["1"]
    assert desk.keeper.seconds_until_step() is None


def until_submitted(desk: KeeperHarness, *, times: int) -> list[float]:
    """Return the seconds before each further submission, up to `times`."""
    pauses, since = [], desk.clock.now
    for _ in range(200):
        if len(pauses) == times or (wait := desk.keeper.seconds_until_step()) is None:
            return pauses
        before = len(desk.batch.submitted)
        desk.later(max(wait, 0.1))
        if len(desk.batch.submitted) > before:
            pauses.append(round(desk.clock.now - since))
            since = desk.clock.now
    raise AssertionError("it goes on for ever")


def test_block_with_hidden_jobs_is_not_submitted_forever(desk: KeeperHarness) -> None:
    desk.batch.lossy = desk.batch.hides = True
    desk.order(B0)
    pauses = until_submitted(desk, times=99)
    assert len(pauses) == MAX_UNANSWERED_SUBMISSIONS - 1
    assert min(pauses) >= 60
    assert desk.batch.submitted == [B0] * MAX_UNANSWERED_SUBMISSIONS
    [(block, phase, reason)] = told(desk.said)
    assert (block, phase) == (B0, REFUSED)
    assert "6 submissions in a row got no answer (submit has not answered for 30 s)" in reason
    assert [each.text for each in desk.said if isinstance(each, SourceTrouble)] == [
        "submit has not answered for 30 s",
        "",
    ]
    desk.order(B1)  # until the batch system answers, each later block is tried once
    until_submitted(desk, times=99)
    assert desk.batch.submitted == [B0] * MAX_UNANSWERED_SUBMISSIONS + [B1]
    assert told(desk.said)[-1][:2] == (B1, REFUSED)
    desk.batch.lossy = desk.batch.hides = False
    assert (B2, PENDING, "") in told(desk.order(B2))
    assert desk.keeper.trouble == ""


def test_jobs_are_watched_while_submissions_wait(desk: KeeperHarness) -> None:
    desk.order(B0)
    desk.batch.lossy = desk.batch.hides = True
    desk.order(B1)
    until_submitted(desk, times=3)
    desk.batch.statuses["1"] = BatchJobStatus(RUNNING, "on n1")
    assert (B0, RUNNING, "on n1") in told(desk.later(10))
    desk.keeper.mark_for_cancellation([B0], "idle")
    desk.settle()
    assert desk.batch.cancelled == ["1"]


def test_block_is_submitted_after_a_long_batch_system_outage(desk: KeeperHarness) -> None:
    desk.batch.down = "away"
    desk.order(B0)
    for _ in range(5 * MAX_UNANSWERED_SUBMISSIONS):
        desk.later(desk.keeper.seconds_until_step() or 0)
    desk.batch.down = ""
    assert told(desk.later(60)) == [(B0, PENDING, "")]


def test_duplicate_job_that_appears_late_is_cancelled(desk: KeeperHarness) -> None:
    desk.order(B0)
    late = desk.batch.put(B0)
    desk.later(61)
    assert desk.batch.cancelled == [late]


def test_new_factory_finds_and_adopts_existing_jobs(desk: KeeperHarness) -> None:
    job = desk.batch.put(B0)
    keeper = desk.another()
    keeper.match_manager_blocks([KnownBlock(B0, "lab", ASKED), KnownBlock(B1, "lab", ASKED)])
    news = desk.settle()
    assert ("b0", PENDING, "") in told(news)
    assert desk.batch.submitted == [B1]
    assert next(each.job for each in news if isinstance(each, BlockUpdate)) == job


@pytest.mark.parametrize(
    ("other", "cancelled"), [(BatchJobStatus(ENDED, "exit code 1"), 0), (BatchJobStatus(PENDING), 1)]
)
def test_running_job_is_kept_if_a_block_has_two_jobs(
    desk: KeeperHarness, other: BatchJobStatus, cancelled: int
) -> None:
    first = desk.batch.put(B0, other)
    running = desk.batch.put(B0, BatchJobStatus(RUNNING))
    desk.another().match_manager_blocks([KnownBlock(B0, "lab", ASKED)])
    assert [each.job for each in desk.settle() if isinstance(each, BlockUpdate)][-1] == running
    assert desk.batch.cancelled == [first] * cancelled


def test_job_of_an_unknown_block_is_reported_to_the_manager(desk: KeeperHarness) -> None:
    stray = desk.batch.put(B2, BatchJobStatus(RUNNING, "on n1"))
    assert desk.settle() == [BlockUpdate(B2, RUNNING, stray, "on n1", source="lab")]
    assert not desk.batch.cancelled
    desk.keeper.mark_for_cancellation([B2], "it was over")
    desk.settle()
    assert desk.batch.cancelled == [stray]


def test_keeper_changes_nothing_before_it_knows_the_blocks(desk: KeeperHarness) -> None:
    job = desk.batch.put(B0, BatchJobStatus(RUNNING))
    keeper = BlockKeeper("lab", make=lambda: desk.batch, owners={}, poll_s=10, lag_s=60, clock=desk.clock)
    assert keeper.seconds_until_step() is None
    assert keeper.run_step() == []
    keeper.match_manager_blocks([KnownBlock(B0, "lab", RUNNING, job)])
    assert told(keeper.run_step()) == [(B0, RUNNING, "")]
    assert not desk.batch.cancelled


def test_jobs_of_another_site_are_not_touched(desk: KeeperHarness) -> None:
    desk.owners[B2] = "other"
    desk.batch.put(B2, BatchJobStatus(RUNNING))
    desk.settle()
    assert not desk.batch.cancelled
    assert desk.keeper.cancel_all_jobs(until=desk.clock.now) == []


def test_block_can_be_cancelled_before_and_after_its_submission(desk: KeeperHarness) -> None:
    desk.order(B0)
    desk.keeper.add_ordered_blocks([B1])
    desk.keeper.mark_for_cancellation([B0, B1], "no call could use it")
    assert (B1, ENDED, "cancelled before it was submitted: no call could use it") in told(desk.settle())
    assert desk.batch.submitted == [B0]
    assert desk.batch.cancelled == ["1"]
    [end] = desk.see(1, ENDED, "cancelled", loss=LossReason.CANCELLED)
    assert end == BlockUpdate(B0, ENDED, "1", "cancelled: no call could use it"), "this end is no loss"


def test_cancel_without_effect_is_repeated(desk: KeeperHarness) -> None:
    desk.order(B0)
    desk.keeper.mark_for_cancellation([B0], "idle")
    desk.settle()
    for _ in range(3):
        desk.later(1)
    assert desk.batch.cancelled == ["1"]
    desk.later(31)
    assert desk.batch.cancelled == ["1", "1"]


def test_block_that_ended_well_during_its_cancellation_is_done(desk: KeeperHarness) -> None:
    desk.order(B0)
    desk.keeper.mark_for_cancellation([B0], "idle")
    desk.batch.statuses["1"] = BatchJobStatus(ENDED, "done")
    assert (B0, ENDED, "done") in told([*desk.settle(), *desk.later(1)])


def test_manager_with_a_lost_journal_part_gets_all_reports_again(desk: KeeperHarness) -> None:
    desk.order(B0, B1, B2)
    desk.batch.statuses["1"] = BatchJobStatus(RUNNING, "on n1")
    desk.batch.statuses["3"] = BatchJobStatus(ENDED, "exit code 1")
    desk.later(10)
    desk.keeper.match_manager_blocks([KnownBlock(B1, "lab", ASKED)])
    assert desk.settle() == [
        BlockUpdate(B2, ENDED, "3", "exit code 1", source="lab"),
        BlockUpdate(B0, RUNNING, "1", "on n1", source="lab"),
        BlockUpdate(B1, PENDING, "2"),
    ]
    assert not desk.batch.cancelled
    assert desk.batch.submitted == [B0, B1, B2]


def test_manager_that_lost_the_end_of_a_block_gets_it_again(desk: KeeperHarness) -> None:
    desk.order(B0)
    desk.see(10, ENDED, "exit code 1")
    desk.keeper.match_manager_blocks([KnownBlock(B0, "lab", RUNNING, "1")])
    assert told(desk.settle()) == [(B0, ENDED, "exit code 1")]
    assert told(desk.order(B0)) == [(B0, ENDED, "exit code 1")]
    assert desk.batch.submitted == [B0]


def test_missing_batch_system_refuses_blocks(desk: KeeperHarness) -> None:
    def make() -> BatchSystem:
        raise ConfigError("site lab: this host has no sbatch on its PATH")

    desk.keeper = BlockKeeper("lab", make=make, owners={}, poll_s=10, lag_s=60, clock=desk.clock)
    desk.keeper.match_manager_blocks([])
    assert told(desk.order(B0)) == [(B0, REFUSED, "site lab: this host has no sbatch on its PATH")]
    assert desk.keeper.seconds_until_step() is None
    assert desk.keeper.cancel_all_jobs(until=desk.clock.now) == []


def test_exception_of_a_provider_is_reported_as_trouble(desk: KeeperHarness, caplog: pytest.LogCaptureFixture) -> None:
    desk.order(B0)

    def broken(jobs: object) -> dict[str, BatchJobStatus]:
        raise KeyError("88123")

    desk.batch.query = broken  # type: ignore[method-assign,assignment]
    assert desk.later(1) == [SourceTrouble("lab", "KeyError: '88123'")]


def test_shutdown_cancels_all_jobs_and_names_remaining_jobs(desk: KeeperHarness) -> None:
    desk.order(B0)
    desk.batch.put(B2, BatchJobStatus(RUNNING))
    assert desk.keeper.cancel_all_jobs(until=desk.clock.now) == ["1", "2"]
    assert desk.batch.cancelled == ["1", "2"]
    desk.batch.statuses = {"1": BatchJobStatus(ENDED, "cancelled"), "2": BatchJobStatus(ENDED, "cancelled")}
    assert desk.keeper.cancel_all_jobs(until=desk.clock.now) == []


def test_shutdown_without_an_answer_names_the_known_jobs(desk: KeeperHarness) -> None:
    desk.order(B0)
    desk.batch.down = "away"
    assert desk.keeper.cancel_all_jobs(until=desk.clock.now) == ["1"]


def test_pending_blocks_can_be_cancelled_alone(desk: KeeperHarness) -> None:
    desk.order(B0, B1)
    desk.see(1, RUNNING)
    desk.keeper.mark_waiting_for_cancellation("the manager is away")
    desk.settle()
    assert desk.batch.cancelled == ["2"]
