from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
from faults.world import until
from polling import PATIENCE_S

import stoker
from stoker.manager.executor import progress


def left_behind(folder: Path) -> list[str]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(str(folder) in word for word in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
    return found


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path):
    yield
    until(lambda: not left_behind(tmp_path))


@pytest.mark.long
def test_parsl_paper_figure_5_runs_with_changed_imports(run_program, tmp_path):
    done = run_program(
        """
        import stoker
        from parsl import python_app

        class AutoModel:
            @classmethod
            def from_pretrained(cls, path):
                print("LOADED", path, flush=True)
                return cls()
            def to(self, device):
                return self
            def generate(self, claim):
                return f"{claim}: SUPPORTED"

        def load_model(model_path):
            model = AutoModel.from_pretrained(model_path).to('gpu')
            return {'model': model}

        @python_app
        def infer_model(claims, parsl_spec):
            from stoker import load_variable_from_serverless
            model = load_variable_from_serverless('model')
            verdicts = [model.generate(claim) for claim in claims]
            return verdicts

        with stoker.load():
            model_path = "models/SmolLM2-1.7B"
            claims = ["the sky is blue", "water is wet"]
            parsl_spec = {'context': [load_model, [model_path], {}]}
            verdicts = infer_model(claims, parsl_spec).result()
            assert [infer_model(claims, parsl_spec=parsl_spec).result() for _ in range(5)] == [verdicts] * 5
            print(verdicts)
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['the sky is blue: SUPPORTED', 'water is wet: SUPPORTED']\n"
    logs = list(tmp_path.glob("runinfo/*/stoker/pilots/*/*.log"))
    assert 1 <= sum(log.read_text(errors="replace").count("LOADED models/SmolLM2-1.7B") for log in logs) <= 2


@pytest.mark.long
def test_program_without_stderr_or_docstrings_needs_no_shutdown(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONOPTIMIZE", "2")  # Python removes docstrings
    (tmp_path / "program.py").write_text(
        'import stoker\n@stoker.app\ndef documented():\n    "Not kept."\n    return documented.__doc__\n'
        "stoker.load()\nprint(documented().result())\n"
    )
    command = f"exec {shlex.quote(sys.executable)} program.py 2>&-"
    ran = subprocess.run(["sh", "-c", command], cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=90)
    assert (ran.returncode, ran.stdout) == (0, "None\n")


def test_program_that_fails_in_its_with_block_raises_its_own_error(run_program):
    done = run_program(
        """
        import stoker, time
        with stoker.load() as session:
            waiting = session.executor.submit(time.sleep, {}, 60)
            raise RuntimeError("my own mistake")
        """
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("RuntimeError: my own mistake")


@pytest.mark.long
def test_context_with_a_long_load_reports_its_progress(tmp_path, monkeypatch, caplog):
    for limit in ("FIRST_S", "CHECK_S"):
        monkeypatch.setattr(progress, limit, 0.5)

    @stoker.context
    def slow(gate):
        print("reading the first shard", flush=True)
        while not os.path.exists(gate):
            time.sleep(0.01)
        return 5

    def told():
        return [record.getMessage() for record in caplog.records if "is loading" in record.getMessage()]

    gate = tmp_path / "gate"
    with stoker.load(run_dir=tmp_path), caplog.at_level(logging.WARNING, logger="stoker"):
        used = stoker.app(context=slow(str(gate)))(lambda loaded: loaded)()
        until(lambda: told() and "first shard" in told()[-1])
        gate.touch()
        assert used.result(60) == 5
    assert re.fullmatch(
        r"context slow-\w{4} is loading \([\d.]+ \w+\); the last line of its log: reading the first shard", told()[-1]
    )


@pytest.mark.parametrize("mode", ["wait", "skip"])
def test_exit_mode_decides_whether_the_with_block_waits(tmp_path, mode):
    gate = tmp_path / "gate"

    @stoker.app
    def gated(path):
        while not os.path.exists(path):
            time.sleep(0.01)
        return "done"

    with stoker.load(run_dir=tmp_path, exit_mode=mode) as session:
        future = gated(str(gate))
        if mode == "wait":
            threading.Timer(0.5, gate.touch).start()
    if mode == "skip":  # the session continues until the program ends the session
        assert not future.done()
        gate.touch()
        assert future.result(60) == "done"
        session.stop()
    assert future.result(0) == "done"


@pytest.mark.long
def test_idle_contexts_are_evicted_for_cache_space(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("site.toml").write_text(
        f'name = "small"\n[pilot]\ndevices = "cpu:2"\ncache_size = "20 MB"\nscratch = "{tmp_path}/scratch"\n'
    )

    @stoker.context(files=("path",))
    def size_of(path):
        return os.path.getsize(path)

    with stoker.load("site.toml"):
        for size in range(9_000_000, 9_000_004):
            Path(f"weights-{size}").write_bytes(os.urandom(size))
            assert stoker.app(context=size_of(f"weights-{size}"))(lambda context: context)().result(60) == size
