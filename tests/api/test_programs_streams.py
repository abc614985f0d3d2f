from __future__ import annotations

import asyncio
import gc
import os
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
from parsl.dataflow.errors import DependencyError

import stoker
from stoker.errors import ConfigError, SerializationError, StokerError
from stoker.manager.executor.pieces import MOST_BYTES, MOST_PIECES


@pytest.fixture(autouse=True)
def _loaded(session):
    return session


@stoker.app
def count(number, *, fail_at=None, pause_s=0.0):
    for each in range(number):
        if each == fail_at:
            raise ValueError(f"no {each}")
        yield each
        time.sleep(pause_s)


@stoker.app
async def count_later(number):
    for each in range(number):
        await asyncio.sleep(0)
        yield each


@stoker.context(slots=4)
def four_slots():
    return os.getpid()


@stoker.app(context=four_slots())
def count_beside(context, number):
    for each in range(number):
        yield context, each


@stoker.app(context=four_slots())
def one(context):
    return context


@stoker.app
def until_it_is_told(place):
    try:
        yield from range(10**9)
    finally:
        Path(place).touch()


def test_pieces_arrive_while_the_call_runs(tmp_path, until):
    gate = tmp_path / "gate"

    def gated(path):
        yield "first"
        while not os.path.exists(path):
            time.sleep(0.001)
        yield {"second": 2}

    stream = stoker.stream(gated, str(gate))
    assert next(stream) == "first"
    gate.touch()
    assert list(stream) == [{"second": 2}]
    with pytest.raises(StopIteration):
        next(stream)
    assert stream.taken == 2


@pytest.mark.parametrize("app", [count, count_later, count.function], ids=["app", "async app", "plain function"])
def test_stream_yields_pieces_in_order(app):
    assert list(stoker.stream(app, 1000)) == list(range(1000))


def test_take_arrived_returns_all_arrived_pieces():
    with stoker.stream(count, 6, fail_at=5) as stream:
        assert next(stream) == 0
        got = [0]
        while len(got) < 5:
            some = stream.take_arrived(2)
            assert len(some) <= 2
            got += some
        assert got == [0, 1, 2, 3, 4]
        assert stream.take_arrived() == []
        with pytest.raises(ValueError, match="no 5") as caught:
            next(stream)
        assert "count" in str(caught.value.__cause__)


def test_generator_future_gives_its_items_as_a_list_and_as_a_stream():
    future = count(5)
    assert list(future.pieces()) == [0, 1, 2, 3, 4]
    assert future.result(30) == [0, 1, 2, 3, 4]
    assert list(future.pieces()) == [0, 1, 2, 3, 4]
    assert stoker.app(sum)(future).result(30) == 10
    failing = count(5, fail_at=2)
    pieces = failing.pieces()
    assert [next(pieces), next(pieces)] == [0, 1]
    with pytest.raises(ValueError, match="no 2"):
        next(pieces)
    with pytest.raises(ValueError, match="no 2"):
        failing.result(30)


def test_cached_call_has_pieces_and_cancelled_or_unsent_call_raises():
    remembered = stoker.app(cache=True)(count.function)
    assert list(remembered(4).pieces()) == [0, 1, 2, 3]
    assert list(remembered(4).pieces()) == [0, 1, 2, 3]
    cancelled = count(10**6, pause_s=0.01)
    pieces = cancelled.pieces()
    next(pieces)
    cancelled.cancel()
    with pytest.raises(CancelledError):
        list(pieces)
    with pytest.raises(DependencyError):
        list(count(stoker.app(abs)("no number")).pieces())


def test_function_that_returns_an_iterator_may_send_pieces():
    def squares(number):
        return (each * each for each in range(number))

    assert list(stoker.stream(squares, 4)) == [0, 1, 4, 9]
    assert list(stoker.app(stream=True)(squares)(4).pieces()) == [0, 1, 4, 9]
    with pytest.raises(TypeError, match=r"called with stream=True and returned a int: yield"):
        list(stoker.stream(abs, -1))


