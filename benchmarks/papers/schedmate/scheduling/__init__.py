"""Evaluate SchedMate's scheduling (§4.3, §5.3) on Philly jobs: shortest job first with prediction errors.

`settings.py` was fixed before the first result.
"""
