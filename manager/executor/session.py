"""`stoker.load`: load Parsl with one StokerExecutor. By default, Parsl then logs no state changes, reports no usage and
makes no retries.
"""

from __future__ import annotations

import atexit
import contextlib
import html
import logging
import math
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import parsl
from parsl.config import Config
from parsl.dataflow.dflow import DataFlowKernel, DataFlowKernelLoader

from stoker import errors
from stoker.config import Site
from stoker.contexts.factory import as_recipe
from stoker.contexts.loading import is_loaded
from stoker.contexts.recipe import Recipe
from stoker.errors import ConfigError, SessionError
from stoker.log_files import BoundedLog
from stoker.manager.executor.detached import RUN_FOLDER_VARIABLE, SESSION_VARIABLE
from stoker.manager.executor.executor import StokerExecutor
from stoker.manager.executor.futures import CallFuture
from stoker.manager.executor.mapping import close_open_streams
from stoker.manager.executor.options import (
    check_integer_option,
    check_load_arguments,
    create_parsl_config,
    parse_call_specification,
)
from stoker.manager.executor.outgoing import wait_for_answer
from stoker.manager.executor.prepared import AppSpecification, RetrySpecification
from stoker.protocol.session import SessionFolder
from stoker.protocol.show_status import format_call_counts
from stoker.protocol.to_client import Status, Story
from stoker.startup import RELEASE
from stoker.units import MOST_AT_ONCE

_current: Session | None = None
_lock = threading.Lock()
SLOW_S = 1.0


def load(
    site: str | os.PathLike[str] | Site | None = None,
    *,
    session: str | os.PathLike[str] | None = None,
    provider: Any = None,
    label: str = "stoker",
    run_dir: str | os.PathLike[str] = "runinfo",
    retries: int = 0,
    working_dir: str | os.PathLike[str] | None = None,
    drain_s: float = 60.0,
    progress: bool = True,
    **options: Any,
) -> Session:
    """Load a site and start its pilots: `with stoker.load("site.toml") as session: ...`.

    In a notebook: `session = stoker.load()` at the start, and `session.stop()` at the end.

    Args:
        site: A site file or a Site. The default is the session in the environment variable STOKER_SESSION, or else this
            machine.
        session: The id or folder of a running session (`stoker up`) to join; the session continues after this program.
        provider: A Parsl provider that replaces the site's provider.
        label: The name of the executor.
        run_dir: The folder in which session folders are created.
        retries: Parsl's retries of a call that raised an exception.
        working_dir: The folder in which calls run.
        drain_s: Seconds for which a drained block may continue its calls.
        progress: Log why calls wait. Faults of the manager are always logged.
        **options: Options of `parsl.config.Config`.

    Returns:
        The session, a context manager.

    Raises:
        SessionError: A session is already loaded, or the session cannot start.
        ConfigError: The site or an option is invalid.
    """
    global _current
    with _lock:
        if _current is not None and DataFlowKernelLoader._dfk is None:  # the program has cleared Parsl
            _current.stop()
        if _current is not None:
            raise SessionError(
                f"session {_current.id} is loaded already; leave its `with` block or call its stop() first",
                session=_current.id,
            )
        if DataFlowKernelLoader._dfk is not None:
            raise SessionError(
                "Parsl is loaded already; either put a stoker.StokerExecutor() into its Config, or end Parsl first with"
                " parsl.dfk().cleanup()"
            )
        if site is None and provider is None and session is None:
            session = os.environ.get(SESSION_VARIABLE) or None
        check_load_arguments(run_dir=run_dir, retries=retries, options=options)
        executor = StokerExecutor(
            site, label=label, provider=provider, session=session, working_dir=working_dir, drain_s=drain_s,
            progress=progress,
        )  # fmt: skip
        defaults = {
            "initialize_logging": False,
            "usage_tracking": 0,
            "strategy": "simple",
            "retry_handler": compute_retry_cost,
        }
        given: dict[str, Any] = {**defaults, **options}
        config = create_parsl_config(executors=[executor], run_dir=os.fspath(run_dir), retries=retries, **given)
        interrupted = False
        try:
            _current = Session(_load_parsl(config), executor)
        except BaseException as error:  # also after Ctrl-C, end the started processes immediately
            with _print_message_if_slow("stoker: ending the session that was starting"):
                kernel: Any = DataFlowKernelLoader._dfk
                if kernel is not None:
                    DataFlowKernelLoader.clear()
                    if not kernel.cleanup_called:
                        kernel.cleanup()
                executor.shutdown()
            if isinstance(error, OSError) and error.filename is not None:
                raise SessionError(
                    f"the session cannot start: {error.filename}: {error.strerror}; the session keeps its files in the"
                    f" folder {run_dir}: make this folder writable, or name another with stoker.load(run_dir=...)"
                ) from error
            interrupted = isinstance(error, KeyboardInterrupt)
            if not interrupted:
                raise
        if interrupted or _current is None:  # raised here, so that the traceback shows the user's line
            raise KeyboardInterrupt("stoker.load was interrupted; its processes have ended")
    return _current


