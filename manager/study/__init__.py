"""Studies: scenarios read from files, simulated many times over processes, measured, and drawn.

What reads or writes files, or starts processes, stands here; what is simulated is `stoker.manager.sim`, which does
neither.
"""
