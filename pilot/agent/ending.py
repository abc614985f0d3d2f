"""How libraries end, and what the manager is told of it."""

from __future__ import annotations

import logging
import signal

from stoker.manager.protocol.calls import Failure, FailureKind
from stoker.manager.protocol.ids import CallId
from stoker.manager.protocol.to_manager import LibraryFacts, LibraryGone
from stoker.pilot.agent import standing
from stoker.pilot.agent.agent import Agent
from stoker.pilot.agent.library import Library
from stoker.pilot.agent.usage import tail
from stoker.pilot.core.library import State
from stoker.pilot.library import frames
from stoker.pilot.zygote import child

log = logging.getLogger("stoker.pilot")

_REMEMBERED = 10_000


def kill(agent: Agent, library: Library, *, cause: Failure | None = None) -> None:
    """End a library's process now. Its end is told when the zygote has reaped it."""
    library.cause = library.cause or cause
    library.told_to_end = True
    if library.zygote is None:
        finish(agent, library)
    else:
        library.zygote.kill(library.state.library)


def finish(agent: Agent, library: Library) -> None:
    """Its process has ended (or never was): settle the books and tell the manager."""
    state = library.state
    if state.state is State.GONE:
        return
    loading = state.state in (State.FETCHING, State.STARTING, State.LOADING)
    ready = not loading
    running = [CallId(call) for call, _ in library.running()]
    if library.garbled and not running:  # the ends of those that ran may be among what could not be read
        running = list(state.held)
    failure = library.cause or _verdict(agent, library, loading=loading, running=running)
    if failure is not None and standing.look(agent):
        log.warning("lib-%d failed of what the pilot lacks: %s", state.library, failure.message)
        failure = None
    left = state.gone(running)
    for call in left.running:
        _remove_drafts(agent, call)
    number = state.library
    log.log(
        logging.WARNING if failure else logging.INFO,
        "lib-%d (%s) ended%s",
        number,
        state.recipe.name,
        f": {failure.message}" if failure else "",
    )
    agent.link.post(
        LibraryGone(number, failure, loading, left.running, left.unstarted, cache_lacks_bytes=library.cache_lacks_bytes)
    )
    agent.wires.unwatch(library)
    library.hang_up()
    for pin in (*library.pins, *library.arguments.values()):
        pin.release()
    agent.ledger.release(number)
    if library.zygote is not None:
        library.zygote.libraries.discard(number)
    agent.scratch.remove_library(number)
    agent.libraries.pop(number, None)
    agent.gone[number] = LibraryFacts(
        library=number, recipe=state.recipe.key, devices=state.devices, ready=ready  # type: ignore[arg-type]
    )  # fmt: skip
    if len(agent.gone) > _REMEMBERED:
        agent.gone.popitem(last=False)


def _remove_drafts(agent: Agent, call: int) -> None:
    """A library that died while it wrote a large result has left a part of it."""
    for draft in agent.session.objects.glob(f"result-{call:x}-*"):
        draft.unlink(missing_ok=True)


def _verdict(agent: Agent, library: Library, *, loading: bool, running: list[CallId]) -> Failure | None:
    """Why a library ended that the agent did not end for a failure; None if it ended as it should."""
    number, how, code = library.state.library, 0, 0
    if library.exited is not None:
        how, code, _ = library.exited
    if library.told_to_end and not loading:
        return None
    if library.told_to_end or (library.state.retires and not how and not code and not running):
        return None
    name = library.state.recipe.name
    if how:
        what = f"was killed by {signal.Signals(how).name}" + (_OOM if how == signal.SIGKILL else "")
    else:
        what = _SAID_BY_CODE.get(code, "ended by itself with exit code {code}: something in it called exit").format(
            code=code, log=library.log
        )
    doing = (
        f"while it loaded {name}" if loading else f"in a call on {name}" if running else f"while it held {name} idle"
    )
    kind = FailureKind.PILOT if code in (child.NOT_SETTLED, frames.FOLDER_GONE) else FailureKind.CONTEXT
    return Failure(
        kind=kind if loading else FailureKind.DIED,
        message=f"lib-{number} on {agent.options.pilot} {what}, {doing}",
        pilot=agent.options.pilot,
        library=number,
        signal=how,
        exit_code=code,
        tail=tail(library.log),
        log=library.log,
    )


_OOM = " (nobody here sent it: most often the system had no memory left)"

_SAID_BY_CODE = {
    frames.SOCKET_LOST: "lost its connection to the pilot: something in it closes files that are not its own",
    frames.FOLDER_GONE: "found that its pilot's scratch folder is gone",
    frames.NO_DESCRIPTORS: "had hardly any file descriptors left: calls in it leave files open",
    frames.OTHER_MODULES: "got a function with other versions of modules that it had imported",
    frames.RUINED: "can run no more calls: one of them emptied sys.modules, or lowered a limit for good",
    child.NOT_SETTLED: "could not open its log {log} or its folder; is that disk full?",
}
