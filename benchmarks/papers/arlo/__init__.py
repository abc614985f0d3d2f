"""Arlo's evaluation (ICPP '24, §5): its systems, its workloads, and a fast model of instances that answer one by one.

`settings.py` was fixed before any result was seen. `tables.py` has the figures as cases, `measured.py` the results that
are kept in docs/reproduction/arlo.json, and `report.py` writes docs/reproduction/arlo.md from them and `page.template`.
"""
