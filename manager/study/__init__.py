"""Simulates scenarios from files in separate processes, and measures and plots the runs."""
