from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from stoker.log_files import free_file_middle
from stoker.manager.cli import calls, down, logs, status, up
from stoker.manager.cli.status import unreachable_pilots_warning
from stoker.manager.live.lease import LeaseHolder
from stoker.protocol import show_status
from stoker.protocol.blocks import BlockPhase, BlockStatus
from stoker.protocol.calls import FailureGroup, ListedCall, ListedState
from stoker.protocol.session import SessionFolder
from stoker.protocol.status import ContextStatus, DeviceStatus, LibraryStatus, ObjectStatus, PilotStatus, StoryLine
from stoker.protocol.to_client import Calls, Status, Story
from stoker.site import Environment, EnvironmentKind, Provider, ProviderKind, Site

NOTHING = Status(
    session="k3v9", uptime_s=3, queued=0, running=0, done=0, failed=0, rate=0, left_s=0, pilots=(), libraries=(),
    contexts=(), blocks={}, lost_pilots=0, rerun_calls=0, refused={},
)  # fmt: skip
LLM = ContextStatus(
    key="7f3a" * 8, name="llm-7f3a", hot=1, loading=1, queued=51_200, running=2, loads=4, ended=9_999, load_s=9.1,
    load_total_s=36.4, run_s=0.2, run_total_s=500, memory_bytes=7_100_000_000, waits_for="the hot library is busy",
    served=2448,
)  # fmt: skip
NODE = PilotStatus(
    pilot="n014-ab12", host="n014", block="0", state="here", folder="/tmp/x", ended=240, rate=2.9, ends_in_s=3840,
    devices=(
        DeviceStatus("cuda:0", "a10", 24_000_000_000, 18_000_000_000, (1,)),
        DeviceStatus("cuda:1", "a10", 24_000_000_000, 0, ()),
        DeviceStatus("cpu:0", "cpu", 8_000_000_000, 8_000_000_000, (2,)),
    ),
)  # fmt: skip
BUSY = replace(
    NOTHING, uptime_s=8040, queued=51_200, running=128, done=10_412, failed=3, rate=38.2, left_s=1320,
    pilots=(NODE,), contexts=(LLM,), blocks={"0": "running", "1": "pending: Priority"}, lost_pilots=9, rerun_calls=61,
    refused={"a frame that the protocol does not define": 2},
    libraries=(
        LibraryStatus(1, "llm-7f3a", "ready", "", "n014-ab12", ("cuda:0",), 1, 240, 1, 1),
        LibraryStatus(2, "llm-7f3a", "loading", "fetching", "n014-ab12", ("cpu:0",), 0, 0, 0, 0),
    ),
)  # fmt: skip


def test_status_log_prints_state_changes_and_one_line_for_calls():
    later = replace(BUSY, uptime_s=9000, rate=37.9)
    assert status.lines_if_status_changed(BUSY, before=None) == [*status.render(BUSY), ""]
    assert status.lines_if_status_changed(later, before=BUSY) == [], "only the times change"
    done = replace(later, done=10_500)
    assert status.lines_if_status_changed(done, before=later) == status.render(done)[:1]
    for change in (
        {"pilots": (replace(NODE, state="draining"),)},
        {"contexts": (replace(LLM, hot=2, loading=0),)},
        {"jobs": (block("b1", BlockPhase.PENDING, reason="Priority"),)},
        {"trouble": {"lab": "squeue has not answered for 30 s"}},
    ):
        changed = replace(later, **change)
        assert status.lines_if_status_changed(changed, before=later) == [*status.render(changed), ""]


def test_cancelled_calls_are_not_counted_as_failed():
    one = replace(NOTHING, done=9, failed=1, cancelled=2)
    assert "9 calls done, 1 failed, 2 cancelled, 0 running" in status.render(one)[0]


def test_empty_session_is_shown_in_two_short_lines():
    assert status.render(NOTHING) == [
        "session k3v9 · up 3.0 s · 0 calls done, 0 running, 0 queued",
        "",
        "  pilots    none",
    ]


