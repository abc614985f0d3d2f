"""`stoker doctor SITE --tests`: run `stoker.site_tests` with pytest, and show the results."""

from __future__ import annotations

import contextlib
import enum
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import msgspec

from stoker.errors import StokerError
from stoker.units import show_seconds

# ---- the page of verdicts


class PromiseVerdict(enum.Enum):
    HOLDS = "holds"
    FAILS = "fails"
    NOT_TRIED = "not tried"


_WORDS = dict(zip(PromiseVerdict, ("ok", "fails", "no"), strict=True))


class TriedPromise(msgspec.Struct, frozen=True):
    title: str
    verdict: PromiseVerdict
    took_s: float = 0.0
    why: str = ""
    remedy: str = ""
    log: str = ""


class SiteReport(msgspec.Struct, frozen=True):
    site: str
    provider: str
    machines: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    promises: tuple[TriedPromise, ...] = ()
    took_s: float = 0.0
    interrupted: bool = False
    troubles: tuple[str, ...] = ()

    @property
    def has_passed(self) -> bool:
        verdicts = {each.verdict for each in self.promises}
        return not self.interrupted and PromiseVerdict.HOLDS in verdicts and PromiseVerdict.FAILS not in verdicts


def render_report(report: SiteReport) -> list[str]:
    found = [", ".join(report.machines) or "no pilot came", ", ".join(report.devices)]
    out = [" · ".join(filter(None, [f"site {report.site}", report.provider, *found])), ""]
    for trouble in report.troubles:
        first, *more = trouble.splitlines()
        out += [f"  warn  {first}", *_indented(more)]
    for verdict in PromiseVerdict:
        for promise in report.promises:
            if promise.verdict is verdict:
                out += format_promise(promise)
    return [*out, "", _summary(report)]


def format_promise(promise: TriedPromise) -> list[str]:
    word = f"  {_WORDS[promise.verdict]:<5} {promise.title}"
    if promise.verdict is PromiseVerdict.HOLDS:
        return [f"{word} · {show_seconds(promise.took_s)}"]
    first, *more = promise.why.splitlines() or ["no reason given"]
    if promise.verdict is PromiseVerdict.NOT_TRIED:
        return [f"{word}: not tried: {first}", *_indented(more)]
    told = [first, *more, promise.remedy, f"log: {promise.log}" if promise.log else ""]
    return [f"{word} · {show_seconds(promise.took_s)}", *_indented(told)]


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"        {line}" for line in lines if line]


def _summary(report: SiteReport) -> str:
    holds, fails, not_tried = (sum(each.verdict is verdict for each in report.promises) for verdict in PromiseVerdict)
    said = [f"{holds} promise{'s hold' if holds != 1 else ' holds'}"]
    said.append(f"{fails} {'do' if fails != 1 else 'does'} not" if fails else "none fails")
    said += [f"{not_tried} could not be tried"] if not_tried else []
    end = "interrupted after" if report.interrupted else "in"
    return f"{', '.join(said)}; {end} {show_seconds(report.took_s)}"


# ---- running pytest


_SUITE = "stoker.site_tests"
_LAST_LINES = 15
_NO_TEST_MATCHES = (4, 5)
"""Exit codes of pytest if no test matches `-k`."""
_EXIT_CODE_CTRL_C = 2
"""Exit code of pytest after Ctrl-C."""


def run_site_suite(site: Path, *, wait_s: float | None = None, chosen: str = "") -> SiteReport:
    """Run the tests of Stoker's promises on a site. `chosen`: pytest's `-k`. Raises StokerError if no test ran."""
    with tempfile.TemporaryDirectory(prefix="stoker-site-") as folder:
        page, output = Path(folder) / "page.json", Path(folder) / "output"
        with output.open("wb") as out:
            # Omit options and plugins that the user sets for other tests.
            environ = {**os.environ, "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
            process = subprocess.Popen(_command(site, page, wait_s=wait_s, chosen=chosen), stdout=out, env=environ)
            while process.returncode is None:  # after Ctrl-C wait on, because pytest gets it too and writes its report
                with contextlib.suppress(KeyboardInterrupt):
                    process.wait()
        if chosen and process.returncode in _NO_TEST_MATCHES:
            hint = "-k matches parts of names, as in -k 'snapshot or gang'"
            raise StokerError(f"no test of the site suite matches -k {chosen!r}; {hint}")
        ended = f"pytest ended with exit code {process.returncode}"
        said = [f"  {line}" for line in output.read_text(errors="replace").splitlines()[-_LAST_LINES:]]
        if not page.exists():
            raise StokerError("\n".join([f"the site suite did not run ({ended}):", *said]))
        report = msgspec.json.decode(page.read_bytes(), type=SiteReport)
        if report.interrupted and process.returncode != _EXIT_CODE_CTRL_C:
            trouble = "\n".join([f"the site suite stopped early ({ended}):", *said])
            report = msgspec.structs.replace(report, troubles=(*report.troubles, trouble))
        return report


def _command(site: Path, page: Path, *, wait_s: float | None, chosen: str) -> list[str]:
    words = [sys.executable, "-P", "-m", "pytest", "-p", f"{_SUITE}.plugin", "--pyargs", _SUITE, "-c", os.devnull]
    words += ["--rootdir", str(Path.cwd()), "--import-mode=importlib", "--noconftest", "-p", "no:cacheprovider"]
    words += ["--no-header", "-q", "--tb=short", "--site", str(site), "--site-json", str(page), "--site-progress"]
    if wait_s is not None:
        words += ["--site-wait", f"{wait_s:g} s"]
    return [*words, "-k", chosen] if chosen else words
