"""Doctor's look at the cluster: the batch system, whether a site fits it, and whether nodes reach this host."""

from __future__ import annotations

import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from stoker.contexts.folders import state_folder
from stoker.errors import ConfigError, StokerError
from stoker.manager.cli import down, dry_run, machine
from stoker.manager.cli.ask import Observer
from stoker.manager.cli.finding import Finding, Level
from stoker.manager.cli.site_check import slurm_faults
from stoker.manager.cli.site_draft import describe
from stoker.manager.cli.slurm_facts import Slurm
from stoker.manager.cli.surroundings import HostFacts, inspect_host
from stoker.manager.executor import detached
from stoker.manager.factory import pacing
from stoker.manager.live import interfaces
from stoker.pilot.taskvine import factory
from stoker.protocol import show_blocks
from stoker.protocol.blocks import BlockPhase
from stoker.protocol.session import SessionFolder
from stoker.protocol.to_client import Status
from stoker.site import Duration, Engine, EnvironmentKind, ProviderKind, ProvisioningName, Site
from stoker.units import show_bytes, show_seconds

PROBE_WALLTIME_S = 60.0
_PRIVATE = ("/tmp", "/var/tmp", "/dev/shm")
_ASK_EVERY_S = 0.5
_SHOWN_DOMAINS = 3
_SEND_FILES = '[provider] shared_files = false with [environment] kind = "packed"'
_SLACK_S = 60.0
"""A probe that was killed leaves a session that ends by itself, so much later than the probe would have."""


def batch_system() -> Iterator[Finding]:
    """The batch system of this host, and what this user may ask of it."""
    around = inspect_host()
    if around.kind is ProviderKind.LOCAL:
        yield Finding("batch", Level.NO, "no batch system on PATH: pilots run on this machine")
        return
    if around.slurm is None:
        queues = f": queues {', '.join(around.queues)}" if around.queues else ""
        yield Finding("batch", Level.OK, f"{around.kind.value} ({around.command}) as user {around.user}{queues}")
    else:
        yield from _slurm(around, around.slurm)
    yield from _places(around)


def _slurm(around: HostFacts, slurm: Slurm) -> Iterator[Finding]:
    if slurm.trouble:
        text = f"Slurm {slurm.version} is installed, and does not answer: {slurm.trouble}"
        yield Finding("batch", Level.WARN, text, "is this a login node of the cluster? try: sinfo")
        return
    partitions = ", ".join(describe(slurm, each) for each in slurm.partitions) or "none that is up"
    yield Finding("batch", Level.OK, f"Slurm {slurm.version} as user {around.user}: partitions {partitions}")
    if slurm.accounts:
        yield Finding("account", Level.OK, f"accounts: {', '.join(slurm.accounts)}")
    else:
        yield Finding("account", Level.OK, "no accounting here: jobs need no account")


def _places(around: HostFacts) -> Iterator[Finding]:
    for each in around.scratch:
        seen = "seen by other hosts too" if each.shared else "of this host"
        yield Finding("scratch", Level.OK, f"scratch {each.path}, {show_bytes(each.free_bytes)} free, {seen}")
    if around.home_shared:
        yield Finding("home", Level.OK, f"sessions lie in {around.home}, on a file system that other hosts see")
    else:
        text = f"sessions lie in {around.home}, which does not look like a file system that compute nodes see"
        yield Finding("home", Level.WARN, text, "if they do not: stoker up --folder DIR, or export STOKER_HOME=DIR")


