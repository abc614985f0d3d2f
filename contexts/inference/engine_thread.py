"""One thread runs the steps of the engine. The library's slots submit requests to this thread and wait for texts.

After each step, the thread runs one job (another use of the model, for example label scores). While tuning reserves the
model, no step runs. If a call gets a stop request (`ambient.StopRequest`), its waits raise immediately. Its requests
leave the batch before the next step, and its waiting jobs do not run.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from math import inf
from queue import SimpleQueue
from typing import Any, TypeVar

import msgspec

from stoker.contexts import ambient
from stoker.contexts.ambient import Evicted, StopRequest, TextSink
from stoker.contexts.inference.adapter import (
    EngineLoad,
    EngineTurns,
    EngineWork,
    GenerationRequest,
    InferenceEngine,
    NewToken,
    Sampling,
    create_engine_turns,
    summarize_work,
)
from stoker.contexts.inference.core_share import release_helper_threads
from stoker.contexts.inference.options import OptionRefused
from stoker.errors import StokerError

log = logging.getLogger(__name__)

T = TypeVar("T")

_LAST_STEP_WEIGHT = 0.2  # weight of the last step's duration in the forecast (a moving average)
_EXIT_WAIT_S = 30.0  # maximum seconds that an exiting process waits for a running step
_CHECK_EVERY_S = 0.1  # seconds between two checks whether a waiting call must stop


class Generation:
    """The new tokens of one request, or its error. The reader receives only the texts that `sink` refuses."""

    def __init__(
        self, request: GenerationRequest, stop: StopRequest, request_abort: Callable[[int], None], sink: TextSink | None
    ) -> None:
        self.request = request
        self.sink = sink
        self.is_over = False
        self.stop = stop
        self._request_abort = request_abort
        self._incoming: SimpleQueue[list[NewToken] | BaseException] = SimpleQueue()
        self._tokens: list[NewToken] = []
        # These are plain fields, because each step reads them (`summarize_work`) and properties would be too slow.
        self.made = 0
        self.prompt_tokens = len(request.prompt)
        self.first_due_at, self.tpot_s = request.due_at, request.tpot_s
        self.most = request.sampling.max_new_tokens

    def tokens(self) -> Iterator[NewToken]:
        """Yield tokens while they are written. Raises ValueError if the request can never run, Evicted after a stop."""
        while True:
            come = self._incoming.get()
            self.stop.raise_if_requested()
            if isinstance(come, BaseException):
                self._mark_finished()
                raise come
            if come[-1].finish is not None:
                self._mark_finished()
            yield from come
            if self.is_over:
                return

    def abort(self) -> None:
        if not self.is_over:
            self._mark_finished()
            self._request_abort(self.request.id)

    def handle_stop(self) -> None:
        self._request_abort(self.request.id)
        self._incoming.put(Evicted())

    def _mark_finished(self) -> None:
        self.is_over = True
        self.stop.remove_wake_function(self.handle_stop)

    # ---- methods for the engine's thread

    @property
    def due_at(self) -> float:
        if self.made and not self.request.tpot_s:
            return inf
        return self.request.due_at + self.made * self.request.tpot_s

    def pass_to_reader(self, token: NewToken) -> None:
        """Pass a token to the reader: at once if the request is streamed, otherwise with all tokens at the end."""
        self._tokens.append(token)
        self.made += 1
        if self.request.pieces or token.finish is not None:
            self._incoming.put(self._tokens)
            self._tokens = []

    def pass_to_sink(self, token: NewToken) -> bool:
        """Pass the token's text to the sink. If the sink refuses it, return False; the reader gets all later tokens."""
        assert self.sink is not None
        if token.text and not self.sink.add(token.text):
            self.sink.send()  # send earlier texts before the reader sends later texts
            self.sink = None
            return False
        self.made += 1
        return True

    def finish(self, token: NewToken) -> None:
        self._incoming.put([msgspec.structs.replace(token, text="")])

    def fail(self, error: BaseException) -> None:
        self._incoming.put(error)


