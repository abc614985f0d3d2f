"""Transfers of objects between pilots.

All modules except the seed use only the standard library and `stoker.errors`: a node that has only Python gets its
environment with them.
"""
