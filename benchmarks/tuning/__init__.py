"""Prompt tuning on real models: banks, the quality of prompts, times of jobs."""
