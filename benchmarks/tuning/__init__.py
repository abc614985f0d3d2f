"""Prompt tuning on real models."""
