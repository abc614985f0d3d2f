import datetime
import fcntl
import os

import msgspec
import pytest

from stoker.apps.prompt_tuning import board, report
from stoker.apps.prompt_tuning.board import BoardEntry, BoardRow, JobDisplay, JobPhase, read_board, write_entry
from stoker.apps.prompt_tuning.watch import SessionPicture, read_saved_state, update_entry
from stoker.console import Screen
from stoker.contexts import payloads
from stoker.errors import ConfigError
from stoker.manager.executor.futures import CallFuture
from stoker.protocol.calls import CallForecast, CallProgress, ListedCall, ListedState
from stoker.protocol.ids import CallId
from stoker.protocol.status import ContextStatus
from stoker.tuning import order
from stoker.tuning.order import InitialPrompt, Saved

NOON = datetime.datetime(2026, 11, 22, 12).timestamp()
JOB = BoardEntry(
    name="facts", iterations=500, metric_name="accuracy", reach=0.9, submitted_at=NOON, deadline_at=NOON + 600
)


def sent(*said):
    future = CallFuture(None)
    future.call = CallId(1)
    for one in said:
        future.report(one)
    return future


def progress(done, *, metric=None):
    state = payloads.dumps(order.pack(Saved(InitialPrompt("x"), b"y", metric)), what="checkpoint")
    return CallProgress(1, done, 500.0, 0.5, b"" if metric is None else state)


def listed(call="c-1", *, state=ListedState.WAITING, since_s=5.0, where=()):
    return ListedCall(call, "tune_prompt", "llm", state, since_s, where)


def context(*, hot=0, loading=0, queued=1, running=0, waits_for="no pilot has joined yet"):
    return ContextStatus(
        key="k", name="llm", hot=hot, loading=loading, queued=queued, running=running, loads=0, ended=0, load_s=0.0,
        load_total_s=0.0, run_s=0.0, run_total_s=0.0, memory_bytes=0, waits_for=waits_for,
    )  # fmt: skip


def picture(*calls, **more):
    return SessionPicture(calls, (context(**more),), {"llm": ("cpu:0",)} if more.get("loading") else {})


def seen(entry, at, *, call=None, of=None):
    return update_entry(entry, call=call or sent(), picture=of, now=NOON + at)


def test_waiting_job_shows_the_reason_of_its_wait():
    assert seen(JOB, 1, of=picture(listed())).why == "no pilot has joined yet"
    behind = seen(JOB, 1, of=picture(listed("c-0"), listed()))
    assert (behind.phase, behind.why) == (JobPhase.QUEUED, "1 job before it")
    assert seen(JOB, 1, of=picture(listed(), hot=2, running=2)).why == "its 2 hot devices are busy"
    assert seen(JOB, 1, of=picture(listed(), hot=1)).why == "waiting for devices to be assigned", "it is the only job"
    assert "kept for a job with an earlier deadline" in seen(JOB, 1, of=picture(listed(), hot=1, queued=2)).why
    loading = seen(JOB, 1, of=picture(listed(), loading=1))
    assert (loading.phase, loading.why) == (JobPhase.LOADING, "its model loads on cpu:0")
    assert update_entry(JOB, call=None, picture=None, now=NOON) == JOB


def test_last_checkpoint_is_kept_if_later_reports_have_no_checkpoint():
    future = sent(progress(2, metric=0.5), progress(9))
    assert (future.progress.done, read_saved_state(future.progress).metric) == (9, 0.5)
    assert read_saved_state(sent(progress(9)).progress) is None
    assert read_saved_state(sent(progress(2, metric=0.5), progress(3, metric=0.7)).progress).metric == 0.7


