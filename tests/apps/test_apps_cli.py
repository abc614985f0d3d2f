import gzip
import json
import random
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

from stoker.apps.common.calls import StoppedBySignal, raise_on_signals
from stoker.apps.common.command_line import align_next_steps, format_command
from stoker.apps.common.runner import RunAttempt
from stoker.apps.fact_verification.cli import command as facts
from stoker.apps.fact_verification.options import VerificationOptions
from stoker.apps.fact_verification.run import _suggest_next_commands
from stoker.apps.inference_sweep.cli import command as sweep
from stoker.console import Progress, Screen
from stoker.errors import ConfigError, RecipeError
from stoker.sessions import ContextFacts
from stoker.units import show_seconds


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--batch-size", "0"], "0 is not a whole number from 1 to"),
        (["--awareness", "some"], "'some' is not one of 'none', 'disk', 'full'"),
        (["--all", "--limit", "5"], "--all and --limit exclude each other"),
        (["--resume", "a", "--fresh"], "leave --out and --fresh out"),
    ],
)
def test_contradictory_options_are_refused(here, arguments, says):
    result = CliRunner().invoke(facts, arguments)
    assert result.exit_code == 2
    assert says in result.output
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        (["--claims", "no.csv"], ConfigError, "no.csv: no such file"),
        (["--prompts", "no.toml"], ConfigError, "no.toml: no such file"),
        (["--model", "./no-model"], RecipeError, "no-model"),
        (["--resume", "."], ConfigError, "is not a run folder"),
        (["--claims", "bad.csv"], ConfigError, "line 2: label is 'PERHAPS'"),
        (["--claims", "cut.jsonl.gz"], ConfigError, "cut.jsonl.gz: is truncated before its first row"),
        (["--claims", "some.csv", "--prompts", "evidence.toml"], ConfigError, "line 3: claim 3 has no evidence"),
    ],
)
def test_unusable_input_changes_no_file(here, arguments, kind, says):
    (here / "bad.csv").write_text("claim,label\nA.,PERHAPS\n")
    (here / "cut.jsonl.gz").write_bytes(gzip.compress(b"\xff" + random.Random(1).randbytes(5000))[:100])
    (here / "some.csv").write_text("claim,label,evidence\nA.,SUPPORTS,x\nB.,SUPPORTS,\n")
    (here / "evidence.toml").write_text("[[prompts]]\nname = 'e'\ntext = '{evidence} {claim}'\n")
    before = sorted(path.name for path in here.iterdir())
    result = CliRunner().invoke(facts, arguments)
    assert isinstance(result.exception, kind)
    assert says in str(result.exception)
    assert sorted(path.name for path in here.iterdir()) == before


def test_invalid_sweep_changes_no_file(here):
    (here / "s.toml").write_text("[[modls]]\n")
    result = CliRunner().invoke(sweep, ["--sweep", "s.toml"])
    assert isinstance(result.exception, ConfigError)
    assert "modls is not a setting; did you mean models?" in str(result.exception)
    assert [path.name for path in here.iterdir()] == ["s.toml"]


