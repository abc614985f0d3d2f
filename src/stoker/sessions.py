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
from stoker.manager.executor.detached import SESSION_VARIABLE
from stoker.manager.executor.new_sessions import KeptSession, kept_session
from stoker.manager.live.clock import Clock
from stoker.manager.live.session_policies import describe_policies, honoured_call_options
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
from stoker.startup import import_on_first_use

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

_NEED_PARSL = {"apps": "StokerApp", "futures": "AppCallFuture CallFuture", "session": "Session"}
__getattr__ = import_on_first_use("stoker.sessions", _NEED_PARSL, home="stoker.manager.executor")


class ContextFacts(msgspec.Struct, frozen=True):
    """Statistics of several contexts, summed. `load_total_s`: device seconds of all loads."""

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
        """Number of calls that found their context loaded."""
        return max(0, self.calls - self.loads)

    def since(self, before: ContextFacts) -> ContextFacts:
        """Return these facts with only the counts that were added since earlier facts.

        Args:
            before: The earlier facts.
        """
        counts = ("loads", "load_total_s", "calls")
        return msgspec.structs.replace(self, **{each: getattr(self, each) - getattr(before, each) for each in counts})


def context_facts(status: Status, *, keys: Collection[str]) -> ContextFacts:
    """Return the summed facts of contexts.

    Args:
        status: Status of the session.
        keys: Recipe keys of the contexts.
    """
    mine = [context for context in status.contexts if context.key in keys]
    names = {name for context in mine for name in (context.key, context.name)}
    here = [pilot for pilot in status.pilots if pilot.state != "gone"]
    loading = [each for each in status.libraries if each.recipe in names and each.state == "loading"]
    sums = ("hot", "loading", "queued", "running", "loads", "load_total_s")
    return ContextFacts(
        names=tuple(context.name for context in mine),
        loading_on=tuple(sorted({device for library in loading for device in library.devices})),
        pilots=len(here),
        devices=sum(len(pilot.devices) for pilot in here),
        calls=sum(context.served for context in mine),
        waits_for=next((context.waits_for for context in mine if context.waits_for), ""),
        **{name: sum(getattr(context, name) for context in mine) for name in sums},
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
    """Return a connection to the session's manager. The connection is a context manager with `status()` and
    `calls(...)`.

    Args:
        session: A loaded session.

    Raises:
        SessionError: The session cannot be reached.
    """
    return Observer(SessionFolder(session.folder))


def policy_of(session: Session) -> str:
    """Return the names of the session's policies, or "" for the default policies.

    Args:
        session: A loaded session.
    """
    return describe_policies(SessionFolder(session.folder))


def honoured_by(session: Session) -> frozenset[str] | None:
    """Return the options of calls and contexts that the session's policies use; None if only the manager knows them.

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
    """Return the session that `stoker run --session` or the environment names, or an empty string."""
    return os.environ.get(SESSION_VARIABLE, "")


def sent_call(future: AppCallFuture) -> CallFuture | None:
    """Return the call of an app's future, or None until Parsl has submitted it.

    Args:
        future: The app's future.
    """
    found: CallFuture | None = future.task_record["exec_fu"]
    return found


def checkpoint_of(progress: CallProgress | None) -> Any:
    """Return the unpickled state of a call's last `stoker.progress(..., state=...)`, or None. For your own calls only.

    Args:
        progress: The last report of the call.
    """
    return payloads.loads(progress.state) if progress is not None and progress.state else None
