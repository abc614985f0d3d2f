"""Serving: gateways, engines, batches, switches between models."""