def test_hint_uses_make_if_the_run_was_started_by_make(monkeypatch):
    monkeypatch.delenv("MAKELEVEL", raising=False)
    assert format_command("app", "--all", through_make=True) == "stoker run app --all"
    monkeypatch.setenv("MAKELEVEL", "1")
    assert format_command("app", "--all", through_make=True) == 'make run ARGS="--all"'
    assert format_command("app", "--all") == "stoker run app --all"
    assert align_next_steps([("a", "x"), ("long", "y")]) == ["  next: a      x", "        long   y"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_second_signal_does_not_interrupt_the_shutdown(number):
    before = signal.getsignal(number)
    with raise_on_signals():
        with pytest.raises(StoppedBySignal):
            signal.raise_signal(number)
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_stdout_has_only_json_and_stderr_has_the_other_lines(capsys):
    screen = Screen(json_only=True, terminal=False)
    screen.line("for people")
    screen.json({"claims": 3})
    out, err = capsys.readouterr()
    assert json.loads(out) == {"claims": 3}
    assert err == "for people\n"


def test_progress_display_names_what_the_run_waits_for():
    facts = ContextFacts(names=("llm-a",), loading=2, loading_on=("cpu:0", "cpu:1"), pilots=1, devices=2)
    progress = Progress(total=600, done=212, noun="claims", facts=lambda: ContextFacts(waits_for="no pilot yet"))
    progress.refresh()
    assert progress.waiting() == "waiting for the first pilot: no pilot yet"
    progress = Progress(total=600, done=212, noun="claims", facts=lambda: facts)
    progress.refresh()
    assert progress.waiting() == "context llm-a   loading on cpu:0, cpu:1 …"
    assert progress.numbers() == "212/600   hot 0/2"
    facts = ContextFacts(names=("llm-a",), hot=2, loads=2, load_total_s=0.8, pilots=3, devices=2)
    progress.refresh()
    assert progress.waiting() == "context llm-a   hot, 2 loads of 0.4 s"
    assert progress.numbers() == "212/600   hot 2/2   3 pilots"
    facts = ContextFacts(waits_for="no pilot yet")
    progress.refresh()
    assert progress.waiting() == "waiting for a pilot: no pilot yet"
    progress.advance(8)
    progress.end()
    assert (progress.numbers(), progress.waiting()) == ("220/600", "")


GONE = "no pilot is connected any more (the last one, p1, {} ago: its job was preempted; block b2: queued for {})"


def lines_of(progress, facts, polls, *, first_at=0.0):
    """Refresh the display `polls` times, twice a second; return plain lines with their times. `facts(now)` returns the
    status.
    """
    lines = []
    for look in range(polls):
        now = first_at + look / 2
        progress._ask = lambda now=now: facts(now)
        progress.refresh()
        if line := progress.due_line(now):
            lines.append((now, line))
    return lines


def test_wait_is_reported_once_a_minute_or_when_its_reason_changes():
    def gone(now):
        return ContextFacts(names=("llm-a",), loads=1, waits_for=GONE.format(show_seconds(now), show_seconds(2 * now)))

    progress = Progress(total=600, done=212, noun="claims", facts=lambda: None)
    hot = ContextFacts(names=("llm-a",), hot=1, loads=1, load_total_s=0.4, pilots=1)
    assert lines_of(progress, lambda _: hot, 200) == [(0.0, "context llm-a   hot, 1 load of 0.4 s")]
    assert [at for at, _ in lines_of(progress, gone, 2 * 150, first_at=100.0)] == [100.0, 160.0, 220.0]
    (line,) = lines_of(progress, gone, 2 * 60, first_at=280.0)
    assert line[1].startswith("waiting for a pilot: no pilot is connected any more (the last one, p1, 4 min 40 s ago")

    def other(now):
        return ContextFacts(loads=1, waits_for=GONE.replace("p1", "p2").format(show_seconds(now), "1.0 s"))

    assert [at for at, _ in lines_of(progress, other, 2, first_at=285.0)] == [285.0], "another pilot has gone"
    assert [at for at, _ in lines_of(progress, lambda _: hot, 2, first_at=290.0)] == [290.0]


def test_progress_display_shows_a_second_counter_as_a_rate(monkeypatch):
    now = 100.0
    monkeypatch.setattr("stoker.console.time.monotonic", lambda: now)
    facts = ContextFacts(names=("llm-a",), hot=1, pilots=1, devices=1)
    progress = Progress(total=100, done=0, noun="requests", facts=lambda: facts, also="tokens")
    progress.refresh()
    progress.advance(1, also=500)
    now = 102.0
    progress.advance(20, also=2000)
    progress.advance(1)  # a request without an answer adds no tokens
    now = 105.0
    assert progress.numbers() == "22/100   11.0 requests/s   1,250 tokens/s   hot 1/1   left 0:06"


def test_suggested_next_command_names_the_same_input_files(here):
    options = VerificationOptions(model="hub/m", claims=str(here / "my claims.csv"), limit=3)
    steps = _suggest_next_commands(options, RunAttempt(), everything=5, prompts=3)
    assert "run fact_verification --model hub/m --claims 'my claims.csv' --all " in steps[0]


def test_commands_start_without_a_gpu_library():
    code = (
        "import sys, stoker.apps.fact_verification.cli, stoker.apps.inference_sweep.cli\n"
        "print(sorted({'torch', 'transformers', 'parsl', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_run_statistics_of_a_joined_session_omit_earlier_work() -> None:
    before = ContextFacts(names=("llm-a",), hot=1, loads=2, load_total_s=8.0, calls=30, devices=1)
    after = ContextFacts(names=("llm-a",), hot=2, loads=3, load_total_s=12.0, calls=37, devices=2)
    mine = after.since(before)
    assert (mine.loads, mine.load_s, mine.calls, mine.found_hot) == (1, 4.0, 7, 6)
    assert (mine.hot, mine.devices) == (2, 2)
