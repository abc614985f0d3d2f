"""Measure how long advice blocks the manager loop: `python -m benchmarks.papers.schedmate.stall`.

`AdvisorLink` runs like in the manager loop, with about 500 iterations and ten questions per second. The advisor is the
shipped process, a process with nine seconds per answer, or a process killed every two seconds. The loop may block for 1
ms.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness import Clock, side_options
from stoker.manager.core.events import AskAdvice, OfFailure
from stoker.manager.live import advisor
from stoker.manager.live.advisor import AdvisorLink
from stoker.protocol.ids import CallId, LibraryId, PilotId
from stoker.protocol.session import SessionFolder

BAR_MS = 1.0
SECONDS = 25.0
TURN_S = 0.002
QUESTION_S = 0.1
KILL_S = 2.0
SLOW = """
import argparse, socket, time
options = argparse.ArgumentParser()
options.add_argument("--session"); options.add_argument("--channel", type=int)
channel = socket.socket(fileno=options.parse_args().channel)
while channel.recv(65536):
    time.sleep(9)
    channel.send(b"\\xc0")
"""


def run(what: str, folder: Path) -> dict[str, float]:
    session = SessionFolder(folder / what)
    session.create_folders()
    link = AdvisorLink(session, watch=lambda _: None, unwatch=lambda _: None)
    shipped = advisor.ADVISOR
    if what == "takes 9 s":
        (folder / "slow_advisor.py").write_text(SLOW)
        os.environ["PYTHONPATH"] = str(folder)
        advisor.ADVISOR = "slow_advisor"
    wall, used, empty = list[float](), list[float](), list[float]()
    answered = asked = kills = 0
    began = time.monotonic()
    ask_at = kill_at = began
    while (now := time.monotonic()) < began + SECONDS:
        clock, cpu = time.perf_counter(), time.thread_time()
        if now >= ask_at:
            asked += 1
            ask_at += QUESTION_S
            about = OfFailure(PilotId("p1"), LibraryId(1), CallId(asked))
            link.queue_question(AskAdvice(about, "f", said="OSError: [Errno 5] Input/output error"), now)
        answered += len(link.receive_answers(now))
        wall.append(time.perf_counter() - clock)
        used.append(time.thread_time() - cpu)
        clock = time.perf_counter()
        link.due_in_s  # noqa: B018 # an empty iteration
        empty.append(time.perf_counter() - clock)
        if what == "is killed" and now >= kill_at + KILL_S and link._process is not None:
            kill_at = now
            with contextlib.suppress(ProcessLookupError):
                os.kill(link._process.pid, signal.SIGKILL)
                kills += 1
        time.sleep(TURN_S)
    link.close()
    advisor.ADVISOR = shipped
    wall.sort()
    return {
        "turns": len(wall), "asked": asked, "answered": answered, "kills": kills,
        "p50_ms": _ms(wall[len(wall) // 2]), "p99_9_ms": _ms(wall[int(len(wall) * 0.999)]), "most_ms": _ms(wall[-1]),
        "most_processor_ms": _ms(max(used)), "most_of_an_empty_turn_ms": _ms(max(empty)),
        "over_bar": sum(1000 * each > BAR_MS for each in wall),
    }  # fmt: skip


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 4)


def main() -> int:
    side_options(__doc__)
    clock = Clock("python -m benchmarks.papers.schedmate.stall")
    gc.freeze()  # The manager uses these settings.
    gc.set_threshold(100_000, 50, 100)
    rows = {}
    with tempfile.TemporaryDirectory() as place:
        for what in ("answers", "takes 9 s", "is killed"):
            rows[what] = run(what, Path(place))
            print(f"{what:10}", rows[what])
    clock.write("schedmate-stall", {"seconds_each": SECONDS, "rows": rows})
    return int(any(row["most_processor_ms"] > BAR_MS for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
