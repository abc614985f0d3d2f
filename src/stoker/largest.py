"""The largest numbers that an option or a message may have: no honest peer says more, and arithmetic still works."""

MOST_S = 1e10
"""No time is longer: three hundred years."""
LONGEST_S = 1e9
"""No option asks for more: thirty years. Added to the time of day it is still below MOST_S."""
MOST_BYTES = 1 << 60
MOST_NUMBER = 1 << 40
"""No library, block or call has a higher number among its kind; no peer sends more frames."""
MOST_AT_ONCE = 100_000
"""No library has more slots, no context more devices, no gang more members."""
