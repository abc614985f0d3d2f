"""Checks of `stoker doctor` and `stoker up`: does a site file fit the cluster, and does the batch system accept the
job? Only Slurm can check a submit script without submitting it (`sbatch --test-only`)."""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from stoker.contexts.folders import state_folder
from stoker.errors import ConfigError, StokerError
from stoker.manager.advice.endpoint import EndpointError, ModelEndpoint
from stoker.manager.cli import doctor_machine, down, surroundings
from stoker.manager.cli.ask import Observer
from stoker.manager.cli.doctor_machine import Finding, FindingLevel, need, no, ok, warn
from stoker.manager.cli.init import describe_partition
from stoker.manager.cli.surroundings import COMMAND_LIMIT_S, IMAGE_PLACEHOLDER, HostFacts, Slurm, inspect_host
from stoker.manager.executor import detached, engines, new_sessions
from stoker.manager.factory import pacing
from stoker.manager.factory.allowed_nodes import PROBE_WALLTIME_S
from stoker.manager.factory.batch import BatchSystemError
from stoker.manager.factory.batches import SUBMIT_COMMANDS, render_submission
from stoker.manager.factory.commands import CommandRunner
from stoker.manager.factory.submitting import is_temporary_submission_error
from stoker.manager.live import interfaces
from stoker.pilot.taskvine import factory as taskvine_factory
from stoker.protocol import show_status
from stoker.protocol.blocks import BlockPhase
from stoker.protocol.session import SessionFolder
from stoker.protocol.to_client import Status
from stoker.site import (
    KINDS_THAT_EXCLUDE_NODES,
    Duration,
    Engine,
    EnvironmentKind,
    ProviderKind,
    ProvisioningName,
    Site,
    node_exclusion_warning,
)
from stoker.units import show_bytes, show_seconds

# ---- dry run: the script of a job


_ENDPOINT_LIMIT_S = 10.0
_EXAMPLE_SESSION = "k3v9"


def render_submit_script(site: Site) -> tuple[list[str], bool]:
    """Return the lines of `stoker up --dry-run`, and True if Slurm refuses the job. Raises ConfigError."""
    folder, text = _make_script(site)
    blocks = f"{site.pilot.init_blocks} at first, up to {site.pilot.max_blocks}"
    how = f"submitted with {SUBMIT_COMMANDS.get(site.provider.kind, 'kubectl')}" if not site.is_local else "run here"
    number = "one in all" if site.engine is Engine.TASKVINE else blocks
    head = (
        f"# site {site.name}: block b1 of session {_EXAMPLE_SESSION} (the real session has another id); {how}, {number}"
    )
    lines = [head, *text.rstrip("\n").split("\n")]
    if site.engine is Engine.TASKVINE:
        factory = engines.taskvine_factory_command(site, folder, session=_EXAMPLE_SESSION)
        return [*lines, f"# this pilot starts TaskVine's factory, which starts workers, {blocks}:", factory], False
    if site.provider.kind is not ProviderKind.SLURM:
        return lines, False
    words, refused = _ask_slurm(site, text)
    return [*lines, f"# site {site.name}: {words}"], bool(refused)


def _make_script(site: Site) -> tuple[SessionFolder, str]:
    folder = SessionFolder(new_sessions.default_session_folder(_EXAMPLE_SESSION))
    return folder, render_submission(
        site, session=_EXAMPLE_SESSION, folder=folder, block="b1", python_path=new_sessions.build_session_python_path()
    )


def _ask_slurm(site: Site, script: str) -> tuple[str, bool | None]:
    """Return Slurm's answer to a submit script, and True if Slurm refuses the script (None: no answer)."""
    if shutil.which("sbatch") is None:
        return "Slurm did not check this script: no sbatch on the PATH of this host", None
    with tempfile.TemporaryDirectory(prefix="stoker-dry-run-") as folder:
        path = Path(folder) / "script.sh"
        path.write_text(script, errors="surrogateescape")
        try:
            run = CommandRunner(limit_s=site.provider.command_limit_s, folder=path.parent).run
            said = run(["sbatch", "--test-only", path.name])
        except BatchSystemError as trouble:
            return f"Slurm could not check this script: {trouble}", None
    words = said.failure_reason.removeprefix("sbatch: ")
    if said.code and is_temporary_submission_error(words):
        return f"Slurm could not check this script: {words}", None
    return f"Slurm {'refuses' if said.code else 'would accept'} this script: {words}", said.code != 0


# ---- site file against Slurm


_CHANGES_TIME_LIMIT = re.compile(r"(?:^|\s)(?:--(?:qos|partition|time)\b|-[qpt])")
"""Matches options of `sbatch` that may change a job's time limit."""


