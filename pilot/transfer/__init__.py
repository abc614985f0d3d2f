"""Transfers of objects between pilots.

All modules except the seed use only the standard library and `stoker.errors`, because a node with only Python fetches
the environment with these modules.
"""
