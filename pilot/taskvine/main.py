"""`python -m stoker.pilot.taskvine.main --session DIR`: be the pilot that has a TaskVine pool behind it.

Started like any pilot on this machine; what it is to tell TaskVine lies in the session folder (`plan`).
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from stoker.errors import ConfigError, StokerError
from stoker.folders import folders_here
from stoker.log_files import keep_log
from stoker.pilot.agent.link import ManagerLink
from stoker.pilot.core.state import PilotFacts
from stoker.pilot.taskvine import finding, messages, plan
from stoker.pilot.taskvine.engine import VineManager
from stoker.pilot.taskvine.factory import VineFactory
from stoker.pilot.taskvine.loop import PoolLoop
from stoker.pilot.taskvine.pool import ANY_BYTES, VinePool
from stoker.protocol.session import SessionFolder

log = logging.getLogger("stoker.pilot")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the pilot; returns its exit code, as `stoker-pilot` does."""
    parser = argparse.ArgumentParser(prog="stoker-pilot-taskvine", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--session", required=True, metavar="DIR", help="the session's folder")
    parser.add_argument("--site", default="local", help="the site whose plan it carries out")
    parser.add_argument("--block", default="", help="the block that this pilot is part of")
    parser.add_argument("--host", default="", help="where workers on other nodes reach this one (default: only here)")
    given = parser.parse_args(arguments)
    try:
        return _run(SessionFolder(given.session), site=given.site, block=given.block, host=given.host)
    except StokerError as error:
        print(f"stoker-pilot-taskvine: {error}", file=sys.stderr)  # noqa: T201  # the one line that a block's log needs
        return 1
    except Exception:
        log.exception("the pilot failed; this is a fault of Stoker")
        raise


def _run(session: SessionFolder, *, site: str, block: str, host: str) -> int:
    os.umask(0o077)
    session.read()
    pilot = f"taskvine-{secrets.token_hex(2)}"
    logs = session.pilot(pilot)
    own = logs / "taskvine"
    running = own / "running"
    try:
        running.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise ConfigError(f"{running} cannot be made: {error}") from error
    keep_log(logs / "pilot.log")
    orders = plan.read(session, site=site)
    programs = finding.find()
    password = _password(session)
    engine = VineManager(finding.taskvine(), orders, folder=own, password=password)
    log.info("TaskVine's manager listens on port %d of %s", engine.port, socket.gethostname())
    setup = messages.Setup(
        pilot=pilot,
        logs=str(logs),
        objects=str(session.objects),
        running=str(running),
        search_path=folders_here(),
    )
    factory = VineFactory(
        orders,
        programs,
        port=engine.port,
        host=host,
        folder=own / "factory",
        password=password,
        log_file=logs / "factory.log",
        session=str(session.path),
    )
    link = ManagerLink(session, pilot=pilot, block=block)
    facts = PilotFacts(
        pilot=pilot,
        session=link.session.session,
        host=socket.gethostname(),
        pid=os.getpid(),
        devices=(),
        block=block,
        cache_bound_bytes=ANY_BYTES,
        logs=str(logs),
        folder=str(logs),
        objects=str(session.objects),
    )
    pool = VinePool(engine, link, facts=facts, setup=setup)
    try:
        return PoolLoop(link, pool, engine, factory, plan=orders).run()
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _password(session: SessionFolder) -> Path:
    """The file that TaskVine's manager and workers prove themselves to each other with; made once a session."""
    path = session.key_file("taskvine").with_suffix("")
    if not path.exists():
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
    return path


if __name__ == "__main__":
    sys.exit(main())