def refuse_sites_that_never_start(sites: Iterable[Site]) -> list[str]:
    """Return notes on settings that do not fit the cluster. Raises ConfigError if jobs of a site would never start."""
    asked = [site for site in sites if not site.is_local and site.provider.kind is ProviderKind.SLURM]
    if not asked:
        return []
    slurm = surroundings.query_slurm(CommandRunner(limit_s=COMMAND_LIMIT_S, folder=Path(tempfile.gettempdir())).run)
    notes = []
    for site in asked if not slurm.trouble else ():
        for text, never in find_slurm_faults(site, slurm):
            if never:
                raise ConfigError(f"site {site.name}: {text}; jobs of this site would wait forever", key="walltime")
            notes.append(f"site {site.name}: {text}")
    return notes


def find_slurm_faults(site: Site, slurm: Slurm) -> Iterator[tuple[str, bool]]:
    """Yield a text about each setting that does not fit, and True if the setting prevents jobs from starting."""
    ask = site.provider
    known = {each.name: each for each in slurm.partitions}
    names = ask.partition.split(",") if ask.partition else [each.name for each in slurm.partitions if each.default]
    chosen = [known[name] for name in names if name in known]
    for name in names:
        if name not in known:
            yield f"[provider] partition {name} is not up; known partitions: {', '.join(known)}", False
    if ask.account and slurm.accounts and ask.account not in slurm.accounts:
        yield f"[provider] account {ask.account} is not yours; your accounts are {', '.join(slurm.accounts)}", False
    # A job never starts if the limit of each of its partitions is below the job's walltime, unless its QOS or `options`
    # change the limit.
    short = [each for each in chosen if each.limit_s and ask.walltime_s > each.limit_s]
    never = len(short) == len(names) and not (ask.qos or any(map(_CHANGES_TIME_LIMIT.search, ask.options)))
    for each in short:
        text = f"[provider] walltime {show_seconds(ask.walltime_s)} is more than partition {each.name} allows"
        yield f"{text}, {show_seconds(each.limit_s)}; set walltime to at most that", never
    there = [gpus for each in chosen for gpus in each.gpus]
    fit = any(gpus.count >= ask.gpu_count and ask.gpu_type in ("", gpus.type) for gpus in there)
    if ask.gpu_count and chosen and not fit:
        shown = ", ".join(dict.fromkeys(map(str, there))) or "none"
        where = ", ".join(each.name for each in chosen)
        yield f'[provider] no node has gpus = "{ask.gpus}" in {where}; they have {shown}', False


# ---- checks of doctor


_PRIVATE_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
_STATUS_EVERY_S = 0.5
_SHOWN_DOMAINS = 3
_SEND_FILES_FIX = '[provider] shared_files = false with [environment] kind = "packed"'
_SLACK_S = 60.0
"""If `stoker doctor` is killed, the probe's session ends this many seconds after the limit of `--wait`."""


def check_batch_system() -> Iterator[Finding]:
    around = inspect_host()
    slurm = around.slurm
    if around.kind is ProviderKind.LOCAL:
        yield no("no batch system on PATH: pilots run on this machine")
        return
    if slurm is None:
        queues = f": queues {', '.join(around.queues)}" if around.queues else ""
        yield ok(f"{around.kind.value} ({around.command}) as user {around.user}{queues}")
    elif slurm.trouble:
        text = f"Slurm {slurm.version} is installed, but does not answer: {slurm.trouble}"
        yield warn(text, "is this a login node of the cluster? try: sinfo")
    else:
        partitions = ", ".join(describe_partition(slurm, each) for each in slurm.partitions) or "none is up"
        yield ok(f"Slurm {slurm.version} as user {around.user}: partitions {partitions}")
        accounts = f"accounts: {', '.join(slurm.accounts)}" if slurm.accounts else ""
        yield ok(accounts or "no accounting here: jobs need no account")
    for each in around.scratch:
        seen = "seen by other hosts too" if each.shared else "of this host"
        yield ok(f"scratch {each.path}, {show_bytes(each.free_bytes)} free, {seen}")
    if around.home_shared:
        yield ok(f"session folders are in {around.home}, on a file system that other hosts see")
    else:
        text = f"session folders are in {around.home}, which does not look like a file system that compute nodes see"
        yield warn(text, "if compute nodes do not see this folder: stoker up --folder DIR, or export STOKER_HOME=DIR")


def check_site_file(site: Site) -> Iterator[Finding]:
    for checks in (check_advice_endpoint(site), _check_engine_and_network(site), _check_batch_site(site)):
        for finding in checks:
            yield msgspec.structs.replace(finding, text=f"site {site.name}: {finding.text}")


