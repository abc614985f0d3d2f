"""Measure the error of the simulator: fact verification on this machine, live and simulated.

The journal of each fresh `stoker run fact_verification` calibrates a world, which is simulated with several seeds. The
error compares the median simulated makespan with the live makespan. Another line forecasts each run from the previous
run. With peft, more lines forecast tuning jobs (`tuning_times`).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from benchmarks.harness import MODEL, missing, need, verify_facts
from benchmarks.tables import Bar, Line, Table
from benchmarks.tuning import tuning_times
from stoker.manager.live.replay import verify_replay
from stoker.manager.live.session_policies import create_policies_of_session
from stoker.manager.policies import default_policies
from stoker.manager.study.calibrate import CalibratedSession, calibrate_world, compare_makespans, read_recorded_session
from stoker.protocol.session import SessionFolder

RUNS, LIMIT, SEEDS = 5, 150, range(9)
PROMPTS = 3


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    need(*MODEL)
    runs, limit = (1, 2) if quick else (RUNS, LIMIT)
    worlds: list[CalibratedSession] = []
    live: list[float] = []
    simulated: list[float] = []
    with tempfile.TemporaryDirectory(prefix="fidelity-") as place:
        if not quick:
            _live(Path(place), limit=2)
            say("the snapshot is made; that run is not counted")
        for _ in range(runs):
            folder = _live(Path(place), limit=limit)
            recorded = read_recorded_session(
                folder.journal, session=folder.read().session, policies=create_policies_of_session(folder)
            )
            worlds.append(calibrate_world(recorded))
            found = compare_makespans(worlds[-1], policies=default_policies, seeds=SEEDS)
            live.append(found.live_s)
            simulated.append(found.live_s * (1 + found.error))
            say(f"{len(recorded.calls)} calls: live {live[-1]:.1f} s, simulated {simulated[-1]:.1f} s")
            again = verify_replay(
                folder.journal, session=folder.read().session, policies=create_policies_of_session(folder)
            )
            if again.difference is not None:
                raise RuntimeError(f"{folder.path} replays with another decision: {again.difference}")
    size = f"{PROMPTS * limit} inferences, s"
    lines = [_line(f"its own world, {size}", live, simulated, bar=Bar(at_most=5.0, repeats=1 if quick else RUNS))]
    if len(worlds) > 1:
        forecast = [_makespan(before) for before, _ in pairwise(worlds)]
        lines.append(_line(f"the world of the run before, {size}", live[1:], forecast))
    if not missing("peft"):
        lines += tuning_times.forecast_lines(tuning_times.sides(say, repeats=1 if quick else 3))
    return Table(lines=lines, notes=["each run's journal replayed with the same decisions"])


def _line(what: str, live: list[float], simulated: list[float], *, bar: Bar | None = None) -> Line:
    errors = [100 * abs(there / here - 1) for here, there in zip(live, simulated, strict=True)]
    return Line(what=what, cells={"live": live, "simulated": simulated, "error, %": errors}, bar=bar, digits=1)


def _makespan(world: CalibratedSession) -> float:
    found = compare_makespans(world, policies=default_policies, seeds=SEEDS)
    return found.live_s * (1 + found.error)


def _live(place: Path, *, limit: int) -> SessionFolder:
    home = place / "home"
    begun = time.time()
    verify_facts(place, "--limit", str(limit), home=home)
    links = [link for link in (home / "sessions").iterdir() if link.lstat().st_mtime >= begun - 1]
    newest = max(links, key=lambda link: link.lstat().st_mtime)
    return SessionFolder(newest.resolve())
