from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker.manager.advice.judging import LogPart, LogParts
from stoker.manager.advice.logs import FaultKind
from stoker.manager.advice.logs.failures import (
    JOB_START_RULES,
    LOG_RULES,
    MESSAGE_RULES,
    PROGRAM_RULES,
    REMEDY_BY_COMPONENT,
)
from stoker.manager.cli import explain
from stoker.protocol.session import SessionFolder
from stoker.protocol.status import StoryLine
from stoker.protocol.to_client import Story

RAISED = (
    "raised an exception in your code after 0.100 s: KeyError: 'claim'\n"
    "at /home/ana/program.py:12 in outer\nat /home/ana/program.py:5 in inner"
)
TRAINING = [f"epoch 1 step {step} loss {2.0 - step / 100:.2f}" for step in range(50)]


@pytest.fixture
def folder(tmp_path: Path) -> SessionFolder:
    (tmp_path / "pilots" / "n1").mkdir(parents=True)
    (tmp_path / "submit_scripts").mkdir()
    return SessionFolder(tmp_path)


def story(subject: str, *texts: str, headline: str = "f  ended", runs_in: tuple[str, ...] = ()) -> Story:
    lines = tuple(StoryLine(float(at), text) for at, text in enumerate(texts))
    return Story(subject, True, headline, lines, runs_in=runs_in)


def diagnose(folder: SessionFolder, subject: str, *texts: str, **more: Any) -> Any:
    return explain.diagnose_story_failure(folder, story(subject, *texts, **more))


def log(folder: SessionFolder, name: str, lines: list[str]) -> Path:
    path = folder.path / "pilots" / "n1" / name
    path.write_text("\n".join(lines) + "\n")
    return path


def test_exception_is_attributed_to_the_program_with_its_lines(folder: SessionFolder):
    fault = diagnose(folder, "c-1", "submitted", RAISED)
    assert fault.kind is FaultKind.USER
    shown = explain.format_verdict_lines(fault)
    assert shown[0].startswith("  verdict   the program (code)")
    assert shown[1:] == [
        '            File "/home/ana/program.py", line 5, in inner',
        "            KeyError: 'claim'",
        "  do        fix that line; try the function without a session, with the same arguments",
    ]


def test_verdict_uses_the_output_of_the_call_as_evidence(folder: SessionFolder):
    sick = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    path = log(folder, "lib-1.log", [*TRAINING, sick, *TRAINING[:3]])
    printed = f"printed {path}:0-{path.stat().st_size}"
    died = "ended without a result (poison): its library died: signal 6"
    fault = diagnose(folder, "c-1", printed, died)
    assert (fault.kind, fault.component) == (FaultKind.INFRASTRUCTURE, "gpu")
    assert [(line.source, line.number, line.text) for line in fault.proof] == [("lib-1", 51, sick)]
    assert f"            lib-1:51: {sick}" in explain.format_verdict_lines(fault)


def test_evidence_lines_have_their_line_numbers_in_the_log(folder: SessionFolder):
    before, sick = "a call before\n" * 20, "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    path = folder.path / "pilots" / "n1" / "lib-1.log"
    path.write_text(f"{before}step 1\n{sick}\n")
    printed = f"printed {path}:{len(before)}-{path.stat().st_size}"
    fault = diagnose(folder, "c-1", printed, "ended without a result (poison): it died")
    assert [(line.source, line.number) for line in fault.proof] == [("lib-1", 22)]


# ---- messages of the session

TOOK = "lib-2 (llm) on n1 took 1.2 GB of memory and declares 300 MB; declare more, or load less"
CROWDED = (
    "lib-4 on n1 was killed by SIGKILL (the node had no memory left: 225 MB are free, the context declares 900 MB,"
    " and processes outside the pilot use 1.5 GB), in a call on llm"
)


