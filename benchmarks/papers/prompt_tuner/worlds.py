"""The paper's clusters as worlds of the simulator: servers of eight GPUs, all there from the beginning.

Loads neither wait for files nor for each other: a cold start is a constant of the model (the parameters say why). A
GPU holds one model at a time.
"""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.papers.prompt_tuner import paper
from benchmarks.papers.prompt_tuner.parameters import MODELS, Model, Parameters
from stoker.manager.sim.world import ContextModel, Delays, DeviceKind, SourceModel, World
from stoker.protocol.blocks import Rule
from stoker.site import Duration, Size

_KIND = "NVIDIA A100-SXM4-80GB"
_GPU_BYTES = Size(80_000_000_000)
_DELAYS = Delays(progress_s=Duration(5.0))
"""A job says every five seconds how far it is."""


def world(models: Iterable[str], parameters: Parameters, *, gpus: int) -> World:
    """A cluster of so many GPUs that runs jobs of these models."""
    servers = gpus // paper.SERVER_GPUS
    source = SourceModel(
        name="servers",
        kind=_KIND,
        capacity=servers,
        devices=paper.SERVER_GPUS,
        rule=Rule.FIXED,
        init_blocks=servers,
        max_blocks=servers,
    )
    contexts = {name: _context(MODELS[name], parameters) for name in models}
    return World(devices={_KIND: DeviceKind(_GPU_BYTES)}, sources=(source,), contexts=contexts, delays=_DELAYS)


def _context(model: Model, parameters: Parameters) -> ContextModel:
    return ContextModel(
        device_memory_bytes=_GPU_BYTES,
        devices=model.devices,
        load_s={"": Duration(parameters.cold_s(model))},
        item_s={"": Duration(model.item_s)},
        gang_s=Duration(parameters.meet_s),
        gang_efficiency=parameters.gang_efficiency,
    )
