"""What the agent and a zygote say to each other: one MessagePack packet a message over a socket pair.

A library's own socket travels with its `Fork` as a file descriptor, so no library ever has a path that somebody else
could connect to.
"""

from __future__ import annotations

import msgspec


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


# ---- to the zygote


class Preload(_Message, frozen=True, tag="preload"):
    """Import these (`module`, or `module:attribute` for packages that import lazily). Always the first message."""

    modules: tuple[str, ...]


class Fork(_Message, frozen=True, tag="fork"):
    """Start a library. The packet carries its socket.

    `entry` is `module:function`, called with the number of the socket. `fresh` runs it in a new interpreter instead
    of a fork. `environment` is set on top of the zygote's own; `cores` empty = as the zygote.
    """

    library: int
    entry: str
    log: str
    folder: str
    environment: dict[str, str]
    cores: tuple[int, ...] = ()
    threads: int = 1
    fresh: bool = False


class Kill(_Message, frozen=True, tag="kill"):
    """Send a signal to a library's process, if it still is one."""

    library: int
    signal: int


ToZygote = Preload | Fork | Kill


# ---- to the agent


class Preloaded(_Message, frozen=True, tag="preloaded"):
    """Imports are done. `failed` says which could not be imported, and why; `threads` which modules have started
    threads, and the threads' names (a process that has some must not fork, so libraries then start in a new
    interpreter); `asked_for_gpus` that one of them asked PyTorch for GPUs (see `cuda_questions`: libraries that have
    some start in a new interpreter)."""

    failed: dict[str, str]
    seconds: float
    threads: dict[str, str] = {}
    asked_for_gpus: bool = False


class Forked(_Message, frozen=True, tag="forked"):
    """A library's process exists."""

    library: int
    pid: int


class ForkFailed(_Message, frozen=True, tag="fork-failed"):
    """The system gave no process."""

    library: int
    reason: str


class Exited(_Message, frozen=True, tag="exited"):
    """A library's process has ended, and what it left behind has been killed. `orphans` counts those."""

    library: int
    pid: int
    signal: int
    exit_code: int
    peak_bytes: int = 0
    orphans: int = 0


FromZygote = Preloaded | Forked | ForkFailed | Exited

LIMIT_BYTES = 200_000
"""No packet is longer."""
