"""docs/notebooks.md names existing options. (test_docs_commands.py runs the program of the page.)"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import stoker
from stoker.contexts import loading
from stoker.manager.executor.session import Session

TEXT = (Path(__file__).parents[2] / "docs" / "notebooks.md").read_text()


def test_options_on_the_page_exist() -> None:
    for option in re.findall(r"stoker\.map\(verify, claims, (\w+)=", TEXT):
        assert option in inspect.signature(stoker.map).parameters
    assert list(inspect.signature(Session.warm).parameters) == ["self", "context", "count"]
    assert f"({loading.ANSWER_S} seconds in a library" in TEXT
