"""Engines that write texts for many requests at once with one language model."""
