"""Studies: scenarios from files, simulated in processes, measured and plotted.

`stoker.manager.sim` itself has neither I/O nor processes.
"""
