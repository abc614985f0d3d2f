"""Run the site suite for `stoker doctor SITE --tests`: pytest over `stoker.site_tests` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from stoker.errors import StokerError
from stoker.manager.cli.site_page import SiteReport

_SUITE = "stoker.site_tests"
_LAST_LINES = 15
_NONE_CHOSEN = (4, 5)
"""Exit codes of pytest: an expression that it cannot read, and no test that matches."""


def run(site: Path, *, wait_s: float | None = None, chosen: str = "") -> SiteReport:
    """Try the promises on a site, all or the ones that `chosen` selects (pytest's `-k`). Progress goes to stderr.

    Raises StokerError if `chosen` selects none, or if the suite itself did not run (with the last lines of pytest).
    """
    with tempfile.TemporaryDirectory(prefix="stoker-site-") as folder:
        page, output = Path(folder) / "page.json", Path(folder) / "output"
        with output.open("wb") as out:
            process = subprocess.Popen(_command(site, page, wait_s=wait_s, chosen=chosen), stdout=out, env=_environ())
            _wait(process)
        if chosen and process.returncode in _NONE_CHOSEN:
            raise StokerError(
                f"no test of the site suite matches -k {chosen!r}; it takes parts of names, as in -k 'snapshot or gang'"
            )
        if not page.exists():
            said = output.read_text(errors="replace").splitlines()[-_LAST_LINES:]
            lines = "\n".join(f"  {line}" for line in said)
            raise StokerError(
                f"the site suite did not run (pytest ended with exit code {process.returncode}):\n{lines}"
            )
        return msgspec.json.decode(page.read_bytes(), type=SiteReport)


def _command(site: Path, page: Path, *, wait_s: float | None, chosen: str) -> list[str]:
    words = [sys.executable, "-P", "-m", "pytest", "-p", f"{_SUITE}.plugin", "--pyargs", _SUITE, "-c", os.devnull]
    words += ["--rootdir", str(Path.cwd()), "--import-mode=importlib", "--noconftest", "-p", "no:cacheprovider"]
    words += ["--no-header", "-q", "--tb=short", "--site", str(site), "--site-json", str(page), "--site-progress"]
    if wait_s is not None:
        words += ["--site-wait", f"{wait_s:g} s"]
    return [*words, "-k", chosen] if chosen else words


def _environ() -> dict[str, str]:
    """Without options and plugins that are meant for the user's own tests."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    return {**kept, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Wait for the suite. Ctrl-C reaches it too, and it writes its page before it ends."""
    while True:
        try:
            process.wait()
            return
        except KeyboardInterrupt:
            continue
