from __future__ import annotations

import json
import logging
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from polling import PATIENCE_S

from stoker.log_files import BoundedLog, RateLimitedLog, free_file_middle

# ---- log files


WRITES = """
import logging, sys
from pathlib import Path
from stoker import log_files
log_files.LOG_BYTES = 50_000
handler = log_files.BoundedLog(sys.argv[1], most_bytes=50_000)
logging.basicConfig(handlers=[handler], level=logging.INFO)
for number in range(3000):
    logging.info("line %05d of %s %s", number, sys.argv[2], "x" * 40)
print("printed at the end", flush=True)
"""


def logger(path: Path, **options: int) -> logging.Logger:
    made = logging.Logger("test")
    made.addHandler(BoundedLog(path, **options))
    return made


def test_full_log_file_is_replaced_by_its_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "manager.log"
    log = logger(path, most_bytes=200_000)
    for number in range(20_000):
        log.info("line %05d", number)
    lines = path.read_text().splitlines()
    assert lines[-1] == "line 19999"
    numbers = [int(line.split()[1]) for line in lines]
    assert numbers == list(range(numbers[0], 20_000)), "no line is lost or cut"
    assert path.stat().st_size < 210_000
    assert (tmp_path / "manager.log.1").stat().st_size < 210_000
    assert len(list(tmp_path.iterdir())) == 2


def test_several_processes_write_and_print_into_one_log(tmp_path: Path) -> None:
    path = tmp_path / "manager.log"
    writers = []
    for name in ("a", "b"):
        with path.open("ab") as output:
            writers.append(
                subprocess.Popen([sys.executable, "-c", WRITES, str(path), name], stdout=output, stderr=output)
            )
    assert [writer.wait(60) for writer in writers] == [0, 0]
    text = path.read_text()
    assert "Traceback" not in text
    assert "line 02999" in text
    # the other process may have rotated the file
    assert "printed at the end" in text + path.with_name("manager.log.1").read_text()
    assert path.stat().st_size < 150_000


def test_process_with_the_old_log_open_prints_into_the_new_log(tmp_path: Path) -> None:
    path = tmp_path / "manager.log"
    late = """
import sys
from stoker import log_files
input()
handler = log_files.BoundedLog(sys.argv[1])
print("printed late", flush=True)
"""
    with path.open("ab") as output:
        writer = subprocess.Popen(
            [sys.executable, "-c", late, str(path)], stdin=subprocess.PIPE, stdout=output, stderr=output, text=True
        )
    full = logger(path, most_bytes=1000)
    for number in range(200):
        full.info("line %05d %s", number, "x" * 40)
    assert path.with_name("manager.log.1").exists()
    writer.communicate("go\n", timeout=60)
    assert writer.returncode == 0
    assert path.read_text().splitlines()[-1] == "printed late"


def test_unwritable_log_affects_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gone" / "manager.log"
    log = logger(path, delay=True)  # type: ignore[arg-type]
    log.info("nowhere")
    assert not capsys.readouterr().err


def test_removing_the_middle_of_a_library_log_keeps_offsets(tmp_path: Path) -> None:
    path = tmp_path / "lib-1.log"
    with path.open("wb") as file:
        for number in range(40):
            file.write(b"%07d\n" % number * 131_072)  # a mebibyte each
    try:
        dropped = free_file_middle(path, most_bytes=20 << 20)
    except OSError as error:
        pytest.skip(f"this file system cannot give back a part of a file: {error}")
    assert dropped
    os.sync()
    assert path.stat().st_size == 40 << 20
    assert path.stat().st_blocks * 512 <= 20 << 20
    data = path.read_bytes()
    assert data.startswith(b"0000000\n")
    assert data.endswith(b"0000039\n")
    assert data[30 << 20 : (30 << 20) + 8] == b"0000030\n"
    assert not free_file_middle(path, most_bytes=20 << 20), "nothing is left to drop"


def test_stoker_logs_follows_a_restarted_log(tmp_path: Path) -> None:
    path = tmp_path / "manager.log"
    log = logger(path, most_bytes=100_000)
    log.info("first")
    code = "import sys; from pathlib import Path; from stoker.manager.cli.logs import _print_file as show; "
    code += "show(Path(sys.argv[1]), follow=True)"
    with subprocess.Popen([sys.executable, "-u", "-c", code, str(path)], stdout=subprocess.PIPE) as follower:
        assert follower.stdout.readline() == b"first\n"
        for number in range(4000):
            log.info("line %05d %s", number, "x" * 30)
        time.sleep(0.5)
        log.info("the end")
        lines = iter(follower.stdout.readline, b"the end\n")
        assert b"line 03999" in b"".join(lines)
        follower.kill()


# ---- limits


PROGRAM = """
import json, os, sys
import psutil
import stoker
from stoker import app

def limits(pid):
    return list(psutil.Process(pid).rlimit(psutil.RLIMIT_NOFILE))

@app()
def mine():
    return os.getpid(), os.getppid()

with stoker.load(sys.argv[1]) as session:
    library, zygote = mine().result()
    here = {"program": limits(os.getpid()), "library": limits(library), "zygote": limits(zygote)}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(session.folder) in words:
            for name in ("stoker.manager.main", "stoker.pilot.main"):
                if name in words:
                    here[name] = limits(process.pid)
print(json.dumps(here))
"""


def test_servers_raise_their_descriptor_limit_but_user_code_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "home"))
    (tmp_path / "one.toml").write_text('name = "one"\n[pilot]\ndevices = "cpu:1"\n')
    (tmp_path / "program.py").write_text(PROGRAM)
    ran = subprocess.run(
        [sys.executable, "program.py", "one.toml"],
        cwd=tmp_path, capture_output=True, text=True, check=True, timeout=2 * PATIENCE_S,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (512, 2048)),
    )  # fmt: skip
    assert json.loads(ran.stdout.splitlines()[-1]) == {
        "program": [512, 2048],
        "library": [512, 2048],
        "zygote": [512, 2048],
        "stoker.manager.main": [2048, 2048],
        "stoker.pilot.main": [2048, 2048],
    }


def test_rate_limited_log_bounds_lines_per_subject_and_in_total(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    lines = RateLimitedLog(logging.getLogger("test"), every_s=10.0, most=3, clock=lambda: now)
    assert [lines.warning("a", "first"), lines.warning("a", "second"), lines.warning("a", "third")] == [
        True, False, False,
    ]  # fmt: skip
    assert [lines.warning(subject, "other") for subject in "bcdef"] == [True, True, False, False, False]
    now = 111.0
    assert lines.warning("a", "again")
    assert caplog.messages == ["first", "other", "other", "again (and 2 more such lines)"]