def site_fits(site: Site) -> Iterator[Finding]:
    """Whether what a site file says is there."""
    topic = f"site {site.name}"
    if site.engine is Engine.TASKVINE:
        yield _taskvine(topic)
        site = msgspec.structs.replace(site, engine=Engine.STOKER)  # its workers run where other sites have pilots
    if site.is_local:
        yield from machine.devices_of(site)
    if site.session.interface or not site.is_local:
        try:
            address = interfaces.resolve(site.session.interface or interfaces.AUTO)
            named = f"{site.session.interface} " if site.session.interface else ""
            text = f"{topic}: the manager will listen on {named}{address}:{site.session.ports}"
            yield Finding(topic, Level.OK, text)
        except StokerError as error:
            yield Finding(topic, Level.NEED, f"{topic}: {error}", "mend [session] interface")
    if site.is_local:
        return
    if site.provider.kind is ProviderKind.CONDOR and site.environment.kind is EnvironmentKind.SHARED:
        yield from _seen_by_slot_users(topic, Path(site.environment.python or sys.executable))
    around = inspect_host()
    if around.kind is not site.provider.kind and site.provider.kind not in around.others:
        here = around.kind.value if around.command else "no batch system"
        text = f"{topic} is for {site.provider.kind.value}; this host has {here}"
        yield Finding(topic, Level.NEED, text, "run it on a login node of that cluster, or write another: stoker init")
        return
    asks = f"{topic}: a session asks {site.provider.kind.title} for {pacing.in_words(site.provider.poll_s)}"
    yield Finding(topic, Level.OK, f"{asks} ([provider] poll)")
    if site.environment.kind is EnvironmentKind.SHARED:
        yield from _below_tmp(topic, Path(site.environment.python or sys.executable).absolute(), state_folder())
    if site.provider.kind is ProviderKind.CONDOR and site.provider.shared_files:
        yield from slot_users(topic, around)
    if around.slurm is not None and site.provider.kind is ProviderKind.SLURM and not around.slurm.trouble:
        faults = list(slurm_faults(site, around.slurm))
        for fault in faults:
            yield Finding(
                topic, Level.NEED, f"{topic}: {fault.text}", "mend the site file; `stoker init --output -` shows one"
            )
        if not faults:
            yield Finding(topic, Level.OK, f"{topic}: partition, account, walltime and GPUs are there")
            yield _taken(topic, site)


def _taken(topic: str, site: Site) -> Finding:
    """Slurm's own answer to the script of a block: it knows limits that `sinfo` does not show."""
    verdict = dry_run.ask_slurm(site)
    text = f"{topic}: {verdict.words}"
    if verdict.refused is None:
        return Finding(topic, Level.WARN, text)
    if not verdict.refused:
        return Finding(topic, Level.OK, text)
    return Finding(topic, Level.NEED, text, "mend the site file; `stoker up SITE --dry-run` prints the script")


def _seen_by_slot_users(topic: str, python: Path) -> Iterator[Finding]:
    """Many pools run jobs as users of their own (slot1, nobody), who cannot pass a folder that is closed to others."""
    closed = next((each for each in reversed(python.absolute().parents) if not _is_open(each)), None)
    if closed is not None:
        text = f"{topic}: {closed} is closed to other users; where HTCondor runs jobs as slot users"
        text += f" they cannot run {python}"
        action = f"chmod o+x {closed}, or {_SEND_FILES}"
        yield Finding(topic, Level.WARN, text, action)


def _below_tmp(topic: str, python: Path, state: Path) -> Iterator[Finding]:
    """Many batch systems give each job a /tmp of its own (HTCondor's MOUNT_UNDER_SCRATCH, Slurm's
    job_container/tmpfs)."""
    packed = 'move it, or [environment] kind = "packed" with shared_files = false'
    for what, path, action in (("Python is", python, packed), ("sessions lie in", state, "export STOKER_HOME=DIR")):
        private = next((folder for folder in _PRIVATE if path.is_relative_to(folder)), "")
        if private:
            text = f"{topic}: {what} {path}, which jobs do not see where they have a {private} of their own"
            yield Finding(topic, Level.WARN, text, action)


def slot_users(topic: str, around: HostFacts) -> Iterator[Finding]:
    """Whether machines of HTCondor's pool run jobs as other users, who may read nothing of a session: its folder is
    closed to all but its owner, since the session's keys are in it."""
    known = [node for node in around.nodes if node.user_domain]
    others = [node for node in known if node.user_domain.lower() != around.user_domain.lower()]
    if not around.user_domain or not others:
        return
    of_all = "machines" if len(others) == len(known) else f"{len(others)} of {len(known)} machines"
    theirs = ", ".join(sorted({node.user_domain for node in others})[:_SHOWN_DOMAINS])
    text = (
        f"{topic}: {of_all} of the pool run jobs as users of their own, who may not read a session's folder: their"
        f" UID_DOMAIN is {theirs}, and this host's is {around.user_domain}"
    )
    level = Level.NEED if len(others) == len(known) else Level.WARN
    yield Finding(topic, level, text, _SEND_FILES)


def _is_open(folder: Path) -> bool:
    try:
        return bool(folder.stat().st_mode & stat.S_IXOTH)
    except OSError:
        return True


def _taskvine(topic: str) -> Finding:
    try:
        programs = factory.find_programs()
    except ConfigError as error:
        return Finding(topic, Level.NEED, f"{topic}: {error}", factory.INSTALL)
    return Finding(topic, Level.OK, f"{topic}: TaskVine's programs are {programs.factory} and {programs.worker}")


