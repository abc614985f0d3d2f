"""A manager whose core raises on accepted calls of the function `boom`, and on requests to explain these calls."""

from __future__ import annotations

import sys
from typing import Any

from stoker.manager.core import dispatch, story
from stoker.manager.main import main

arrive, tell = dispatch.submit_calls, story.tell_story


def _arrive(core: Any, group: Any, specs: Any) -> None:
    arrive(core, group, specs)
    if group.function.name == "boom":
        raise ZeroDivisionError("division by zero")


def _tell(state: Any, subject: str) -> Any:
    if subject == "boom":
        raise KeyError(subject)
    return tell(state, subject)


dispatch.submit_calls, story.tell_story = _arrive, _tell
sys.exit(main(sys.argv[1:]))
