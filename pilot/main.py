"""`stoker-pilot`: run one pilot of a session until the session, the manager or the batch job ends.

A provider starts the pilot in a batch job, or a user starts the pilot by hand: `python -m stoker.pilot.main --session
DIR`. The pilot reads its keys from the session folder, so the command line contains no secret.
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import zmq

from stoker import connections
from stoker.contexts.folders import SNAPSHOTS
from stoker.errors import ConfigError, StokerError
from stoker.log_files import log_to_file
from stoker.pilot.agent import objects, observing
from stoker.pilot.agent.agent import Agent, ManagerLink, PeerServer, PilotOptions
from stoker.pilot.agent.loop import TERMINATION_SIGNALS, AgentLoop
from stoker.pilot.agent.scratch import Scratch, base_folder
from stoker.pilot.cache import ObjectCache, store
from stoker.pilot.cache.store import MAX_UNUSED_S
from stoker.pilot.core.state import PilotFacts
from stoker.pilot.devices import GrantedDevices, cpu, find_devices, monitor
from stoker.pilot.devices.gpu import DRIVER_LIMIT_S
from stoker.pilot.zygote import processes
from stoker.protocol.session import PYTHON, KeyPair, SessionFolder
from stoker.site import GPU_CORES
from stoker.units import parse_bytes, show_bytes

log = logging.getLogger("stoker.pilot")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a pilot and return its exit code: 2 if no manager was found, 3 if the manager refused the pilot."""
    given = _create_parser().parse_args(arguments)
    own = None
    try:
        if not given.block:
            own = _create_block_key(SessionFolder(given.session))
            given.block = own.stem if own is not None else ""
        agent = _create_agent(given)
        code = AgentLoop(agent).run()
        if code:  # the batch job's log shows this line, and the factory reports it
            print(f"stoker-pilot: {agent.state.leaving}", file=sys.stderr)  # noqa: T201
        return code
    except StokerError as error:
        print(f"stoker-pilot: {error}", file=sys.stderr)  # noqa: T201  # the batch job's log shows this line
        return 1
    except Exception:
        log.exception("the pilot failed because of a bug in Stoker")
        raise
    finally:
        if own is not None:
            with suppress(OSError):
                own.unlink()


def _create_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="stoker-pilot", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--session", required=True, metavar="DIR", help="the session's folder")
    parser.add_argument("--block", default="", help="the block that contains this pilot [none: started by hand]")
    parser.add_argument("--devices", default="auto", help="auto, gpu, cpu[:N], or gpu+cpu[:N] (default: %(default)s)")
    for option, kind, default, metavar, text in (
        ("--gpu-cores", int, GPU_CORES, "N", "cores kept for each GPU with gpu+cpu (default: %(default)s)"),
        ("--cache-size", str, "50 GB", "SIZE", "size of the object cache (default: %(default)s)"),
        ("--cache-age", float, MAX_UNUSED_S, "S", "seconds after which an unused object is removed"),
        ("--scratch", str, "", "DIR", "local disk for the cache and calls' folders"),
        ("--grace", float, 2.0, "S", "seconds that running calls may continue when the pilot exits"),
        ("--source", str, "", "NAME", "the site of the block"),
        ("--walltime-s", float, 0.0, "S", "walltime of the job in seconds, from the start of the pilot"),
        ("--probe", str, "", "COMMAND", "the command that probes a device; never: no probes"),
        ("--probe-every", float, 300.0, "S", "seconds between two probes of a device; 0: only at the start"),
        ("--asked-gpus", int, 0, "N", "number of GPUs per node that the job requested"),
        ("--driver-limit", float, DRIVER_LIMIT_S, "S", "seconds after which a silent GPU driver counts as hung"),
        ("--environment", str, "", "NAME=FILE", "the archive of the environment, to offer to other pilots"),
    ):
        parser.add_argument(option, type=kind, default=default, metavar=metavar, help=text)
    return parser


