"""Settings of a site file that change nothing where they stand: they are refused, so that no one expects an effect.

Whether a setting has an effect often depends on others: a pilot on this machine has no walltime, and `finish_within` is
what the rule "demand" aims at. In a file such a setting may not stand at all; of a Site that a program made, it must
have its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from stoker.errors import ConfigError
from stoker.site import NO_PROBE, Engine, ProviderKind, ProvisioningName, Site

Setting = tuple[str, str]
"""A table of a site file, and a setting in it."""


def without_effect(site: Site) -> dict[Setting, str]:
    """The settings that change nothing on this site, each with why and what to do."""
    found: dict[Setting, str] = {}
    local, ours = site.provider.kind is ProviderKind.LOCAL, site.engine is Engine.STOKER
    if local:
        found["provider", "walltime"] = "a pilot on this machine lasts as long as its session; leave it out"
    if local and ours:
        found["provider", "command_limit"] = "no batch system is asked where kind is local; leave it out"
    if ours:  # what TaskVine cannot do is refused elsewhere, with other words
        rule = site.policy.provisioning
        if rule is ProvisioningName.DEFAULT:
            rule = ProvisioningName.FIXED if local else ProvisioningName.OPPORTUNISTIC
        if rule is not ProvisioningName.DEMAND:
            found["policy", "finish_within"] = (
                'it is the aim of provisioning = "demand" alone; write that below [policy], or leave it out'
            )
        if rule is not ProvisioningName.OPPORTUNISTIC:
            found["policy", "keep_pending"] = (
                f'it belongs to provisioning = "opportunistic", and here it is "{rule.value}"; write that below'
                " [policy], or leave it out"
            )
    if not site.pilot.mixed:
        found["pilot", "gpu_cores"] = (
            f'it goes with devices = "gpu+cpu", and here it is "{site.pilot.devices}", whose GPUs share all cores;'
            " leave it out"
        )
    if not site.advice.url:
        for setting in ("model", "key_variable", "time_limit", "tokens"):
            found["advice", setting] = "no language model is asked without url; give it, or leave this out"
    if site.pilot.probe == NO_PROBE:
        found["pilot", "probe_every"] = f'nothing is probed with probe = "{NO_PROBE}"; leave one of the two out'
    return found


def stands_in_vain(site: Site, data: Mapping[str, Any]) -> tuple[Setting, str] | None:
    """The first setting of a file's tables that changes nothing, and what to say of it."""
    for (table, setting), why in without_effect(site).items():
        if setting in data.get(table, {}):
            return (table, setting), f"[{table}] {setting} has no effect: {why}"
    return None


def refuse_in_vain(site: Site) -> None:
    """Raise ConfigError if a Site that a program made says what changes nothing."""
    for (table, setting), why in without_effect(site).items():
        settings = getattr(site, table)
        field = next(each for each in msgspec.structs.fields(settings) if each.encode_name == setting)
        if getattr(settings, field.name) != field.default:
            raise ConfigError(f"site {site.name}: [{table}] {field.name} has no effect: {why}", key=setting)
