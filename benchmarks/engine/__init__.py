"""Costs of the engine: calls, contexts, streams, transfers."""
