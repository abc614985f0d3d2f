"""Settings of all runs, fixed on 2026-11-26 before any policy had run on the trace."""

from __future__ import annotations

FIXED_ON = "2026-11-26"

WINDOW_S = 7 * 86_400.0
"""A window is a week of one virtual cluster from its first job. It begins empty, and ends with its last job."""
LEAST_JOBS = 100
LEAST_GPUS = 4.0
"""A week takes part with this many jobs and busy GPUs on average: else nothing waits. None is drawn."""

NODE_GPUS = 8
MAIN_LOAD = 0.8
LOADS = (0.6, 0.8, 0.95)
"""The GPUs of a window are its GPU-seconds inside the week over its seconds and the load; rounded up to whole pilots,
and no fewer than its largest job wants."""

DRAWS = 3
"""Of an error, for each window, which counts with their mean."""
SEED = 20261126

PAPER_SHARE, LUCID_SHARE = 0.857, 0.277
"""§5.4: the share of relative errors under 100 %."""
SPREADS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
"""Of log(prediction / truth), for the sweep; the median is right."""
UNKNOWN_SHARE = 0.3
"""Of jobs without an estimate, in one system."""

TIRESIAS_THRESHOLDS_GPU_S = (18_000.0,)
TIRESIAS_OTHER_GPU_S = (3_250.0, 7_200.0)
"""Of Lucid's published simulator, and of Tiresias's own."""
TIRESIAS_RESTART_S = (40.0, 60.0)
"""Of a preempted job, on up to 8 GPUs and on more; from Lucid's simulator."""

RESAMPLES = 2_000
CONFIDENCE = 0.95
LONGEST_S = 400 * 86_400.0
"""A longer run is refused as wrong."""
