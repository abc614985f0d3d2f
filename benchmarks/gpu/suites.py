"""The two suites of tests that `make gpu` runs: the site suite, and the tests with the marker `gpu`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.site_file import write_site

_LINE = re.compile(r"^(\S+::.+?) (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)(?: \((.*?)\))?(?:\s|$)", re.MULTILINE)
SITE_WORDS = {"PASSED": "holds", "FAILED": "fails", "ERROR": "fails", "SKIPPED": "not tried"}
_NOT = ("fails", "failed", "error")


@dataclass(frozen=True)
class Suite:
    """A suite: pytest's arguments. `missing`: why it cannot run. `results`: the file that the suite writes, if any."""

    words: list[str] = field(default_factory=list)
    missing: str = ""
    results: Path | None = None

    def numbers(self, log: Path) -> dict[str, Any]:
        """Return results by test and their counts, complete or so far."""
        found = results_of(self.results) if self.results is not None else {}
        words = SITE_WORDS if self.results is not None else {}
        if not found:
            found = {
                name.rpartition("::")[2]: said(words.get(word, word.lower()), why)
                for name, word, why in _LINE.findall(log.read_text(errors="replace") if log.exists() else "")
            }
        outcomes = [each.partition(":")[0] for each in found.values()]
        return {each: outcomes.count(each) for each in sorted(set(outcomes))} | found

    def verdict(self, code: int, log: Path) -> tuple[str, str]:
        """Return a status and the reason for it, of a suite that has ended."""
        found = self.numbers(log)
        bad = [name for name, each in found.items() if isinstance(each, str) and each.partition(":")[0] in _NOT]
        last = (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        if bad or code not in (0, 5):
            return "failed", f"{', '.join(bad)}: {last}" if bad else f"pytest ended with code {code}: {last}"
        if not any(found.get(each) for each in ("passed", "holds")):
            return "skipped", f"no test ran: {last}"
        return "ok", ""


def suite(name: str, *, root: Path, work: Path, rehearse: bool) -> Suite:
    """Return the suite of a part."""
    if name == "tests":
        marked = [path for path in sorted(root.glob("tests/**/test_*.py")) if "@pytest.mark.gpu" in path.read_text()]
        words = ["-m", "gpu", "-v", "-rs", "--timeout", "70", *map(str, marked)]
        return Suite(words, missing="" if marked else "no test has the marker gpu")
    if not (root / "tests" / "site").is_dir():
        return Suite(missing="tests/site is missing")
    site = write_site(work / "site.toml", devices="cpu:2" if rehearse else "gpu")
    results = work / "site-results.json"
    results.unlink(missing_ok=True)
    words = ["-v", "--site", str(site), "--site-json", str(results), "tests/site"]
    return Suite(words, results=results)


def results_of(file: Path) -> dict[str, str]:
    """Return verdicts by promise, from the file that `--site-json` writes after each test."""
    try:
        promises = json.loads(file.read_text())["promises"]
        return {each["title"]: said(each["verdict"], each.get("why", "")) for each in promises}
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def said(what: str, why: str) -> str:
    """Return an outcome with its reason, on one line."""
    return f"{what}: {' '.join(why.split())[:200]}" if why else what
