"""Calls see changes of captured objects, but do not change the objects of the program."""

from __future__ import annotations

import pytest

HEAD = """
import functools
import os
import uuid
import numpy as np
import stoker

"""
CHANGED = """
table = np.zeros(200_000)
items = [1]
seen = []


class Config:
    rate = 0


config = Config()


def total(items):
    return sum(items)


@stoker.app
def entry(place):
    return float(table[place])


@stoker.app
def rates(seen=seen):
    return Config.rate, config.own, list(seen)


totals = stoker.app(functools.partial(total, items))


def changed():
    for step in range(3):
        table[137_137] = Config.rate = step
        config.own = [step]
        seen.append(step)
        items.append(step)
        yield step, entry(137_137).result(), rates().result(), totals().result()
"""
BURST = """
rate, held, settings = 0, [0], {}


class Burst:
    rate = 0


@stoker.app
def rate_of(tried=""):
    if tried and not os.path.exists(tried):
        open(tried, "w").close()
        raise RuntimeError("tried once")
    return rate, held[0], settings["rate"]


@stoker.app
def of_class():
    return Burst.rate


@stoker.app(cache=True)
def cached(number):
    return number, rate


def burst():
    global rate
    calls = []
    for rate in range(3):
        held[0] = settings["rate"] = Burst.rate = rate
        calls.append((rate_of(), of_class(), rate_of(f"tried-{rate}"), cached(rate)))
    for plain, own, again, known in calls:
        yield plain.result(60), own.result(60), again.result(60), known.result(60)
"""
MEMO = """
factor = 1


@stoker.app(cache=True)
def times(number):
    return number * factor, uuid.uuid4().hex


def adder(step):
    @stoker.app(cache=True)
    def add(number):
        return number + step
    return add


def memoized():
    global factor
    first, again = times(10).result(60), times(10).result(60)
    factor = 2
    yield first == again, times(10).result(60)[0], adder(1)(1).result(60), adder(2)(1).result(60)
"""
MAIN = """
if __name__ == "__main__":
    with stoker.load(retries=1):
        for part in (changed, burst, memoized):
            for line in part():
                print(part.__name__, line)
"""
SAID = {
    "changed": [
        (0, 0.0, (0, [0], [0]), 1),
        (1, 1.0, (1, [1], [0, 1]), 2),
        (2, 2.0, (2, [2], [0, 1, 2]), 4),
    ],
    "burst": [((rate, rate, rate), rate, (rate, rate, rate), (rate, rate)) for rate in range(3)],
    "memoized": [(True, 20, 2, 3)],
}  # fmt: skip


@pytest.fixture(scope="module")
def done(tmp_path_factory, run_program_in):
    return run_program_in(tmp_path_factory.mktemp("captured"), HEAD + CHANGED + BURST + MEMO + MAIN)


@pytest.mark.parametrize("part", SAID)
def test_captured_objects_reach_the_call(done, part):
    said = [line.removeprefix(f"{part} ") for line in done.stdout.splitlines() if line.startswith(part)]
    assert said == [str(line) for line in SAID[part]], done.stderr
    assert done.stderr.count("entry uses table, which may change: its 1.6 MB are pickled with every call") == 1
    assert done.returncode == 0
