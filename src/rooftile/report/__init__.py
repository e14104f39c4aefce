"""Terminal and JSON views of an audit. No torch: a saved report is rendered again from its file."""

from rooftile.report.model import SCHEMA, SECTIONS, Report

__all__ = ["SCHEMA", "SECTIONS", "Report"]