def test_busy_session_is_shown_completely():
    assert status.render(BUSY) == [
        "session k3v9 · up 2 h 14 min · 10,412 calls done, 3 failed, 128 running, 51,200 queued"
        " · 38.2 calls/s · done in about 22 min",
        "",
        "  pilots    1 here (2 a10, 1 cpu) · block b1: pending: Priority",
        "  contexts  llm-7f3a   1 hot, 1 loading   7.1 GB each   4 loads of 9.1 s   used 612 times a load"
        "   51,200 queued",
        "  losses    9 pilots, 61 calls run again, 0 results lost",
        "",
        "  calls of llm-7f3a wait: the hot library is busy",
        "",
        "  n014-ab12  3 devices                                                     walltime 1 h 4 min  2.9 calls/s",
        "             cuda:0 a10  llm-7f3a             ▇▇▇▇▇▇▁▁ 18.0 GB of 24.0 GB",
        "             cuda:1 a10  -                    ▁▁▁▁▁▁▁▁ 0 of 24.0 GB",
        "             cpu:0       llm-7f3a (fetching)  ▇▇▇▇▇▇▇▇ 8.0 GB of 8.0 GB",
    ]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"served": 2448}, "used 612 times a load"),
        ({"served": 1}, "used 0.2 times a load"),
        ({"served": 0, "running": 0, "hot": 0, "queued": 0}, "never used"),
    ],
)
def test_status_shows_how_many_calls_used_each_context_load(facts: dict[str, Any], said: str):
    context = replace(LLM, **facts)
    [line] = [line for line in status.render(replace(NOTHING, contexts=(context,))) if " load" in line]
    assert said in line


def test_pilot_with_one_device_is_shown_in_one_row():
    small = replace(NODE, devices=NODE.devices[:1], rate=0.01)
    assert status.render(replace(NOTHING, pilots=(small,)))[-1:] == [
        "  n014-ab12  cuda:0 a10  -  ▇▇▇▇▇▇▁▁ 18.0 GB of 24.0 GB  walltime 1 h 4 min  0.6 calls/min"
    ]


def test_contexts_that_wait_in_parallel_have_a_forecast_each():
    other = replace(LLM, name="nli-02c1", left_s=127.0, waits_for="its hot library is busy")
    two = replace(BUSY, contexts=(LLM, other))
    assert "  calls of nli-02c1 wait: its hot library is busy; done in about 2 min 10 s" in status.render(two)
    assert "  calls of nli-02c1 wait: its hot library is busy" in status.render(replace(BUSY, contexts=(other,)))


def test_calls_without_a_context_are_labelled_as_such():
    plain = replace(LLM, key="bare", name="bare", last_failure="no room")
    one = replace(NOTHING, contexts=(plain,), pilots=(NODE,), libraries=(
        LibraryStatus(1, "bare", "ready", "", "n014-ab12", ("cuda:0",), 1, 240, 1, 1),
    ))  # fmt: skip
    text = "\n".join(status.render(one))
    assert "bare" not in text
    assert text.count("no context") == 2, "its row, and its library on a device"
    assert "calls without a context wait: " in text


def block(name: str, phase: BlockPhase, *, reason: str = "", expected_in_s: float = 0.0, **more: Any) -> BlockStatus:
    facts = {"source": "backfill", "job": name[1:], "since_s": 30.0, "pilots": ()} | more
    return BlockStatus(block=name, phase=phase.value, reason=reason, expected_in_s=expected_in_s, **facts)


def test_blocks_are_shown_by_phase_with_reason_and_expected_start():
    jobs = (
        block("b1", BlockPhase.RUNNING, pilots=("n014-ab12",)),
        block("b2", BlockPhase.RUNNING, since_s=42),
        block("b3", BlockPhase.PENDING, reason="Priority", expected_in_s=660),
        block("b4", BlockPhase.PENDING, reason="Priority", expected_in_s=900),
        block("b5", BlockPhase.PENDING, reason="QOSMaxGRESPerUser"),
        block("b6", BlockPhase.ASKED, job=""),
    )
    one = replace(BUSY, blocks={}, jobs=jobs, ended_blocks={"out of walltime": 2, "preempted": 9})
    assert status.render(one)[2] == (
        "  pilots    1 here (2 a10, 1 cpu) · 1 to be submitted · 3 queued (2 Priority, 1 QOSMaxGRESPerUser;"
        " the first in about 11 min) · 1 starting (its job runs for 42 s, no pilot yet)"
        " · 9 preempted, 2 out of walltime"
    )
    alone = replace(NOTHING, jobs=(jobs[2],))
    assert status.render(alone)[2] == "  pilots    1 queued (Priority; the first in about 11 min)"
    silent = replace(NOTHING, jobs=(block("b7", BlockPhase.RUNNING, since_s=720),))
    assert status.render(silent)[2] == (
        "  pilots    1 starting (its job runs for 12 min, no pilot yet:"
        " read the job output in the session folder's submit/)"
    )


