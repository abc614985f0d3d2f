"""A manager that compacts its journal early and stops at one step like a killed process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stoker.manager.live import compaction, records, snapshot
from stoker.manager.live.journal import Journal

compaction.LEAST_BYTES = 20_000


def stop(mark: Path) -> None:
    mark.write_text(str(os.getpid()))
    while True:
        time.sleep(60)


def stop_at(step: str, mark: Path) -> None:
    def before(place: Any, name: str, *, skip: int = 0) -> None:
        real, calls = getattr(place, name), [0]

        def stopping(*args: Any, **more: Any) -> Any:
            calls[0] += 1
            if calls[0] > skip:
                stop(mark)
            return real(*args, **more)

        setattr(place, name, stopping)

    if step == "before the segment":
        before(Journal, "begin_segment")
    elif step == "between the segments":
        before(os, "rename", skip=1)
    elif step == "before the fork":
        before(os, "fork")
    elif step == "half a snapshot":
        before(snapshot._GraphPickler, "field_values", skip=20)
    elif step == "no name":
        real_draft = snapshot.draft_file

        @contextmanager
        def unnamed(path: Path, **how: Any) -> Iterator[Path]:
            with real_draft(path, **how) as draft:
                yield draft
                stop(mark)

        vars(snapshot)["draft_file"] = unnamed
    elif step == "before removal":
        before(records, "older_files")