def test_pieces_can_be_read_in_an_event_loop():
    async def read():
        got = [each async for each in stoker.stream(count, 50, pause_s=0.001)]
        future = count(3)
        also = [each async for each in future.pieces()]
        failing = stoker.stream(count, 3, fail_at=1)
        failed = await anext(failing)
        with pytest.raises(ValueError, match="no 1"):
            await anext(failing)
        both = await asyncio.gather(*(collect(stoker.stream(count, n)) for n in (5, 300)))
        return got, also, failed, await future, both

    async def collect(stream):
        return [each async for each in stream]

    got, also, failed, result, both = asyncio.run(read())
    assert got == list(range(50))
    assert also == result == [0, 1, 2]
    assert failed == 0
    assert both == [list(range(5)), list(range(300))]


def test_reader_that_waits_in_an_event_loop_can_be_cancelled(tmp_path, until):
    place = tmp_path / "closed"

    async def give_up():
        begun = asyncio.Event()

        async def read():
            async for _ in stoker.stream(until_it_is_told, str(place)):
                begun.set()
                await asyncio.sleep(3600)

        reader = asyncio.ensure_future(read())
        await begun.wait()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader

    asyncio.run(give_up())
    gc.collect()
    until(place.exists)


def test_leaving_a_stream_loop_ends_the_call_but_not_its_library(tmp_path, until):
    loads = tmp_path / "loads"

    @stoker.context(max_libraries=1)  # without this limit another device may load the context while the call ends
    def loaded(path):
        with open(path, "a") as file:
            file.write("x")
        return path

    @stoker.app(context=loaded(str(loads)))
    def endless(context, place):
        yield from until_it_is_told.function(place)

    for how in ("break", "close", "with", "cancel"):
        place = tmp_path / how
        if how == "cancel":
            future = endless(str(place))
            next(future.pieces())
            assert future.cancel()
        else:
            stream = stoker.stream(endless, str(place))
            assert next(stream) == 0
            if how == "close":
                stream.close()
                assert list(stream) == []
            elif how == "with":
                with stream:
                    next(stream)
            del stream
        until(place.exists)
    assert stoker.app(context=loaded(str(loads)))(len)().result(60) == len(str(loads))
    assert loads.read_text() == "x"


def test_slow_reader_loses_no_piece_and_delays_no_other_reader(session, until):
    count_all = 3 * MOST_PIECES
    slow = stoker.stream(count_beside, count_all)
    first = next(slow)

    def given():
        """Return the number of sent pieces if the call waits for its reader, else False."""
        told = session.explain(slow.call).headline
        pieces = told.partition(" pieces")[0].rpartition(" ")[2]
        return "has waited for its reader" in told and int(pieces.replace(",", ""))

    assert MOST_PIECES < until(lambda: (number := given()) > MOST_PIECES and number) < count_all
    assert [each for _, each in stoker.stream(count_beside, 1000)] == list(range(1000))
    assert one().result(30) == first[0]
    assert [each for _, each in slow] == list(range(1, count_all))


def test_library_that_serves_one_call_delivers_its_whole_stream():
    @stoker.context(awareness="none")
    def fresh():
        return os.getpid()

    @stoker.app(context=fresh())
    def count_in(context, number):
        for each in range(number):
            yield context, each

    runs = [list(stoker.stream(count_in, 300)) for _ in range(2)]
    assert [[each for _, each in run] for run in runs] == [list(range(300))] * 2
    assert len({context for run in runs for context, _ in run}) == 2


def test_wait_for_the_reader_does_not_count_as_run_time():
    def limited(number, size, pause_s):
        for _ in range(number):
            yield b"x" * size
            time.sleep(pause_s)

    size = MOST_BYTES // 100
    stream = stoker.stream(stoker.app(timeout=2.0)(limited), 150, size, 0.0)
    next(stream)
    time.sleep(2.5)
    assert sum(map(len, stream)) == 149 * size
    with pytest.raises(StokerError, match="its limit is 1 s"):
        list(stoker.stream(stoker.app(timeout=1.0)(limited), 100, 1, 0.1))


