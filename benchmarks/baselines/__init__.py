"""Baseline policies of papers."""