def test_end_of_a_job_is_estimated_by_its_pace_or_the_forecast():
    running = picture(listed(state=ListedState.RUNNING, since_s=10.0, where=("a/lib-1", "b/lib-2")))
    forecast = CallForecast(1, NOON + 700, False)
    entry = seen(JOB, 30, call=sent(progress(2, metric=0.5), forecast), of=running)
    assert (entry.phase, entry.devices, entry.started_at) == (JobPhase.TUNING, ("a/lib-1", "b/lib-2"), NOON + 20)
    assert (entry.iteration, entry.loss, entry.metric) == (2, 0.5, 0.5)
    assert (entry.ends_at, entry.missed_since, entry.meets_deadline(NOON + 30)) == (NOON + 700, NOON + 30, False)
    shifted = update_entry(JOB, call=sent(forecast), picture=running, now=NOON + 30, ahead_s=-60.0)
    assert shifted.ends_at == NOON + 640, "the job's clock is behind the wall clock, which the forecast uses"
    later = seen(entry, 50, call=sent(progress(102), forecast), of=running)
    assert later.ends_at == NOON + 50 + 398 * 20 / 100
    assert (later.meets_deadline(NOON + 50), later.missed_since) == (True, None)
    assert later.metric == 0.5
    # Without a new report, the forecast end does not move with the clock.
    assert seen(later, 52, call=sent(progress(102), forecast), of=running).ends_at == later.ends_at
    assert later.restarts == 0
    # The job restarts with one device fewer.
    alone = picture(listed(state=ListedState.RUNNING, where=("a/lib-1",)))
    again = seen(later, 60, call=sent(progress(90), forecast), of=alone)
    assert (again.restarts, again.devices, again.started_at) == (1, ("a/lib-1",), NOON + 20)
    assert again.ends_at == NOON + 700


def test_job_end_is_shown_relative_to_its_deadline():
    now = NOON + 60
    cases = [
        (JOB, "deadline 12:10:00"),
        (replaced(ends_at=NOON + 540), "ends 12:09:00, in time by 1 min (deadline 12:10:00)"),
        (replaced(ends_at=NOON + 720), "ends 12:12:00, late by 2 min (deadline 12:10:00)"),
        (replaced(phase=JobPhase.DONE, ended_at=NOON + 570), "ended 12:09:30, in time by 30 s (deadline 12:10:00)"),
        (replaced(ends_at=NOON + 600.09), "ends 12:10:00, about in time (deadline 12:10:00)"),
        (
            replaced(phase=JobPhase.DONE, ended_at=NOON + 600.09),
            "ended 12:10:00, late by less than a second (deadline 12:10:00)",
        ),
        (replaced(phase=JobPhase.FAILED, ended_at=NOON), "deadline 12:10:00"),
        (replaced(deadline_at=None, ends_at=NOON + 86_400), "ends 2026-11-23 12:00"),
        (replaced(deadline_at=None), ""),
    ]
    for entry, said in cases:
        assert board.format_due_time(entry, now=now) == said
    over = NOON + 600.09
    assert board.format_due_time(replaced(ends_at=over), now=over) == "late by 1.0 s so far (deadline 12:10:00)"
    assert (
        board.format_due_time(replaced(ends_at=NOON + 580), now=NOON + 630) == "late by 30 s so far (deadline 12:10:00)"
    )
    late = replaced(ends_at=NOON + 720)
    assert "the earliest that can be met is 12:12:00, 2 min later; it runs" in board.format_late_notice(
        late, now=now, drops_late_jobs=False
    )
    assert "it is dropped" in board.format_late_notice(late, now=now, drops_late_jobs=True)
    running = replaced(ends_at=NOON + 720, phase=JobPhase.TUNING)
    notice = board.format_late_notice(running, now=over, drops_late_jobs=True)
    assert notice.endswith("its deadline, 12:10:00, has passed; it runs anyway")


def replaced(**changes):
    return msgspec.structs.replace(JOB, **changes)


