"""A pilot that has a whole TaskVine pool behind it, for sites that run TaskVine (`engine = "taskvine"`)."""

POOL = "STOKER_POOL"
"""The environment variable with the session's folder, in all processes that TaskVine starts for it."""