def check_advice_endpoint(site: Site) -> Iterator[Finding]:
    named = site.advice
    if not named.url:
        return
    endpoint = ModelEndpoint(msgspec.structs.replace(named, time_limit_s=Duration(_ENDPOINT_LIMIT_S)))
    if named.key_variable and not os.environ.get(named.key_variable):
        fix = f"export {named.key_variable}=KEY, where `stoker up` runs"
        yield warn(f"the variable {named.key_variable} ([advice] key_variable) is not set", fix)
    try:
        names = endpoint.list_models()
    except EndpointError as error:
        fix = f"fix [advice] url = {endpoint.name}; the URL must end before /chat/completions"
        text = f"the language model of [advice] cannot be reached, so advice comes from rules: {error}"
        yield warn(text, fix)
        return
    if named.model in names:
        yield ok(f"advice may ask {named.model} at {endpoint.name}")
    else:
        fix = f"fix [advice] model: the endpoint serves {', '.join(names[:5]) or 'no model'}"
        yield warn(f"{endpoint.name} has no model {named.model}", fix)


def _check_engine_and_network(site: Site) -> Iterator[Finding]:
    if site.engine is Engine.TASKVINE:
        try:
            worker, factory = taskvine_factory.find_programs()
            yield ok(f"TaskVine's programs are {factory} and {worker}")
        except ConfigError as error:
            yield need(str(error), taskvine_factory.INSTALL)
        # TaskVine's workers run on the same kind of nodes as pilots, so check the site as if it had pilots.
        site = msgspec.structs.replace(site, engine=Engine.STOKER)
    if site.is_local:
        yield from doctor_machine.check_site_devices(site)
    if site.session.interface or not site.is_local:
        try:
            address = interfaces.resolve_interface(site.session.interface or interfaces.AUTO)
            where = f"{site.session.interface} {address}".lstrip()
            yield ok(f"the manager will listen on {where}:{site.session.ports}")
        except StokerError as error:
            yield need(str(error), "fix [session] interface")


def _check_batch_site(site: Site) -> Iterator[Finding]:
    if msgspec.structs.replace(site, engine=Engine.STOKER).is_local:
        return
    ask, is_condor = site.provider, site.provider.kind is ProviderKind.CONDOR
    shares_python = site.environment.kind is EnvironmentKind.SHARED
    python = Path(site.environment.python or sys.executable).absolute()
    if is_condor and shares_python:
        yield from warn_about_closed_folders(python)
    around = inspect_host()
    if around.kind is not ask.kind and ask.kind not in around.others:
        here = around.kind.value if around.command else "no batch system"
        fix = "use it on a login node of that cluster, or write another site file: stoker init"
        yield need(f"it is for {ask.kind.value}; this host has {here}", fix)
        return
    if ask.image == IMAGE_PLACEHOLDER:
        text = f"[provider] image is {IMAGE_PLACEHOLDER}, which `stoker init` wrote in place of a name"
        yield need(text, "write the name of your container image, with Stoker installed")
    yield ok(f"a session sends {ask.kind.title} {pacing.describe_request_rate(ask.poll_s)} ([provider] poll)")
    if ask.kind not in KINDS_THAT_EXCLUDE_NODES:
        yield no(node_exclusion_warning(ask.kind))
    if shares_python:
        yield from warn_about_folders_in_tmp(python, state_folder())
    if is_condor and ask.shared_files:
        yield from check_slot_users(around)
    if around.slurm is not None and ask.kind is ProviderKind.SLURM and not around.slurm.trouble:
        faults = [text for text, _ in find_slurm_faults(site, around.slurm)]
        for text in faults:
            yield need(text, "fix the site file; `stoker init --output -` shows a valid one")
        if not faults:
            yield ok("partition, account, walltime and GPUs are available")
            words, refused = _ask_slurm(site, _make_script(site)[1])  # Slurm applies limits that `sinfo` does not show
            level = {None: FindingLevel.WARN, False: FindingLevel.OK, True: FindingLevel.NEED}[refused]
            yield Finding(
                level, words, "fix the site file; `stoker up SITE --dry-run` prints the script" if refused else ""
            )


def warn_about_closed_folders(python: Path) -> Iterator[Finding]:
    """Warn if other users cannot reach Python, because many HTCondor pools run jobs as other users."""
    closed = next((each for each in reversed(python.absolute().parents) if not _can_others_enter(each)), None)
    if closed is not None:
        text = f"{closed} is closed to other users; if HTCondor runs jobs as slot users, the jobs cannot run {python}"
        yield warn(text, f"chmod o+x {closed}, or {_SEND_FILES_FIX}")


def warn_about_folders_in_tmp(python: Path, state: Path) -> Iterator[Finding]:
    """Warn if Python or the session folders are in /tmp, because each job may have its own /tmp (HTCondor's
    MOUNT_UNDER_SCRATCH, Slurm's job_container/tmpfs)."""
    packed = 'install it elsewhere, or set [environment] kind = "packed" and shared_files = false'
    for what, path, fix in (("Python is", python, packed), ("session folders are in", state, "export STOKER_HOME=DIR")):
        private = next((folder for folder in _PRIVATE_FOLDERS if path.is_relative_to(folder)), "")
        if private:
            yield warn(f"{what} {path}, which jobs do not see if each job has its own {private}", fix)


