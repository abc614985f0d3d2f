from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from cli.command_line import Stoker
from live.peers import Manager, Peer, key_pair, session_folder
from polling import PATIENCE_S

from stoker.config import parse_site
from stoker.errors import SessionError
from stoker.manager.cli import ask
from stoker.manager.cli.ask import Observer, SessionEndedError
from stoker.manager.core.libraries import MAX_FAILED_LOADS
from stoker.manager.live import lease
from stoker.manager.live.session_policies import copy_policies_into_session, create_policies_of_session
from stoker.protocol import to_client, to_pilot, wire
from stoker.protocol import to_manager as say
from stoker.protocol.calls import CallEnd, Failure, FailureKind, OutputRange
from stoker.protocol.session import SessionFile, SessionFolder


def library_log(folder: SessionFolder, text: str) -> Path:
    log = folder.pilot_folder("n014-ab12") / "lib-1.log"
    log.parent.mkdir()
    log.write_text(text)
    return log


def submit_a_call(client: Peer) -> int:
    """Submit the call c-7; return its number."""
    call: int = client.hear(to_client.ClientWelcome).number << 40 | 7
    client.define()
    client.submit(call)
    return call


def run_a_call(client: Peer, pilot: Peer, *, printed: OutputRange | None = None) -> tuple[int, int]:
    """Run the call c-7; return its library and its number."""
    call = submit_a_call(client)
    library = pilot.serve()
    pilot.hear(to_pilot.RunCalls)
    pilot.send(say.CallsEnded(library, [CallEnd(call, True, b"result", 0.01, None, printed)]))
    client.hear(to_client.Results)
    return library, call


def test_live_session_is_shown_and_explained(stoker: Stoker, folder: SessionFolder, client: Peer, pilot: Peer):
    log = library_log(folder, "before\nmäßig\nafter\n")
    run_a_call(client, pilot, printed=OutputRange(str(log), 7, 15))
    result = stoker.ok("status")
    assert result.output.startswith("session test · up ")
    assert "1 call done, 0 running, 0 queued" in result.output
    assert "n014-ab12  cpu:0" in result.output
    assert "policy" not in result.output
    told = msgspec.json.decode(stoker("status", "--json").output)
    assert (told["over"], told["policy"]) == ("", "default")
    assert told["status"]["done"] == 1
    assert [pilot["pilot"] for pilot in told["status"]["pilots"]] == ["n014-ab12"]
    assert stoker.ok("explain", "n014-ab12").output.startswith("n014-ab12  here")
    about_call = stoker.ok("explain", "c-7")
    assert about_call.output.startswith("call c-7  f  wants no context")
    assert "submitted" in about_call.output
    told = msgspec.json.decode(stoker("explain", "c-7", "--json").output)
    assert told["story"]["found"] is True
    assert "did you mean n014-ab12?" in str(stoker("explain", "n014-ab21").exception)
    assert isinstance(stoker("explain", "c-99").exception, SessionError)
    assert stoker.ok("logs", "c-7").stdout == "mäßig\n"
    assert stoker("logs", "lib-1").stdout == "before\nmäßig\nafter\n"
    with Observer(folder) as observer:
        assert observer.status().refused == {}, "queries change nothing"


def test_policy_of_a_session_is_in_its_status_and_its_log(stoker: Stoker, folder: SessionFolder, tmp_path: Path):
    (tmp_path / "mine.py").write_text("from stoker.manager.policies import HottestFirst as Mine\n")
    text = f'[policy]\nname = "exclusive"\ndispatch = "{tmp_path}/mine.py:Mine"\n'
    copy_policies_into_session(folder, [parse_site(text, file="site.toml")])
    with closing(Manager(folder)):
        assert "  policy    exclusive, dispatch mine.py:Mine\n" in stoker("status").output
        told = msgspec.json.decode(stoker("status", "--json").output)
        assert told["policy"] == "exclusive, dispatch mine.py:Mine"
        assert "INFO policy: exclusive, dispatch mine.py:Mine\n" in folder.manager_log.read_text()


