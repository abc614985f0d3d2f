"""The default residency, whose idle libraries end where another needs the room, and never sleep."""

from __future__ import annotations

from stoker.manager.policies.residency import LoadWhereWanted


class Sleepless(LoadWhereWanted):
    lets_sleep = False
