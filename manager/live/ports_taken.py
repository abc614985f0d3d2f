"""What a manager says that finds no free port in its range: which sessions have its ports, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

from stoker.contexts.folders import state_folder
from stoker.errors import SessionError
from stoker.manager.live import lease
from stoker.protocol.session import SessionFolder

NO_PORT = 5
"""The exit status of a manager that comes back and finds no free port in its range."""
_MOST_NAMED = 5


class PortsTakenError(SessionError):
    """No port in the manager's range is free."""


def ports_taken(folder: SessionFolder, *, interface: str, ports: tuple[int, int]) -> PortsTakenError:
    """The error of a manager that cannot listen. A session whose manager comes back keeps the ports that it began with:
    compute nodes may reach no others."""
    first, last = ports
    names = list(_sessions_on(ports, but=folder))
    by = f" (by session{'s' * (len(names) != 1)} {', '.join(names[:_MOST_NAMED])})" if names else ""
    text = f"the manager cannot listen on {interface}: ports {first}-{last} are all taken{by}"
    if not folder.file.exists():
        return PortsTakenError(f"{text}; give it others ([session] ports in the site file)")
    session = folder.read().session
    free = f"`stoker down {names[0]}`, or end another program" if names else "end a program"
    again = f", then `stoker attach {session}`" if folder.launch.exists() else ""
    return PortsTakenError(
        f"{text}; session {session} keeps the ports of its site file: free one ({free} that listens there){again}",
        session=session,
    )


def _sessions_on(ports: tuple[int, int], *, but: SessionFolder) -> Iterator[str]:
    """This user's sessions whose managers live on this machine and listen on one of these ports."""
    for link in sorted((state_folder() / "sessions").glob("*")):
        folder = SessionFolder(link.resolve())
        if folder.path == but.path.resolve():
            continue
        with suppress(SessionError, ValueError):  # gone, or damaged
            holder, file = lease.read_if_whole(folder.lease), folder.read()
            if holder is not None and lease.is_alive(holder) and _port(file.address) in range(ports[0], ports[1] + 1):
                yield file.session


def _port(address: str) -> int:
    return urlsplit(address).port or 0
