from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

import stoker
from stoker import errors
from stoker.units import show_bytes


def raises():
    print("reading the weights")
    raise OSError("weights.bin is not a checkpoint")


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


@pytest.mark.parametrize(
    ("loader", "needs", "said", "printed", "fact"),
    [
        (raises, {}, "raised OSError: weights.bin is not a checkpoint", "reading the weights", {}),
        # The time limit includes the start of the process, which needs time to reach the loader.
        (hangs_in_c, {"load_limit": "4 s"}, "raise load_limit", "waiting for a lock", {}),
        (eats, {"memory": "200 MB"}, "of memory and declares 200 MB", "reading the weights", {}),
        (exits, {}, "raised SystemExit: no GPU here", "giving up", {}),
        (exits_hard, {}, "exited with code 7", "giving up", {"exit_code": 7}),
        (dies, {}, "was killed by SIGSEGV", "about to crash", {"signal": signal.SIGSEGV}),
        (asks, {}, "EOFError", "what now?", {}),
        (downloads, {}, "`hf download NAME --local-dir models/NAME`", "asking the hub", {}),
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