def test_all_fields_of_a_users_policies_reach_the_session(folder: SessionFolder, tmp_path: Path):
    text = "import msgspec\nfrom stoker.manager.policies import default_policies\n"
    text += "mine = lambda: msgspec.structs.replace(default_policies(), compares_kinds=False)\n"
    (tmp_path / "mine.py").write_text(text)
    copy_policies_into_session(folder, [parse_site(f'[policy]\nname = "{tmp_path}/mine.py:mine"\n', file="site.toml")])
    assert not create_policies_of_session(folder).compares_kinds


def test_call_of_another_session_is_found_with_its_session_name(
    stoker: Stoker, client: Peer, pilot: Peer, folder: SessionFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    log = library_log(folder, "said\n")
    run_a_call(client, pilot, printed=OutputRange(str(log), 0, 5))
    with closing(Manager(session_folder(tmp_path / "mine" / "runinfo" / "000" / "stoker"), name="own")):
        monkeypatch.chdir(tmp_path / "mine")
        explained = stoker("explain", "c-7")
        assert "call c-7  f" in explained.stdout, explained.exception
        assert "c-7 is not in session own; this is session test" in explained.stderr.replace("\n", " ")
        assert stoker("logs", "c-7").stdout == "said\n"
        nowhere = str(stoker("explain", "c-99").exception)
        assert "no such call in the session; searched sessions own, test" in nowhere
        assert "searched" not in str(stoker("explain", "c-99", "own").exception)


def test_calls_are_listed_by_names_that_explain_accepts(stoker: Stoker, client: Peer, pilot: Peer):
    run_a_call(client, pilot)
    client.submit(*range(8, 48))
    pilot.hear(to_pilot.RunCalls)
    shown = stoker.ok("calls", "--limit", "3")
    lines = [line.split() for line in shown.output.splitlines()]
    running = next(line for line in lines if line[1:2] == ["running"])
    assert (running[0], running[4:7]) == ("c-8", ["f", "no", "context"])
    assert running[7].startswith("n014-ab12/lib-")
    told = msgspec.json.decode(stoker("calls", "--json", "--state", "waiting", "--limit", "2").output)
    assert {call["state"] for call in told["calls"]["calls"]} == {"waiting"}
    assert len(told["calls"]["calls"]) == 2
    assert told["calls"]["running"] + told["calls"]["waiting"] == 40
    stoker.ok("explain", told["calls"]["calls"][0]["call"], "test")


def test_ended_session_is_shown_from_its_journal(stoker: Stoker, manager: Manager, client: Peer, pilot: Peer):
    library, call = run_a_call(client, pilot)
    client.submit(call - 7)
    pilot.hear(to_pilot.RunCalls)
    pilot.send(say.CallsEnded(library, [CallEnd(call - 7, False, b"exception", 0.01)]))
    client.hear(to_client.Results)
    client.send(say.EndSession("done"))
    manager.ended()
    result = stoker.ok("status")
    assert re.search(r"^session test ended at \d\d:\d\d:\d\d \(done\); its last state:$", result.output, re.MULTILINE)
    assert "1 call done" in result.output
    assert "call c-7  f" in stoker.ok("explain", "c-7").output
    shown = stoker("calls").output
    assert shown.startswith("session test ended at")
    assert "1 x  f  an exception" in shown
    assert "the last is c-0" in shown
    shown = stoker("calls", "--all").output
    assert "c-0  failed" in shown
    assert "raised an exception in your code after 0.010 s" in shown


def test_logs_of_a_call_with_a_failed_load_show_the_loader_output(
    stoker: Stoker, folder: SessionFolder, client: Peer, pilot: Peer
):
    log = library_log(folder, "FileNotFoundError: no such model\n")
    submit_a_call(client)
    for _ in range(MAX_FAILED_LOADS):
        library = pilot.hear(to_pilot.StartLibrary).library
        failure = Failure(FailureKind.CONTEXT, "the loader raised", "n014-ab12", library, log=str(log))
        pilot.send(say.LibraryGone(library, failure, loading=True))
    client.hear(to_client.Results)
    result = stoker.ok("logs", "c-7")
    assert result.stdout == "FileNotFoundError: no such model\n"
    assert f"its context could not be loaded; this is the log of the failed load, {log}" in result.stderr
    assert f"its library's log is {log}" in stoker("explain", "c-7").output


def test_ended_session_is_found_from_its_start_folder(stoker: Stoker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for number in ("000", "001"):
        folder = SessionFolder(tmp_path / "runinfo" / number / "stoker")
        folder.create_folders()
        folder.write(SessionFile(f"k{number}", wire.VERSION, "tcp://127.0.0.1:1", key_pair().public))
        folder.manager_log.write_text(f"log of {number}")
        os.utime(folder.file, (int(number) + 1, int(number) + 1))
    assert stoker("logs", "manager").output == "log of 001"
    assert stoker("logs", "manager", "--session", "k000").output == "log of 000"
    assert isinstance(stoker("logs", "--session", "zz").exception, SessionError)


def test_session_of_a_killed_manager_counts_as_ended(stoker: Stoker, manager: Manager, client: Peer):
    client.hear(to_client.ClientWelcome)
    manager.kill()
    assert "session test ended at" in stoker("status").output


def test_ended_session_with_an_unreadable_journal_is_reported(stoker: Stoker, folder: SessionFolder):
    folder.write(SessionFile("gone", wire.VERSION, "tcp://127.0.0.1:1", key_pair().public))
    with pytest.raises(SessionEndedError, match="session gone ended at"):
        Observer(folder)
    assert "left no journal" in str(stoker("status").exception)
    folder.journal.write_bytes(os.urandom(4096))
    for command in (["status"], ["explain", "c-1"]):
        result = stoker(*command)
        assert isinstance(result.exception, SessionError)
        assert "\n" not in str(result.exception)
        assert str(folder.path) in str(result.exception)


def test_unresponsive_manager_raises_a_clear_error(
    stoker: Stoker, folder: SessionFolder, monkeypatch: pytest.MonkeyPatch
):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        folder.write(SessionFile("test", wire.VERSION, f"tcp://127.0.0.1:{silent.getsockname()[1]}", key_pair().public))
        lease.take_lease(folder.lease)
        with pytest.raises(
            SessionError, match=r"does not answer within 0\.2 s; its log may show why: .*manager\.log"
        ) as why:
            Observer(folder, timeout_s=0.2).__enter__()
    assert f"kill it (kill -9 {os.getpid()}): its program, or `stoker attach {folder.path}`" in str(why.value)


def test_client_with_a_wrong_key_is_refused_with_the_reason(
    stoker: Stoker, manager: Manager, monkeypatch: pytest.MonkeyPatch
):
    folder, file, key = manager.folder, manager.folder.read(), manager.folder.read_key("client")
    folder.write_key("client", key_pair())
    with pytest.raises(SessionError, match="does not answer"):
        Observer(folder, timeout_s=0.3).__enter__()
    folder.write_key("client", key)
    folder.write(msgspec.structs.replace(file, session="other"))
    with pytest.raises(SessionError, match="this is session test"):
        Observer(folder).__enter__()
    folder.write(msgspec.structs.replace(file, protocol=wire.VERSION - 1))
    monkeypatch.setattr(ask.wire, "VERSION", wire.VERSION + 1)  # the hello of this command has this version
    refused = stoker("down", str(folder.path))
    assert isinstance(refused.exception, SessionError)
    assert "both sides need the same version of Stoker" in str(refused.exception)
    assert f"its manager (pid {manager.process.pid} on " in str(refused.exception)


def test_logs_command_lists_and_follows_until_ctrl_c(stoker: Stoker, manager: Manager):
    listed = stoker("logs")
    assert "manager  " in listed.output
    assert str(manager.folder.manager_log) in listed.output
    assert "listens on" in stoker("logs", "manager").output
    assert "did you mean manager?" in str(stoker("logs", "managr").exception)
    assert stoker("logs", "-f").exit_code == 2
    of_call = stoker("logs", "c-1", "-f")
    assert of_call.exit_code == 2, of_call.output
    assert "--follow cannot follow a call" in of_call.output
    grown = manager.folder.pilot_folder("n1") / "pilot.log"
    grown.parent.mkdir()
    grown.write_text("one\n")
    command = [sys.executable, "-m", "stoker.manager.cli.main", "logs", "n1", "-f"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as following:
        assert following.stdout.readline() == b"one\n"
        with grown.open("a") as file:
            file.write("two\n")
        assert following.stdout.readline() == b"two\n"
        following.send_signal(signal.SIGINT)
        assert b"".join(following.communicate(timeout=PATIENCE_S)).strip() == b""
    assert following.returncode == 130


def test_logs_command_shows_the_output_of_batch_jobs(stoker: Stoker, manager: Manager):
    folder = manager.folder
    folder.submit.mkdir(exist_ok=True)
    (folder.submit / "stoker-test-b1.err").write_text("module: command not found\n")
    (folder.submit / "stoker-test-b1.out").write_text("")
    (folder.path / "factory.log").write_text("block b1: submitted as job 7\n")
    (folder.submit / "stoker-test-b10.err").write_text("another job\n")
    assert "b1.err  " in stoker("logs").output
    assert stoker("logs", "b1").output == "module: command not found\n"
    (folder.submit / "stoker-test-b1.out").write_text("on n014\n")
    both = stoker("logs", "b1")
    assert sorted(both.stdout.splitlines()) == ["module: command not found", "on n014"]
    assert sorted(both.stderr.splitlines()) == ["b1.err:", "b1.out:"]
    assert stoker("logs", "b1.out").output == "on n014\n"
    assert str(stoker("logs", "b1", "-f").exception) == "b1 matches b1.err, b1.out; write one of these names"
    assert "no call, pilot, library, context or block of this name" in str(stoker("logs", "b7").exception)
    assert stoker("logs", "factory").output == "block b1: submitted as job 7\n"


def test_empty_journal_does_not_hide_the_answer_of_the_manager(stoker: Stoker, manager: Manager, client: Peer):
    client.hear(to_client.ClientWelcome)
    manager.folder.journal.rename(manager.folder.path / "elsewhere")
    manager.folder.journal.touch()
    for command in (["explain", "b7"], ["logs", "b7"], ["logs", "c-77"]):
        said = str(stoker(*command).exception)
        assert "of this name" in said or "no such call" in said, command


def test_watch_on_a_pipe_ends_with_its_session(manager: Manager, client: Peer):
    client.hear(to_client.ClientWelcome)
    command = [sys.executable, "-c", WATCH]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ.copy()) as watching:
        assert watching.stdout.readline().startswith(b"session test \xc2\xb7 up")
        client.send(say.EndSession("done"))
        rest, _ = watching.communicate(timeout=PATIENCE_S)
    assert "session test is over" in rest.decode()
    assert watching.returncode == 0


WATCH = """
from stoker.manager.cli import main, status
status._WATCH_EVERY_ON_A_PIPE_S = 0.1
main.main(["status", "--watch"])
"""


def test_attach_on_a_pipe_prints_changes_and_detaches_on_ctrl_c(manager: Manager, client: Peer, pilot: Peer):
    script = WATCH.replace('["status", "--watch"]', '["attach", "test"]')
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as attached:
        while not (line := attached.stdout.readline()).startswith("  n014-ab12"):
            assert line, "the session has ended"
        run_a_call(client, pilot)
        while "1 call done" not in (line := attached.stdout.readline()):
            assert line, "the session has ended"
        attached.send_signal(signal.SIGINT)
        rest, _ = attached.communicate(timeout=PATIENCE_S)
    assert attached.returncode == 0
    assert rest.splitlines()[-1] == "session test keeps running, and ends with its program"
    assert manager.process.poll() is None


def test_closed_output_pipe_ends_the_command_silently(manager: Manager):
    big = manager.folder.pilot_folder("n1") / "pilot.log"
    big.parent.mkdir()
    big.write_bytes(b"line\n" * 1_000_000)
    script = f"{sys.executable} -m stoker.manager.cli.main logs n1 | head -1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, timeout=PATIENCE_S)
    assert done.stdout == b"line\n"
    assert done.stderr == b""
