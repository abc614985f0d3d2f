"""List the parts of `make gpu` in order, divide 470 seconds between parts, and define its two test suites.

A part may use the time until the deadline minus the *typical* times of later parts: at least its own typical time, at
most its *limit*. A part is skipped if less than half of its typical time (at most 20 s) is left. Times are for one H100
or H200 with 16 cores.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.place import write_site

IN_ALL_S = 470.0


@dataclass(frozen=True)
class Part:
    """`needs`: parts that must run before."""

    title: str
    typical_s: float
    limit_s: float
    needs: tuple[str, ...] = ()


KIT = Part("missing packages are installed, and the large ones are imported once", 20.0, 90.0)
PARTS: dict[str, Part] = {
    "site": Part("the site suite, tests/site", 80.0, 150.0),
    "tests": Part("tests with the marker gpu", 25.0, 80.0),
    "device": Part("devices and their bandwidth", 8.0, 45.0),
    "model": Part("a model of SmolLM2-1.7B's shape with random weights is written", 15.0, 60.0, ("device",)),
    "awareness": Part("inferences a second by awareness", 45.0, 100.0, ("device", "model")),
    "load": Part("loads from a file, a snapshot, a peer and host memory", 50.0, 110.0, ("device", "model")),
    "decode": Part("decode and prefill by batch, against Transformers and vLLM", 50.0, 110.0, ("device", "model")),
    "slinfer": Part("8 models of 1 to 3 B, slinfer against exclusive", 120.0, 440.0, ("device", "model")),
    "encoder": Part("an encoder in one length, in several, and in any length", 20.0, 60.0),
    "turns": Part("libraries on one device take turns", 8.0, 30.0),
    "tune": Part("soft prompts are tuned", 12.0, 50.0, ("device", "model")),
    "gang": Part("two ranks exchange numbers", 12.0, 50.0),
}


def with_needs(names: Sequence[str]) -> list[str]:
    wanted = set(names) | {need for name in names for need in PARTS[name].needs}
    return [name for name in PARTS if name in wanted]


def allowed_s(name: str, *, left_s: float, later: Sequence[str]) -> float:
    part = PARTS[name]
    if left_s < min(20.0, part.typical_s / 2):
        return 0.0
    spare_s = left_s - sum(PARTS[each].typical_s for each in later)
    return min(left_s, part.limit_s, max(part.typical_s, spare_s))


_LINE = re.compile(r"^(\S+::.+?) (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)(?: \((.*?)\))?(?:\s|$)", re.MULTILINE)
SITE_WORDS = {"PASSED": "holds", "FAILED": "fails", "ERROR": "fails", "SKIPPED": "not tried"}
_NOT = ("fails", "failed", "error")


@dataclass(frozen=True)
class Suite:
    """Arguments for pytest. `missing`: reason why the suite cannot run; `results`: output file."""

    words: list[str] = field(default_factory=list)
    missing: str = ""
    results: Path | None = None

    def numbers(self, log: Path) -> dict[str, Any]:
        found = results_of(self.results) if self.results is not None else {}
        words = SITE_WORDS if self.results is not None else {}
        if not found:
            found = {
                name.rpartition("::")[2]: outcome_line(words.get(word, word.lower()), why)
                for name, word, why in _LINE.findall(log.read_text(errors="replace") if log.exists() else "")
            }
        outcomes = [each.partition(":")[0] for each in found.values()]
        return {each: outcomes.count(each) for each in sorted(set(outcomes))} | found

    def verdict(self, code: int, log: Path) -> tuple[str, str]:
        found = self.numbers(log)
        bad = [name for name, each in found.items() if isinstance(each, str) and each.partition(":")[0] in _NOT]
        last = (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        if bad or code not in (0, 5):
            return "failed", f"{', '.join(bad)}: {last}" if bad else f"pytest ended with code {code}: {last}"
        if not any(found.get(each) for each in ("passed", "holds")):
            return "skipped", f"no test ran: {last}"
        return "ok", ""


def site_suite(name: str, *, root: Path, work: Path, rehearse: bool) -> Suite:
    if name == "tests":
        marked = [path for path in sorted(root.glob("tests/**/test_*.py")) if "@pytest.mark.gpu" in path.read_text()]
        words = ["-m", "gpu", "-v", "-rs", "--timeout", "70", *map(str, marked)]
        return Suite(words, missing="" if marked else "no test has the marker gpu")
    site = write_site(work / "site.toml", devices="cpu:2" if rehearse else "gpu")
    results = work / "site-results.json"
    results.unlink(missing_ok=True)
    words = ["-v", "--site", str(site), "--site-json", str(results), "tests/site"]
    return Suite(words, results=results)


def results_of(file: Path) -> dict[str, str]:
    try:
        promises = json.loads(file.read_text())["promises"]
        return {each["title"]: outcome_line(each["verdict"], each.get("why", "")) for each in promises}
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def outcome_line(what: str, why: str) -> str:
    return f"{what}: {' '.join(why.split())[:200]}" if why else what
