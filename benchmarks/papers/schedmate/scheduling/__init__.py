"""SchedMate's scheduling (its §4.3 and §5.3) on jobs of Philly: shortest first, with predictions that are wrong.

`settings.py` was fixed before any result was seen; `records.py` keeps results in docs/reproduction/schedmate.json, and
`report.py` writes docs/reproduction/schedmate.md from them and `page.template`. The policies are
benchmarks/baselines/shortest_first.py and benchmarks/baselines/tiresias.py.
"""
