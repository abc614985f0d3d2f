"""The process that holds one context and serves calls."""
