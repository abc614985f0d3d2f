from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import os
import re
import tempfile
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from parsl import File, bash_app, join_app, python_app
from parsl.app.errors import AppTimeout
from parsl.executors.errors import InvalidResourceSpecification

import stoker
from stoker import errors

LOADS = "loads.txt"


@stoker.context
def greeter(word, log):
    with open(log, "a") as file:
        file.write("loaded\n")
    return {"word": word}


@pytest.fixture
def greet(session, tmp_path):
    log = tmp_path / LOADS

    @stoker.app(context=greeter("hello", str(log)))
    def greet(context, name, mark="!"):
        return f"{context['word']} {name}{mark}"

    greet.log = log
    return greet


def test_map_accepts_an_app_with_bound_arguments(greet):
    assert list(stoker.map(functools.partial(greet, mark="?"), ["a", "b"])) == ["hello a?", "hello b?"]


def test_context_is_loaded_once_and_serves_several_calls(greet):
    assert greet("ana").result(60) == "hello ana!"
    assert [greet(str(n), mark="?").result(60) for n in range(20)] == [f"hello {n}?" for n in range(20)]
    assert greet.log.read_text().count("loaded") <= 2


def test_context_can_be_loaded_ahead(session, tmp_path):
    log = tmp_path / LOADS
    recipe = greeter("warm", str(log))
    assert session.warm(recipe).result(60) is True
    assert log.read_text().count("loaded") == 1
    devices = sum(len(pilot.devices) for pilot in session.status().pilots)
    assert session.warm(recipe, devices).result(60) is True
    assert log.read_text().count("loaded") == devices
    [context] = [each for each in session.status().contexts if each.name == recipe.name]
    assert context.hot == devices

    @stoker.app(context=recipe)
    def word(context):
        return context["word"]

    assert word().result(60) == "warm"
    assert log.read_text().count("loaded") == devices
    with pytest.raises(errors.ConfigError, match="count"):
        session.warm(recipe, 0)
    with pytest.raises(errors.RecipeError, match="has not been called"):
        session.warm(greeter)


def test_futures_can_be_awaited(greet, session):
    async def main():
        both = await asyncio.gather(greet("ana"), greet("bo", mark="?"))
        with pytest.raises(ZeroDivisionError):
            await failing()
        slow = sleeper()
        waiting = asyncio.ensure_future(_wait_for(slow))
        await asyncio.sleep(0.5)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return both, slow

    @stoker.app()
    def failing():
        return 1 / 0

    @stoker.app()
    def sleeper():
        time.sleep(60)

    both, slow = asyncio.run(main())
    assert both == ["hello ana!", "hello bo?"]
    assert slow.cancelled()
    assert asyncio.run(_wait_for(session.executor.submit(abs, None, -3))) == 3


def test_async_function_runs_in_its_own_event_loop(greet, session):
    @stoker.app(context=greeter("async", str(greet.log)))
    async def both(context, first, second):
        async def one(text):
            await asyncio.sleep(0.01)
            return f"{context['word']} {text}"

        return await asyncio.gather(one(first), one(second))

    assert both("a", "b").result(60) == ["async a", "async b"]

    @stoker.app()
    async def failing():
        raise LookupError("nothing there")

    with pytest.raises(LookupError, match="nothing there"):
        failing().result(60)


async def _wait_for(future):
    return await future


def test_map_of_an_endless_input_reads_at_most_its_window(greet):
    pulled = []

    def items():
        for number in itertools.count():
            pulled.append(number)
            yield number

    results = stoker.map(greet, items(), window=20)
    assert next(results) == "hello 0!"
    assert len(pulled) <= 60
    assert list(itertools.islice(results, 299)) == [f"hello {n}!" for n in range(1, 300)]
    assert results.taken == 300
    results.close()
    assert list(results) == []


def test_unordered_map_yields_results_as_they_arrive(session, tmp_path, until):
    gate = tmp_path / "gate"

    def nap(is_slow):
        while is_slow and not gate.exists():
            time.sleep(0.01)
        if not is_slow:
            tempfile.mkstemp(prefix="quick-", dir=tmp_path)
        return is_slow

    def where(_number):
        time.sleep(0.1)
        return os.getpid()

    while len(set(stoker.map(where, range(4)))) < 2:
        pass  # wait until both libraries run, so that a slow call does not occupy the only library
    naps = [True, False, False, False]
    results = stoker.map(nap, naps, ordered=False)
    assert list(itertools.islice(results, 3)) == [False] * 3
    gate.touch()
    assert list(results) == [True]
    gate.unlink()
    with ThreadPoolExecutor(1) as thread:
        ordered = thread.submit(list, stoker.map(nap, naps, ordered=True))
        until(lambda: len(list(tmp_path.glob("quick-*"))) == 6)
        gate.touch()
        assert ordered.result(60) == naps


