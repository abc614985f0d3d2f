from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from faults.world import command_of, is_alive, until

import stoker
from stoker import errors
from stoker.units import show_bytes


def raises():
    print("reading the weights")
    raise OSError("weights.bin is not a checkpoint")


def hangs():
    print("waiting for a lock")
    time.sleep(300)


def hangs_in_c():
    print("waiting for a lock")
    import ctypes

    ctypes.CDLL(None).pause()


def eats():
    print("reading the weights")
    taken = [bytearray(os.urandom(1_000_000) * 50) for _ in range(8)]
    time.sleep(300)
    return taken


def exits():
    print("giving up")
    sys.exit("no GPU here")


def exits_hard():
    print("giving up")
    sys.stdout.flush()
    os._exit(7)


def dies():
    print("about to crash")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGSEGV)


def asks():
    print("what now?")
    return input("password: ")


def downloads():
    from huggingface_hub import hf_hub_download

    print("asking the hub")
    return hf_hub_download("gpt2", "config.json", endpoint="http://127.0.0.1:9", cache_dir="here")


def recurses():
    print("down")
    return recurses()


@pytest.mark.parametrize(
    ("loader", "needs", "said", "printed", "fact"),
    [
        (raises, {}, "raised OSError: weights.bin is not a checkpoint", "reading the weights", {}),
        # The time limit starts with the request for the process, which needs time to reach the loader.
        (hangs, {"load_limit": "4 s"}, "did not load within 4.0 s", "waiting for a lock", {}),
        (hangs_in_c, {"load_limit": "4 s"}, "raise load_limit", "waiting for a lock", {}),
        (eats, {"memory": "200 MB"}, "of memory and declares 200 MB", "reading the weights", {}),
        (exits, {}, "raised SystemExit: no GPU here", "giving up", {}),
        (exits_hard, {}, "exited with code 7", "giving up", {"exit_code": 7}),
        (dies, {}, "was killed by SIGSEGV", "about to crash", {"signal": signal.SIGSEGV}),
        (asks, {}, "EOFError", "what now?", {}),
        (downloads, {}, "`hf download NAME --local-dir models/NAME`", "asking the hub", {}),
        (recurses, {}, "RecursionError", "down", {}),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_failed_loader_reports_its_error_location_and_output(shared, loader, needs, said, printed, fact):
    @stoker.app(context=stoker.context(**needs)(loader)())
    def use(context):
        return context

    @stoker.app()
    def other(number):
        return number

    future, others = use(), [other(number) for number in range(20)]
    assert [one.result(60) for one in others] == list(range(20))
    with pytest.raises(errors.ContextError) as caught:
        future.result(60)
    error, text = caught.value, str(caught.value)
    assert said in text
    assert loader.__name__ in text, "the message names the context"
    [pilot] = shared.status().pilots
    assert pilot.pilot in text, "the message names the place"
    assert f"stoker explain {error.call}" in text, "the message gives advice"
    assert f"stoker logs {error.call}" in text
    log = Path(error.log)
    assert printed in log.read_text()
    for name, value in fact.items():
        assert getattr(error, name) == value
    story = shared.explain(error.call)
    assert story.found
    assert any(said in line.text for line in story.lines)


def test_failed_loader_is_tried_again_for_later_calls(shared, tmp_path):
    flag = tmp_path / "weights"

    @stoker.context
    def needs_file(path):
        with open(path) as file:
            return file.read()

    @stoker.app(context=needs_file(str(flag)))
    def use(context, number):
        return context, number

    for future in [use(number) for number in range(30)]:
        with pytest.raises(errors.ContextError, match="FileNotFoundError"):
            future.result(60)
    flag.write_text("weights")
    assert [use(number).result(60) for number in range(3)] == [("weights", number) for number in range(3)]


def test_loader_that_fails_once_is_retried(shared, tmp_path):
    flag = tmp_path / "tried"

    @stoker.context
    def at_second():
        if not flag.exists():
            flag.touch()
            raise OSError("the file system was away")
        return 5

    @stoker.app(context=at_second())
    def use(context):
        return context

    assert use().result(60) == 5


def test_loader_and_calls_may_print_megabytes(shared):
    @stoker.context
    def talks():
        for _ in range(40_000):
            print("x" * 99)
        os.write(1, b"y" * 1_000_000)
        return 1

    @stoker.app(context=talks())
    def talk(context, number):
        for _ in range(10_000):
            print("z" * 99)
        return context + number

    assert [talk(number).result(60) for number in range(3)] == [1, 2, 3]


def test_children_of_a_loader_end_with_their_library(shared, shared_world):
    @stoker.context
    def forks():
        import subprocess

        plain = subprocess.Popen(["sleep", "299"])
        away = subprocess.Popen(["setsid", "sh", "-c", "sleep 299 & sleep 299 & wait"])
        if os.fork() == 0:
            if os.fork() == 0:
                time.sleep(299)
            os._exit(0)
        os.wait()
        return os.getpid(), plain.pid, away.pid

    @stoker.app(context=forks())
    def use(context):
        return context

    library, plain, away = use().result(60)
    assert is_alive(plain)
    assert is_alive(away)

    def below():
        return [pid for pid in shared_world.processes() if _sleeps(pid) or _session(pid) == library]

    until(lambda: len(below()) >= 5, why="the shell that left its session starts two more")
    children = below()
    os.kill(library, signal.SIGKILL)
    until(lambda: not any(is_alive(pid) for pid in children), why="a library's children go with it")


def _sleeps(pid):
    return "sleep" in " ".join(command_of(pid))


def _session(pid):
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def test_context_that_fits_no_device_fails_at_once(shared):
    [pilot] = shared.status().pilots
    devices = len(pilot.devices)
    for needs, named in (
        ({"memory": "900 TB"}, "900 TB"),
        ({"devices": devices + 1}, f"{devices + 1} devices of one kind on one pilot"),
        ({"kinds": ["NVIDIA B9000"]}, "kind NVIDIA B9000"),
    ):

        @stoker.app(context=stoker.context(**needs)(dict)())
        def never(context):
            return context

        with pytest.raises(errors.NoDeviceError) as caught:
            never().result(30)
        assert named in str(caught.value)
        assert f"cpu {show_bytes(pilot.devices[0].memory_bytes)}" in str(caught.value)
        assert f"x {devices}" in str(caught.value)


def test_invalid_recipe_raises_at_its_definition(shared, tmp_path):
    @stoker.context
    def load(path, size=1):
        return path

    with pytest.raises(errors.RecipeError, match="sise"):
        load("a", sise=2)
    with pytest.raises(errors.StokerError, match="lock"):
        load(threading.Lock())
    with pytest.raises(errors.RecipeError, match="400 parsecs"):
        stoker.context(memory="400 parsecs")(load)
