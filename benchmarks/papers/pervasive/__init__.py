"""The papers' evaluations in the simulator: parameters are fitted on some figures, the others are predicted."""
