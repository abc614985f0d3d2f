"""What a sweep comes to, for `stoker plan inference_sweep`: an input is one row with one combination."""

from __future__ import annotations

from stoker.apps.inference_sweep.generate import generate
from stoker.apps.inference_sweep.run import Options
from stoker.planning import Work

WORK = Work(app="inference_sweep", function=generate.__name__, inputs=1000, inputs_per_call=Options().batch_size)
