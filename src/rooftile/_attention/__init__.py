"""Exact tiled attention: one function, several kernels, and an account of which one ran and why."""

from rooftile._attention.function import attention

__all__ = ["attention"]
