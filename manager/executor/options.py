"""What `stoker.load` and `StokerExecutor` are given, checked before anything is started."""

from __future__ import annotations

import difflib
import inspect
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from parsl.config import Config
from parsl.data_provider.staging import Staging
from parsl.errors import ConfigurationError
from parsl.monitoring.radios.base import RadioConfig
from parsl.providers.base import ExecutionProvider
from typeguard import TypeCheckError

from stoker.errors import ConfigError
from stoker.site import ProvisioningName, Site
from stoker.units import LONGEST_S

_LOADS = ("site", "session", "provider", "label", "run_dir", "retries", "working_dir", "drain_s", "progress")
_PARSLS = tuple(
    name for name in inspect.signature(Config).parameters if name not in ("executors", "run_dir", "retries")
)
_STRATEGIES = (None, "simple", "htex_auto_scale", "none")


def refuse(option: str, value: Any, want: str) -> ConfigError:
    """The error for an option's value that is not what is wanted. `option`: as the user wrote it, with its function."""
    return ConfigError(f"{option}: {value!r:.80} is not {want}", key=option.rpartition(" ")[2])


def check_truth(option: str, value: Any) -> None:
    """Raise ConfigError for what is neither True nor False: a text is always true, also "no"."""
    if not isinstance(value, bool):
        raise refuse(option, value, "True or False")


def check_count(option: str, value: Any, *, least: int, most: int | None = None) -> None:
    """Raise ConfigError for what is no whole number, or too small, or too large."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise refuse(option, value, f"a whole number of at least {least}")
    if most is not None and value > most:
        raise refuse(option, value, f"at most {most:,}")


def check_session(session: Any) -> None:
    """Raise ConfigError for what names no session. None: no session is joined."""
    if session is not None and not isinstance(session, str | os.PathLike):
        raise refuse("session", session, "the id or the folder of a session")
    if session is not None and not os.fspath(session):
        raise ConfigError(
            "session: '' names no session (is the variable that it comes from not set?); name one that `stoker"
            " sessions` lists, or leave session= out to start one here",
            key="session",
        )


def check_load(*, run_dir: Any, retries: Any, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for options of `stoker.load` that an executor does not have. `options` go to Parsl."""
    unknown = next((name for name in options if name not in _PARSLS), "")
    if unknown:
        near = difflib.get_close_matches(unknown, [*_LOADS, *_PARSLS], n=1)
        hint = f"did you mean {near[0]}?" if near else f"beside its own it takes those of Parsl: {', '.join(_PARSLS)}"
        raise ConfigError(f"stoker.load has no option {unknown}; {hint}", key=unknown)
    if options.get("strategy", None) not in _STRATEGIES:
        raise refuse("strategy", options["strategy"], 'one of "simple", "htex_auto_scale", "none"')
    if "internal_tasks_max_threads" in options:
        check_count("internal_tasks_max_threads", options["internal_tasks_max_threads"], least=1)
    if not isinstance(run_dir, str | os.PathLike) or not os.fspath(run_dir):
        raise refuse("run_dir", run_dir, "the path of a folder")
    check_count("retries", retries, least=0)


def parsls_config(**options: Any) -> Config:
    """Parsl's Config. Raises ConfigError, naming the option, for a value that Parsl refuses."""
    try:
        return Config(**options)
    except (TypeCheckError, TypeError, ValueError, ConfigurationError) as error:
        words = re.sub(r'^argument "\w+" ', "", str(error).partition("\n")[0])
        name = next((name for name in options if f'"{name}"' in str(error)), "")
        name = name or next((name for name in options if name.replace("_", " ") in str(error).lower()), "options")
        given = repr(options.get(name))
        raise ConfigError(f"{name}: {given:.80} is refused by parsl.config.Config: {words}", key=name) from None


def check_options(
    *,
    label: Any,
    session: Any,
    working_dir: Any,
    drain_s: Any,
    provider: Any,
    progress: Any,
    storage_access: Any,
    block_error_handler: Any,
    remote_monitoring_radio: Any,
) -> None:
    """Raise ConfigError, naming the option, for a value that would be of no use much later."""
    if not isinstance(label, str) or not label or "/" in label:
        raise ConfigError(f"label: {label!r:.80} is not a name: write a text without slashes; it names a folder, too")
    check_session(session)
    if working_dir is not None and (not isinstance(working_dir, str | os.PathLike) or not os.fspath(working_dir)):
        raise refuse("working_dir", working_dir, "the path of a folder")
    number = isinstance(drain_s, int | float) and not isinstance(drain_s, bool)
    if not number or not 0 <= drain_s <= LONGEST_S:
        raise ConfigError(f"drain_s: {drain_s!r:.80} is not a number of seconds, 0 or more")
    if provider is not None and not isinstance(provider, ExecutionProvider):
        raise ConfigError(
            f"provider: {provider!r:.80} is not a provider of Parsl's; a batch system is named in a site file:"
            " stoker.load('site.toml')"
        )
    check_truth("progress", progress)
    if storage_access is not None and (
        not isinstance(storage_access, Sequence) or not all(isinstance(each, Staging) for each in storage_access)
    ):
        raise refuse("storage_access", storage_access, "a list of Parsl's staging providers")
    if not isinstance(block_error_handler, bool) and not callable(block_error_handler):
        raise refuse("block_error_handler", block_error_handler, "True, False or a function of (executor, status)")
    if remote_monitoring_radio is not None and not isinstance(remote_monitoring_radio, RadioConfig):
        raise refuse("remote_monitoring_radio", remote_monitoring_radio, "a radio of parsl.monitoring.radios")


def check_local_policy(site: Site) -> None:
    """Raise ConfigError for what only the manager's own blocks heed, where Parsl starts those of this machine."""
    rule = site.policy.provisioning
    if rule not in (ProvisioningName.DEFAULT, ProvisioningName.FIXED):
        raise ConfigError(
            f'site {site.name}: [policy] provisioning = "{rule.value}" has no effect in a program that starts its own'
            " pilots on this machine; leave it out, or use the site with `stoker up`",
            key="provisioning",
        )