def probe(site: Site, *, wait_s: float, say: Callable[[str], None]) -> Iterator[Finding]:
    """Submit a one-minute pilot of a site, and wait until it has joined: nodes see the environment and the session's
    folder then, and reach this host. `say` hears what is submitted and what is waited for."""
    topic = f"probe {site.name}"
    folder = detached.make([one_minute(site)], idle_s=wait_s + _SLACK_S)
    say(f"a session of its own, {folder.path}, submits one job of at most a minute to site {site.name}")
    began = time.monotonic()
    try:
        detached.start(folder, waiting=say)
    except KeyboardInterrupt:
        _forget(folder)
        raise
    try:
        status = _wait_for_pilot(folder, wait_s=wait_s, say=say)
        address = folder.read().address.removeprefix("tcp://")
        took = show_seconds(time.monotonic() - began)
        lacks = _lacks(status, site)
        if lacks:
            fix = f'the pilot\'s log: {folder.path / "pilots"}; to run on its cores: [pilot] devices = "cpu"'
            yield Finding(topic, Level.NEED, f"compute nodes reach this host, but {lacks}", fix)
        elif status.pilots:
            hosts = ", ".join(pilot.host for pilot in status.pilots)
            yield Finding(
                topic, Level.OK, f"compute nodes reach this host on {address} (asked a pilot on {hosts}; {took})"
            )
        else:
            yield Finding(topic, Level.NEED, *_no_pilot(status, folder, address=address, took=took))
    finally:
        before = down.end(folder)
        remains = down.wait_until_gone(folder, before, wait_s=60.0, waiting=say)
        yield from (Finding(topic, Level.WARN, f"the probe has left {each.what}", each.remove) for each in remains)
    if status.pilots and not lacks and not remains:
        detached.forget(folder)


def _forget(folder: SessionFolder) -> None:
    """Leave nothing of a probe's session whose start was interrupted."""
    if folder.file.exists():  # its manager was just coming up
        down.end(folder)
    else:
        detached.forget(folder)


def one_minute(site: Site) -> Site:
    """The site with one block of a minute, which no other follows."""
    replace = msgspec.structs.replace
    return replace(
        site,
        sites=(),
        provider=replace(site.provider, walltime_s=Duration(PROBE_WALLTIME_S)),
        pilot=replace(site.pilot, init_blocks=1, min_blocks=0, max_blocks=1),
        policy=replace(site.policy, provisioning=ProvisioningName.ONCE),
    )


def _wait_for_pilot(folder: SessionFolder, *, wait_s: float, say: Callable[[str], None]) -> Status:
    until, said = time.monotonic() + wait_s, object()
    with Observer(folder) as observer:
        while True:
            status = observer.status()
            now = ([(job.phase, job.reason) for job in status.jobs], status.trouble)
            if now != said:
                said = now
                say("; ".join([*show_blocks.coming(status.jobs), *status.trouble.values()]) or "asking for a job")
            gone = (status.ended_blocks and not status.jobs) or status.gone_pilots
            if status.pilots or gone or time.monotonic() > until:
                return status
            time.sleep(_ASK_EVERY_S)


def _lacks(status: Status, site: Site) -> str:
    """Why the pilot that has come is of no use, in words; empty if it is of use, or none has come."""
    faults = [[device.fault for device in pilot.devices] for pilot in status.pilots]
    for said in faults:
        if said and all(said):
            return said[0]
    came = status.pilots or status.gone_pilots
    return status.trouble.get(site.name, "") if came and not any(faults) else ""


def _no_pilot(status: Status, folder: SessionFolder, *, address: str, took: str) -> tuple[str, str]:
    """What a probe that no pilot has answered means, and what to do."""
    pending = show_blocks.pending_of(status.jobs)
    if pending:
        why = show_blocks.reasons(pending) or "no reason is told"
        return f"the probe still waits in the queue after {took}: {why}", "try again when the cluster is less busy"
    if status.trouble or status.ended_blocks:
        said = [*status.trouble.values(), *show_blocks.ended(status.ended_blocks)]
        return f"the probe brought no pilot: {'; '.join(said)}", f"its scripts and output: {folder.path / 'submit'}"
    if all(job.phase == BlockPhase.ASKED.value for job in status.jobs):
        return f"the probe was not submitted within {took}", f"what its factory did: {folder.path / 'factory.log'}"
    fix = (
        "a firewall between them? name the network that they share: [session] interface, ports; what the job printed: "
        f"{folder.path / 'submit'}"
    )
    return f"the probe runs, and its pilot has not reached {address} within {took}", fix
