"""`stoker explain`: show why a call, pilot, library, context or block is in its state. For a failure, show the cause, a
remedy and what Stoker has done to recover."""

from __future__ import annotations

import datetime
import difflib
import re
import time
from collections.abc import Iterator

import click
import msgspec

from stoker.errors import SessionError
from stoker.manager.advice.judging import (
    LogPart,
    ProofLine,
    find_fault,
    make_log_part_of_exception,
    make_log_part_of_text,
)
from stoker.manager.advice.logs import FaultKind
from stoker.manager.advice.logs.failures import CALL_RULES, JOB_LOG_RULES, suggest_remedy
from stoker.manager.advice.metrics import FollowedLog, LoggedProgress
from stoker.manager.cli import console, logs, session_choice
from stoker.manager.cli.logs import BLOCK_ID, is_call_id, list_log_files
from stoker.manager.cli.session_choice import (
    add_session_argument,
    find_story_of_subject,
    is_ambiguous_subject,
    list_object_names,
    read_session_status,
)
from stoker.manager.core.blame import MIN_SHOWN_CERTAINTY
from stoker.protocol import show_status
from stoker.protocol.session import SessionFolder
from stoker.protocol.to_client import Story
from stoker.units import first_words, show_about, show_seconds

# ---- progress of a running call


def read_printed_progress(folder: SessionFolder, story: Story) -> LoggedProgress | None:
    """Return the progress that a running call has printed, unless several calls share the log."""
    if not is_call_id(story.subject) or len(story.runs_in) != 1 or story.waits_for or story.runs_from < 0:
        return None
    own = [file for file in list_log_files(folder) if file.name.rpartition("/")[2] == story.runs_in[0]]
    if len(own) != 1:
        return None
    return FollowedLog(own[0].path, start=story.runs_from).track(at_s=time.time())


def format_progress_line(progress: LoggedProgress) -> str:
    """Return a line such as `90 of 200 steps, 3.0 steps/s, about 36 s left, loss 0.31`."""
    of = f" of {progress.total:,g}" if progress.total else ""
    parts = [f"{progress.done:,g}{of} {progress.unit}s"]
    rate = progress.rate_per_s
    if rate:
        parts.append(f"{show_seconds(1 / rate)} each" if rate < 1 else f"{rate:,.1f} {progress.unit}s/s")
    if progress.seconds_left is not None:
        part = "" if progress.whole else f" of this {'epoch' if progress.epoch is not None else 'part'}"
        parts.append(f"about {show_about(progress.seconds_left)} left{part}")
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:g}")
    return f"  progress  {', '.join(parts)} (from the call's output)"


# ---- the cause of a failure


_RAISED = re.compile(r"raised an exception in your code after (?P<ran_s>[\d.]+) s: (?P<what>.*)", re.DOTALL)
_NO_RESULT = re.compile(r"ended without a result \((?P<kind>\w+)\): (?P<what>.*)", re.DOTALL)
_SENT = re.compile(r"sent to \S+ \(.* of (?P<pilot>\S+)\)", re.DOTALL)
_FAILED_BLOCK = re.compile(
    r"refused: |ended: .*(?:exit code (?!0\b)|[A-Z]+_[A-Z]+|PREEMPTED|preempted|out of memory|node failed"
    r"|out of walltime|killed by signal|vacated|held)"
)
_LOST_PILOT = re.compile(r"counted as lost: ")
_INTENDED_ENDS = frozenset({"cancelled", "dropped"})
_RECOVERY_PATTERNS = tuple((re.compile(pattern), words) for pattern, words in (
    (r"runs again, for (?P<time>.+ s) not on (?P<where>.+)", "ran again, for {time} not on {where}"),
    (r"runs again, for .+ s not on (?P<where>\S+ of \S+)", "{where} was probed at once"),
    (r"back in the queue: (?P<where>\S+ of \S+) is quarantined", "{where} is no longer used (quarantined)"),
    (r"its library died .*, 1 of (?P<most>\d+) before", "ran again after the first death of its library"),
    (r"its library died .*the call runs again alone", "ran again alone"),
    (r"may have run when (?P<where>\S+) died \(\d+\); the call runs alone", "ran again alone on a pilot"),
    (r"back in the queue: .* \(.*outside the pilot use.*", "ran again, not counted as a try"),
    (r"ran .* and was cut off by the walltime of (?P<where>\S+)", "waited for a pilot with more time left"),
    (r"^(?P<where>[^\n]{1,200}?) quarantined for (?P<time>[^:\n]{1,40}): ",
     "{where} got no new calls for {time} (quarantined)"),
    (r"^(?P<where>[^\n]{1,200}?) may be used again", "{where} is used again"),
    (r"^(?P<where>\S{1,200}) quarantined: ", "{where} was probed, failed, and is no longer used (quarantined)"),
    (r"^(?P<where>\S{1,200}) works again", "{where} was probed again, and is used again"),
))  # fmt: skip
_MOST_SHOWN_LINES = 6
_FAULT_OWNERS = {
    FaultKind.USER: "the program", FaultKind.FRAMEWORK: "what is installed",
    FaultKind.INFRASTRUCTURE: "the infrastructure",
}  # fmt: skip
_REQUEST_COMPONENTS = frozenset({"other_user", "site", "walltime", "time", "declared_memory"})


