"""What `status`, `explain` and `doctor` print, from what they are told. Pure."""

from __future__ import annotations

import datetime

import msgspec

from stoker.manager.cli import explain, finding, logs, status
from stoker.manager.cli.finding import Finding, Level
from stoker.manager.protocol.to_client import (
    ContextStatus,
    DeviceStatus,
    LibraryStatus,
    PilotStatus,
    Status,
    Story,
    StoryLine,
)

NOTHING = Status(
    session="k3v9", uptime_s=3, queued=0, running=0, done=0, failed=0, rate=0, left_s=0, pilots=(), libraries=(),
    contexts=(), blocks={}, lost_pilots=0, rerun_calls=0, refused={},
)  # fmt: skip
LLM = ContextStatus(
    key="7f3a" * 8, name="llm-7f3a", hot=1, loading=1, queued=51_200, running=2, loads=4, ended=2448, load_s=9.1,
    load_total_s=36.4, run_s=0.2, run_total_s=500, memory_bytes=7_100_000_000, waits_for="the hot library is busy",
)  # fmt: skip
NODE = PilotStatus(
    pilot="n014-ab12", host="n014", block="0", state="here", folder="/tmp/x", ended=240, rate=2.9, ends_in_s=3840,
    devices=(
        DeviceStatus("cuda:0", "a10", 24_000_000_000, 18_000_000_000, (1,)),
        DeviceStatus("cuda:1", "a10", 24_000_000_000, 0, ()),
        DeviceStatus("cpu:0", "cpu", 8_000_000_000, 8_000_000_000, (2,)),
    ),
)  # fmt: skip
BUSY = msgspec.structs.replace(
    NOTHING, uptime_s=8040, queued=51_200, running=128, done=10_412, failed=3, rate=38.2, left_s=1320,
    pilots=(NODE,), contexts=(LLM,), blocks={"0": "running", "1": "pending: Priority"}, lost_pilots=9, rerun_calls=61,
    refused={"a frame that is not in the protocol": 2},
    libraries=(
        LibraryStatus(1, "llm-7f3a", "ready", "", "n014-ab12", ("cuda:0",), 1, 240, 1, 1),
        LibraryStatus(2, "llm-7f3a", "loading", "fetching", "n014-ab12", ("cpu:0",), 0, 0, 0, 0),
    ),
)  # fmt: skip


def test_calls_that_were_cancelled_did_not_fail() -> None:
    one = msgspec.structs.replace(NOTHING, done=9, failed=1, cancelled=2)
    assert "9 calls done (1 failed, 2 cancelled), 0 running" in status.render(one)[0]
    assert "9 calls done (2 cancelled)" in status.render(msgspec.structs.replace(one, failed=0))[0]


def test_an_empty_session_is_two_short_lines() -> None:
    assert status.render(NOTHING) == [
        "session k3v9 · up 3.0 s · 0 calls done, 0 running, 0 queued",
        "",
        "  pilots    none",
    ]


def test_a_busy_session_says_all_of_it() -> None:
    assert status.render(BUSY) == [
        "session k3v9 · up 2 h 14 min · 10,412 calls done (3 failed), 128 running, 51,200 queued"
        " · 38.2 calls/s · done in about 22 min",
        "",
        "  pilots    1 here · block 1: pending: Priority",
        "  contexts  llm-7f3a   1 hot, 1 loading   7.1 GB each   4 loads of 9.1 s   used 612 times a load"
        "   51,200 queued",
        "  losses    9 pilots, 61 calls run again, 0 results lost",
        "  refused   2 a frame that is not in the protocol",
        "",
        "  llm-7f3a waits: the hot library is busy",
        "",
        "  n014-ab12  cuda:0 a10  llm-7f3a             ▇▇▇▇▇▇▁▁ 18.0 GB of 24.0 GB  walltime 1 h 4 min  2.9 calls/s",
        "             cuda:1 a10  -                    ▁▁▁▁▁▁▁▁ 0 of 24.0 GB",
        "             cpu:0       llm-7f3a (fetching)  ▇▇▇▇▇▇▇▇ 8.0 GB of 8.0 GB",
    ]


def test_a_session_that_is_over_makes_no_promises() -> None:
    lines = status.render(BUSY, over=True)
    assert lines[0].startswith("session k3v9 · was up 2 h 14 min")
    assert "done in about" not in lines[0]
    assert not any("waits:" in line for line in lines)


def test_a_story_has_times_and_the_date_where_it_changes() -> None:
    today = datetime.datetime.combine(datetime.date.today(), datetime.time(10, 22, 7))
    yesterday = today - datetime.timedelta(days=1)
    lines = (
        StoryLine(yesterday.timestamp(), "submitted"),
        StoryLine(today.timestamp(), "sent to lib-3\nwhere it is hot"),
    )
    assert explain.render(Story("c-12", True, "verify  wants llm-7f3a", lines)) == [
        "call c-12  verify  wants llm-7f3a",
        f"  {yesterday:%Y-%m-%d}",
        "  10:22:07  submitted",
        f"  {today:%Y-%m-%d}",
        "  10:22:07  sent to lib-3",
        "            where it is hot",
    ]
    assert explain.render(Story("n014", True, "here", lines[1:]))[:2] == ["n014  here", "  10:22:07  sent to lib-3"]


def test_where_a_call_printed_is_read_from_its_story() -> None:
    places = logs.printed(
        ["submitted", "printed /s/pilots/n 1:2/lib-3.log:10-52", "ended; printed /a.log:0-0 (nothing)", "printed x:1-2"]
    )
    assert [(str(path), start, end) for path, start, end in places] == [
        ("/s/pilots/n 1:2/lib-3.log", 10, 52),
        ("/a.log", 0, 0),
    ]


def test_the_libraries_that_a_call_took_with_it_are_read_from_its_story() -> None:
    texts = ["submitted to lib-1", "its library died (lib-2 on n was killed by SIGKILL), 1 of 2", "sent to lib-3"]
    assert logs.died(texts) == ["lib-2"]


def test_findings_stand_with_their_fixes_and_a_verdict() -> None:
    good = Finding("python", Level.OK, "Python 3.12")
    bad = Finding("sockets", Level.NEED, "no CURVE", "pip install pyzmq")
    odd = Finding("files", Level.WARN, "few files", "ulimit -n 4096")
    assert finding.render([good, bad, odd]) == [
        "  ok    Python 3.12",
        "  need  no CURVE",
        "        pip install pyzmq",
        "  warn  few files",
        "        ulimit -n 4096",
        "",
        "1 thing missing that Stoker needs: each has its fix below it",
    ]
    assert finding.render([good, odd])[-1].startswith("ready, with 1 warning;")
    assert finding.render([good])[-1].startswith("ready; ")