def test_unpicklable_piece_ends_the_call_and_is_named():
    def large(size):
        yield "small"
        yield b"x" * size

    def odd():
        yield 1
        yield iter([])

    stream = stoker.stream(large, 1_100_000)
    assert next(stream) == "small"
    with pytest.raises(SerializationError, match=r"piece 1, a bytes, has 1\.1 MB .* than 1\.0 MB: yield smaller"):
        next(stream)
    assert len(list(stoker.stream(large, 900_000))[1]) == 900_000
    stream = stoker.stream(odd)
    assert next(stream) == 1
    with pytest.raises((SerializationError, TypeError)):
        list(stoker.stream(lambda: (lock for lock in [__import__("threading").Lock()])))


def test_checkpoint_in_a_generator_function_is_refused():
    def saving():
        yield 1
        stoker.progress(1, 2)
        stoker.progress(1, 2, state="here")
        yield 2

    stream = stoker.stream(saving)
    assert next(stream) == 1
    with pytest.raises(StokerError, match="cannot use a checkpoint; leave state out"):
        next(stream)


def test_invalid_stream_options_are_refused_at_once():
    with pytest.raises(ConfigError, match=r"stoker\.stream: 3 is not a function"):
        stoker.stream(3)
    with pytest.raises(ConfigError, match="rerun_may_differ"):
        stoker.stream(count, 3, rerun_may_differ="yes")
    with pytest.raises(ConfigError, match="this call sends no pieces"):
        stoker.app(abs)(-1).pieces()
    with pytest.raises(ConfigError, match="cache=True"):
        stoker.stream(stoker.app(cache=True)(count.function), 3)
    with pytest.raises(ConfigError, match="Parsl's walltime"):
        count(3, walltime=5)


# ---- stoker.amap


def double(number):
    if number < 0:
        raise ValueError(f"no {number}")
    return number * 2


async def numbers(count):
    for each in range(count):
        await asyncio.sleep(0)
        yield each


def test_amap_returns_the_results_of_map():
    async def run():
        got = [each async for each in stoker.amap(double, range(500), window=50)]
        awaited = [each async for each in stoker.amap(double, numbers(100))]
        batches = [each async for each in stoker.amap(len, range(5), batch_size=2)]
        errors = [each async for each in stoker.amap(double, [1, -1, 2], return_exceptions=True)]
        return got, awaited, batches, errors

    got, awaited, batches, errors = asyncio.run(run())
    assert got == [each * 2 for each in range(500)]
    assert awaited == [each * 2 for each in range(100)]
    assert batches == [2, 2, 1]
    assert [errors[0], str(errors[1]), errors[2]] == [2, "no -1", 4]


def test_event_loop_runs_while_a_map_has_no_result(tmp_path):
    gate = tmp_path / "gate"

    def gated(path):
        while not os.path.exists(path):
            time.sleep(0.001)
        return "through"

    async def run():
        results = stoker.amap(gated, [str(gate)])
        waiting = asyncio.ensure_future(anext(results))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        gate.touch()
        assert await waiting == "through"
        with pytest.raises(StopAsyncIteration):
            await anext(results)

    asyncio.run(run())


def test_amap_that_fails_or_is_closed_cancels_waiting_calls(session, until):
    def sleep(number):
        time.sleep(60 if number else 0)
        return number

    async def fail():
        async for _ in stoker.amap(double, [1, -1, 2]):
            pass

    async def leave():
        async for each in stoker.amap(sleep, range(4), ordered=False):
            assert each == 0
            break

    async def give_up():
        await asyncio.wait_for(collect(stoker.amap(sleep, [1, 2])), 0.3)

    async def give_up_input():
        async def never():
            yield 0
            await asyncio.sleep(3600)

        await asyncio.wait_for(collect(stoker.amap(sleep, never())), 0.3)

    async def collect(results):
        return [each async for each in results]

    with pytest.raises(ValueError, match="no -1"):
        asyncio.run(fail())
    asyncio.run(leave())
    for end in (give_up, give_up_input):
        with pytest.raises(TimeoutError):
            asyncio.run(end())
    gc.collect()
    until(lambda: session.status().running == session.status().queued == 0)


def test_async_items_require_an_event_loop():
    with pytest.raises(ConfigError, match="need a running event loop"):
        stoker.amap(double, numbers(3))
