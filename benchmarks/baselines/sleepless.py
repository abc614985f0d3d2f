"""The default residency without sleep: idle libraries end if another library needs the device."""

from __future__ import annotations

from stoker.manager.policies.residency import LoadWhereWanted


class Sleepless(LoadWhereWanted):
    lets_sleep = False