@pytest.mark.parametrize(
    ("said", "kind", "component"),
    [
        (f"(memory): it ended its library 2 times; the last time: {TOOK}", "user", "declared_memory"),
        (f"(infrastructure): devices failed it 3 times, on 3 pilots:\n  n1: {CROWDED}", "infrastructure", "memory"),
        ("(poison): it ended its library 2 times; the last time: lib-2 was killed by SIGKILL (no Stoker process sent"
         " the signal; the system probably ran out of memory), in a call on llm", "user", "memory"),
        ("(timeout): the call ran for 5.1 s on n1; its limit is 5 s", "user", "time"),
        ("(timeout): ran 50 s and was cut off by the 60 s walltime, twice; raise [provider] walltime, or save state",
         "user", "walltime"),
        ("(transfer): the result can't be sent back to the program: a _thread.lock can't be pickled", "user", "result"),
        ("(transfer): the function verify could not be unpickled on n1: No module named 'claims'; its imports must"
         " be installed there", "framework", "package"),
        ("(infrastructure): devices, disks or networks failed the call 3 times\n  p1: an existing file could not be"
         " opened: FileNotFoundError: No such file or directory: /w", "infrastructure", "filesystem"),
        ("(infrastructure): devices, disks or networks failed the call 3 times\n  p1: a disk of the node is full:"
         " OSError: 4096 requested and 12 written", "infrastructure", "disk"),
    ],
)  # fmt: skip
def test_verdict_is_derived_from_the_failure_message_of_a_call(
    folder: SessionFolder, said: str, kind: str, component: str
):
    fault = diagnose(folder, "c-1", "submitted", f"ended without a result {said}")
    assert (fault.kind.value, fault.component) == (kind, component)
    assert fault.proof[0].text in said
    assert explain.format_verdict_lines(fault)[-1].startswith("  do        ")


def test_log_evidence_takes_precedence_over_a_bare_signal(folder: SessionFolder):
    path = log(folder, "lib-2.log", [*TRAINING, "RuntimeError: CUDA error: uncorrectable ECC error encountered"])
    died = "ended without a result (poison): it ended its library 2 times; the last time: lib-2 was killed by SIGABRT"
    fault = diagnose(folder, "c-1", f"printed {path}:0-", died, f"its library's log is {path}")
    assert (fault.kind, fault.component) == (FaultKind.INFRASTRUCTURE, "gpu")


@pytest.mark.parametrize("kind", ["poison", "serialization", "memory", "timeout"])
def test_output_of_other_calls_in_the_library_is_no_evidence(folder: SessionFolder, kind: str):
    others = ["OSError: [Errno 28] No space left on device: '/data/cache'; going on without a cache"] * 6
    path = log(folder, "lib-2.log", others)
    died = f"ended without a result ({kind}): it ended its library 2 times; the last time: lib-2 was killed by SIGSEGV"
    fault = diagnose(folder, "c-6", died, f"its library's log is {path}")
    assert (fault.kind, fault.component) == (FaultKind.USER, "crash")
    assert not any("No space left" in line.text for line in fault.proof)


