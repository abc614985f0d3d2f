"""As much of the `kubernetes` package as Parsl's provider uses, over a dictionary of pods."""
