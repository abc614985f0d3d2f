"""Pure functions that decide what a pilot does, from its state, an event and the time."""
