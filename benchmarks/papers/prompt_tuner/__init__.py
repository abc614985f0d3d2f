"""PromptTuner's evaluation (§6) in the simulator: workloads, baselines, ablations, and the page."""
