"""Roofs, ridge points and bounds (Williams, Waterman, Patterson: Roofline, CACM 2009). No torch."""

from __future__ import annotations

from rooftile.roofline.bound import Bound, attainable, bound_of, check_bandwidth, check_rate, ridge, ridges
from rooftile.roofline.quantisation import GemmQuantisation, gemm_quantisation
from rooftile.roofline.summary import FamilyRow, OpRow, RooflineSummary, summary

__all__ = [
    "Bound",
    "FamilyRow",
    "GemmQuantisation",
    "OpRow",
    "RooflineSummary",
    "attainable",
    "bound_of",
    "check_bandwidth",
    "check_rate",
    "gemm_quantisation",
    "ridge",
    "ridges",
    "summary",
]