@pytest.mark.parametrize(
    ("raised", "component"),
    [
        ("ModuleNotFoundError: No module named 'claim_reader'", "package"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'claims.npy'", "data"),
        ("safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, file not fully"
         " covered", "damaged_file"),
        ("json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)", "damaged_file"),
        ("urllib.error.URLError: <urlopen error [Errno 111] Connection refused>", "service"),
        ("ValueError: operands could not be broadcast together with shapes (2,) (3,)", "code"),
    ],
)  # fmt: skip
def test_verdict_assigns_common_exceptions_to_their_components(folder: SessionFolder, raised: str, component: str):
    text = f"raised an exception in your code after 0.100 s: {raised}\nat /home/ana/program.py:12 in verify"
    fault = diagnose(folder, "c-1", "submitted", text)
    assert (fault.kind, fault.component) == (FaultKind.USER, component)
    assert [line.text for line in fault.proof] == ['File "/home/ana/program.py", line 12, in verify', raised]


def test_uncertain_verdict_is_not_shown_as_certain(folder: SessionFolder):
    raised = "raised an exception in your code after 3.1 s: OddError: it went\nat /opt/odd/lib.py:7 in go"
    fault = diagnose(folder, "c-1", "submitted", "sent to lib-1 (cpu:0 of n014)", "in between", "more", raised)
    unsure = msgspec.structs.replace(fault, sure=0.46)
    assert explain.format_verdict_lines(unsure) == [
        "  happened  OddError: it went on n014, 3.1 s after it began",
        '            File "/opt/odd/lib.py", line 7, in go',
        "  look      the call printed nothing; run the function alone with the same arguments",
    ]
    assert explain.format_verdict_lines(msgspec.structs.replace(fault, sure=0.5))[0].startswith("  verdict   ")


@pytest.mark.parametrize(
    ("texts", "look"),
    [
        (("printed /logs/lib-2.log:4-9",), "its output: stoker logs c-1"),
        (("its library died (lib-2 on n1 was killed)",), "which other calls share: stoker logs lib-2"),
    ],
)
def test_verdict_names_the_log_or_device_to_look_at(folder: SessionFolder, texts: tuple[str, ...], look: str):
    died = "ended without a result (poison): it ended its library 2 times; the last time: lib-2 on n1 was killed"
    fault = diagnose(folder, "c-1", "sent to lib-2 (cpu:0 of n1)", *texts, died + " by SIGSEGV")
    assert (
        fault.happened == f"{died.partition('): ')[2]} by SIGSEGV, {len(texts) + 1}.0 s after the call was sent there"
    )
    assert fault.look.endswith(look)


def test_probe_of_a_device_that_failed_a_call_is_shown(folder: SessionFolder):
    ecc = "the device met a memory error that it cannot correct: AcceleratorError: CUDA error: uncorrectable ECC error"
    texts = (
        f"lib-1 (cuda:0 of n1) failed it: {ecc}",
        "runs again, for 15 s not on cuda:0 of n1",
        f"ended without a result (infrastructure): devices, disks or networks failed the call 3 times:\n  n1: {ecc}",
    )
    fault = diagnose(folder, "c-1", *texts)
    assert (fault.kind, fault.component) == (FaultKind.INFRASTRUCTURE, "gpu")
    assert fault.done == ("ran again, for 15 s not on cuda:0 of n1", "cuda:0 of n1 was probed at once")


def test_loader_traceback_precedes_the_failure_message(folder: SessionFolder):
    path = log(
        folder,
        "lib-2.log",
        [
            "Traceback (most recent call last):",
            '  File "/home/ana/program.py", line 7, in model',
            "    return numpy.zeros(3).foo",
            "AttributeError: 'numpy.ndarray' object has no attribute 'foo'",
        ],
    )
    failed = (
        "ended without a result (context): context llm could not be loaded: the loader of llm raised AttributeError"
    )
    fault = diagnose(folder, "c-1", failed, f"its library's log is {path}")
    assert fault.component == "code"
    assert [(line.source, line.number) for line in fault.proof[:2]] == [("lib-2", 2), ("lib-2", 4)]
    elsewhere = diagnose(folder, "c-1", failed)
    assert elsewhere.component == "context"


# ---- pilots and blocks


@pytest.mark.parametrize(
    ("loss", "kind", "component"),
    [
        ("preempted", "infrastructure", "scheduler"),
        ("node lost", "infrastructure", "node"),
        ("out of walltime", "user", "walltime"),
        ("out of memory", "user", "memory"),
        ("unexplained", "infrastructure", "node"),
    ],
)
def test_lost_pilot_has_a_verdict(folder: SessionFolder, loss: str, kind: str, component: str):
    (folder.path / "pilots" / "n1" / "pilot.log").write_text("I 12:00 it has joined\n")
    texts = ("joined from n1", "cuda:0 quarantined: it computed 3, twice", "gone: lost", f"counted as lost: {loss}")
    fault = diagnose(folder, "n1", *texts, headline="gone; 3 calls ended there")
    assert (fault.kind.value, fault.component) == (kind, component)
    assert [line.text for line in fault.proof] == [texts[-1]]
    assert fault.done == ("cuda:0 was probed, failed, and is no longer used (quarantined)",)


@pytest.mark.parametrize(
    ("subject", "texts", "headline"),
    [
        ("c-1", ("submitted", "ended with a result after 1.000 s in its function"), "f  ended"),
        ("c-1", ("submitted", "ended without a result (cancelled): cancelled by its program"), "f  ended"),
        ("c-1", ("submitted", "waits for 3 s: its 2 hot libraries are busy"), "f  waits"),
        ("b1", ("pending as job 7", "ended: exit code 0"), "ended"),
    ],
)
def test_subject_without_a_failure_has_no_verdict(
    folder: SessionFolder, subject: str, texts: tuple[str, ...], headline: str
):
    assert diagnose(folder, subject, *texts, headline=headline) is None


def test_pilot_that_left_as_planned_has_no_verdict(folder: SessionFolder):
    (folder.path / "pilots" / "n1" / "pilot.log").write_text("I 12:00 it has joined\n")
    assert diagnose(folder, "n1", "joined", "gone: the session ended", headline="gone") is None
    lost = ("counted as lost: unexplained", "reconnected")
    assert diagnose(folder, "n1", *lost, headline="here; 1 call ended there") is None


def test_dead_library_has_a_verdict_and_a_serving_library_has_none(folder: SessionFolder):
    log(folder, "lib-3.log", [*TRAINING, "RuntimeError: CUDA error: uncorrectable ECC error encountered"])
    state = "llm on cpu:0 of n1: {}, 7 calls served, 0 held, 1 GB in use"
    fault = diagnose(folder, "lib-3", "ready", headline=state.format("gone"))
    assert fault.component == "gpu"
    assert diagnose(folder, "lib-3", "ready", headline=state.format("ready")) is None


@pytest.mark.parametrize(
    ("printed", "ended", "kind", "component"),
    [
        ("env: ‘/opt/python’: No such file or directory", "ended: exit code 127: {}", "framework", "environment"),
        ("/usr/bin/python3: No module named stoker", "ended: exit code 1: {}", "framework", "environment"),
        ("stoker-pilot: /home/ana/s is not a session folder that you can read: [Errno 13] Permission denied: 's.json'",
         "ended: exit code 1: {}", "user", "other_user"),
        ("condor_exec.exe: line 4: /home/ana/venv/bin/python: Permission denied", "ended: exit code 126: {}", "user",
         "other_user"),
        ("stoker-pilot: --devices gpu: no GPU was granted to this pilot: …", "ended: exit code 1: {}", "user",
         "site"),
        ("", "refused: sbatch: error: invalid partition specified: gpuu", "user", "site"),
        ("", "ended: NODE_FAIL", "infrastructure", "node"),
        ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-26 DUE TO TIME LIMIT ***", "ended: TIME_OUT",
         "infrastructure", "scheduler"),
    ],
)  # fmt: skip
def test_block_with_a_failed_job_has_a_verdict(
    folder: SessionFolder, printed: str, ended: str, kind: str, component: str
):
    if printed:
        folder.submit.mkdir(exist_ok=True)
        (folder.submit / "stoker-ab12-b1.err").write_text(printed + "\n")
    ended = ended.format(printed)
    fault = diagnose(folder, "b1", "asked of source local", ended, headline=f"block: {ended}")
    assert (fault.kind.value, fault.component) == (kind, component)
    assert any(line.text == printed or line.text in ended for line in fault.proof)
    assert explain.format_verdict_lines(fault)[-1].startswith("  do        ")


