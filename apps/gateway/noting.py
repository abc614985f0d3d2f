"""What the gateway leaves in its session's folder for `stoker status`, every few seconds."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time

from stoker.apps.gateway.meters import median
from stoker.apps.gateway.served import ServedModel, ServedModels
from stoker.sessions import (
    WRITTEN_EVERY_S,
    GatewayNote,
    ServedModelFigures,
    Session,
    remove_gateway_note,
    write_gateway_note,
)

log = logging.getLogger("stoker.gateway")


class GatewayNotes:
    """The note of one gateway. `name`: of its file, the same each time it is started; `address`: where it listens."""

    def __init__(self, session: Session, models: ServedModels, *, name: str, address: str) -> None:
        self._session, self._models = session, models
        self._name, self._address = name, address

    async def keep(self) -> None:
        """Write the note again and again; remove it when this is cancelled. A full disk costs the note alone."""
        told = ""
        try:
            while True:
                try:
                    await asyncio.to_thread(write_gateway_note, self._session.folder, self._name, self.now())
                    told = ""
                except OSError as error:
                    why = error.strerror or str(error)  # its text names a draft, another one each time
                    if told != why:
                        told = why
                        log.warning("stoker status will not show these models: %s", error)
                await asyncio.sleep(WRITTEN_EVERY_S)
        finally:
            remove_gateway_note(self._session.folder, self._name)

    def now(self) -> GatewayNote:
        """The note as it is to be written now."""
        models = tuple(map(_figures, self._models.values()))
        return GatewayNote(self._address, socket.gethostname(), os.getpid(), models, at=time.time())


def _figures(model: ServedModel) -> ServedModelFigures:
    meter = model.meter
    return ServedModelFigures(
        name=model.name,
        key=model.recipe.key if model.recipe is not None else "",
        recipe=model.recipe.name if model.recipe is not None else "",
        running=meter.running,
        tokens_per_s=meter.rate(time.monotonic()),
        ttft_s=median(meter.ttft),
        ttft_objective_s=float(model.settings.ttft) or None,
        met=meter.met,
        trouble=model.trouble,
    )
