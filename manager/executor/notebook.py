"""One line of text that stands still below a notebook's cell, where a terminal would have a progress bar."""

from __future__ import annotations

import sys
from typing import Any

WIDTH = 30


def in_notebook() -> bool:
    """True in a process that is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookLine:
    """Shows a text below the cell that runs; `show` replaces it."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str) -> None:
        """Put this text in the place of the one before."""
        from IPython.display import display  # only a notebook has it

        data = {"text/plain": text}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def bar_of(done: int, total: int | None) -> str:
    """`━━━━━━━─── 7/10`; without a total the number alone."""
    if not total:
        return f"{done:,}"
    full = WIDTH * min(done, total) // total
    return f"{'━' * full}{'─' * (WIDTH - full)} {done:,}/{total:,}"
