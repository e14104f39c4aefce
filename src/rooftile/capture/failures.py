"""Turn what a model raised into one sentence with the user's own file and line."""

from __future__ import annotations

import linecache
import os
import sysconfig
import traceback

import torch

from rooftile.errors import CaptureError, RooftileError

__all__ = ["capture_error", "is_refusal", "user_frame"]

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_STDLIB = sysconfig.get_paths()["stdlib"]

#: Ways in which a tensor without data says that its value was asked for.
_NEEDS_VALUE = ("DataDependentOutputException", "GuardOnDataDependentSymNode", "DynamicOutputShapeException")
_NEEDS_VALUE_TEXT = ("item() cannot be called on meta", "data-dependent", "Cannot copy out of meta", "dynamic shape")


def user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame of the user's own code, or of another library's if there is none; never torch's or ours."""
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if not f.filename.startswith((_OWN, _TORCH, "<")) and not f.filename.startswith(_STDLIB + os.sep + "site")
    ]
    own = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith(_STDLIB)]
    candidates = own or frames
    return candidates[-1] if candidates else None


def is_refusal(error: BaseException) -> bool:
    """Whether this package refused what it was given; an error that the model's own code met is told with its place."""
    return isinstance(error, RooftileError) and user_frame(error) is None


def capture_error(error: BaseException) -> CaptureError:
    """One sentence: where, what, and the way out."""
    frame = user_frame(error)
    module = getattr(error, "rooftile_module", None)
    where = f"the module {module!r}" if module else "the model"
    if frame is not None:
        line = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
        where = f"{frame.filename}:{frame.lineno} (`{line}`)" + (f" in module {module!r}" if module else "")
    if isinstance(error, SystemExit):
        return CaptureError(f"{where} called sys.exit({error.code!r}); a target must return a rooftile.Step.")
    text = (str(error).strip().splitlines() or [""])[0]
    if type(error).__name__ in _NEEDS_VALUE or any(part in str(error) for part in _NEEDS_VALUE_TEXT):
        return CaptureError(
            f"{where} needs the value of a tensor, and an audit runs without data; replace the branch by torch.where "
            "or a plain Python argument, or capture on real CPU tensors with --live."
        )
    return CaptureError(f"{where} raised {type(error).__name__}: {text}")
