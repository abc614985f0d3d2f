"""Whole programs as processes: their output, their exit status, and their leftovers."""

from __future__ import annotations

import code
import contextlib
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from faults.world import until
from polling import PATIENCE_S


def script(folder: Path, text: str) -> Path:
    file = folder / "program.py"
    file.write_text(textwrap.dedent(text))
    return file


def run(folder: Path, text: str, *, limit_s: float = 90) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script(folder, text))], cwd=folder, capture_output=True, text=True, timeout=limit_s
    )


def start(folder: Path, text: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", str(script(folder, text))],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def left_behind(folder: Path) -> list[str]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(str(folder) in word for word in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
    return found


@pytest.mark.long
def test_figure_5_with_its_import_lines_changed(tmp_path):
    done = run(
        tmp_path,
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
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['the sky is blue: SUPPORTED', 'water is wet: SUPPORTED']\n"
    logs = list(tmp_path.glob("runinfo/*/stoker/pilots/*/*.log"))
    assert 1 <= sum(log.read_text(errors="replace").count("LOADED models/SmolLM2-1.7B") for log in logs) <= 2
    until(lambda: not left_behind(tmp_path))


def test_a_program_with_a_module_beside_it(tmp_path):
    (tmp_path / "beside.py").write_text("FACTOR = 3\n\ndef triple(x):\n    return FACTOR * x\n")
    done = run(
        tmp_path,
        """
        import stoker, beside

        @stoker.app()
        def inside(x):
            import beside
            return beside.triple(x)

        with stoker.load():
            print(list(stoker.map(beside.triple, range(3))), inside(5).result())
        """,
    )
    assert done.stdout == "[0, 3, 6] 15\n", done.stderr


def test_app_called_before_load_shows_how_to_load(tmp_path):
    done = run(
        tmp_path,
        """
        import stoker
        @stoker.app()
        def verify(claim):
            return claim
        verify("x")
        """,
    )
    assert done.returncode == 1
    assert "verify was called before a site was loaded" in done.stderr
    assert "with stoker.load():" in done.stderr


@pytest.mark.long
def test_a_program_that_forgets_to_stop_leaves_nothing(tmp_path):
    done = run(
        tmp_path,
        """
        import stoker
        session = stoker.load()
        print(session.executor.submit(abs, {}, -1).result())
        """,
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    until(lambda: not left_behind(tmp_path))


def test_a_program_that_fails_in_its_block_ends_with_its_own_error(tmp_path):
    done = run(
        tmp_path,
        """
        import stoker, time
        with stoker.load() as session:
            waiting = session.executor.submit(time.sleep, {}, 60)
            raise RuntimeError("my own mistake")
        """,
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("RuntimeError: my own mistake")
    until(lambda: not left_behind(tmp_path))


@pytest.mark.parametrize("place", ["in the loop's body", "in the map"])
def test_ctrl_c_stops_cleanly_and_says_what_is_kept(tmp_path, place):
    body = "time.sleep(60)" if place == "in the loop's body" else "pass"
    program = start(
        tmp_path,
        f"""
        import stoker, time
        def slowly(n):
            time.sleep(0.02 if n < 4 else 60)
            return n
        with stoker.load():
            for value in stoker.map(slowly, range(100)):
                print(value)
                if value == 3:
                    {body}
        """,
    )
    assert [program.stdout.readline() for _ in range(4)] == ["0\n", "1\n", "2\n", "3\n"]
    time.sleep(0.2)
    os.killpg(program.pid, signal.SIGINT)  # as a terminal does: the whole group
    _, said = program.communicate(timeout=PATIENCE_S)
    assert said.count("stoker.map stopped: 4 of 100 results were taken") == 1
    assert said.rstrip().endswith("KeyboardInterrupt") or "KeyboardInterrupt" in said
    until(lambda: not left_behind(tmp_path))


@pytest.mark.slow
def test_a_killed_program_takes_everything_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "home"))  # where no calls are known that were over at once
    program = start(
        tmp_path,
        """
        import stoker, time
        with stoker.load() as session:
            waiting = [session.executor.submit(time.sleep, {}, 60) for _ in range(4)]
            while session.status().running < 2:
                time.sleep(0.05)
            print("running")
            time.sleep(60)
        """,
    )
    assert program.stdout.readline() == "running\n"
    assert len(left_behind(tmp_path)) >= 3
    program.kill()
    program.communicate()
    until(lambda: not left_behind(tmp_path))


def test_cells_of_a_notebook(tmp_path):
    cells = [
        "import stoker",
        f"session = stoker.load(run_dir={str(tmp_path)!r})",
        "scale = 10",
        "@stoker.app()\ndef times(x):\n    return x * scale\n",
        "first = times(4).result(60)",
        "@stoker.app()\ndef times(x):\n    return -x * scale\n",
        "second = times(4).result(60)",
        "shown = repr(session), session._repr_html_(), repr(times)",
        "session.stop()",
        "after = repr(session)",
    ]
    names: dict[str, object] = {"__name__": "__main__"}
    notebook = code.InteractiveInterpreter(names)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        for cell in cells:
            exec(compile(cell, f"<cell {cells.index(cell)}>", "exec"), notebook.locals)
    assert (names["first"], names["second"]) == (40, -40)
    assert "1 pilot" in names["shown"][0]
    assert "<table>" in names["shown"][1]
    assert names["shown"][2] == "<app times: no context>"
    assert names["after"].endswith("stopped>")


@pytest.mark.long
@pytest.mark.slow
def test_a_context_that_loads_for_long_says_what_it_does(tmp_path):
    done = run(
        tmp_path,
        """
        import time, stoker
        from stoker import app, context

        @context
        def slow():
            print("reading the first shard", flush=True)
            time.sleep(16)
            return 5

        @app(context=slow())
        def use(number):
            return number

        with stoker.load():
            print(use().result(120))
        """,
    )
    assert done.stdout.split() == ["5"]
    told = [line for line in done.stderr.splitlines() if "is loading" in line]
    assert len(told) == 1, done.stderr
    assert re.fullmatch(
        r"stoker: context slow-\w{4} is loading \(1\d s\); its last line: reading the first shard", told[0]
    )


def test_importing_stoker_imports_nothing_heavy():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, stoker\n"
            "heavy = {'parsl', 'zmq', 'torch', 'transformers', 'numpy', 'rich', 'cloudpickle', 'psutil'}\n"
            "print(sorted(heavy & set(sys.modules)))\n"
            "import stoker.manager.main, stoker.pilot.main, stoker.manager.factory.main\n"
            "print(sorted({'parsl', 'asyncio'} & set(sys.modules)))\n"
            "import stoker.manager.executor.client\n"
            "print('parsl' in sys.modules)",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n[]\nFalse\n"


@pytest.mark.long
def test_a_program_without_standard_error_ends_well(tmp_path):
    (tmp_path / "program.py").write_text(
        "import stoker\nwith stoker.load():\n    print(stoker.app()(abs)(-3).result())\n"
    )
    command = f"exec {shlex.quote(sys.executable)} program.py 2>&-"
    ran = subprocess.run(["sh", "-c", command], cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=90)
    assert (ran.returncode, ran.stdout) == (0, "3\n")


@pytest.mark.long
def test_a_python_that_keeps_no_docstrings_runs_programs_too(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONOPTIMIZE", "2")
    done = run(
        tmp_path,
        """
        import stoker

        @stoker.app
        def documented():
            "Not kept."
            return documented.__doc__

        with stoker.load():
            print(documented().result(60))
        """,
    )
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr


@pytest.mark.parametrize(("mode", "seconds", "waits"), [("wait", 1, True), ("cleanup", 600, False)])
def test_exit_mode_says_whether_the_end_of_the_block_waits_for_calls(tmp_path, mode, seconds, waits):
    done = run(
        tmp_path,
        f"""
        import stoker, time

        @stoker.app
        def slow():
            time.sleep({seconds})
            return "done"

        with stoker.load(exit_mode={mode!r}):
            future = slow()
            time.sleep(0.2)
        print(future.result() if future.exception() is None else type(future.exception()).__name__)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout.split()[-1] == "done") is waits
    until(lambda: not left_behind(tmp_path))


def test_exit_mode_skip_leaves_the_session_to_the_program(tmp_path):
    done = run(
        tmp_path,
        """
        import stoker

        with stoker.load(exit_mode="skip") as session:
            future = stoker.app(pow)(2, 5)
        print(future.result(60))
        session.stop()
        """,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["32"]), done.stderr
    until(lambda: not left_behind(tmp_path))


@pytest.mark.long
def test_idle_contexts_make_room_in_the_cache(tmp_path):
    (tmp_path / "site.toml").write_text(
        f'name = "small"\n[pilot]\ndevices = "cpu:2"\ncache_size = "20 MB"\nscratch = "{tmp_path}/scratch"\n'
    )
    done = run(
        tmp_path,
        """
        import os
        import stoker

        @stoker.context(files=("path",))
        def size_of(path):
            return os.path.getsize(path)

        def size(context):
            return context

        with stoker.load("site.toml"):
            for number in range(4):
                path = f"weights-{number}"
                with open(path, "wb") as file:
                    file.write(os.urandom(9_000_000 + number))
                print(stoker.app(context=size_of(path))(size)().result(60))
        """,
    )
    assert done.returncode == 0, done.stderr
    assert [int(line) for line in done.stdout.split()] == [9_000_000, 9_000_001, 9_000_002, 9_000_003]