def check_slot_users(around: HostFacts) -> Iterator[Finding]:
    known = [node for node in around.nodes if node.user_domain]
    others = [node.user_domain for node in known if node.user_domain.lower() != around.user_domain.lower()]
    if not around.user_domain or not others:
        return
    of_all = "machines" if len(others) == len(known) else f"{len(others)} of {len(known)} machines"
    text = (
        f"{of_all} of the pool run jobs as their own users, who may not read a session's folder: the machines'"
        f" UID_DOMAIN is {', '.join(sorted(set(others))[:_SHOWN_DOMAINS])}, and this host's UID_DOMAIN is"
        f" {around.user_domain}"
    )
    yield Finding(FindingLevel.NEED if len(others) == len(known) else FindingLevel.WARN, text, _SEND_FILES_FIX)


def _can_others_enter(folder: Path) -> bool:
    try:
        return bool(folder.stat().st_mode & stat.S_IXOTH)
    except OSError:
        return True


def probe_site(site: Site, *, wait_s: float, say: Callable[[str], None]) -> Iterator[Finding]:
    """Submit a one-minute pilot and wait until it joins. This proves that compute nodes can access the environment and
    the session folder, and can reach this host."""
    folder = new_sessions.create_session([make_probe_site(site)], idle_s=wait_s + _SLACK_S)
    say(f"the probe's session, {folder.path}, submits one job of at most a minute to site {site.name}")
    began = time.monotonic()
    try:
        detached.start_session_manager(folder, on_wait=say)
    except KeyboardInterrupt:
        if folder.file.exists():  # the manager has already started, so it must be told to end
            down.end_session(folder)
        else:
            detached.delete_session(folder)
        raise
    try:
        status = _wait_for_pilot(folder, wait_s=wait_s, say=say)
        address = folder.read().address.removeprefix("tcp://")
        took = show_seconds(time.monotonic() - began)
        lacks = _explain_unusable_pilots(status, site)
        if lacks:
            fix = f'the pilot\'s log: {folder.path / "pilots"}; to use only the cores: [pilot] devices = "cpu"'
            yield need(f"compute nodes reach this host, but {lacks}", fix)
        elif status.pilots:
            hosts = ", ".join(pilot.host for pilot in status.pilots)
            yield ok(f"compute nodes reach this host on {address} (a pilot on {hosts} joined; {took})")
        else:
            yield need(*_explain_missing_pilot(status, folder, address=address, took=took))
    finally:
        before = down.end_session(folder)
        remains = down.wait_until_gone(folder, before, wait_s=60.0, on_wait=say)
        yield from (warn(f"the probe left behind: {each.what}", each.remove) for each in remains)
    if status.pilots and not lacks and not remains:
        detached.delete_session(folder)


def make_probe_site(site: Site) -> Site:
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
                facts = [*show_status.describe_blocks_without_pilot(status.jobs), *status.trouble.values()]
                say("; ".join(facts) or "requesting a job")
            gone = (status.ended_blocks and not status.jobs) or status.gone_pilots
            if status.pilots or gone or time.monotonic() > until:
                return status
            time.sleep(_STATUS_EVERY_S)


def _explain_unusable_pilots(status: Status, site: Site) -> str:
    faults = [[device.fault for device in pilot.devices] for pilot in status.pilots]
    for said in faults:
        if said and all(said):
            return said[0]
    came = status.pilots or status.gone_pilots
    return status.trouble.get(site.name, "") if came and not any(faults) else ""


def _explain_missing_pilot(status: Status, folder: SessionFolder, *, address: str, took: str) -> tuple[str, str]:
    if pending := show_status.pending_blocks(status.jobs):
        why = show_status.format_reasons(pending) or "no reason given"
        return f"the probe still waits in the queue after {took}: {why}", "try again when the cluster is less busy"
    output = folder.path / "submit"
    if status.trouble or status.ended_blocks:
        said = "; ".join([*status.trouble.values(), *show_status.format_counts_by_reason(status.ended_blocks)])
        return f"the job of the probe started no pilot: {said}", f"the job's scripts and output: {output}"
    if all(job.phase == BlockPhase.ASKED.value for job in status.jobs):
        fix = f"see the log of the factory: {folder.path / 'factory.log'}"
        return f"the probe was not submitted within {took}", fix
    fix = (
        f"does a firewall block the node? name a common network: [session] interface, ports; the job's output: {output}"
    )
    return f"the probe runs, but its pilot has not reached {address} within {took}", fix