def _create_agent(given: argparse.Namespace) -> Agent:
    umask = os.umask(0o077)
    connections.raise_descriptor_limit()
    session = SessionFolder(given.session)
    there = session.read()
    pilot = _create_pilot_folder(session)
    logs = session.pilot_folder(pilot)
    log_to_file(logs / "pilot.log")
    found = find_devices(
        given.devices, gpus_asked=given.asked_gpus, gpu_cores=given.gpu_cores, limit_s=given.driver_limit
    )
    if kept := cpu.cores_outside_cpu_devices(found.offered):
        os.sched_setaffinity(0, kept)  # restricts the agent and its zygotes; each library sets its own cores
    if not there.is_for_this_python:
        found = found.with_fault(
            f"the pilot runs Python {PYTHON} ({sys.executable}), but its session runs Python {there.python}, whose"
            " functions the pilot cannot run; start pilots with the session's Python ([environment] python, or"
            " [provider] worker_init)"
        )
        log.error("%s", found.lacks)
    devices = found.offered
    base = base_folder(given.scratch)
    cache = ObjectCache(base / "cache", capacity_bytes=parse_bytes(given.cache_size), max_unused_s=given.cache_age)
    store.remove_evicted_snapshots(cache)
    store.remove_stale_snapshots(cache, max_unused_s=given.cache_age)
    os.environ.setdefault(SNAPSHOTS, str(store.snapshot_folder_beside(cache)))  # for libraries
    processes.adopt_orphans()
    # Until the loop handles these signals, a signal would end the pilot without removing its scratch folder.
    signal.pthread_sigmask(signal.SIG_BLOCK, TERMINATION_SIGNALS)
    scratch = Scratch(base, pilot=pilot)
    try:
        agent = _build_agent(given, session, found, scratch, cache, pilot=pilot, umask=umask)
        agent.monitors = monitor.start_monitors(devices, limit_s=given.driver_limit)
        objects.share_environment_archive(agent, given.environment)
    except BaseException:
        scratch.remove()
        raise
    for device in devices:
        facts = device.facts
        log.info("%s: %s, %s, %d cores", facts.device, facts.kind, show_bytes(facts.memory_bytes), facts.cores)
    for trouble in found.troubles:
        log.warning("%s", trouble)
    for device in devices:
        if device.facts.fault:
            log.error("%s: %s", device.facts.device, device.facts.fault)
    if session.is_copied:
        session.objects.mkdir(mode=0o700, exist_ok=True)
        log.info("the session folder is a copy from the job; logs are stored on this node, in %s", logs)
    return agent


def _build_agent(
    given: argparse.Namespace, session: SessionFolder, found: GrantedDevices, scratch: Scratch, cache: ObjectCache, *,
    pilot: str, umask: int,
) -> Agent:  # fmt: skip
    host, logs = socket.gethostname(), session.pilot_folder(pilot)
    options = PilotOptions(given.walltime_s, probe=given.probe, in_batch=bool(given.source), umask=umask)
    link = ManagerLink(session, pilot=pilot, block=given.block)
    peers = PeerServer(session, cache)
    facts = PilotFacts(
        pilot=pilot,
        session=link.session.session,
        host=host,
        pid=os.getpid(),
        devices=tuple(device.facts for device in found.offered),
        block=given.block,
        troubles=found.troubles,
        lacks=found.lacks,
        address=peers.host,
        peer=peers.address,
        cache=cache.identity,
        cache_bound_bytes=cache.capacity_bytes,
        logs=str(logs),
        folder=f"{host}:{logs}" if session.is_copied else str(logs),
        objects=str(session.objects),
        is_carried=session.is_copied,
        sleeper_bytes=cpu.sleeper_bytes(found.offered),
        exit_grace_s=given.grace,
        probed=observing.devices_to_probe(options, found.offered),
        probe_every_s=given.probe_every,
        node=observing.batch_system_node_name(os.environ),
    )
    return Agent(
        facts, options, session=session, devices=found.offered, scratch=scratch, cache=cache, link=link, peers=peers
    )


def _create_block_key(session: SessionFolder) -> Path | None:
    session.read()
    if session.is_copied or session.key_file("pilot").exists():
        return None
    block = f"by-hand-{secrets.token_hex(3)}"
    public, secret = zmq.curve_keypair()
    try:
        session.block_keys.mkdir(mode=0o700, exist_ok=True)
        session.write_block_key(block, KeyPair(public.decode(), secret.decode()))
    except OSError as error:
        raise ConfigError(f"no key could be written to {session.block_keys}: {error}; free disk space there") from error
    return session.block_key_file(block)


def _create_pilot_folder(session: SessionFolder) -> str:
    while True:
        pilot = f"{socket.gethostname().partition('.')[0]}-{secrets.token_hex(2)}"
        try:
            session.pilot_folder(pilot).mkdir(mode=0o700, parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            where = session.pilot_folder(pilot)
            raise ConfigError(f"{where} cannot be made: {error}; pilots must see the session folder") from error
        return pilot


if __name__ == "__main__":
    sys.exit(main())
