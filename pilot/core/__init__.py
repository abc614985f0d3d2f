"""The decisions of a pilot, as pure functions of state, event and time."""
