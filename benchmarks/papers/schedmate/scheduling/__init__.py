"""SchedMate's scheduling (§4.3, §5.3) on jobs of Philly: shortest first, with predictions that are wrong.

`settings.py` was fixed before any result was seen. Policies: benchmarks/baselines/shortest_first.py and tiresias.py.
"""
