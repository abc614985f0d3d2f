"""Settings of all runs, fixed on 2026-11-26 before the first run on the trace."""

from __future__ import annotations

FIXED_ON, SEED = "2026-11-26", 20261126

WINDOW_S, LEAST_JOBS, LEAST_GPUS = 7 * 86_400.0, 100, 4.0
"""A window is a week of a virtual cluster, counted from its first job. It has at least these jobs and mean busy GPUs,
because jobs in smaller weeks never wait. The cluster starts empty, and the last job ends the run.
"""
NODE_GPUS, MAIN_LOAD, LOADS = 8, 0.8, (0.6, 0.8, 0.95)
DRAWS = 3

PAPER_SHARE, LUCID_SHARE = 0.857, 0.277
"""Shares of predictions with relative errors under 100 % (§5.4)."""
PAPER_F1 = 67.7
"""F1 of the failure handler with 7 billion parameters (Table 4)."""
PAPER_OVER_TIRESIAS = 0.84
"""Mean completion time of standalone SchedMate divided by that of Tiresias (§5.3)."""
SPREADS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
"""Spreads of log(prediction / truth) in the sweep of errors; the median is correct."""
UNKNOWN_SHARE = 0.3
"""Share of jobs without an estimate in one system."""

TIRESIAS_THRESHOLDS_GPU_S, TIRESIAS_OTHER_GPU_S = (18_000.0,), (3_250.0, 7_200.0)
"""Thresholds of the published simulators of Lucid and of Tiresias."""
TIRESIAS_RESTART_S = (40.0, 60.0)
"""Extra seconds of a preempted job on up to 8 GPUs, and on more GPUs, from Lucid's simulator."""

RESAMPLES, CONFIDENCE = 2_000, 0.95
LONGEST_S = 400 * 86_400.0
