"""Findings: one rule a file."""
