"""Job arrays that a site's `options` ask for: with `--array=0-3` a block of Slurm's is four jobs, each with pilots."""

from __future__ import annotations

import re
from collections.abc import Sequence

_SLURM = re.compile(r"(?:^|\s)(?:--array(?:=|\s+)|-a\s*=?)([\d,:%-]+)")
_INDICES = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")
_OTHERS = re.compile(r"^(?:#\S+\s+)?(?:-J\s+\d|-J\s+\S*\[\d|-t\s+\d)")
"""Of PBS (`-J 0-3`), LSF (`-J "name[1-4]"`) and Grid Engine (`-t 1-4`)."""


def tasks_at_once(options: Sequence[str]) -> int:
    """How many tasks of an array may run at the same time; 1 where no array is asked for, or none that can be read
    (Slurm refuses that one in its own words). Where `--array` is given twice, the last one counts, as for sbatch."""
    given = [found for line in options for found in _SLURM.findall(line)]
    if not given:
        return 1
    indices, _, most = given[-1].partition("%")
    count = sum(_count(part) for part in indices.split(","))
    return max(1, min(count, int(most)) if most.isdecimal() and int(most) else count)


def asks_for_array(option: str) -> bool:
    """Whether a line of PBS, LSF or Grid Engine makes a job an array."""
    return _OTHERS.search(option.replace('"', "").replace("'", "")) is not None


def _count(part: str) -> int:
    """Tasks of `3`, `0-3` or `0-15:4`."""
    found = _INDICES.fullmatch(part)
    if found is None:
        return 0
    first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
    return max(0, last - first) // max(1, step) + 1
