"""Fake of the `kubernetes` package for Parsl's provider, over a dictionary of pods."""
