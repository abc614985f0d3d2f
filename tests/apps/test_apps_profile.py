from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli.command_line import Stoker
from tiny_model import write_tiny_model

from stoker.apps.model_profile.run import format_grid
from stoker.contexts.performance import PerformanceStore
from stoker.contexts.step_times import StepTimes

PROFILE = [sys.executable, "-m", "stoker.manager.cli.main", "profile"]
LIMIT_S = 150


def test_profile_table_has_a_column_for_each_context_length() -> None:
    cells = [(1.0, 64.0, 0.0021, 5), (1.0, 130.0, 0.0123, 5), (8.0, 64.0, 1.5, 5)]
    assert [line.split() for line in format_grid(cells, rows="requests")] == [
        ["requests", "64", "128"], ["1", "2.10", "12.3"], ["8", "1,500", "·"],
    ]  # fmt: skip
    assert len(format_grid([(1.0, 2.0**power, 0.1, 1) for power in range(20)], rows="tokens")[0].split()) <= 13


def test_profile_refuses_a_site_together_with_a_session() -> None:
    done = Stoker()("profile", "--site", "a", "--session", "b")
    assert done.exit_code == 2
    assert "give one" in done.output


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")),
    reason="needs torch and transformers",
)
def test_measured_profile_is_kept_by_the_manager(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny", longest=256)
    done = subprocess.run(
        [*PROFILE, "tiny", "--quick", "--json"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S,
        check=False, env={**os.environ, "STOKER_HOME": str(tmp_path / "home")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["engine"], found["device"]) == ("continuous", "cpu")
    assert found["times"]["decode"]
    assert found["times"]["prefill"]
    assert found["times"]["prefill_error"][1] > 0
    assert found["kept"] == str(tmp_path / "home" / "performance.sqlite")
    store = PerformanceStore(found["kept"])
    [(kind, kept)] = store.step_times(found["recipe"]).items()
    store.close()
    assert kind.startswith("cpu")
    assert isinstance(kept, StepTimes)
    assert len(kept.decode) >= len(found["times"]["decode"])
