"""Measure the step times of a model's engine on a device of a session: `stoker profile`."""
