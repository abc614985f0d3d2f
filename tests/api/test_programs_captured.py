"""Calls see what a program changed in place in captured objects."""

from __future__ import annotations

import pytest
from lazily import lazily

lazily("torch")

PROGRAM = """
import functools
import numpy as np
import torch
import stoker

net = torch.nn.Linear(1, 1, bias=False)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
table = np.zeros(200_000)
items = [1]
seen = []


class Config:
    rate = 0


config = Config()


def total(items):
    return sum(items)


@stoker.app
def predict(x):
    return float(net(torch.tensor([[x]])).detach())


@stoker.app
def entry(place):
    return float(table[place])


@stoker.app
def rates(seen=seen):
    return Config.rate, config.own, list(seen)


totals = stoker.app(functools.partial(total, items))

if __name__ == "__main__":
    with stoker.load():
        for step in range(3):
            optimizer.zero_grad()
            ((net(torch.ones(1, 1)) - 5) ** 2).sum().backward()
            optimizer.step()
            table[137_137] = Config.rate = step
            config.own = [step]
            seen.append(step)
            items.append(step)
            here = float(net(torch.ones(1, 1)).detach())
            there = predict(1.0).result()
            print(step, there == here, entry(137_137).result(), rates().result(), totals().result())
"""


def test_results_follow_what_is_trained_and_changed_in_place(run_program):
    done = run_program(PROGRAM)
    assert done.stdout.splitlines() == [
        "0 True 0.0 (0, [0], [0]) 1",
        "1 True 1.0 (1, [1], [0, 1]) 2",
        "2 True 2.0 (2, [2], [0, 1, 2]) 4",
    ], done.stderr
    assert done.stderr.count("entry uses table, which may change: its 1.6 MB are pickled with every call") == 1
    assert done.returncode == 0


BURST = """
import stoker

rates, settings = [0], {}


class Config:
    rate = 0


@stoker.app
def rate_of(tried=""):
    import os, signal
    if tried and not os.path.exists(tried):
        open(tried, "w").close()
        raise RuntimeError("tried once")
    return rate, rates[0], settings["rate"]


@stoker.app
def of_class():
    return Config.rate


@stoker.app(cache=True)
def cached(number):
    return number, rate


if __name__ == "__main__":
    import sys
    with stoker.load(retries=1, progress=False):
        calls = []
        for rate in range(5):
            rates[0] = settings["rate"] = Config.rate = rate
            calls.append((rate_of(), of_class(), rate_of(f"{sys.argv[1]}/{rate}"), cached(rate)))
        for plain, own, again, known in calls:
            print(*plain.result(60), own.result(60), *again.result(60), *known.result(60))
"""


@pytest.mark.long
def test_each_call_of_a_loop_has_what_was_captured_when_it_was_made(run_program, tmp_path):
    done = run_program(BURST, str(tmp_path))
    expected = "".join(" ".join([str(rate)] * 9) + "\n" for rate in range(5))
    assert (done.returncode, done.stdout) == (0, expected), done.stderr


PROGRAM_WITH_CLASSES = """
import stoker

level = 1


class Config:
    rate = 1.0

    def level(self):
        return level


class ConfigError(Exception):
    rate = 1.0


class Same:
    def level(self):
        return 1


@stoker.app
def same():
    return Same()


@stoker.app
def make(fail):
    if fail:
        raise ConfigError("too much")
    return Config()


if __name__ == "__main__":
    with stoker.load():
        futures = make(False), make(True)
        method = Config.level
        for future in futures:
            future.exception()
        Config.rate = ConfigError.rate = 0.5
        level = 2
        again = make(False)
        assert isinstance(make(True).exception(), ConfigError)
        for _ in range(3):
            same().result()
        print(type(again.result()) is Config, Config.rate, ConfigError.rate, Config.level is method, Config().level())
"""


def test_results_leave_the_programs_classes_alone(run_program):
    done = run_program(PROGRAM_WITH_CLASSES)
    assert done.stdout == "True 0.5 0.5 True 2\n", done.stderr


MEMO = """
import stoker

rate = 1


@stoker.app(cache=True)
def times(number):
    import uuid
    return number * rate, uuid.uuid4().hex


def make(step):
    @stoker.app(cache=True)
    def add(number):
        return number + step
    return add


if __name__ == "__main__":
    with stoker.load(progress=False):
        first, again = times(10).result(60), times(10).result(60)
        rate = 2
        print(first == again, times(10).result(60)[0], make(1)(1).result(60), make(2)(1).result(60))
"""


def test_results_are_kept_for_the_function_as_it_is(run_program):
    done = run_program(MEMO)
    assert (done.returncode, done.stdout) == (0, "True 20 2 3\n"), done.stderr
