"""Losses, kills, damage and outages, and the time to recover."""
