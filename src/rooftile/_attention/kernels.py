"""The kernels by name, and which one takes a call.

``"auto"`` asks native, then tiled. The reference and torch's own kernel run only when they are named: the first because
its memory grows with Lq * Lk, the second because it keeps less of the contract.
"""

from __future__ import annotations

from rooftile._attention.call import Call
from rooftile._attention.kernel import Kernel
from rooftile._attention.native import Native
from rooftile._attention.reference import Reference
from rooftile._attention.sdpa import Sdpa
from rooftile._attention.tiled import Tiled
from rooftile.errors import UsageError

__all__ = ["AUTOMATIC", "KERNELS", "checked_names", "refusals", "select"]

KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (Native(), Tiled(), Reference(), Sdpa())}

#: What "auto" stands for, in order.
AUTOMATIC = ("native", "tiled")


def checked_names(kernel: object) -> tuple[str, ...]:
    """``kernel`` as names in order of preference."""
    if kernel == "auto":
        return AUTOMATIC
    names = (kernel,) if isinstance(kernel, str) else kernel
    if not isinstance(names, (tuple, list)) or not names:
        raise UsageError(f"kernel={kernel!r}: give 'auto', a name or a tuple of names of {', '.join(KERNELS)}")
    for name in names:
        if name not in KERNELS:
            raise UsageError(
                f"kernel={kernel!r}: there is no kernel {name!r}; there are {', '.join(KERNELS)}, and 'auto'"
            )
    return tuple(names)


def select(kernel: object, call: Call, needs_grad: bool) -> str:
    """The first of the kernels asked for that takes the call; an error with every reason if none does."""
    names = checked_names(kernel)
    for name in names:
        if not KERNELS[name].refusals(call, needs_grad):
            return name
    reasons = "; ".join(f"{name}: {', '.join(KERNELS[name].refusals(call, needs_grad))}" for name in names)
    raise UsageError(f"kernel={kernel!r}: no kernel takes this call ({reasons}); name another one, 'tiled' takes any")


def refusals(call: Call, needs_grad: bool) -> dict[str, tuple[str, ...]]:
    """Why each kernel can't take the call; empty where it can."""
    return {name: kernel.refusals(call, needs_grad) for name, kernel in KERNELS.items()}