class FailureVerdict(msgspec.Struct, frozen=True):
    """The cause of a failure (see `Fault`). `do`: a remedy for the user. `done`: steps that Stoker took to recover."""

    kind: FaultKind
    component: str
    sure: float
    means: str
    proof: tuple[ProofLine, ...]
    do: str
    done: tuple[str, ...] = ()
    happened: str = ""
    look: str = ""


def diagnose_story_failure(folder: SessionFolder, story: Story) -> FailureVerdict | None:
    texts, subject = [line.text for line in story.lines], story.subject
    said: list[str] = []
    parts: list[LogPart] = []
    is_block = BLOCK_ID.fullmatch(subject) is not None
    if is_call_id(subject):
        parts = list(_log_parts_of_call(texts))
        ends = [hit for text in texts if (hit := _NO_RESULT.fullmatch(text)) and hit["kind"] not in _INTENDED_ENDS]
        said = [hit["what"] for hit in ends[-1:]] if parts else []
    elif is_block:
        said = [text for text in (*texts, story.headline) if _FAILED_BLOCK.search(text)][:1]
        own = [file for file in list_log_files(folder) if file.name.startswith(f"{subject}.")]
        parts = [*(LogPart(file.name, path=file.path) for file in own), *map(make_log_part_of_text, said)]
    elif story.headline.startswith("gone") or ": gone, " in story.headline:  # a pilot or a library
        said = [text for text in texts if _LOST_PILOT.search(text)][-1:]
        own = [file for file in list_log_files(folder) if subject in (file.name, file.name.rpartition("/")[2])]
        parts = [LogPart(file.name.rpartition("/")[2], path=file.path) for file in own]
    found = find_fault(parts, said, JOB_LOG_RULES if is_block else CALL_RULES)
    if found is None:
        return None
    fault, proof = found
    hits = [(words, hit) for text in texts for pattern, words in _RECOVERY_PATTERNS if (hit := pattern.search(text))]
    done = dict.fromkeys(words.format(**hit.groupdict()) for words, hit in hits)
    return FailureVerdict(
        fault.kind, fault.component, fault.sure, fault.means, proof, suggest_remedy(fault, subject),
        tuple(done)[-_MOST_SHOWN_LINES:], _describe_failure(story, said), _suggest_log_command(subject, texts),
    )  # fmt: skip


def format_verdict_lines(verdict: FailureVerdict) -> list[str]:
    done = [f"  done      {what}" for what in verdict.done]
    proof = []
    for line in verdict.proof[:_MOST_SHOWN_LINES]:
        where = f"{line.source}:{line.number}: " if line.number else f"{line.source}: " if line.source else ""
        proof.append(f"            {where}{line.text}")
    if verdict.sure < MIN_SHOWN_CERTAINTY:
        told = [line for line in proof if line.strip() not in verdict.happened]
        return [f"  happened  {verdict.happened}", *told, *done, f"  look      {verdict.look}"]
    is_request = verdict.kind is FaultKind.USER and verdict.component in _REQUEST_COMPONENTS
    whose = "the request" if is_request else _FAULT_OWNERS[verdict.kind]
    head = f"  verdict   {whose} ({verdict.component}), {verdict.sure:.0%} sure: {verdict.means}"
    return [head, *proof, *done, f"  do        {verdict.do}"]


