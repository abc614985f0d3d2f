"""What people see: the page at `/`, and the figures that it shows, as JSON or as events, one a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec

from stoker.apps.gateway.meters import median
from stoker.apps.gateway.served import ServedModel, ServedModels
from stoker.apps.gateway.watch import SessionWatch, facts_of
from stoker.sessions import Status

PAGE = Path(__file__).parent / "data" / "page.html"
_EVERY_S = 1.0


class GatewayFigures:
    """The figures of a gateway and of its session."""

    def __init__(self, models: ServedModels, watch: SessionWatch, *, site: str) -> None:
        self._models = models
        self._watch = watch
        self._site = site
        self._begun = time.time()

    async def now(self) -> dict[str, Any]:
        """All of them."""
        status = await self._watch.now()
        return {
            "at": time.time(),
            "since": self._begun,
            "site": self._site,
            "session": self._watch.session.id,
            "trouble": self._watch.trouble,
            "models": [_model(model, status) for model in self._models.values()],
            "pilots": _pilots(status, self._models),
            "waiting": [
                {"block": str(job.block), "source": job.source, "job": job.job, "phase": job.phase, "why": job.reason}
                for job in (status.jobs if status else ())
                if job.phase != "running"
            ],
            "calls": {"queued": status.queued, "running": status.running, "rate": status.rate} if status else {},
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The figures as server-sent events."""
        while True:
            yield b"data: " + msgspec.json.encode(await self.now()) + b"\n\n"
            await asyncio.sleep(_EVERY_S)


def _model(model: ServedModel, status: Status | None) -> dict[str, Any]:
    facts, meter, settings = facts_of(status, model), model.meter, model.settings
    return {
        "name": model.name,
        "kind": settings.kind.value,
        "state": "trouble" if model.trouble else facts.state,
        "hot": facts.hot,
        "loading": facts.loading,
        "loading_s": facts.loading_s,
        "load_s": facts.load_s,
        "why": model.trouble or (facts.waits_for if not facts.hot else "") or (facts.failure if not facts.hot else ""),
        "running": meter.running,
        "queued": facts.queued,
        "requests": meter.requests,
        "failed": meter.failed,
        "tokens_per_s": meter.rate(time.monotonic()),
        "ttft_s": median(meter.ttft),
        "tpot_s": median(meter.tpot),
        "ttft_objective_s": float(settings.ttft) or None,
        "tpot_objective_s": float(settings.tpot) or None,
        "met": meter.met,
        "min": settings.min,
        "max": settings.max,
        "keep_alive_s": None if settings.keep_alive is None else float(settings.keep_alive),
    }


def _pilots(status: Status | None, models: ServedModels) -> list[dict[str, Any]]:
    if status is None:
        return []
    names: dict[str, list[str]] = {}
    for model in models.values():
        if model.recipe is not None:  # models of the same settings share one
            names.setdefault(model.recipe.name, []).append(model.name)
    holds = {
        library.library: f"{' and '.join(names.get(library.recipe, [library.recipe]))} ({library.state})"
        for library in status.libraries
    }
    return [
        {
            "pilot": pilot.pilot,
            "host": pilot.host,
            "state": pilot.draining or pilot.state,
            "ends_in_s": pilot.ends_in_s,
            "rate": pilot.rate,
            "devices": [
                {
                    "device": device.device,
                    "kind": device.kind,
                    "memory_bytes": device.memory_bytes,
                    "promised_bytes": device.promised_bytes,
                    "fault": device.fault,
                    "holds": [holds[one] for one in device.libraries if one in holds],
                }
                for device in pilot.devices
            ],
        }
        for pilot in status.pilots
    ]
