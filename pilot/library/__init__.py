"""The process that contains one context and runs calls."""
