"""Roofs, ridge points and bounds."""
