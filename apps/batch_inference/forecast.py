"""Estimate the work of a batch for `stoker plan batch_inference`. Each request of the batch is one input."""

from __future__ import annotations

from stoker.apps.batch_inference import APP
from stoker.planning import Work

WORK = Work(app=APP, function="stoker.apps.batch_inference.functions:answer", inputs=1000, inputs_per_call=1)
