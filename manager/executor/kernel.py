"""Changes to Parsl's kernel (DataFlowKernel), which stores a program's tasks.

- The kernel passes each result to its memoizer before it sets the call's future. If the memoizer raises (pickle refuses
  a result, the disk is full), the future never ends: see `make_memoizer_safe`.
- The kernel submits tasks on another thread. `enable_immediate_launch` submits calls of Stoker apps with pickled
  arguments on the caller's thread, because these calls wait for no other task.
- Executors do not receive the kernel's record of a task, which shows cancellations: see `task_being_launched`.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from parsl.dataflow.dflow import DataFlowKernel, DataFlowKernelLoader
from parsl.dataflow.memoization import BasicMemoizer, Memoizer
from parsl.dataflow.taskrecord import TaskRecord
from parsl.errors import NoDataFlowKernelError

from stoker.errors import CallCancelledError, SerializationError, SessionError
from stoker.manager.executor.prepared import PACKED, logger

HOW_TO_LOAD = """  with stoker.load():              # this machine; or stoker.load("site.toml")
      ...                          # call it here"""


def get_loaded_kernel(name: str, *, inside: str = "") -> DataFlowKernel:
    """Return Parsl's loaded kernel. `inside`: advice for code inside a call."""
    try:
        return DataFlowKernelLoader.dfk()
    except NoDataFlowKernelError:
        raise SessionError(
            f"{name} was called before a site was loaded. Load a site first:\n\n{HOW_TO_LOAD}\n\n"
            f"Inside another call, {inside or f'call the function itself: {name}.function(...)'}"
        ) from None


def enable_immediate_launch(kernel: DataFlowKernel) -> None:
    launch_now: Callable[[TaskRecord], None] | None = getattr(kernel, "_launch_if_ready_async", None)
    if launch_now is None or "launch_if_ready" in vars(kernel):
        return
    launch_later, launch = kernel.launch_if_ready, kernel.launch_task

    def launch_task(task: TaskRecord) -> Future[Any]:
        before, _thread_state.task = task_being_launched(), task
        try:
            launched: Future[Any] = launch(task)
            return launched
        finally:
            _thread_state.task = before

    def launch_if_ready(task: TaskRecord) -> None:
        if PACKED not in task["kwargs"] or task["fail_count"]:
            launch_later(task)
            return
        try:
            launch_now(task)
        except BaseException:  # after Ctrl-C the program has no future: fail the call, so that no task waits for it
            failed: Future[Any] = Future()
            failed.set_exception(CallCancelledError("the program was interrupted while it submitted this call"))
            with suppress(Exception):
                kernel.handle_exec_update(task, failed)
            raise

    kernel.launch_if_ready, kernel.launch_task = launch_if_ready, launch_task


_thread_state = threading.local()


def task_being_launched() -> TaskRecord | None:
    """Return the record of the task that the kernel is launching on this thread."""
    return getattr(_thread_state, "task", None)


def make_memoizer_safe(kernel: DataFlowKernel) -> None:
    memoizer: Memoizer = kernel.memoizer
    if "update_memo_result" in vars(memoizer):
        return
    keep_result, keep_exception, close = memoizer.update_memo_result, memoizer.update_memo_exception, memoizer.close
    warned: set[str] = set()

    def warn_once(task: TaskRecord, error: Exception) -> None:
        name = str(task["func_name"])
        if name not in warned:
            warned.add(name)
            text = "a result of %s cannot be kept in Parsl's checkpoint: %s; the program gets it, and the call runs"
            text += " again in the next run (shown once). stoker.map(%s, ..., keep=PATH) keeps results of any kind"
            logger.warning(text, name, error, name)

    def update_memo_result(task: TaskRecord, r: Any) -> None:
        is_basic = isinstance(memoizer, BasicMemoizer)
        try:
            if is_basic and memoizer.checkpoint_mode is not None and task.get("hashsum"):
                _refuse_unpicklable_result(r)
            keep_result(task, r)
        except Exception as error:
            warn_once(task, error)
            if isinstance(error, SerializationError):
                update_memo_exception(task, error)  # memoizes the call's future without a checkpoint

    def update_memo_exception(task: TaskRecord, e: BaseException) -> None:
        try:
            keep_exception(task, e)
        except Exception as error:
            warn_once(task, error)

    def close_safely() -> None:
        try:
            close()
        except Exception as error:
            logger.warning("Parsl's last checkpoint could not be written: %r", error)

    memoizer.update_memo_result, memoizer.update_memo_exception = update_memo_result, update_memo_exception
    memoizer.close = close_safely


def _refuse_unpicklable_result(result: Any) -> None:
    """Raise SerializationError if the result cannot be pickled: half a pickle would damage Parsl's checkpoint."""
    try:
        with open(os.devnull, "wb") as nothing:
            pickle.dump(result, nothing)
    except Exception as error:
        what = f"{type(result).__name__}: pickle cannot serialize it ({error})"
        raise SerializationError(what, what="result") from error