def test_board_has_a_line_for_each_job():
    tuning = replaced(
        phase=JobPhase.TUNING, iteration=120, loss=0.4123, metric=0.75, devices=("a/lib-1",), ends_at=NOON
    )
    failed = replaced(name="other", phase=JobPhase.FAILED, why="no\nmodel", deadline_at=None)
    lines = board.format_job_board([BoardRow("runs/a", tuning), BoardRow("runs/b", failed, abandoned=True)], now=NOON)
    assert lines[0] == "2 tuning jobs: 1 tuning, 1 failed"
    assert lines[2].split("  ")[1:] == [
        "facts", "tuning", "120/500", "loss 0.412", "accuracy 0.75 of 0.9", "1 device",
        "ends 12:00:00, in time by 10 min (deadline 12:10:00)",
    ]  # fmt: skip
    assert lines[4:6] == ["      no", "      model"]
    assert lines[-1].startswith("other: the submitting program has ended")
    assert "stoker tune submit" in board.format_job_board([], now=NOON)[0]
    many = [BoardRow(f"runs/{at}", replaced(name=f"job-{at}", phase=JobPhase.DONE, ended_at=NOON)) for at in range(5)]
    few = board.format_job_board([BoardRow("runs/a", tuning), *many], now=NOON, most_over=2)
    assert [line.split()[0] for line in few[2:]] == ["…", "facts", "job-3", "job-4"]
    assert few[2].endswith("3 older (--all)")


