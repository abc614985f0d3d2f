"""Statistics, forecasts, checkpoints and policies of a loaded session and its calls.

    with stoker.load() as session:
        ask = facts_of(session, {recipe.key})            `ask()` returns the statistics since this moment
        future = verify(claims)
        with observe(session) as observer:               reads status and calls from any thread
            print(observer.calls(limit=100, only=None).calls)
        call = sent_call(future)
        print(call and call.progress, call and call.forecast)

Times are in seconds. SessionError is raised if the manager does not answer in time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import msgspec

from stoker.contexts import payloads
from stoker.manager.cli.ask import Observer
from stoker.manager.cli.session_choice import FollowedSession
from stoker.manager.executor.detached import JOINS
from stoker.manager.executor.new_sessions import KeptSession, kept_session
from stoker.manager.live.clock import Clock
from stoker.manager.live.session_policies import honoured_call_options, policy_in_words
from stoker.protocol.calls import CallForecast, CallProgress, Features, ListedCall, ListedState
from stoker.protocol.session import (
    WRITTEN_EVERY_S,
    GatewayNote,
    ServedModelFigures,
    SessionFolder,
    WorkerFacts,
    remove_gateway_note,
    write_gateway_note,
)
from stoker.protocol.status import JOURNAL, ContextStatus
from stoker.protocol.to_client import Status
from stoker.startup import import_deferring_interrupt

if TYPE_CHECKING:
    from stoker.manager.executor.apps import StokerApp
    from stoker.manager.executor.futures import AppCallFuture, CallFuture
    from stoker.manager.executor.session import Session

__all__ = [
    "WRITTEN_EVERY_S", "AppCallFuture", "CallForecast", "CallFuture", "CallProgress", "Clock", "ContextFacts",
    "ContextStatus", "Features", "FollowedSession", "GatewayNote", "KeptSession", "ListedCall", "ListedState",
    "Observer", "ServedModelFigures", "Session", "Status", "StokerApp", "WorkerFacts", "checkpoint_of",
    "context_facts", "facts_of", "honoured_by", "joined_session", "journal_trouble", "kept_session", "observe",
    "policy_of", "remove_gateway_note", "sent_call", "write_gateway_note",
]  # fmt: skip

_HOME = {
    "AppCallFuture": "stoker.manager.executor.futures",
    "CallFuture": "stoker.manager.executor.futures",
    "Session": "stoker.manager.executor.session",
    "StokerApp": "stoker.manager.executor.apps",
}
"""Names that need Parsl, with their modules. Each module is imported when its name is first used."""


class ContextFacts(msgspec.Struct, frozen=True):
    """Statistics summed over a set of contexts. `load_total_s`: seconds of device time of all loads."""

    names: tuple[str, ...] = ()
    hot: int = 0
    loading: int = 0
    loading_on: tuple[str, ...] = ()
    pilots: int = 0
    devices: int = 0
    queued: int = 0
    running: int = 0
    loads: int = 0
    load_total_s: float = 0.0
    calls: int = 0
    waits_for: str = ""

    @property
    def load_s(self) -> float:
        """Mean seconds of a load."""
        return self.load_total_s / self.loads if self.loads else 0.0

    @property
    def found_hot(self) -> int:
        """Number of calls that ran without a load."""
        return max(0, self.calls - self.loads)

    def since(self, before: ContextFacts) -> ContextFacts:
        """Subtract earlier facts from these facts.

        Args:
            before: The earlier facts.

        Returns:
            The difference.
        """
        return msgspec.structs.replace(
            self,
            loads=self.loads - before.loads,
            load_total_s=self.load_total_s - before.load_total_s,
            calls=self.calls - before.calls,
        )


def context_facts(status: Status, *, keys: Collection[str]) -> ContextFacts:
    """Return the summed facts of contexts.

    Args:
        status: Status of the session.
        keys: Recipe keys of the contexts.
    """
    mine = [context for context in status.contexts if context.key in keys]
    names = {context.key: context.name for context in mine}
    here = [pilot for pilot in status.pilots if pilot.state != "gone"]
    loading_on = sorted(
        {
            device
            for library in status.libraries
            if (library.recipe in names or library.recipe in names.values()) and library.state == "loading"
            for device in library.devices
        }
    )
    return ContextFacts(
        names=tuple(context.name for context in mine),
        hot=sum(context.hot for context in mine),
        loading=sum(context.loading for context in mine),
        loading_on=tuple(loading_on),
        pilots=len(here),
        devices=sum(len(pilot.devices) for pilot in here),
        queued=sum(context.queued for context in mine),
        running=sum(context.running for context in mine),
        loads=sum(context.loads for context in mine),
        load_total_s=sum(context.load_total_s for context in mine),
        calls=sum(context.served for context in mine),
        waits_for=next((context.waits_for for context in mine if context.waits_for), ""),
    )


def facts_of(session: Session, keys: Collection[str]) -> Callable[[], ContextFacts]:
    """Return a function that returns the facts of contexts since this moment.

    Args:
        session: A loaded session.
        keys: Recipe keys.

    Raises:
        SessionError: The manager does not answer; also raised by the returned function.
    """
    before = context_facts(session.status(), keys=keys)
    return lambda: context_facts(session.status(), keys=keys).since(before)


def observe(session: Session) -> Observer:
    """Open a connection to the session's manager.

    Args:
        session: A loaded session.

    Returns:
        A context manager with `status()` and `calls(...)`.

    Raises:
        SessionError: The session cannot be reached.
    """
    return Observer(SessionFolder(session.folder))


def policy_of(session: Session) -> str:
    """Return the names of the session's policies, or "" for the default policies.

    Args:
        session: A loaded session.
    """
    return policy_in_words(SessionFolder(session.folder))


def honoured_by(session: Session) -> frozenset[str] | None:
    """Return the options of calls and contexts that the session's policies use (docs/options.md).

    None if only the manager knows the options.

    Args:
        session: A loaded session.

    Raises:
        SessionError: The session's files cannot be read.
    """
    return honoured_call_options(SessionFolder(session.folder))


def journal_trouble(status: Status) -> str:
    """Return why the journal cannot be written (this delays calls and results), or "".

    Args:
        status: The session's status.
    """
    return status.trouble.get(JOURNAL, "")


def joined_session() -> str:
    """Return the session named by `stoker run --session` or the environment, or ""."""
    return os.environ.get(JOINS, "")


def sent_call(future: AppCallFuture) -> CallFuture | None:
    """Return the call of an app's future, or None until Parsl has submitted it.

    Args:
        future: The app's future.
    """
    found: CallFuture | None = future.task_record["exec_fu"]
    return found


def checkpoint_of(progress: CallProgress | None) -> Any:
    """Unpickle the state of a call's last `stoker.progress(..., state=...)`. Use this function only for your own calls.

    Args:
        progress: The last report of the call.

    Returns:
        The state, or None if the call has reported no state.
    """
    return payloads.loads(progress.state) if progress is not None and progress.state else None


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'stoker.sessions' has no attribute {name!r}")
    value = getattr(import_deferring_interrupt(_HOME[name]), name)
    globals()[name] = value
    return value
