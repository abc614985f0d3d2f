"""Settings of all runs, fixed on 2026-11-26 before any policy had run on the trace; the page names later changes."""

from __future__ import annotations

FIXED_ON = "2026-11-26"

WINDOW_S = 7 * 86_400.0
"""A window is a week of one virtual cluster, counted from its first job. Each begins with an empty cluster and an empty
queue, and ends with the last of its jobs."""
LEAST_JOBS = 100
LEAST_GPUS = 4.0
"""A week takes part if it has this many jobs, and on average this many busy GPUs: else nothing waits. All such weeks
take part; none is drawn."""

NODE_GPUS = 8
MAIN_LOAD = 0.8
LOADS = (0.6, 0.8, 0.95)
"""The GPUs of a window are its GPU-seconds inside the week, if each job ran when it came, over the seconds of the week
and over the load; rounded up to whole pilots, and no fewer than its largest job wants. So the load of a small window is
lower than its name."""

DRAWS = 3
"""Draws of an error for each window; a window counts with their mean."""
SEED = 20261126

PAPER_SHARE, LUCID_SHARE = 0.857, 0.277
"""§5.4: the share of relative errors under 100 %, of SchedMate and of Lucid's estimator."""
SPREADS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
"""Standard deviations of the logarithm of prediction over truth, for the sweep; the median is right."""
UNKNOWN_SHARE = 0.3
"""Of jobs that get no estimate, in one of the systems: they count as long as the window's median job."""

TIRESIAS_THRESHOLDS_GPU_S = (18_000.0,)
TIRESIAS_OTHER_GPU_S = (3_250.0, 7_200.0)
"""Of the published simulator of Lucid, which is by the authors of SchedMate; and of Tiresias's own."""
TIRESIAS_RESTART_S = (40.0, 60.0)
"""Extra time of a preempted job, on up to 8 GPUs and on more; from the same simulator of Lucid."""

RESAMPLES = 2_000
CONFIDENCE = 0.95
"""Of the paired bootstrap: weeks are drawn again within each virtual cluster."""
LONGEST_S = 400 * 86_400.0
"""A run longer than this is refused as wrong."""
