"""What a run comes to, for `stoker plan fact_verification`: an input is one claim with one template."""

from __future__ import annotations

from stoker.apps.fact_verification.options import Options
from stoker.apps.fact_verification.verify import verify
from stoker.planning import Work

_TEMPLATES = 3
WORK = Work(
    app="fact_verification",
    function=verify.__name__,
    inputs=Options().limit * _TEMPLATES,
    inputs_per_call=Options().batch_size,
)