_RUN_DIR_TRIES = 20


def _load_parsl(config: Config) -> DataFlowKernel:
    """Load Parsl; retry if another program has just created the same numbered run folder."""
    os.makedirs(config.run_dir, exist_ok=True)
    for _ in range(_RUN_DIR_TRIES):
        try:
            return parsl.load(config)
        except FileExistsError as error:
            if not os.path.basename(str(error.filename)).isdigit():
                raise
    return parsl.load(config)


def _unload_in_forked_child() -> None:
    global _current
    if _current is not None:
        _current = None
        DataFlowKernelLoader.clear()


os.register_at_fork(after_in_child=_unload_in_forked_child)


class Session:
    """A loaded site. Made by `load`. `id`: the session's id. `folder`: the folder with the session's files."""

    def __init__(self, kernel: Any, executor: StokerExecutor) -> None:
        self.executor = executor
        self.id = executor.link.session.session
        self.folder = executor.link.folder.path
        self._kernel = kernel
        self._over = False
        self._pid = os.getpid()
        self._log = _start_logging_to_file(os.fspath(self.folder / "client.log"))
        atexit.register(self.stop)
        if run := os.environ.get(RUN_FOLDER_VARIABLE):  # commands find the session through this file
            with contextlib.suppress(OSError):
                Path(run, "session").write_text(os.path.abspath(self.folder))

    def status(self, timeout_s: float = 5.0) -> Status:
        """Return pilots, contexts, queues and rates.

        Args:
            timeout_s: Seconds to wait for the manager.

        Raises:
            SessionError: The manager does not answer.
        """
        if self._over:
            raise SessionError(f"session {self.id} was stopped; stoker.load() loads a new one", session=self.id)
        return wait_for_answer(self.executor.link.ask_status(), timeout_s=timeout_s)

    def explain(self, subject: str, timeout_s: float = 5.0) -> Story:
        """Return why a call, pilot, library or context is in its state.

        Args:
            subject: The id or name of the object (`c-12`).
            timeout_s: Seconds to wait for the manager.

        Raises:
            SessionError: The manager does not answer.
            ConfigError: `subject` is not a string.
        """
        if not isinstance(subject, str):
            raise ConfigError(
                f"session.explain: {subject!r:.80} is not the name of an object: write for example 'c-12'"
            )
        story = wait_for_answer(self.executor.link.ask_for_story(subject), timeout_s=timeout_s)
        if not story.found:  # the manager forgets successful calls; the journal has them
            from stoker.manager.live.replay import complete_story_from_journal

            return complete_story_from_journal(SessionFolder(self.folder), subject, story)
        return story

    @property
    def over(self) -> Exception | None:
        """Why the session accepts no more calls, or None."""
        if self._over:
            return SessionError(f"session {self.id} was stopped", session=self.id)
        return self.executor.link.over

    def warm(self, context: Recipe, count: int = 1) -> CallFuture:
        """Load a context before its calls.

        Args:
            context: A recipe.
            count: Number of libraries that load the context.

        Returns:
            A future that ends when the context is loaded. It raises ContextError if the load fails, NoDeviceError if
            too few devices exist.

        Raises:
            ConfigError: The count is out of range.
            RecipeError: The context is not a recipe.
        """
        check_integer_option("session.warm: count", count, least=1, most=MOST_AT_ONCE)
        requirements = parse_call_specification({"context": as_recipe(context), "gang": count}, takes_context=True)
        return self.executor.submit(is_loaded, AppSpecification(requirements))

    def stop(self) -> None:
        """Cancel open calls, clear Parsl, and end the pilots unless the session was joined."""
        global _current
        if self._over or os.getpid() != self._pid:  # a forked child must not end its parent's session
            return
        self._over = True
        atexit.unregister(self.stop)
        try:
            with _print_message_if_slow(f"stoker: session {self.id} is ending: loads and calls are being stopped"):
                if not self._kernel.cleanup_called:
                    self._kernel.cleanup()
        finally:
            self.executor.shutdown()
            if DataFlowKernelLoader._dfk is self._kernel:
                DataFlowKernelLoader.clear()
            if _current is self:
                _current = None
            logging.getLogger("stoker").removeHandler(self._log)
            self._log.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            for said in close_open_streams():
                sys.stderr.write(f"\n{said}\n")
        mode = self._kernel.config.exit_mode
        if mode == "wait" and kind is None:
            self._kernel.wait_for_current_tasks()
        if mode != "skip":
            self.stop()

    def __repr__(self) -> str:
        status = None if self._over else self.executor.ask_status(0.5)
        state = ": stopped" if self._over else "" if status is None else f": {_format_summary(status)}"
        return f"<session {self.id} on site {self.executor.site.name}{state}>"

    def _repr_html_(self) -> str:
        status = None if self._over else self.executor.ask_status(1.0)
        if status is None:
            return f"<code>{html.escape(repr(self))}</code>"
        rows = "".join(
            f"<tr><td>{html.escape(context.title)}</td><td>{context.hot} hot, {context.loading} loading</td>"
            f"<td>{context.running} running, {context.queued} queued</td><td>{context.ended} ended</td></tr>"
            for context in status.contexts
        )
        head = f"stoker {RELEASE} · site {self.executor.site.name} · session {self.id} · {_format_summary(status)}"
        return f"<p>{html.escape(head)}</p><table>{rows}</table>"


