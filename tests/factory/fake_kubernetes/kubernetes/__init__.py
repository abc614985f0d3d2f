"""The part of the `kubernetes` package that Parsl's provider uses, over a dictionary of pods."""
