"""Check whether the manager of a session runs. Maintain `session.json`, from which programs read the manager's address.

Another program may use the port, so Stoker checks in this order:

- The lease: a session that is over has no manager.
- The port: it must accept connections.
- The lease again: a holder on this machine must run and listen on that port. It may be busy or frozen.
- A CURVE handshake or a renewed lease, if the manager is on another machine or the lease is unreadable.

If the check wrongly finds no manager, no second manager starts, because a new manager waits for the lease.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import time
from urllib.parse import urlsplit
from uuid import uuid4

import psutil
import zmq

from stoker.dealer import ConnectionChange, CurveKeys, Dealer
from stoker.errors import SessionError
from stoker.manager.live import lease
from stoker.manager.live.interfaces import is_listening
from stoker.protocol.session import SessionFile, SessionFolder

log = logging.getLogger("stoker.manager")

MAX_CHECK_S = 2 * lease.RENEW_S + 1
"""Seconds in which a manager on another machine renews its lease twice."""
_POLL_S = 0.25
_RECONNECT_MS = (500, 1000)


def write_session_file(folder: SessionFolder, file: SessionFile, *, before: SessionFile | None) -> None:
    """Write `session.json`. `before`: the file of an earlier manager. Raises OSError."""
    try:
        folder.write(file)
    except OSError:  # on a full disk, keep a file with the same content; its new time shows that a manager listens
        if before != file:
            raise
        os.utime(folder.file)


def restore_session_file(folder: SessionFolder, file: SessionFile) -> None:
    try:
        if folder.read() == file:
            return
    except SessionError as error:
        what = str(error) if folder.file.exists() else f"{folder.file} was removed"
        log.warning("%s; it is written again", what)
    folder.write(file)


def check_session_folder(folder: SessionFolder) -> None:
    if not folder.key_file("server").exists():
        raise SessionError(f"{folder.path} is not a session folder: it has no keys; `stoker.load()` creates one")


def is_manager_up(folder: SessionFolder) -> bool:
    """True if the session's manager runs at its address. Takes up to `MAX_CHECK_S`. Raises SessionError."""
    if not folder.file.exists() or folder.end_reason():
        return False
    file = folder.read()
    if not is_listening(file.address):
        return False
    holder = lease.read_lease_or_none(folder.lease)
    alive = lease.is_holder_alive(holder) if holder is not None else None
    if holder is not None and alive is not None:
        return alive and _is_process_listening(holder.pid, file.address)
    return _answers_or_renews_lease(folder, file, holder)


def describe_remote_manager(folder: SessionFolder) -> str:
    """Return ` (pid 7 on login2)` for a manager on another machine, or an empty text."""
    holder = lease.read_lease_or_none(folder.lease)
    return f" ({holder})" if holder is not None and lease.is_holder_alive(holder) is None else ""


def _is_process_listening(pid: int, address: str) -> bool:
    """True if the process listens at the address, or if this cannot be checked."""
    port = urlsplit(address).port
    try:
        if os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net"):
            return True
        connections = psutil.Process(pid).net_connections("tcp")
    except (psutil.AccessDenied, PermissionError):
        return True
    except (psutil.Error, OSError):
        return False
    return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in connections)


def _answers_or_renews_lease(folder: SessionFolder, file: SessionFile, holder: lease.LeaseHolder | None) -> bool:
    until = time.monotonic() + MAX_CHECK_S
    try:
        pair = folder.read_key("client")
        keys = CurveKeys(file.server_key, pair.public, pair.secret)
        name = f"client-{uuid4().hex[:12]}"
        dealer = Dealer(file.address, name=name, keys=keys, log=log, reconnect_ms=_RECONNECT_MS)
    except (SessionError, zmq.ZMQError) as error:  # the keys are lost or damaged, so no program can connect
        log.warning("session %s: its manager cannot be reached: %s", file.session, error)
        return False
    poll = select.poll()
    poll.register(dealer.filenos()[1], select.POLLIN)
    is_foreign = False
    with contextlib.closing(dealer):
        while True:
            for change in dealer.read_connection_changes():
                if change is ConnectionChange.MADE:
                    return True
                is_foreign |= change is not ConnectionChange.BROKEN
            there = lease.read_lease_or_none(folder.lease)
            if there is not None and there != holder:
                is_renewed = holder is not None and there.token == holder.token
                return not there.over if is_renewed else is_manager_up(folder)
            if time.monotonic() > until or (holder is None and is_foreign):
                return False
            if not dealer.has_input():
                poll.poll(_POLL_S * 1000)
