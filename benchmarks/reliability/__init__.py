"""Measure the effect of losses, kills, damage and outages, and recovery times."""
