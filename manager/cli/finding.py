"""What `stoker doctor` finds: one line each, and what to do about it."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

import msgspec


class Level(enum.Enum):
    """How much a finding matters."""

    OK = "ok"
    """It is here and it works."""
    NO = "no"
    """It is not here, and nothing here needs it."""
    WARN = "warn"
    """Stoker works, but something will be slower, smaller or in the way."""
    NEED = "need"
    """It is needed and it is missing."""


class Finding(msgspec.Struct, frozen=True):
    """One fact about this machine. `fix` is what to do about it: a command, mostly."""

    topic: str
    level: Level
    text: str
    fix: str = ""


def render(findings: Iterable[Finding], *, sites: Sequence[str] = ()) -> list[str]:
    """The lines of `stoker doctor`, and a last one that sums up. `sites`: the files that it was asked about."""
    findings = list(findings)
    step = f"stoker up {' '.join(sites)}" if sites else "stoker run fact_verification"
    out = []
    for finding in findings:
        first, *more = finding.text.split("\n")
        out.append(f"  {finding.level.value:<5} {first}")
        out += [f"        {line}" for line in [*more, *finding.fix.splitlines()]]
    needs = sum(finding.level is Level.NEED for finding in findings)
    warnings = sum(finding.level is Level.WARN for finding in findings)
    out.append("")
    if needs:
        out.append(f"{needs} thing{'s' * (needs != 1)} missing that Stoker needs: each has its fix below it")
    elif warnings:
        out.append(f"ready, with {warnings} warning{'s' * (warnings != 1)}; try: {step}")
    else:
        out.append(f"ready; try: {step}")
    return out
