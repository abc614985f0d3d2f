"""Serving models: gateways, engines, batches, switches between models."""
