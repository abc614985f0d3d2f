"""The costs of the engine: calls, contexts, streams, transfers."""