@contextlib.contextmanager
def _print_message_if_slow(text: str) -> Iterator[None]:
    timer = threading.Timer(SLOW_S, lambda: sys.stderr.write(f"{text}\n"))
    timer.daemon = True
    if sys.stderr is not None and sys.stderr.isatty():  # stderr is None if it was closed at the start
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _format_summary(status: Status) -> str:
    pilots, devices = len(status.pilots), sum(len(pilot.devices) for pilot in status.pilots)
    here = f"{pilots} pilot{'s' * (pilots != 1)}, {devices} device{'s' * (devices != 1)}"
    return f"{here}; {format_call_counts(status)}"


def _start_logging_to_file(path: str) -> logging.Handler:
    handler = BoundedLog(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.setLevel(logging.INFO)
    logger = logging.getLogger("stoker")
    logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logging.getLogger().handlers and len(logger.handlers) == 1:
        terminal = logging.StreamHandler(sys.stderr)
        terminal.setLevel(logging.WARNING)
        terminal.setFormatter(logging.Formatter("stoker: %(message)s"))
        logger.addHandler(terminal)
    return handler


_FINAL_ERRORS = (
    errors.CallDroppedError, errors.CallCancelledError, errors.PoisonCallError, errors.NoDeviceError,
    errors.SerializationError, errors.StreamDiffersError,
)  # fmt: skip


def compute_retry_cost(error: Exception, task: dict[str, Any]) -> float:
    """Return how many of Parsl's retries a failure costs; infinite if the manager's decision is final. Retries keep the
    deadline of the first try."""
    if isinstance(error, _FINAL_ERRORS):
        return math.inf
    sent, given = task["exec_fu"], task["resource_specification"]
    if isinstance(sent, CallFuture) and (due_at := sent.due_at) is not None:
        is_apps = isinstance(given, AppSpecification)
        task["resource_specification"] = (
            given.copy_with(due_at=due_at) if is_apps else RetrySpecification(given, due_at=due_at)
        )
    return 1.0
