"""The page of the site suite: each promise with its verdict, reason and remedy."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator

import msgspec

from stoker.units import show_seconds


class PromiseVerdict(enum.Enum):
    """How a promise ended."""

    HOLDS = "holds"
    FAILS = "fails"
    NOT_TRIED = "not tried"


_WORDS = {PromiseVerdict.HOLDS: "ok", PromiseVerdict.FAILS: "fails", PromiseVerdict.NOT_TRIED: "no"}


class TriedPromise(msgspec.Struct, frozen=True):
    """One promise. `why` is a sentence where it fails or was not tried; `log` is a folder. `took_s` in seconds."""

    title: str
    verdict: PromiseVerdict
    took_s: float = 0.0
    why: str = ""
    remedy: str = ""
    log: str = ""


class SiteReport(msgspec.Struct, frozen=True):
    """The result of a run. `machines` are the hosts of its pilots, `devices` their devices, `troubles` their
    complaints; `took_s` in seconds."""

    site: str
    provider: str
    machines: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    promises: tuple[TriedPromise, ...] = ()
    took_s: float = 0.0
    interrupted: bool = False
    troubles: tuple[str, ...] = ()

    @property
    def sound(self) -> bool:
        """True if the run came to its end, a promise holds and none fails."""
        verdicts = {each.verdict for each in self.promises}
        return not self.interrupted and PromiseVerdict.HOLDS in verdicts and PromiseVerdict.FAILS not in verdicts


def render(report: SiteReport) -> list[str]:
    """The lines of the page."""
    out = [" · ".join([f"site {report.site}", report.provider, *_found(report)]), ""]
    out += [f"  warn  {trouble}" for trouble in report.troubles]
    for verdict in PromiseVerdict:
        for promise in report.promises:
            if promise.verdict is verdict:
                out += line_of(promise)
    return [*out, "", _summary(report)]


def line_of(promise: TriedPromise) -> list[str]:
    """The lines of one promise."""
    word = f"  {_WORDS[promise.verdict]:<5} {promise.title}"
    if promise.verdict is PromiseVerdict.HOLDS:
        return [f"{word} · {show_seconds(promise.took_s)}"]
    first, *more = promise.why.splitlines() or ["no reason is known"]
    if promise.verdict is PromiseVerdict.NOT_TRIED:
        return [f"{word}: not tried: {first}", *_indented(more)]
    told = [first, *more, promise.remedy, f"log: {promise.log}" if promise.log else ""]
    return [f"{word} · {show_seconds(promise.took_s)}", *_indented(told)]


def _found(report: SiteReport) -> Iterator[str]:
    yield ", ".join(report.machines) or "no pilot came"
    if report.devices:
        yield ", ".join(report.devices)


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"        {line}" for line in lines if line]


def _summary(report: SiteReport) -> str:
    count = {verdict: sum(each.verdict is verdict for each in report.promises) for verdict in PromiseVerdict}
    holds, fails, not_tried = (count[verdict] for verdict in PromiseVerdict)
    said = [f"{holds} promise{'s hold' if holds != 1 else ' holds'}"]
    said.append(f"{fails} {'do' if fails != 1 else 'does'} not" if fails else "none fails")
    if not_tried:
        said.append(f"{not_tried} could not be tried")
    end = "interrupted after" if report.interrupted else "in"
    return f"{', '.join(said)}; {end} {show_seconds(report.took_s)}"
