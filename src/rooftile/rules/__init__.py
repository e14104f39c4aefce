"""Findings: one rule a file. A module named after a code (``mem001_...``) that defines ``RULE`` is found by itself."""

from rooftile.rules.finding import FAMILIES, Context, Family, Finding, Recapture, Rule, Saving, Severity
from rooftile.rules.registry import all_rules, check_all, matches, rule, select_rules

__all__ = [
    "FAMILIES",
    "Context",
    "Family",
    "Finding",
    "Recapture",
    "Rule",
    "Saving",
    "Severity",
    "all_rules",
    "check_all",
    "matches",
    "rule",
    "select_rules",
]