class EngineThread:
    """An engine (created at first use), its thread, and the requests of all slots. Computes within `computing()`.

    `stepped` is called after each step with its duration in seconds. A step begins when the thread accepts requests,
    and ends when it has sent the tokens. Waiting for other libraries is excluded; the handover of a turn
    (`LibraryTurns.begin`) is included.
    """

    def __init__(
        self,
        make: Callable[[], InferenceEngine],
        *,
        computing: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        stepped: Callable[[float], None] | None = None,
    ) -> None:
        self._make = make
        self._computing = computing
        self._stepped = stepped
        self._engine: InferenceEngine | None = None
        # The engine's thread holds this lock during a step; other threads hold it while they use the model.
        self._model_lock = threading.RLock()
        self._new_requests: deque[Generation | int] = deque()
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._work = threading.Condition()
        self._open_requests: dict[int, Generation] = {}
        self._last_request_id = 0
        self._reservations_requested = 0  # number of calls of `alone`
        self._reservations_granted = 0  # number of calls of `alone` that no longer wait
        self._reserving_thread = 0
        self._device_turns: EngineTurns | None = None
        self._asleep = False
        self._step_s = 0.0
        self._accepted_count, self._ended_count, self._mean_output = 0, 0, 0.0
        self._failure: BaseException | None = None
        self._pid = os.getpid()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="stoker-engine", daemon=True)
        self._thread.start()
        release_helper_threads()  # release the helper threads of the thread that loaded the model
        atexit.register(_close_at_exit, weakref.ref(self), self._thread, self._pid)

    @property
    def engine(self) -> InferenceEngine:
        with self._model_lock:
            if self._engine is None:
                self._engine = self._make()
                self._release_helpers_of_caller()
            return self._engine

    def get_load(self) -> EngineLoad:
        engine = self._engine
        return EngineLoad() if engine is None else msgspec.structs.replace(engine.get_load(), rows=engine.count_slots())

    def submit(
        self, prompt: tuple[int, ...], sampling: Sampling, *, pieces: bool = False, due_at: float = inf,
        tpot_s: float = 0.0, sink: TextSink | None = None,
    ) -> Generation:  # fmt: skip
        """Submit a request, which joins the batch before the next step. Raises Evicted if the call must stop."""
        self._check_not_forked()
        self._check_model_not_reserved_here()
        stop = ambient.current_stop_request()
        stop.raise_if_requested()
        with self._work:
            self._check_not_closed()
            self._last_request_id += 1
            request = GenerationRequest(self._last_request_id, prompt, sampling, due_at, tpot_s, pieces)
            generation = Generation(request, stop, self._request_abort, sink)
            self._new_requests.append(generation)
            self._work.notify()
        stop.add_wake_function(generation.handle_stop)
        return generation

    def _request_abort(self, request: int) -> None:
        if os.getpid() != self._pid:
            return
        with self._work:
            self._new_requests.append(request)
            self._work.notify()

    def run(self, function: Callable[[], T]) -> T:
        """Run a function between two steps. Raises Evicted if the call must stop before the function has started."""
        self._check_not_forked()
        stop = ambient.current_stop_request()
        stop.raise_if_requested()
        if self._reserving_thread == threading.get_ident():  # the engine's thread waits for this thread, so run it here
            return function()
        job: Future[T] = Future()

        def cancel() -> None:
            job.cancel()

        with self._work:
            self._check_not_closed()
            self._jobs.append((job, function))
            self._work.notify()
        stop.add_wake_function(cancel)
        try:
            return job.result()
        except CancelledError:
            raise Evicted from None
        finally:
            stop.remove_wake_function(cancel)

    def sleep(self) -> None:
        """Put the engine to sleep. Until `wake`, the engine does not compete for its devices. Raises RuntimeError while
        requests run.
        """
        self.run(lambda: self._set_asleep(asleep=True))

    def wake(self) -> None:
        self.run(lambda: self._set_asleep(asleep=False))

    def _set_asleep(self, *, asleep: bool) -> None:
        (self.engine.sleep if asleep else self.engine.wake)()
        self._asleep = asleep

    def close(self, *, wait: bool = True) -> None:
        """Stop the thread after its current step. Open requests fail."""
        if os.getpid() != self._pid:
            return
        if wait:
            self._check_model_not_reserved_here()
        with self._work:
            self._is_closed = True
            self._work.notify()
        if wait and threading.current_thread() is not self._thread:
            self._thread.join()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Reserve the model for the calling thread. The engine computes no steps until the `with` block ends."""
        self._check_not_forked()
        stop = ambient.current_stop_request(own_thread=True)
        with self._work:
            self._reservations_requested += 1
        try:
            while not self._model_lock.acquire(timeout=_CHECK_EVERY_S):
                stop.raise_if_requested()
        finally:  # count after an exception too, because the engine thread waits until the two numbers are equal
            with self._work:
                self._reservations_granted += 1
                self._work.notify()
        before, self._reserving_thread = self._reserving_thread, threading.get_ident()
        try:
            with self._computing():
                yield
        finally:
            self._reserving_thread = before
            self._release_helpers_of_caller()
            self._model_lock.release()

    def _release_helpers_of_caller(self) -> None:
        if threading.current_thread() is not self._thread:
            release_helper_threads()

    def _check_not_forked(self) -> None:
        if os.getpid() != self._pid:
            raise StokerError("a process that was forked from a library cannot use its model; use it in the library")

    def _check_model_not_reserved_here(self) -> None:
        if self._reserving_thread == threading.get_ident():
            raise StokerError("this thread has exclusive use of the model; leave the `with model.alone()` block first")

    def _check_not_closed(self) -> None:
        if self._is_closed:
            raise StokerError("the model was closed; it accepts no more requests") from self._failure

    def _run(self) -> None:
        try:
            self._device_turns = create_engine_turns()
            self._run_steps()
        except BaseException as failure:
            log.exception("the engine's thread failed")
            self._failure = failure
        finally:  # fail all open requests, so that no caller waits forever
            with self._work:
                self._is_closed = True
            error = StokerError("the model was closed before the request was complete")
            error.__cause__ = self._failure
            for each in (*self._open_requests.values(), *self._new_requests):
                if not isinstance(each, int):
                    each.fail(error)
            for job, _ in self._jobs:
                if job.set_running_or_notify_cancel():
                    job.set_exception(error)
            self._open_requests.clear()
            try:
                if self._device_turns is not None:
                    self._device_turns.close()
            except Exception:  # an exception here must not prevent `stop`
                log.exception("an engine that has ended could not release its turns; other engines may wait")
            if self._engine is not None:
                self._engine.stop()

    def _run_steps(self) -> None:
        turns = self._device_turns
        while True:
            with self._work:
                wanted = self._reservations_requested
                if self._reservations_granted < wanted:
                    release_helper_threads()
                if turns is not None and (
                    self._reservations_granted < wanted or not (self._new_requests or self._open_requests or self._jobs)
                ):
                    turns.end()
                    if self._asleep:
                        turns.leave()
                    else:
                        turns.publish(self._summarize_open_requests())
                while not self._is_closed and (
                    self._reservations_granted < wanted or not (self._new_requests or self._open_requests or self._jobs)
                ):
                    self._work.wait()
                if self._is_closed:
                    return
            with self._model_lock:
                began = time.monotonic()
                self._accept_requests()
                if turns is not None and (self._open_requests or self._jobs):
                    due_at = (
                        min((each.due_at for each in self._open_requests.values()), default=inf)
                        if turns.shared
                        else inf
                    )
                    accepted_s = time.monotonic() - began
                    handover_s = turns.begin(due_at=due_at, step_s=self._step_s, work=self._summarize_open_requests)
                    began = time.monotonic() - accepted_s - handover_s
                    self._accept_requests()  # requests that came during other libraries' turns join this step
                if not (self._open_requests or self._jobs):
                    continue
                with self._computing():
                    if self._open_requests:
                        self._run_engine_step()
                        if self._stepped is not None:
                            self._stepped(time.monotonic() - began)
                    if self._jobs:
                        _run_job(*self._jobs.popleft())
                took_s = time.monotonic() - began
                self._step_s += (took_s - self._step_s) * (_LAST_STEP_WEIGHT if self._step_s else 1.0)

    def _summarize_open_requests(self) -> EngineWork:
        now, open_ones = time.monotonic(), self._open_requests.values()
        return summarize_work(open_ones, now=now, accepted_requests=self._accepted_count, mean_output=self._mean_output)

    def _accept_requests(self) -> None:
        while self._new_requests:
            each = self._new_requests.popleft()
            if isinstance(each, int):
                if self._open_requests.pop(each, None) is not None:
                    self.engine.abort(each)
                continue
            self._accepted_count += 1
            try:
                self.engine.add(each.request)
            except Exception as error:
                each.fail(error)
            else:
                self._open_requests[each.request.id] = each

    def _run_engine_step(self) -> None:
        try:
            tokens = self.engine.step()
        except BaseException as error:
            log.exception("a step of the engine failed, so its %d requests failed", len(self._open_requests))
            ended, self._open_requests = self._open_requests, {}
            for generation in ended.values():
                generation.fail(_copy_of_exception(error))
            for id in ended:
                self.engine.abort(id)
            return
        sink, relayed_ends = None, list[tuple[Generation, NewToken]]()
        for token in tokens:
            request = self._open_requests.get(token.request)
            if request is None:
                continue
            if token.finish is not None:
                del self._open_requests[token.request]
                self._ended_count += 1
                self._mean_output += (request.made + 1 - self._mean_output) / self._ended_count
            if token.error:
                request.fail(OptionRefused(token.option, token.error) if token.option else RuntimeError(token.error))
            elif request.sink is not None and request.pass_to_sink(token):
                sink = request.sink
                if token.finish is not None:
                    relayed_ends.append((request, token))
            else:
                request.pass_to_reader(token)
        if sink is not None:
            sink.send()
        for request, token in relayed_ends:
            request.finish(token)


def _run_job(job: Future[Any], function: Callable[[], Any]) -> None:
    if job.set_running_or_notify_cancel():
        try:
            job.set_result(function())
        except BaseException as error:
            job.set_exception(error)


def _close_at_exit(engine: weakref.ref[EngineThread], thread: threading.Thread, pid: int) -> None:
    if os.getpid() != pid:
        return
    here = engine()
    if here is not None:
        here.close(wait=False)
        del here
    thread.join(_EXIT_WAIT_S)


def _copy_of_exception(error: BaseException) -> BaseException:
    try:
        copy = type(error)(*error.args)
    except Exception:
        copy = RuntimeError(str(error))
    return copy.with_traceback(error.__traceback__)
