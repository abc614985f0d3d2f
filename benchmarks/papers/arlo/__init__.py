"""Arlo's evaluation (ICPP '24, §5). `settings.py` was fixed before any result was seen; `report.py` writes the page."""