def test_leaving_a_map_loop_cancels_unfinished_calls(session):
    @stoker.app(context=greeter("nap", os.devnull))
    def nap(context, seconds):
        time.sleep(seconds)
        return seconds

    for seconds in stoker.map(nap, [0.05] + [600.0] * 1_000):
        assert seconds == 0.05
        break
    assert nap(0.0).result(60) == 0.0
    assert session.status().queued == 0


def test_call_error_names_its_call_and_its_map_item(session):
    @stoker.app()
    def half(number):
        print("half of", number)
        return 1 / number

    with pytest.raises(ZeroDivisionError) as one:
        half(0).result(60)
    assert one.value.args == ("division by zero",)
    assert "return 1 / number" in str(one.value.__cause__)
    assert re.fullmatch(r"call (c-\d+) \(its output: stoker logs \1 --session \w+\)", one.value.__notes__[0])
    for ordered in (True, False):
        with pytest.raises(ZeroDivisionError) as among:
            list(stoker.map(half, [1, 2, 0, 4], ordered=ordered))
        assert among.value.__notes__[1] == "stoker.map: item 2, counted from 0"


def test_map_with_batch_size_passes_lists_to_the_function(session):
    assert list(stoker.map(sum, range(10), batch_size=4)) == [6, 22, 17]
    assert list(stoker.map(sum, [5], batch_size=1)) == [5]

    @stoker.app(batch_size=3)
    def total(numbers):
        return sum(numbers)

    assert list(stoker.map(total, range(6))) == [3, 12]
    assert list(stoker.map(total, [1, 2], batch_size=2)) == [3]
    assert list(stoker.map(total, [])) == []


def test_failed_map_item_raises_in_order_and_cancels_later_calls(session):
    def picky(number):
        if number == 7:
            raise ValueError("seven")
        return number

    results = stoker.map(picky, range(1000))
    assert list(itertools.islice(results, 7)) == list(range(7))
    with pytest.raises(ValueError, match="seven"):
        next(results)
    assert list(results) == []
    assert session.executor.outstanding() == 0


@pytest.mark.parametrize("return_exceptions", [False, True])
def test_broken_input_ends_a_map_after_the_earlier_results(session, return_exceptions):
    def items():
        yield 1
        raise OSError("the file is gone")

    results = stoker.map(abs, items(), return_exceptions=return_exceptions)
    assert next(results) == 1
    with pytest.raises(OSError, match="the file is gone"):
        next(results)
    results = stoker.map(abs, [1, threading.Lock()])
    assert next(results) == 1
    with pytest.raises(errors.SerializationError, match="abs"):
        next(results)


def test_input_iterator_may_wait_for_results_one_at_a_time(session):
    seen = [1]

    def doubled():
        while seen[-1] < 8:
            yield seen[-1]

    for result in stoker.map(lambda x: 2 * x, doubled(), window=1):
        seen += [result]
    assert seen == [1, 2, 4, 8]


def test_map_progress_counts_items_instead_of_batches(session, capsys):
    assert list(stoker.map(sum, range(10), batch_size=4, progress=True)) == [6, 22, 17]
    assert "sum 10/10" in capsys.readouterr().err
    said = []
    results = stoker.map(sum, iter(range(10)), batch_size=4, progress=lambda done, total: said.append((done, total)))
    assert next(results) == 6
    assert repr(results).startswith("<map of sum: 4 items' results taken")
    assert list(results) == [22, 17]
    assert [done for done, _ in dict.fromkeys(said) if done] == [4, 8, 10]
    assert {total for _, total in said} == {None}
    stopped = stoker.map(sum, range(10), batch_size=4)
    assert next(stopped) == 6
    assert stopped.close_and_describe().startswith("stoker.map stopped: 4 of 10 items' results (1 batch) were taken")
    stopped = stoker.map(abs, range(10), ordered=False)
    next(stopped)
    said = stopped.close_and_describe()
    assert said.startswith("stoker.map stopped: 1 of 10 results were taken")
    assert said.endswith("to continue a map with ordered=False, return the item's name with each result")


