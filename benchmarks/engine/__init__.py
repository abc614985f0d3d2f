"""Measure the costs of calls, contexts, streams and transfers."""
