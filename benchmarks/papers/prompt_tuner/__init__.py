"""PromptTuner's evaluation (§6) in the simulator: its workloads, both baselines, the ablations, and the page."""
