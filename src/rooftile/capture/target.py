"""From what stands on the command line to a Step: a zoo name, a function in a file or module, or a ``config.json``."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rooftile import zoo
from rooftile._names import unknown_name
from rooftile.capture.compiler import without_compiler
from rooftile.capture.failures import capture_error, user_frame
from rooftile.capture.meta_init import on_meta
from rooftile.capture.step import STEP_PHASES, Step, StepPhase
from rooftile.errors import CaptureError, RooftileError, UsageError

__all__ = ["load_target", "zoo_step"]


def load_target(
    target: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    phase: StepPhase | None = None,
    live: bool = False,
) -> Step:
    """The Step that ``target`` names.

    ``batch``, ``seq`` and ``phase`` are handed to a function that has parameters of these names; a function that has
    not keeps its own, and asking for others is a UsageError. The function is called with meta as torch's default
    device, so that the model it builds takes no memory; where it can't work so, it is called again as it stands, and
    with ``live`` only as it stands: on real tensors.
    """
    if phase is not None and phase not in STEP_PHASES:
        raise UsageError(f"phase {phase!r} is not one of {', '.join(STEP_PHASES)}.")
    for name, value in (("batch", batch), ("seq", seq)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise UsageError(f"{name} is {value!r}; give a whole number of at least 1.")
    if target in zoo.names():
        return zoo_step(target, batch=batch or 1, seq=seq, phase=phase or "train", device="cpu" if live else "meta")
    if target.endswith(".json"):
        from rooftile.capture.hf import config_step

        return without_compiler(
            lambda: config_step(Path(target), batch=batch or 1, seq=seq, phase=phase or "train", live=live)
        )
    module_name, colon, function_name = target.rpartition(":")
    if target.endswith((".py", ".py:")):
        raise UsageError(f"{target!r} names a file and no function; give {target.removesuffix(':')}:FUNCTION.")
    if Path(target, "config.json").is_file():
        raise UsageError(f"{target!r} is a folder; give {Path(target, 'config.json')}.")
    if not colon or not function_name or not module_name:
        raise unknown_name(
            "target",
            target,
            zoo.names(),
            see="or give file.py:function, package.module:function or a Hugging Face config.json",
        )
    function = _find_function(module_name, function_name)
    arguments = _accepted(function, target, {"batch": batch, "seq": seq, "phase": phase})
    step = _call(function, arguments, live)
    if not isinstance(step, Step):
        raise UsageError(
            f"{target} returned an object of type {type(step).__name__}, not a rooftile.Step; "
            "return rooftile.Step(model=..., inputs=..., loss=...)."
        )
    if phase is not None and step.phase != phase:
        step = dataclasses.replace(step, phase=phase)
    return dataclasses.replace(step, name=step.name or target, batch=step.batch or batch, seq=step.seq or seq)


def zoo_step(
    name: str, *, batch: int = 1, seq: int | None = None, phase: StepPhase = "train", device: str = "meta"
) -> Step:
    """The zoo's step as a Step."""
    sizes: dict[str, Any] = {"batch": batch, "seq": seq, "phase": phase, "device": device}
    if device == "meta":
        built = without_compiler(lambda: _on_meta(zoo.build, {"name": name, **sizes}))
    else:
        built = zoo.build(name, **sizes)
    config = dataclasses.asdict(built.config)
    return Step(built.model, built.inputs, built.loss, None, built.phase, name, built.batch, built.seq, config)


def _find_function(module_name: str, function_name: str) -> Callable[..., Any]:
    module = _load_file(Path(module_name)) if module_name.endswith(".py") else _load_module(module_name)
    function = getattr(module, function_name, None)
    if function is None:
        functions = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise unknown_name("function", function_name, functions, see=f"in {module_name}")
    if not callable(function):
        raise UsageError(f"{function_name!r} in {module_name} is of type {type(function).__name__}, not a function.")
    return function


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"there is no file {str(path)!r} (working directory {os.getcwd()}); check the path.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{str(path)!r} can't be imported as a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickles look their module up by name
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)  # as `python file.py` would: the file may import its neighbours
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise _import_error(str(path), error) from error
    finally:
        sys.path.remove(folder)
    return module


def _load_module(name: str) -> Any:
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and name.split(".")[0] == error.name.split(".")[0]:
            raise UsageError(f"there is no module {name!r} on the Python path; is it spelled right?") from error
        raise _import_error(name, error) from error
    except (Exception, SystemExit) as error:
        raise _import_error(name, error) from error
    finally:
        sys.path.remove(os.getcwd())


def _import_error(what: str, error: BaseException) -> RooftileError:
    frame = user_frame(error)
    where = f" at {frame.filename}:{frame.lineno}" if frame else ""
    if isinstance(error, SyntaxError):
        where = f" at {error.filename}:{error.lineno}"
    return CaptureError(f"importing {what} failed{where} with {type(error).__name__}: {error}")


def _accepted(function: Callable[..., Any], target: str, asked: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    taken = {}
    for name, value in asked.items():
        if value is None:
            continue
        if name in parameters or anything:
            taken[name] = value
        elif name != "phase":
            raise UsageError(
                f"--{name} {value} was given, but {target} has no parameter {name!r}; add one, or leave --{name} out."
            )
    missing = [
        n for n, p in parameters.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        and n not in taken
    ]  # fmt: skip
    if missing:
        raise UsageError(
            f"{target} needs the argument {missing[0]!r}; a target is called with batch, seq and phase only."
        )
    return taken


def _on_meta(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    with on_meta():
        return function(**arguments)


def _call(function: Callable[..., Any], arguments: dict[str, Any], live: bool) -> Any:
    if not live:
        # Whatever goes wrong on meta, the second call, on real tensors, tells the user.
        with contextlib.suppress(Exception, SystemExit):
            return without_compiler(lambda: _on_meta(function, arguments))
    try:
        return function(**arguments)
    except RooftileError:
        raise
    except (Exception, SystemExit) as error:
        raise capture_error(error) from error
