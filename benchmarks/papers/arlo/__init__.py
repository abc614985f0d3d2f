"""Arlo's evaluation (ICPP '24, §5). `settings.py` was fixed before the first result."""
