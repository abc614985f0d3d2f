"""What a pilot decides, as pure functions of state, event and time."""
