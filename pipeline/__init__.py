"""Putting the steps together."""
