"""What the engine costs: calls, contexts, streams, transfers."""