def _describe_failure(story: Story, said: list[str]) -> str:
    place, sent_at, happened = None, 0.0, ""
    for line in story.lines:
        if sent := _SENT.fullmatch(line.text):
            place, sent_at = sent["pilot"], line.at
        end = _RAISED.fullmatch(line.text) or _NO_RESULT.fullmatch(line.text)
        if end is None:
            continue
        happened = first_words(end["what"])
        if place is not None:
            ran_s = end.groupdict().get("ran_s")
            after = f"{ran_s} s after it began" if ran_s else ""
            after = after or f"{show_seconds(line.at - sent_at)} after the call was sent there"
            happened += f"{'' if place in happened else f' on {place}'}, {after}"
    return happened or (first_words(said[0]) if said else story.headline.strip())


def _suggest_log_command(subject: str, texts: list[str]) -> str:
    if not is_call_id(subject):
        return f"stoker logs {subject}"
    if logs.find_outputs(texts):
        return f"its output: stoker logs {subject}"
    if libraries := logs.find_dead_libraries(texts):
        return f"the call printed nothing; its library's log, which other calls share: stoker logs {libraries[-1]}"
    return "the call printed nothing; run the function alone with the same arguments"


def _log_parts_of_call(texts: list[str]) -> Iterator[LogPart]:
    raised = next((hit["what"] for text in reversed(texts) if (hit := _RAISED.fullmatch(text))), "")
    failed = next((hit for text in reversed(texts) if (hit := _NO_RESULT.fullmatch(text))), None)
    if not raised and (failed is None or failed["kind"] in _INTENDED_ENDS):
        return
    for path, start, end in logs.find_outputs(texts)[-1:]:
        yield LogPart(path.stem, path=path, start=start, end=end)
    if (log := logs.find_log_of_failed_loader(texts)) is not None:
        yield LogPart(log.stem, path=log)
    if failed is not None:
        yield make_log_part_of_text(failed["what"])
    if raised:
        yield make_log_part_of_exception(raised)


@click.command(short_help="Explain the state of a call, pilot, context or block.")
@click.argument("subject", default="")
@click.option("--json", "as_json", is_flag=True, help="One JSON document, for programs.")
@add_session_argument(default=session_choice.SHOWN_BY_DEFAULT)
def explain(*, subject: str, session: str, as_json: bool) -> None:
    """Show why SUBJECT is in its state: a call (c-12), a pilot, a library (lib-3), a context (llm-7f3a) or a block
    (b3).

    For a failure, show whether the program, the installed software or the infrastructure is at fault, and the log lines
    that prove the verdict. For a running call, show the printed progress.

    A unique prefix of a pilot's or context's name is enough. The manager remembers ended libraries, pilots and blocks
    for some time.
    """
    if not subject:
        raise click.UsageError("name a call, pilot, library, context or block; `stoker calls` lists calls")
    folder, story, over = find_story_of_subject(session, subject)
    fault = diagnose_story_failure(folder, story) if story.found else None
    progress = read_printed_progress(folder, story) if story.found and not over else None
    if as_json:
        told = show_status.with_decoded_arguments(story)
        console.json({"over": over, "story": told, "verdict": fault, "progress": progress})
    elif story.found:
        if over:
            console.note(f"{over}; its journal:")
        console.lines(show_status.format_explanation_lines(story, today=datetime.date.today()))
        console.lines(format_verdict_lines(fault) if fault is not None else ())
        console.lines([format_progress_line(progress)] if progress is not None else ())
    if not story.found:
        hint = "" if as_json or is_ambiguous_subject(story) else _nearest_name_hint(session, subject)
        raise SessionError(f"{story.subject}: {story.headline}{hint}")


def _nearest_name_hint(session: str, subject: str) -> str:
    try:
        names = list_object_names(read_session_status(session)[1].status)
    except SessionError:
        return ""
    close = difflib.get_close_matches(subject, names, n=1, cutoff=0.5)
    if number := re.fullmatch(r"[cC][-_. ]?(\d[\d.]*)", subject):
        close = [f"c-{number[1]}"] if f"c-{number[1]}" != subject else []
    if close:
        return f"; did you mean {close[0]}?"
    return f"\nthere are {', '.join(names[:12])}; calls have the names c-0, c-1, …" if names else ""
