"""Read jobs of Microsoft's Philly clusters in weeks of a virtual cluster.

The file in `../shared/data/philly` (`missing`) is from the artifact of Sia: 77,456 rows of `timestamp, duration,
num_gpus, gpu_time, cluster`. A timestamp counts as arrival. These jobs keep 4 to 29 % of the nodes busy (artifact of
QSSF), so the GPUs of a window are computed from its jobs and a load (`gpus_at`).
"""

from __future__ import annotations

import csv
import gzip
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

import msgspec

from benchmarks.papers import common
from benchmarks.papers.schedmate.scheduling import settings

PHILLY = common.DATA / "philly" / "philly.csv.gz"


class Job(msgspec.Struct, frozen=True):
    at_s: float
    duration_s: float
    gpus: int


class Window(msgspec.Struct, frozen=True):
    """Jobs of a week of a virtual cluster, in order of arrival."""

    cluster: str
    week: int
    jobs: tuple[Job, ...]

    @property
    def name(self) -> str:
        return f"{self.cluster}/{self.week}"

    @property
    def gpus_at_work(self) -> float:
        week_s = settings.WINDOW_S
        return sum(job.gpus * min(job.duration_s, week_s - job.at_s) for job in self.jobs) / week_s

    def gpus_at(self, load: float) -> int:
        """Return the GPUs of whole pilots for the jobs at this load, at least those of the largest job."""
        wanted = max(self.gpus_at_work / load, max(job.gpus for job in self.jobs))
        return settings.NODE_GPUS * math.ceil(wanted / settings.NODE_GPUS)


def missing() -> str:
    return common.missing(PHILLY, "the jobs of Philly are")


@lru_cache(maxsize=1)
def windows(path: Path = PHILLY) -> tuple[Window, ...]:
    with gzip.open(path, "rt") as file:
        return tuple(windows_of(csv.DictReader(file)))


def windows_of(rows: Iterable[dict[str, str]]) -> Iterator[Window]:
    clusters: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
    for row in rows:
        at = datetime.fromisoformat(row["timestamp"]).replace(tzinfo=UTC).timestamp()
        clusters[row["cluster"]].append((at, float(row["duration"]), int(row["num_gpus"])))
    for cluster, jobs in sorted(clusters.items()):
        jobs.sort(key=lambda job: job[0])
        weeks: dict[int, list[Job]] = defaultdict(list)
        for at, duration_s, gpus in jobs:
            week, at_s = divmod(at - jobs[0][0], settings.WINDOW_S)
            weeks[int(week)].append(Job(at_s, duration_s, gpus))
        for week, several in sorted(weeks.items()):
            window = Window(cluster, int(week), tuple(several))
            if len(several) >= settings.LEAST_JOBS and window.gpus_at_work >= settings.LEAST_GPUS:
                yield window
