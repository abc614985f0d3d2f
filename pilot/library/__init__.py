"""The process that holds one context and runs calls on it."""
