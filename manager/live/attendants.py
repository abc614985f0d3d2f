"""Processes that a session needs beside its manager: the factory, which submits blocks, and the seed, which serves
objects to pilots that share no file system with this machine. The manager starts them, and again when they die.

They find everything in the session folder, hold a lock in it so that there is one of each, and end by themselves when
the session does: a manager that is killed leaves them running, and finds them again.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time

from stoker.config import load_site
from stoker.manager.protocol.blocks import Rule, Source
from stoker.manager.protocol.session import SessionFolder
from stoker.site import Engine, EnvironmentKind, ProviderKind, ProvisioningName, Site

log = logging.getLogger("stoker.manager")

FACTORY = "stoker.manager.factory.main"
SEED = "stoker.pilot.transfer.seed"
LOOK_S = 1.0
"""How often it is looked whether they live."""
PAUSE_S = 2.0
"""How long after its start one that died is started again at the soonest; doubles while it dies at once."""
LONGEST_PAUSE_S = 60.0


class Attendant:
    """One such process."""

    def __init__(self, folder: SessionFolder, module: str) -> None:
        self._folder = folder
        self._module = module
        self._name = module.split(".")[-2 if module.endswith(".main") else -1]
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._pause_s = PAUSE_S

    def keep_up(self, now: float) -> None:
        """Start it if it does not run. `now` is in seconds, on a clock that does not jump."""
        process = self._process
        if process is not None and process.poll() is None:
            if now - self._started_at > LONGEST_PAUSE_S:
                self._pause_s = PAUSE_S
            return
        if process is not None:
            if now - self._started_at < self._pause_s:
                return
            log.warning("the %s ended (%s); it is started again", self._name, process.returncode)
            self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
        self._started_at = now
        with open(self._folder.path / f"{self._name}.log", "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module, "--session", str(self._folder.path)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )


class Attendants:
    """Those that the session needs."""

    def __init__(self, folder: SessionFolder, sites: tuple[Site, ...]) -> None:
        modules = [FACTORY] if sites else []
        if any(not site.provider.shared_files or site.environment.kind is EnvironmentKind.PACKED for site in sites):
            modules.append(SEED)
        self._each = [Attendant(folder, module) for module in modules]
        self._look_at = 0.0

    def look(self) -> None:
        """Start those that are not there."""
        now = time.monotonic()
        if not self._each or now < self._look_at:
            return
        self._look_at = now + LOOK_S
        for attendant in self._each:
            attendant.keep_up(now)

    @property
    def wait_s(self) -> float:
        """How soon `look` wants to be called again; infinite when there is nothing to look after."""
        return max(0.0, self._look_at - time.monotonic()) if self._each else float("inf")


def sites_of(folder: SessionFolder) -> tuple[Site, ...]:
    """The session's sites: those whose blocks are the manager's business. Raises ConfigError."""
    return tuple(load_site(file) for file in sorted(folder.sites.glob("*.toml")))


def source_of(site: Site, *, kept: bool) -> Source:
    """What the manager needs to know of a site. `kept`: the session outlives programs."""
    provider, pilot, policy = site.provider, site.pilot, site.policy
    cpus = int(pilot.devices[4:]) if pilot.devices.startswith("cpu:") else 0
    slots = cpus or provider.gpu_count
    if site.engine is Engine.TASKVINE:  # its pool is one pilot that stays; how many workers that has is its own affair
        return Source(name=site.name, rule=Rule.FIXED, first=1, least=1, most=1, slots=slots * pilot.max_blocks)
    rules = {
        ProvisioningName.DEFAULT: Rule.FIXED if site.is_local else Rule.OPPORTUNISTIC,
        ProvisioningName.OPPORTUNISTIC: Rule.OPPORTUNISTIC,
        ProvisioningName.DEMAND: Rule.DEMAND,
        ProvisioningName.FIXED: Rule.FIXED,
    }
    return Source(
        name=site.name,
        rule=rules[policy.provisioning],
        first=pilot.init_blocks,
        least=pilot.min_blocks,
        most=pilot.max_blocks,
        keep_pending=policy.keep_pending,
        idle_s=policy.let_go_after_s(kept=kept),
        finish_within_s=float(policy.finish_within_s),
        nodes=provider.pilots,
        walltime_s=0.0 if provider.kind is ProviderKind.LOCAL else float(provider.walltime_s),
        slots=slots,
    )
