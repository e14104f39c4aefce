"""Exact tiled attention: one function, several kernels, and an account of which one ran and why."""

from rooftile._attention.explain import Explanation, with_explain
from rooftile._attention.function import attention as _attention

__all__ = ["Explanation", "attention"]

attention = with_explain(_attention)