@pytest.mark.parametrize("ordered", [True, False])
def test_map_returns_exceptions_as_results(session, ordered):
    def picky(number):
        if number % 10 == 3:
            raise ValueError(number)
        return number

    items = itertools.chain(range(40), [threading.Lock()])
    stream = stoker.map(picky, items, ordered=ordered, return_exceptions=True)
    found = [(stream.failed_item, result) for result in stream]
    failed = {place: error for place, error in found if isinstance(error, Exception)}
    assert sorted(failed) == [3, 13, 23, 33, 40]
    assert all(failed[place].args == (place,) for place in (3, 13, 23, 33))
    assert "stoker.map: item 13, counted from 0" in failed[13].__notes__
    numbers = [result for _, result in found if isinstance(result, int)]
    assert (numbers if ordered else sorted(numbers)) == [number for number in range(40) if number % 10 != 3]


def test_map_returns_the_error_of_a_batch_that_cannot_be_pickled(session):
    said = []
    lists = stoker.map(
        len,
        [1, threading.Lock(), -3, 4],
        batch_size=3,
        return_exceptions=True,
        progress=lambda done, total: said.append((done, total)),
    )
    assert [type(each) for each in lists] == [errors.SerializationError, int]
    assert said[-1] == (4, 4)


@pytest.mark.parametrize("batch_size", [None, 2])
def test_map_waits_for_futures_among_its_items(greet, batch_size):
    assert list(stoker.map(str.upper if batch_size is None else "".join, [greet("a"), "b"], batch_size=batch_size)) == (
        ["HELLO A!", "B"] if batch_size is None else ["hello a!b"]
    )
    failed, ready = Future(), Future()
    failed.set_exception(OSError("the file is gone"))
    ready.set_result(2)
    items = [failed, 1, 1, ready] if batch_size else [1, failed, ready]
    results = list(stoker.map(str, items, batch_size=batch_size, return_exceptions=True))
    assert [type(each) for each in results] == ([OSError, str] if batch_size else [str, OSError, str])
    assert results[-1] == ("[1, 2]" if batch_size else "2")
    with pytest.raises(OSError, match="the file is gone"):
        list(stoker.map(str, items, batch_size=batch_size))


def test_stop_iteration_raised_by_a_call_does_not_end_the_map_loop(session):
    def takes_one_too_many(number):
        return next(iter([number] * number))

    with pytest.raises(RuntimeError, match=r"call .* raised StopIteration\(\), which would end the loop"):
        list(stoker.map(takes_one_too_many, [1, 0, 1]))
    assert [type(each) for each in stoker.map(takes_one_too_many, [0, 1], return_exceptions=True)] == [
        RuntimeError,
        int,
    ]

    async def awaits():
        return await stoker.app()(takes_one_too_many)(0)

    with pytest.raises(RuntimeError, match="raised StopIteration"):
        asyncio.run(asyncio.wait_for(awaits(), 30))


def test_arguments_changed_after_submission_do_not_affect_the_call(session):
    double = stoker.app()(lambda point, **more: (point["v"], more))
    point, array, found = {}, np.zeros(1), []
    for number in range(20):
        point["v"] = array[:] = number
        found.append(double(point, at=array))
    for number, each in enumerate(found):
        value, more = each.result(60)
        assert (value, float(more["at"][0])) == (number, number)


def test_threads_may_share_a_stream(session):
    stream = stoker.map(abs, range(200), window=8)
    with ThreadPoolExecutor(4) as threads:
        parts = [threads.submit(list, stream) for _ in range(4)]
        assert sorted(value for part in parts for value in part.result(60)) == list(range(200))


def as_file(columns):
    pytest.importorskip("pyarrow.feather").write_feather(arrow(columns), "rows.feather")
    return Path("rows.feather")


def arrow(columns):
    return pytest.importorskip("pyarrow").table(columns)


def as_reader(columns):
    table = arrow(columns)
    return pytest.importorskip("pyarrow").RecordBatchReader.from_batches(table.schema, table.to_batches())


TABLES = {
    "pyarrow table": arrow,
    "pyarrow batch": lambda columns: pytest.importorskip("pyarrow").RecordBatch.from_pydict(columns),
    "pandas": lambda columns: pytest.importorskip("pandas").DataFrame(columns, index=range(7, 3007)),
    "polars": lambda columns: pytest.importorskip("polars").DataFrame(columns),
    "reader": as_reader,
    "data set": lambda columns: pytest.importorskip("pyarrow.dataset").dataset(arrow(columns)),
    "file": as_file,
}


