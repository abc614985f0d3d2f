"""Studies: scenarios from files are simulated in processes, measured and plotted.

`stoker.manager.sim` itself has neither I/O nor processes.
"""