def test_several_blocks_without_a_pilot_are_shown_in_the_plural():
    starting = [block(name, BlockPhase.RUNNING, since_s=since_s) for name, since_s in (("b1", 42), ("b2", 720))]
    emptied = [block(name, BlockPhase.RUNNING, emptied_s=since_s) for name, since_s in (("b3", 60), ("b4", 5))]
    one = replace(NOTHING, jobs=(*starting, *emptied))
    assert status.render(one)[2] == (
        "  pilots    2 starting (their jobs run for up to 12 min, no pilot yet:"
        " read the job output in the session folder's submit/)"
        " · 2 without a pilot (the pilots left up to 1 min ago; the batch system says that the jobs run)"
    )


def test_problems_are_shown_in_the_status():
    sick = replace(NODE.devices[0], fault="gave a wrong matrix product, twice")
    going = replace(
        NODE, devices=(sick, NODE.devices[1]), state="draining", draining="calls take 40 s, its walltime ends in 30 s"
    )
    fetched = ObjectStatus(
        f"file-{'7f3a9c21' * 8}.gguf", 7_100_000_000, 4, 2, 7_100_000_000, 21_300_000_000, "peers cannot reach n021"
    )
    one = replace(
        NOTHING, pilots=(going,), objects=(fetched,), trouble={"backfill": "sbatch has not answered for 30 s"}
    )
    assert status.render(one)[2:] == [
        "  pilots    1 draining (2 a10)",
        "  objects   file-7f3a9c21….gguf   7.1 GB   on 4 pilots, 2 fetch it"
        "   7.1 GB read from its source, 21.3 GB from peers",
        "  trouble   backfill: sbatch has not answered for 30 s",
        "            file-7f3a9c21….gguf: peers cannot reach n021",
        "            n014-ab12 cuda:0 is quarantined: gave a wrong matrix product, twice",
        "",
        "  n014-ab12  2 devices                                   walltime 1 h 4 min  2.9 calls/s"
        "  draining: calls take 40 s, its walltime ends in 30 s",
        "             cuda:0 a10  -  ▇▇▇▇▇▇▁▁ 18.0 GB of 24.0 GB                                   quarantined",
        "             cuda:1 a10  -  ▁▁▁▁▁▁▁▁ 0 of 24.0 GB",
    ]
    well = replace(going, devices=(NODE.devices[1],))
    told = status.render(replace(NOTHING, pilots=(well,)))
    assert told[-1].endswith("draining: calls take 40 s, its walltime ends in 30 s")


def test_session_status_is_equal_in_a_program_and_in_the_cli():
    assert str(BUSY) == "\n".join(status.render(BUSY))
    assert str(Story("n014", True, "here", (StoryLine(0.0, "joined"),))).startswith("n014  here\n  19")


def test_consecutive_job_ids_are_shown_as_a_range():
    assert show_status.format_job_ids(["88124", "88123", "88125", "88140", "88123"]) == "88123-88125, 88140"
    assert show_status.format_job_ids(["7.0", "8.0"]) == "7.0, 8.0"
    assert show_status.format_job_ids(str(number) for number in range(0, 40, 2)) == "0, 2, 4, 6, 8, 10, and 14 more"
    assert show_status.format_job_ids([]) == ""


HOLDER = LeaseHolder(host="login1", machine="m", pid=4121, started=1, token="t")
BACKFILL = Site(name="backfill", provider=Provider(kind=ProviderKind.SLURM, partition="backfill"))


