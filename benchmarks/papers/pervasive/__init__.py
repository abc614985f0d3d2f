"""The context paper's evaluations in the simulator."""
