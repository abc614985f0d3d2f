"""Parsl's `tests/conftest.py` as a plugin for newer pytest (`--noconftest -p parsl_conftest`)."""

from pathlib import Path

import parsl

_FILE = Path(parsl.__file__).parent / "tests" / "conftest.py"
_SOURCE = _FILE.read_text()
for _old, _new in (
    ("def pytest_ignore_collect(path)", "def pytest_ignore_collect(collection_path)"),
    ("path.strpath", "str(collection_path)"),
    ("else:\n        return False\n\n\ndef create_traceback", "else:\n        return None\n\n\ndef create_traceback"),
):
    _SOURCE = _SOURCE.replace(_old, _new)
exec(compile(_SOURCE, str(_FILE), "exec"), globals())