def test_up_prints_the_manager_host_and_the_queued_jobs():
    jobs = tuple(block(f"b{n}", BlockPhase.PENDING, reason="Priority", expected_in_s=660) for n in range(88123, 88131))
    now = datetime.datetime(2026, 11, 21, 10, 31)
    folder = SessionFolder("/home/ana/k3v9")
    assert up.render_session(replace(NOTHING, jobs=jobs), HOLDER, [BACKFILL], folder=folder, now=now) == [
        "session k3v9 is up: manager here (pid 4121), 8 blocks submitted to backfill (jobs 88123-88130)",
        "  queued   8   Priority; the first is expected at 10:42 (in 11 min)",
        'use it: stoker.load(session="k3v9") in a program, or stoker run APP --session k3v9',
        "log out any time: `stoker attach k3v9` works on any login node that sees /home/ana/k3v9,"
        " `stoker down k3v9` ends the session",
    ]


def test_up_reports_why_submitted_jobs_ended():
    over = replace(NOTHING, ended_blocks={"exit code 1": 2}, trouble={"backfill": "it failed"})
    why = "block of source backfill: ended: exit code 1: module: command not found"
    lines = up.render_session(
        over, HOLDER, [BACKFILL], folder=SessionFolder("/s"), now=datetime.datetime.now(), why=why
    )
    assert lines[1:] == [
        "  trouble  backfill: it failed",
        "  ended    2 exit code 1",
        "no pilot has joined; the first job ended: exit code 1: module: command not found",
        "fix the site file and start another session",
        "the job's output: stoker logs b1 k3v9; end the session: stoker down k3v9",
    ]


def test_up_fails_only_if_every_submission_was_refused():
    def refused(**more: Any) -> bool:
        return up.is_first_job_refused(replace(NOTHING, **({"ended_blocks": {"refused": 1}} | more)))

    assert refused()
    assert refused(jobs=(block("b2", BlockPhase.ASKED),)), "the next block has been requested in the meantime"
    assert not refused(jobs=(block("b2", BlockPhase.PENDING),)), "another site has started a block"
    assert not refused(pilots=(NODE,))
    assert not refused(ended_blocks={"refused": 1, "preempted": 1})
    assert not refused(ended_blocks={})


def test_down_reports_finished_work_and_ended_jobs():
    jobs = (block("b1", BlockPhase.RUNNING, job="7"), block("b2", BlockPhase.PENDING, job="8"))
    before = replace(BUSY, cancelled=2, jobs=jobs)
    assert down.describe_ended_session(before, name="k3v9") == (
        "session k3v9 has ended: 10,412 calls done, 3 failed, 51,330 cancelled, 1 pilot released, 2 jobs ended;"
        " no process or job remains"
    )
    one = replace(NOTHING, done=1)
    assert (
        down.describe_ended_session(one, name="k3v9")
        == "session k3v9 has ended: 1 call done; no process or job remains"
    )
    assert down.describe_ended_session(None, name="k3v9") == "session k3v9 has ended already; no process or job remains"


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"lost_pilots": 1, "rerun_calls": 1}, "1 pilot, 1 call run again, 0 results lost"),
        (
            {"lost_pilots": 4, "rerun_calls": 61, "losses": {"preempted": 3, "node failed": 1}},
            "4 pilots (3 preempted, 1 node failed), 61 calls run again, 0 results lost",
        ),
        ({"lost_pilots": 2, "rerun_calls": 0}, "2 pilots, 0 calls run again, 0 results lost"),
        ({"lost_pilots": 0, "rerun_calls": 3}, "3 calls run again, 0 results lost"),
    ],
)
def test_losses_are_grouped_by_reason(facts: dict[str, Any], line: str):
    assert f"  losses    {line}" in status.render(replace(NOTHING, **facts))
    assert not any("losses" in shown for shown in status.render(NOTHING))


def test_ended_session_shows_no_forecasts():
    lines = status.render(BUSY, has_ended=True)
    assert lines[0].startswith("session k3v9 · was up 2 h 14 min")
    assert "done in about" not in lines[0]
    assert not any("waits:" in line for line in lines)