@pytest.mark.parametrize("kind", TABLES)
def test_map_over_a_table_yields_its_rows(session, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    make = functools.partial(TABLES[kind], {"claim": list(map(str, range(3000))), "label": list(range(3000))})
    said = []
    results = stoker.map(lambda row: row["claim"] + str(row["label"]), make(), progress=lambda *both: said.append(both))
    assert list(results) == [2 * str(number) for number in range(3000)]
    assert said[-1] == (3000, None if kind in ("reader", "data set", "file") else 3000)
    assert list(stoker.map(len, make(), batch_size=1700)) == [1700, 1300]


def test_map_over_a_file_names_an_unreadable_row(session, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"n": 1}\n{"n": 2}\n{"n": \n')
    taken = []
    with pytest.raises(errors.ConfigError, match=r"rows\.jsonl: line 3: is not JSON"):
        taken.extend(stoker.map(lambda row: row["n"], tmp_path / "rows.jsonl"))
    assert taken == [1, 2]
    with pytest.raises(errors.ConfigError, match="no such file"):
        stoker.map(len, tmp_path / "none.csv")
    with pytest.raises(errors.ConfigError, match=r"write Path\('rows\.jsonl'\)"):
        stoker.map(len, "rows.jsonl")


@pytest.mark.parametrize("kind", ["DataFrame", "LazyFrame"])
def test_table_without_rows_as_dicts_is_refused(session, kind):
    what = "two columns 'a'"
    if kind == "DataFrame":
        table = pytest.importorskip("pandas").DataFrame([[1, 2], [3, 4]], columns=["a", "a"])
    else:
        table, what = pytest.importorskip("polars").LazyFrame({"a": [1]}), r"frame\.collect\(\)"
    with pytest.raises(errors.ConfigError, match=what):
        stoker.map(len, table)


def test_walltime_option_of_parsl_ends_a_call(session):
    @stoker.app
    def spin(seconds, walltime=None):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.01)
        return word

    word = "first"
    first = spin(0, walltime=20)
    word = "second"
    second = spin(0, walltime=20)
    with pytest.raises(AppTimeout):
        spin(30, walltime=1).result(60)
    assert (first.result(60), second.result(60)) == ("first", "second")


class Checker:
    def __init__(self, limit):
        self.limit = limit

    def above(self, value):
        return value > self.limit


def closure(step):
    def add(value):
        return value + step

    return add


class Later:
    async def __call__(self, value):
        await asyncio.sleep(0)
        return value


@pytest.mark.parametrize(
    ("function", "value", "result"),
    [
        (lambda value: value * 2, 4, 8),
        (closure(10), 1, 11),
        (Checker(3).above, 4, True),
        (functools.partial(pow, 2), 5, 32),
        (str.upper, "a", "A"),
        (np.sum, [1, 2], 3),
        (Checker, 5, None),
        (Later(), 2, 2),
        (len, "abc", 3),
        (int, "4", 4),
    ],
    ids=["lambda", "closure", "method", "partial", "builtin-method", "ufunc", "class", "object", "len", "int"],
)
def test_all_kinds_of_functions_can_be_sent(session, function, value, result):
    [got] = stoker.map(function, [value])
    assert got.limit == 5 if result is None else got == result
    if function is not int:  # int has no signature, so it cannot be an app
        got = stoker.app(function)(value).result(60)
        assert got.limit == 5 if result is None else got == result


class Judge:
    def __init__(self, strictness):
        self.strictness = strictness

    @stoker.app(context=stoker.context(dict)(word="said"))
    def weigh(self, context, claim):
        return f"{context['word']} {claim} {self.strictness}"

    @stoker.app()
    def plainly(self, claim):
        return claim * self.strictness

    @stoker.app(context=stoker.context(dict)(word="said"))
    @staticmethod
    def repeat(context, claim):
        return f"{context['word']} {claim}"


def test_methods_can_be_apps(session):
    assert Judge(3).weigh("it").result(60) == "said it 3"
    assert Judge(3).plainly("ab").result(60) == "ababab"
    assert Judge(3).repeat("it").result(60) == Judge.repeat("it").result(60) == "said it"
    assert list(stoker.map(Judge(2).weigh, ["a", "b"])) == ["said a 2", "said b 2"]


@stoker.app()
def countdown(n):
    return [n, *countdown.function(n - 1)] if n else [0]


def test_app_called_inside_a_call_raises_an_error_with_advice(session):
    assert countdown(3).result(60) == [3, 2, 1, 0]

    @stoker.app()
    def outer():
        return countdown(1)

    with pytest.raises(errors.SessionError, match=r"countdown\.function"):
        outer().result(60)


def test_plain_parsl_apps_run(session, tmp_path):
    @python_app
    def add(a, b=1):
        return a + b

    @join_app
    def both():
        return [add(1), add(2)]

    @bash_app
    def shout(word, stdout=None):
        return f"echo {word}"

    @bash_app
    def copy(inputs=(), outputs=()):
        return f"cat {inputs[0].filepath} > {outputs[0].filepath}"

    assert add(add(1), b=add(2, b=3)).result(60) == 7
    assert both().result(60) == [2, 3]
    out = tmp_path / "out.txt"
    assert shout("hey", stdout=str(out)).result(60) == 0
    assert out.read_text() == "hey\n"
    copied = copy(inputs=[File(str(out))], outputs=[File(str(tmp_path / "copy.txt"))])
    copied.result(60)
    assert (tmp_path / "copy.txt").read_text() == "hey\n"


def test_memoization_distinguishes_contexts(session, tmp_path):
    def stamp(context):
        return f"{context['word']} {time.time()}"

    first = stoker.app(context=greeter("a", str(tmp_path / "log")), cache=True)(stamp)
    other = stoker.app(context=greeter("b", str(tmp_path / "log")), cache=True)(stamp)
    assert first().result(60) == first().result(60)
    assert other().result(60).startswith("b ")


def test_large_argument_and_result_are_transferred(session, until):
    @stoker.app()
    def double(array):
        return array * 2

    array = np.arange(3_000_000, dtype=np.int64)
    assert np.array_equal(double(array).result(60), array * 2)
    assert [len(part) for part in stoker.map(bytes.upper, [b"x" * 2_000_000] * 5)] == [2_000_000] * 5
    until(lambda: not list((session.folder / "objects").iterdir()))


def test_call_that_exceeds_its_timeout_fails(session):
    @stoker.app(timeout="0.5 s")
    def sleep():
        time.sleep(60)

    with pytest.raises(errors.CallTimeoutError, match="stoker explain") as caught:
        sleep().result(60)
    assert caught.value.call.startswith("c-")


def test_parsl_resource_specification_may_name_the_context(session, tmp_path):
    @python_app
    def word(parsl_resource_specification=None):
        from stoker import load_variable_from_serverless

        return load_variable_from_serverless("word")

    wants = {"context": greeter("named", str(tmp_path / "log")), "priority": 2}
    assert word(parsl_resource_specification=wants).result(60) == "named"
    with pytest.raises(InvalidResourceSpecification, match="cpus is not a key"):
        word(parsl_resource_specification={"cpus": 1}).result(60)


def test_session_returns_its_status(session, greet):
    greet("x").result(60)
    status = session.status()
    assert status.session == session.id
    assert len(status.pilots) == 1
    assert session.id in repr(session)
    assert "1 pilot" in repr(session)
    assert session.id in session._repr_html_()
    assert session.explain(status.pilots[0].pilot).found
    call = session.executor.submit(abs, {}, -1)
    call.result(60)
    ended = session.explain(call.parsl_executor_task_id)  # the journal contains successful calls
    assert "ended with a result" in ended.lines[-1].text
    assert not session.explain("c-99999999").found
    assert repr(greet) == f"<app greet: context {greet.specification.requirements.recipe.name}>"


def test_option_that_the_session_policy_does_not_support_is_refused(session):
    with pytest.raises(errors.ConfigError, match=r"does not honour .*leave out variants"):
        stoker.app(variants=[greeter("other", os.devnull)])(abs)(1).result(60)


def test_session_status_lists_its_running_maps(session):
    stream = stoker.map(abs, range(-10_000, 0), window=10)
    next(stream)
    (one,) = session.status().maps
    assert (one.function, one.total, one.kept) == ("abs", 10_000, 0)
    stream.close()
    assert session.status().maps == ()
    endless = stoker.map(abs, iter(range(10_000)), window=10)
    next(endless)
    (one,) = session.status().maps
    assert one.total == -1
    endless.close()


def test_second_load_is_refused_with_the_session_name(session):
    with pytest.raises(errors.SessionError, match=session.id):
        stoker.load()


def test_session_folder_can_be_found_and_is_private(session):
    from stoker.protocol.session import find_session

    assert find_session(session.id).path.resolve() == session.folder.resolve()
    assert session.folder.stat().st_mode & 0o077 == 0
    for key in (session.folder / "keys").iterdir():
        assert key.stat().st_mode & 0o077 == 0


def test_results_are_not_kept_after_they_are_delivered(session, until):
    class Big:
        pass

    @stoker.app()
    def make():
        return Big()

    future = make()
    kept = weakref.ref(future.result(60))
    del future

    def gone():
        gc.collect()
        return kept() is None

    until(gone)
    assert session.executor.outstanding() == 0


def test_call_does_not_see_the_command_line_of_the_pilot(session):
    @stoker.app()
    def second_argument():
        import sys

        return sys.argv[1:]

    assert second_argument().result(60) == []
