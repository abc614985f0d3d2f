"""A causal language model as a context."""

from __future__ import annotations


class CausalLM:
    """A language model on its device."""
