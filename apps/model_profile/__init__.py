"""`stoker profile`: measure how long the steps of a model's engine take on a device of a session."""