def test_jobs_are_found_in_their_folders(tmp_path):
    assert read_board(tmp_path / "nothing") == []
    for name, at, phase in (("b", 2.0, JobPhase.DONE), ("a", 1.0, JobPhase.TUNING), ("c", 3.0, JobPhase.TUNING)):
        write_entry(tmp_path / name, replaced(name=name, submitted_at=at, phase=phase))
        (tmp_path / name / ".lock").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "state.json").write_text("{")
    held = os.open(tmp_path / "c" / ".lock", os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    found = read_board(tmp_path)
    assert [(one.entry.name, one.abandoned) for one in found] == [("a", True), ("b", False), ("c", False)]
    os.close(held)
    assert [one.entry.name for one in read_board(tmp_path / "b")] == ["b"]
    with pytest.raises(ConfigError, match="is not a folder of runs"):
        read_board(tmp_path / "a" / "state.json")


def test_job_shows_its_wait_for_the_model_and_its_lookup():
    entry = replaced(looks_up=True)
    for at, of in ((2, listed()), (3, listed()), (9, listed())):
        entry = seen(entry, at, of=picture(of, loading=1))
    assert (entry.loading_at, entry.loading_s) == (NOON + 2, 0.0)
    queued = seen(entry, 10, of=picture(listed(), hot=1))
    assert (queued.loading_at, queued.loading_s) == (None, 8.0)
    running = listed(state=ListedState.RUNNING, since_s=1.0, where=("a/lib-1",))
    started = seen(entry, 12, of=picture(running))
    assert (started.started_at, started.loading_s) == (NOON + 11, 9.0)
    assert "looks up its prompt" in board.format_job_table([started], now=NOON + 12)[0]
    assert "  begins  " in board.format_job_table([msgspec.structs.replace(started, looks_up=False)], now=NOON + 12)[0]
    told = seen(started, 20, call=sent(progress(0)), of=picture(running))
    assert "0/500" in board.format_job_table([told], now=NOON + 20)[0]
    assert told.loss == 0.5
    begun = CallProgress(1, 3, 500.0)
    assert seen(told, 25, call=sent(begun), of=picture(running)).loss == 0.5, "a restarted job has no loss yet"
    again = seen(told, 30, of=picture(listed(), loading=1))
    assert (again.loading_at, seen(again, 40, of=picture(running)).loading_s) == (NOON + 30, 9.0)


SPENT_S = {"bank": 30.0, "start": 0.1, "data": 0.5, "compute": 470.0, "communication": 9.5, "evaluation": 60.0}
RESULT = report.TuningResult(
    metric="accuracy", reach=None, end="iterations", iterations=240, iterations_to_accuracy=None, initial="say",
    initial_from="the bank", text="say", held_out={"metric": 0.5}, devices=2, communication_share=0.02, spent_s=SPENT_S,
)  # fmt: skip


def test_report_shows_how_a_job_spent_its_time():
    done = replaced(
        phase=JobPhase.DONE, started_at=NOON + 9, ended_at=NOON + 580, loading_s=8.0, devices=("a/lib-1", "b/lib-2")
    )
    assert report.explain_outcome(report.JobOutcome("runs/x", done, RESULT)) == [
        "waited 1.0 s for devices, and 8.0 s for its model to load",
        "ran 9 min 31 s on 2 devices: 30 s with the prompt bank, 240 iterations of 2.0 s, 1 min of evaluations",
    ]
    lines = report.format_report([report.JobOutcome("runs/x", done, RESULT)], now=NOON)
    assert any("240 iterations, no target was set; ranks exchanged gradients for 2% of that time" in x for x in lines)


def test_report_says_why_a_deadline_was_missed():
    done = replaced(
        phase=JobPhase.DONE, started_at=NOON + 90, ended_at=NOON + 750, missed_since=NOON + 60, restarts=1,
        devices=("a/lib-1",),
    )  # fmt: skip
    waited, ran, again, late = report.explain_outcome(report.JobOutcome("runs/x", done, RESULT))
    assert waited == "waited 1 min 30 s for devices"
    assert ran.startswith("ran 11 min on 1 device: 30 s with")
    assert again == "was started again 1 time, from its last checkpoint; 1 min 30 s were lost between its starts"
    assert late == "late: it had 10 min; that was known after 1 min"
    soon = msgspec.structs.replace(done, ended_at=NOON + 665)
    assert (
        "in time without the wait of 1 min 30 s"
        in report.explain_outcome(report.JobOutcome("runs/x", soon, RESULT))[-1]
    )
    near = msgspec.structs.replace(done, started_at=NOON + 10, ended_at=NOON + 680)
    assert (
        "in time if it had not been interrupted"
        in report.explain_outcome(report.JobOutcome("runs/x", near, RESULT))[-1]
    )
    short = msgspec.structs.replace(done, deadline_at=NOON + 20)
    assert (
        "it had 20 s, which is less than its iterations need"
        in report.explain_outcome(report.JobOutcome("runs/x", short, RESULT))[-1]
    )
    early = replaced(phase=JobPhase.DONE, started_at=NOON + 90, ended_at=NOON + 300, devices=("a", "b"))
    failed = replaced(name="bad", phase=JobPhase.FAILED, ended_at=NOON + 1, why="its prompt is too long")
    lines = report.format_report([report.JobOutcome("runs/x", entry) for entry in (done, early, failed, JOB)], now=NOON)
    assert lines[0] == "4 tuning jobs · 1 of 3 deadlines met, 1 not over yet"
    assert "  facts   done at 12:12:30, late by 2 min 30 s (deadline 12:10:00)" in lines
    assert "    ran 3 min 30 s on 2 devices" in lines
    assert "  bad   failed: no tuned prompt" in lines
    assert "    its prompt is too long" in lines
    facts = report.job_outcome_to_json(report.JobOutcome("runs/x", done, RESULT), now=NOON)
    assert facts["in_time"] is False
    assert facts["why"].endswith("; late: it had 10 min; that was known after 1 min")


def test_output_to_a_pipe_prints_each_change_of_a_job_once(capsys):
    shown = JobDisplay(Screen(terminal=False), drops_late_jobs=False, place=None)
    due, end = NOON * 2, NOON * 4
    late = replaced(phase=JobPhase.TUNING, deadline_at=due, ends_at=end)
    in_time = msgspec.structs.replace(late, ends_at=due)
    for entry in (late, late, in_time, late, msgspec.structs.replace(late, phase=JobPhase.DONE, ended_at=NOON)):
        shown.show_jobs([entry])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["facts", "cannot"], ["facts", "tuning"], ["facts", "done"]]
