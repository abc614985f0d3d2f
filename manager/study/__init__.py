"""Studies: scenarios from files, simulated in many processes, measured and plotted.

All I/O and processes of simulations are here; `stoker.manager.sim` has neither.
"""
