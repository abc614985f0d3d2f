"""Estimate the work of a run for `stoker plan fact_verification`. One input is one claim with one template."""

from __future__ import annotations

from stoker.apps.fact_verification import APP
from stoker.apps.fact_verification.options import VerificationOptions
from stoker.planning import Work

_TEMPLATES = 3
WORK = Work(
    app=APP,
    function="stoker.apps.fact_verification.functions:verify",
    inputs=VerificationOptions().limit * _TEMPLATES,
    inputs_per_call=VerificationOptions().batch_size,
)
