"""Policies that papers compare against."""
