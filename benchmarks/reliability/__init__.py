"""Losses, kills, damage and outages, and how soon work continues."""
