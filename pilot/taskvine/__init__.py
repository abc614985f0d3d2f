"""A pilot that runs a whole TaskVine pool, for sites with `engine = "taskvine"`."""

POOL = "STOKER_POOL"
"""The environment variable with the session's folder, for all processes that TaskVine starts for the session."""
