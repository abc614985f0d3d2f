"""Simulates scenario files in separate processes, and measures and plots the runs."""
