"""Estimate the work of a sweep for `stoker plan inference_sweep`. One input is one row with one combination."""

from __future__ import annotations

from stoker.apps.inference_sweep import APP
from stoker.apps.inference_sweep.plan import SweepOptions
from stoker.planning import Work

WORK = Work(
    app=APP,
    function="stoker.apps.inference_sweep.functions:generate",
    inputs=1000,
    inputs_per_call=SweepOptions().batch_size,
)
