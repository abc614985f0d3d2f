"""What was raised in code of the user's own, as lines that begin there: he has no use for the frames above."""

from __future__ import annotations

import traceback

_OURS = "stoker."


def raised(error: BaseException) -> list[str]:
    """The lines of a traceback from its first frame outside of Stoker on; none where there is no such frame."""
    frames = list(traceback.walk_tb(error.__traceback__))
    begins = [number for number, (frame, _) in enumerate(frames) if not _is_ours(frame.f_globals.get("__name__", ""))]
    if not begins:
        return []
    own = traceback.StackSummary.extract(iter(frames[begins[0] :]))
    text = "".join([*traceback.format_list(own), *traceback.format_exception_only(error)])
    return text.rstrip().splitlines()


def _is_ours(module: str) -> bool:
    return module.startswith(_OURS)
