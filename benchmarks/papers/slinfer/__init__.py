"""SLINFER's evaluation in the simulator: its systems, its workloads, and the step times that its authors measured.

`tables.py` has the figures as cases, `cases.py` one run and the results kept in docs/reproduction/slinfer.json, and
`report.py` writes docs/reproduction/slinfer.md from them and `page.template`.
"""
