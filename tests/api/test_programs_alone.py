from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from faults.world import until

import stoker


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
    monkeypatch.setenv("PYTHONOPTIMIZE", "2")  # with this setting Python removes docstrings
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
