"""ClassAds of machines, matching of jobs, and output of HTCondor's commands."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

os.environ.setdefault("CONDOR_CONFIG", "/dev/null")

import classad

Ad = classad.ClassAd

IDLE, RUNNING, REMOVED, COMPLETED, HELD = 1, 2, 3, 4, 5


def now() -> int:
    return int(time.time())


def turn(ad: Ad, status: int, **attributes: Any) -> None:
    """Set a job's state and attributes; None removes an attribute. Count holds."""
    if ad["JobStatus"] != status:
        if status == HELD:
            ad["NumHolds"] = int(ad.get("NumHolds", 0)) + 1
        ad["LastJobStatus"] = ad["JobStatus"]
        ad["JobStatus"] = status
        ad["EnteredCurrentStatus"] = now()
    for name, value in attributes.items():
        if value is not None:
            ad[name] = value
        elif name in ad:
            del ad[name]


def no_longer_held(ad: Ad) -> dict[str, Any]:
    """Return the ad changes when a held job is released."""
    held = {"HoldReason": None, "HoldReasonCode": None, "HoldReasonSubCode": None}
    return {**held, **{f"Last{name}": ad[name] for name in held if name in ad}}


def value(ad: Ad, name: str, default: Any = None) -> Any:
    """Return the value of an attribute; `default` if it is undefined or an error."""
    found = ad.eval(name) if name in ad else None
    return default if found is None or isinstance(found, classad.Value) else found


def is_true(ad: Ad, expression: str) -> bool:
    """Return True if an expression is true for this ad. Raises SyntaxError or ValueError for an invalid expression."""
    return bool(classad.ExprTree(expression).eval(ad) is True)


def gpu_name(uuid: str) -> str:
    return f"GPUs_{uuid.replace('-', '_')}"


def machine_ad(machine: dict[str, Any], *, name: str, free: dict[str, int], gpus: Sequence[dict[str, Any]]) -> Ad:
    """Return the ad of a slot with the `free` Cpus, Memory and Disk, and these GPUs."""
    ad = Ad(
        {
            "MyType": "Machine", "Name": name, "Machine": machine["name"], "Arch": "X86_64", "OpSys": "LINUX",
            "State": "Unclaimed", "Activity": "Idle", "HasFileTransfer": True, "TotalGPUs": len(machine["gpus"]),
            "FileSystemDomain": machine["domain"], "UidDomain": "submit.pool", "GPUs": len(gpus), **free,
            "TotalSlotCpus": free["Cpus"], "TotalSlotMemory": free["Memory"], "TotalSlotGPUs": len(gpus),
        }
    )  # fmt: skip
    ad["Start"] = True
    ad["Requirements"] = classad.ExprTree("Start && TARGET.RequestCpus <= Cpus && TARGET.RequestMemory <= Memory")
    for gpu in machine["gpus"]:
        ad[gpu_name(gpu["uuid"])] = gpu_ad(gpu)
    ad["AvailableGPUs"] = classad.ExprTree("{" + ",".join(gpu_name(gpu["uuid"]) for gpu in gpus) + "}")
    for attribute, expression in machine["more"].items():
        ad[attribute] = classad.ExprTree(expression)
    return ad


def gpu_ad(gpu: dict[str, Any]) -> Ad:
    return Ad(
        {
            "Id": gpu["uuid"], "DeviceName": gpu["name"], "Capability": gpu["capability"],
            "GlobalMemoryMb": gpu["memory_mb"], "DeviceUuid": gpu["uuid"].removeprefix("GPU-"),
        }
    )  # fmt: skip


# ---- output


def print_json(ads: Iterable[Ad], attributes: Sequence[str]) -> str:
    return "\n,\n".join(_part(ad, attributes).printJson() for ad in ads)


def print_values(ad: Ad, attributes: Sequence[str], *, letters: str) -> str:
    """Return a line of `-af`: values separated by blanks. `letters`: `j` adds the id in front; `r` prints expressions
    unevaluated.
    """
    words = [f"{ad['ClusterId']}.{ad['ProcId']}"] if "j" in letters else []
    for attribute in attributes:
        if attribute not in ad:
            words.append("undefined")
        elif "r" in letters:
            words.append(str(ad.lookup(attribute)))
        else:
            words.append(_plain(ad.eval(attribute)))
    return " ".join(words)


def _plain(found: Any) -> str:
    if isinstance(found, classad.Value):
        return str(found).rpartition(".")[2].lower()
    return found if isinstance(found, str) else json.dumps(found, default=str)


def _part(ad: Ad, attributes: Sequence[str]) -> Ad:
    if not attributes:
        return ad
    wanted = {attribute.lower() for attribute in attributes}
    part = Ad()
    for name in ad.keys():  # noqa: SIM118  # a ClassAd is not iterable in all versions
        if name.lower() in wanted:
            part[name] = ad.lookup(name)
    return part
