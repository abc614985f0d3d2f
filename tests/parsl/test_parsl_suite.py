from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest


def _suite():
    spec = importlib.util.spec_from_file_location("run_suite", Path(__file__).with_name("run_suite.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
@pytest.mark.slow
def test_suite_of_parsl_passes(tmp_path):
    done = _suite().run([], folder=str(tmp_path), limit_s=300)
    assert done.returncode == 0, done.stdout[-8000:]
    passed = int(re.search(r"(\d+) passed", done.stdout)[1])
    assert passed >= 100, done.stdout[-2000:]
