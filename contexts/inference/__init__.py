"""Engines that write text with one language model for many requests at once."""
