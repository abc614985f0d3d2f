"""Whose fault a failure is, what to do about it and what was done, for `stoker explain`.

Three things are judged: what a call, a pilot or a block's job has printed, what a call raised, and what the manager and
its pilots say of it. Logs are read where they lie; where that is another machine, the rest has to do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import msgspec

from stoker.manager.advice.judging import LogPart, ProofLine, judged, raised_part, told_part
from stoker.manager.advice.logs import FaultKind
from stoker.manager.advice.logs.failures import OF_CALLS, OF_JOBS, remedy
from stoker.manager.cli import printed
from stoker.manager.cli.logs import files, is_call
from stoker.manager.core.blame import LEAST_SURE
from stoker.protocol.session import SessionFolder
from stoker.protocol.to_client import Story
from stoker.units import first_words, show_seconds

_RAISED = re.compile(r"raised an exception in your code after (?P<ran_s>[\d.]+) s: (?P<what>.*)", re.DOTALL)
_NO_RESULT = re.compile(r"ended without a result \((?P<kind>\w+)\): (?P<what>.*)", re.DOTALL)
_SENT = re.compile(r"sent to \S+ \(.* of (?P<pilot>\S+)\)", re.DOTALL)
_BLOCK = re.compile(r"b\d+")
_FAILED_BLOCK = re.compile(
    r"refused: |ended: .*(?:exit code (?!0\b)|[A-Z]+_[A-Z]+|PREEMPTED|preempted|out of memory|node failed"
    r"|out of walltime|killed by signal|vacated|held)"
)
_LOST_PILOT = re.compile(r"counted as lost: ")
_WANTED = frozenset({"cancelled", "dropped"})
"""Ends that somebody wanted."""
_DONE = (
    (re.compile(r"runs again, for (?P<time>.+ s) not on (?P<where>.+)"), "ran again, for {time} not on {where}"),
    (re.compile(r"runs again, for .+ s not on (?P<where>\S+ of \S+)"), "{where} was probed at once"),
    (re.compile(r"back in the queue: (?P<where>\S+ of \S+) is quarantined"), "{where} is used no more (quarantined)"),
    (re.compile(r"its library died .*, 1 of (?P<most>\d+) before"), "ran again after the first death of its library"),
    (re.compile(r"its library died .*it is tried again by itself"), "ran again by itself, with nothing beside it"),
    (re.compile(r"may have run when (?P<where>\S+) died \(\d+\); it runs alone"), "ran again alone on a pilot"),
    (re.compile(r"back in the queue: .* \(.*which are not the pilot's hold.*"), "ran again, at no cost of its tries"),
    (re.compile(r"ran .* and was cut off by the walltime of (?P<where>\S+)"), "waited for a pilot with more time left"),
    (
        re.compile(r"^(?P<where>[^\n]{1,200}?) quarantined for (?P<time>[^:\n]{1,40}): "),
        "{where} got nothing new for {time} (quarantined)",
    ),
    (re.compile(r"^(?P<where>[^\n]{1,200}?) may be used again"), "{where} is used again"),
    (
        re.compile(r"^(?P<where>\S{1,200}) quarantined: "),
        "{where} was probed, failed, and is used no more (quarantined)",
    ),
    (re.compile(r"^(?P<where>\S{1,200}) is well again"), "{where} was probed again, and is used again"),
)  # fmt: skip
"""What a story says was done about a failure, and how that is told."""
_MOST_DONE = 6
_SHOWN = 6
_WHOSE = {FaultKind.USER: "the program", FaultKind.FRAMEWORK: "what is installed"}
_SETTINGS = frozenset({"other_user", "site", "walltime", "time", "declared_memory"})


class FailureVerdict(msgspec.Struct, frozen=True):
    """Whose fault a failure is. `kind`, `component`, `sure`, `means`: see `Fault`. `do`: what to do about it; `done`:
    what was done about it already, in the order in which that happened. `happened`: what is known for certain, and
    `look`: where to read more. These two are shown instead of a verdict that is not sure."""

    kind: FaultKind
    component: str
    sure: float
    means: str
    proof: tuple[ProofLine, ...]
    do: str
    done: tuple[str, ...] = ()
    happened: str = ""
    look: str = ""


def verdict_of(folder: SessionFolder, story: Story) -> FailureVerdict | None:
    """Whose fault it is that a call, a pilot or a block failed; None where nothing has failed or nothing says why."""
    texts = [line.text for line in story.lines]
    said: list[str] = []
    rules = OF_CALLS
    if is_call(story.subject):
        parts = list(_of_call(texts))
        said = [hit["what"] for text in texts if (hit := _failed(text))][-1:] if parts else []
    elif _BLOCK.fullmatch(story.subject):
        rules = OF_JOBS
        said = [text for text in (*texts, story.headline) if _FAILED_BLOCK.search(text)][:1]
        own = [file for file in files(folder) if file.name.startswith(f"{story.subject}.")]
        parts = [*(LogPart(file.name, path=file.path) for file in own), *(told_part(text) for text in said)]
    else:
        said = [text for text in texts if _LOST_PILOT.search(text)][-1:] if _is_over(story) else []
        own = [file for file in files(folder) if story.subject in (file.name, file.name.rpartition("/")[2])]
        parts = [LogPart(file.name.rpartition("/")[2], path=file.path) for file in own] if _is_over(story) else []
    found = judged(parts, said, rules)
    if found is None:
        return None
    fault, proof = found
    return FailureVerdict(
        fault.kind,
        fault.component,
        fault.sure,
        fault.means,
        proof,
        remedy(fault, story.subject),
        tuple(_done(texts)),
        _happened(story, said),
        _where_to_look(story),
    )


def show(verdict: FailureVerdict) -> list[str]:
    """The lines of `stoker explain`: the verdict, or what happened where it is too unsure to be called one."""
    done = [f"  done      {what}" for what in verdict.done[-_SHOWN:]]
    proof = []
    for line in verdict.proof[:_SHOWN]:
        where = f"{line.source}:{line.number}: " if line.number else f"{line.source}: " if line.source else ""
        proof.append(f"            {where}{line.text}")
    if verdict.sure < LEAST_SURE:
        told = [line for line in proof if line.strip() not in verdict.happened]
        return [f"  happened  {verdict.happened}", *told, *done, f"  look      {verdict.look}"]
    whose = _WHOSE.get(verdict.kind, "the infrastructure")
    if verdict.kind is FaultKind.USER and verdict.component in _SETTINGS:
        whose = "what was asked for"
    head = f"  verdict   {whose} ({verdict.component}), {verdict.sure:.0%} sure: {verdict.means}"
    return [head, *proof, *done, f"  do        {verdict.do}"]


def _happened(story: Story, said: list[str]) -> str:
    """What happened to a call, where, and how long after it began; or what the session says of a pilot or a block."""
    for index, line in reversed(list(enumerate(story.lines))):
        end = _RAISED.fullmatch(line.text) or _NO_RESULT.fullmatch(line.text)
        if end is None:
            continue
        sent = next((each for each in reversed(story.lines[:index]) if _SENT.fullmatch(each.text)), None)
        what = first_words(end["what"])
        place = _SENT.fullmatch(sent.text) if sent is not None else None
        if sent is None or place is None:
            return what
        where = "" if place["pilot"] in what else f" on {place['pilot']}"
        ran_s = end.groupdict().get("ran_s")
        since = f"{ran_s} s after it began" if ran_s else f"{show_seconds(line.at - sent.at)} after it was sent there"
        return f"{what}{where}, {since}"
    return first_words(said[0]) if said else story.headline.strip()


def _where_to_look(story: Story) -> str:
    """Where to read more about a failure."""
    if is_call(story.subject):
        texts = [line.text for line in story.lines]
        libraries = printed.died(texts)
        if printed.printed(texts):
            return f"what it printed: stoker logs {story.subject}"
        if libraries:
            return f"it printed nothing; the log of its library, also of other calls: stoker logs {libraries[-1]}"
        return "it printed nothing; run the function by itself with the same arguments"
    return f"stoker logs {story.subject}"


# ---- what is judged


def _of_call(texts: list[str]) -> Iterator[LogPart]:
    """What a call that failed has printed in its last try, and what it raised, as Python shows that."""
    raised = next((hit["what"] for text in reversed(texts) if (hit := _RAISED.fullmatch(text))), "")
    failed = next((hit for text in reversed(texts) if (hit := _NO_RESULT.fullmatch(text))), None)
    if not raised and (failed is None or failed["kind"] in _WANTED):
        return
    for path, start, end in printed.printed(texts)[-1:]:
        yield LogPart(path.stem, path=path, start=start, end=end)
    log = printed.loaders_log(texts)
    if log is not None:
        yield LogPart(log.stem, path=log)
    if failed is not None:
        yield told_part(failed["what"])
    if raised:
        yield raised_part(raised)


def _failed(text: str) -> re.Match[str] | None:
    found = _NO_RESULT.fullmatch(text)
    return found if found is not None and found["kind"] not in _WANTED else None


def _is_over(story: Story) -> bool:
    """Whether a pilot or a library is gone, as its headline says."""
    return story.headline.startswith("gone") or ": gone, " in story.headline


def _done(texts: Iterable[str]) -> list[str]:
    """What was done about a failure, once each, in its order."""
    found: dict[str, None] = {}
    for text in texts:
        for pattern, words in _DONE:
            hit = pattern.search(text)
            if hit is not None:
                found.setdefault(words.format(**hit.groupdict()))
    return list(found)[-_MOST_DONE:]
