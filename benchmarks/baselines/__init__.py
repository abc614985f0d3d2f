"""Baselines of papers: policies outside of Stoker, named by their files as a user's own are."""
