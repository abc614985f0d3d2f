"""SchedMate's scheduling (§4.3, §5.3) on Philly's jobs: shortest first, with wrong predictions.

`settings.py` was fixed before the first result.
"""