def test_explanation_prints_times_and_each_new_date():
    today = datetime.datetime.combine(datetime.date.today(), datetime.time(10, 22, 7))
    yesterday = today - datetime.timedelta(days=1)
    lines = (
        StoryLine(yesterday.timestamp(), "submitted"),
        StoryLine(today.timestamp(), "sent to lib-3\nwhere it is hot"),
    )
    found = show_status.format_explanation_lines(
        Story("c-12", True, "verify  wants llm-7f3a", lines), today=today.date()
    )
    assert found == [
        "call c-12  verify  wants llm-7f3a",
        f"  {yesterday:%Y-%m-%d}",
        "  10:22:07  submitted",
        f"  {today:%Y-%m-%d}",
        "  10:22:07  sent to lib-3",
        "            where it is hot",
    ]
    pilot = show_status.format_explanation_lines(Story("n014", True, "here", lines[1:]), today=today.date())
    assert pilot[:2] == ["n014  here", "  10:22:07  sent to lib-3"]


def test_libraries_that_died_with_a_call_are_found_in_its_history():
    texts = ["submitted to lib-1", "its library died (lib-2 on n was killed by SIGKILL), 1 of 2", "sent to lib-3"]
    assert logs.find_dead_libraries(texts) == ["lib-2"]


GROUPS = (
    FailureGroup("verify", "ValueError", "/a/claims.py:31 in verify", 3_211, "c-9000", "ValueError: no", 7_200.0, 3.0),
    FailureGroup("crash", "poison (SIGSEGV)", "", 1, "c-7", "it ended its library 2 times", 60.0, 60.0),
)
FAILED = Calls(
    "k3v9", 1, 0, 3_212,
    (
        ListedCall("c-9001", "verify", "llm", ListedState.RUNNING, 2.0, ("n1/lib-1",)),
        ListedCall("c-9000", "verify", "llm", ListedState.FAILED, 3.0, error="ValueError: no"),
    ),
    GROUPS,
)  # fmt: skip


def test_failed_calls_are_shown_in_groups():
    assert calls.render_calls(FAILED)[3:] == [
        "",
        "  3,211 x  verify  ValueError at /a/claims.py:31 in verify  2 h to 3.0 s ago, the last is c-9000",
        "      ValueError: no",
        "  1 x  crash  poison (SIGSEGV)  1 min ago, the last is c-7",
        "      it ended its library 2 times",
        "  each failed call: stoker calls --all --state failed",
        "",
        "more about a call: stoker explain c-9001 k3v9",
    ]
    shown = calls.render_calls(FAILED, only=ListedState.FAILED, limit=1)
    assert "  … 1 more in 1 other groups; show more groups: --limit N" in shown
    assert shown[-1] == "more about a call: stoker explain c-9000 k3v9"


HERE, THERE = "tcp://10.0.0.1:21000", "tcp://10.0.0.2:21000"
SHARED = Site(name="lab")
POOL = Site(
    name="pool",
    provider=Provider(kind=ProviderKind.CONDOR, shared_files=False),
    environment=Environment(kind=EnvironmentKind.PACKED),
)


def test_moved_manager_prints_a_warning_if_pilots_share_no_files():
    said = unreachable_pilots_warning([SHARED, POOL], before=HERE, now=THERE)
    assert "pilots of pool share no files with this host" in said
    assert f"look for it at {HERE}" in said
    assert "attach from its previous host" in said


def test_no_warning_is_printed_if_pilots_can_find_their_manager():
    assert unreachable_pilots_warning([SHARED], before=HERE, now=THERE) == ""
    assert unreachable_pilots_warning([SHARED, POOL], before=HERE, now=HERE) == ""


LINE = b"%06d a line that some call printed\n"


def test_missing_log_section_of_a_call_is_reported(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]):
    log = tmp_path / "lib-1.log"
    log.write_bytes(b"".join(LINE % number for number in range(1_200_000)))
    size = log.stat().st_size
    assert free_file_middle(log, most_bytes=1 << 20)
    logs._print_part("c-1", log, start=10 << 20, end=11 << 20)
    out, err = capfdbinary.readouterr()
    assert out == b""
    assert b"1.0 MB of the output of c-1 are lost" in b" ".join(err.split())
    logs._print_part("c-2", log, start=(1 << 20) - len(LINE % 0), end=size)
    out, err = capfdbinary.readouterr()
    assert out.endswith(LINE % 1_199_999)
    assert b"of the output of c-2 are lost" in b" ".join(err.split())
    logs._print_part("c-3", log, start=0, end=len(LINE % 0))
    assert capfdbinary.readouterr() == (LINE % 0, b"")
