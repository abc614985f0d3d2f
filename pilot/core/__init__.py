"""A pilot's decisions, as pure functions of state, event and time."""