def test_components_of_rules_and_of_remedies_are_equal():
    rules = {(rule.kind, rule.component) for rule in (*LOG_RULES, *MESSAGE_RULES, *JOB_START_RULES, *PROGRAM_RULES)}
    assert set(REMEDY_BY_COMPONENT) == rules
    assert all(text.format("c-1")[0].islower() and len(text) <= 110 for text in REMEDY_BY_COMPONENT.values())


# ---- files that are not logs


def test_missing_or_vanishing_log_loses_only_its_own_lines(folder: SessionFolder):
    pipe = folder.path / "pilots" / "n1" / "lib-1.log"
    os.mkfifo(pipe)
    for path in (pipe, folder.path / "pilots", folder.path / "gone.log", Path("/dev/zero"), Path("/proc/self/mem")):
        died = "ended without a result (poison): it ended its library 2 times; the last time: it went away"
        assert diagnose(folder, "c-1", f"printed {path}:0-", died) is None, path
    parts = LogParts([LogPart("away", path=folder.path / "away"), LogPart("", text=b"one"), LogPart("", text=b"two\n")])
    assert list(parts) == [b"one", b"two\n"]


def test_log_on_another_machine_loses_only_its_own_verdict(folder: SessionFolder):
    away = "printed /no/such/place/lib-1.log:0-100"
    fault = diagnose(folder, "c-1", away, RAISED)
    assert fault.kind is FaultKind.USER
    assert diagnose(folder, "c-1", away, "ended without a result (died): it died") is None


def test_progress_of_a_running_call_is_read_from_its_output(folder: SessionFolder):
    log(folder, "lib-3.log", [f"step {step}/200 loss {3.0 - step / 100:.2f}" for step in range(1, 91)])
    progress = explain.read_printed_progress(folder, story("c-1", "submitted", runs_in=("lib-3",)))
    assert explain.format_progress_line(progress).startswith("  progress  90 of 200 steps")
    assert "loss" in explain.format_progress_line(progress)
    size = (folder.path / "pilots" / "n1" / "lib-3.log").stat().st_size
    later = msgspec.structs.replace(story("c-2", "submitted", runs_in=("lib-3",)), runs_from=size)
    assert explain.read_printed_progress(folder, later) is None, "only earlier calls have printed there"
    assert explain.read_printed_progress(folder, story("c-3")) is None, "a waiting call"
