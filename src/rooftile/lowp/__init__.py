"""Scaled low precision."""
