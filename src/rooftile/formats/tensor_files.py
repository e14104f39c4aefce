"""Tensors in files, read in pieces: .safetensors, .npy and .pt (``weights_only``), never a whole tensor in memory.

safetensors needs no package: eight bytes, a JSON header and plain data, and reading it here keeps memory bounded.
"""

from __future__ import annotations

import ctypes
import json
import math
import pickle
import re
import sys
import tarfile
import tokenize
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rooftile.errors import UsageError

__all__ = ["StoredTensor", "open_tensors"]

PIECE_BYTES = 1 << 25  # of one read: large against the cost of a call, small against any memory
_AGAIN = "copy or download it again"
_HEADER_LIMIT = 100_000_000  # bytes, of the safetensors format itself


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file: ``pieces()`` yields it in parts, each valid until the next is asked for.

    ``unread`` says why there are no pieces, and is empty where there are.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    pieces: Callable[[], Iterator[torch.Tensor]]
    unread: str = ""


def open_tensors(path: str | Path) -> tuple[StoredTensor, ...]:
    """The tensors of a file, by its suffix; the data is read when ``pieces()`` is walked.

    Raises:
        UsageError: no such file, an unknown suffix, or contents that are not what the suffix says.
    """
    path = Path(path)
    readers = {".safetensors": _safetensors, ".npy": _npy, ".pt": _torch_file, ".pth": _torch_file, ".bin": _torch_file}
    if path.suffix not in readers:
        raise UsageError(f"{path} has suffix {path.suffix!r}; give a {', '.join(readers)} file")
    if not path.is_file():
        raise UsageError(f"there is no file {path}; give the path of a {path.suffix} file")
    try:
        if not path.stat().st_size:
            raise UsageError(f"{path} is empty; {_AGAIN}")
        return readers[path.suffix](path)
    except OSError as error:
        raise UsageError(
            f"{path} can't be read: {error.strerror or error}; check the path and its permissions"
        ) from None


def _nothing() -> Iterator[torch.Tensor]:
    return iter(())


def _read_pieces(
    path: Path, start: int, nbytes: int, make: Callable[[memoryview], torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Pieces share one buffer: each is valid until the next is asked for."""
    buffer = memoryview(bytearray(min(PIECE_BYTES, nbytes)))
    with open(path, "rb", buffering=0) as stream:
        stream.seek(start)
        while nbytes:
            piece = buffer[: min(PIECE_BYTES, nbytes)]
            _fill(stream, piece, path)
            nbytes -= piece.nbytes
            yield make(piece)


def _fill(stream: FileIO, view: memoryview, path: Path) -> None:
    while view.nbytes:
        count = stream.readinto(view)
        if not count:
            raise UsageError(f"{path} ends in the middle of a tensor; {_AGAIN}")
        view = view[count:]


# --- safetensors ---

_SAFETENSORS: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
_OTHER_WIDTHS = {
    "I8": 8,
    "U8": 8,
    "BOOL": 8,
    "I16": 16,
    "U16": 16,
    "I32": 32,
    "U32": 32,
    "I64": 64,
    "U64": 64,
    "C64": 64,
}


def _safetensors(path: Path) -> tuple[StoredTensor, ...]:
    size = path.stat().st_size
    with open(path, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(_HEADER_LIMIT, size - 8):
            raise UsageError(f"{path} is no safetensors file: its header would be {length} bytes of {size}; {_AGAIN}")
        try:
            header = json.loads(stream.read(length))
        except (ValueError, RecursionError):
            raise UsageError(f"{path} is no safetensors file: its header is not JSON; {_AGAIN}") from None
    if not isinstance(header, dict):
        raise UsageError(f"{path} is no safetensors file: its header is not a JSON object; {_AGAIN}")
    entries = ((name, entry) for name, entry in header.items() if name != "__metadata__")
    return tuple(_safetensors_entry(path, name, entry, 8 + length, size) for name, entry in entries)


def _safetensors_entry(path: Path, name: str, entry: Any, base: int, size: int) -> StoredTensor:
    try:
        kind, shape, (first, last) = (
            str(entry["dtype"]),
            tuple(map(int, entry["shape"])),
            map(int, entry["data_offsets"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        raise UsageError(
            f"{path}: the header's entry for {name!r} lacks dtype, shape or data_offsets; {_AGAIN}"
        ) from None
    if not 0 <= first <= last <= size - base or min(shape, default=0) < 0:
        raise UsageError(f"{path}: tensor {name!r} lies at bytes {first}..{last}, outside the file; {_AGAIN}")
    dtype = _SAFETENSORS.get(kind)
    width = _OTHER_WIDTHS.get(kind) if dtype is None else dtype.itemsize * 8
    if width is not None and math.prod(shape) * width != (last - first) * 8:
        raise UsageError(
            f"{path}: tensor {name!r} of shape {shape} and dtype {kind} has {last - first} bytes; {_AGAIN}"
        )
    if dtype is None:
        reason = "no floating dtype" if width is not None else f"dtype {kind} is not read"
        return StoredTensor(name, kind.lower(), shape, last - first, _nothing, reason)

    def pieces(
        dtype: torch.dtype = dtype, start: int = base + first, nbytes: int = last - first
    ) -> Iterator[torch.Tensor]:
        return _read_pieces(path, start, nbytes, lambda buffer: torch.frombuffer(buffer, dtype=torch.uint8).view(dtype))

    return StoredTensor(name, str(dtype).removeprefix("torch."), shape, last - first, pieces)


# --- npy ---


def _npy(path: Path) -> tuple[StoredTensor, ...]:
    with open(path, "rb") as stream:
        try:
            version = np.lib.format.read_magic(stream)
            read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
            shape, _, dtype = read(stream)
        except (ValueError, KeyError, TypeError, SyntaxError, tokenize.TokenError):
            # numpy's own sentence may advise allow_pickle, which would run what the file holds
            raise UsageError(
                f"{path} is no .npy file of plain numbers: its header is damaged; {_AGAIN}, or save it with numpy.save"
            ) from None
        start = stream.tell()
    nbytes = math.prod(shape) * dtype.itemsize
    if dtype.hasobject:
        raise UsageError(f"{path} holds Python objects, which are never unpickled here; save plain numbers")
    if min(shape, default=0) < 0 or path.stat().st_size - start < nbytes:
        raise UsageError(
            f"{path} has {path.stat().st_size - start} bytes of data and its shape {shape} needs {nbytes}; {_AGAIN}"
        )
    if dtype.kind != "f" or dtype.itemsize > 8:
        return (StoredTensor(path.stem, str(dtype), shape, nbytes, _nothing, "no floating dtype that torch has"),)

    def make(buffer: memoryview) -> torch.Tensor:
        array = np.frombuffer(buffer, dtype=dtype)
        return torch.from_numpy(array if dtype.isnative else array.astype(dtype.newbyteorder("=")))

    def pieces() -> Iterator[torch.Tensor]:
        return _read_pieces(path, start, nbytes, make)  # the order of elements does not matter, nor does Fortran's

    return (StoredTensor(path.stem, dtype.newbyteorder("=").name, shape, nbytes, pieces),)


# --- torch.save ---


def _torch_file(path: Path) -> tuple[StoredTensor, ...]:
    with open(path, "rb") as stream:
        start = stream.read(2)
    is_zip = zipfile.is_zipfile(path)
    if start == b"PK" and not is_zip:
        raise UsageError(f"{path} is damaged, the end of its archive is missing; {_AGAIN}")
    if not is_zip and start[:1] != b"\x80" and not tarfile.is_tarfile(path):
        raise UsageError(f"{path} is no torch checkpoint; give a file that torch.save wrote")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about the file's pickle; what matters is said below
            # mmap leaves the data in the file; only the zip format of torch >= 1.6 has it.
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        raise UsageError(f"{path} {_refused(str(error))}") from None
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
        if "TorchScript" in str(error):
            raise UsageError(f"{path} is a TorchScript archive, which is not read; save its state_dict") from None
        raise UsageError(
            f"{path} can't be loaded by torch ({_first_sentence(error)}); {_AGAIN}, or save it again with torch.save"
        ) from None
    return tuple(_torch_entry(path, name, tensor) for name, tensor in _walk(content, ""))


def _refused(message: str) -> str:
    """Why torch's reader of plain tensors refused a file, without its advice to run whatever the file holds."""
    if "nested" in message:
        return "holds nested jagged tensors, which are not read; save their values and offsets instead"
    found = re.search(r"GLOBAL ([\w.]+)", message)
    if found:
        return f"holds more than tensors ({found[1]}), and loading that could run any code; save a state_dict"
    return "is no torch checkpoint of plain tensors; save a state_dict with torch.save"


def _first_sentence(error: Exception) -> str:
    """Of torch's message; only the error's name where that would be torch's advice to load without care."""
    first = str(error).strip().partition("\n")[0].partition(". ")[0]
    return first if first and "weights_only" not in first else type(error).__name__


def _walk(content: Any, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of nested dicts, lists and tuples, with its dotted path."""
    if isinstance(content, torch.Tensor):
        yield prefix or "tensor", content.detach()
    elif isinstance(content, dict):
        for key, value in content.items():
            yield from _walk(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(content, list | tuple):
        for index, value in enumerate(content):
            yield from _walk(value, f"{prefix}.{index}" if prefix else str(index))


def _torch_entry(path: Path, name: str, tensor: torch.Tensor) -> StoredTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_nested:  # has no shape to ask for
        return StoredTensor(name, dtype, (), 0, _nothing, "a nested tensor is not read")
    shape = tuple(tensor.shape)
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        return StoredTensor(name, dtype, shape, 0, _nothing, _unread_layout(tensor))
    nbytes = tensor.numel() * tensor.element_size()
    if tensor.dtype not in _SAFETENSORS.values():
        return StoredTensor(name, dtype, shape, nbytes, _nothing, "no floating dtype that is read")

    def pieces() -> Iterator[torch.Tensor]:
        if not tensor.is_contiguous():
            yield tensor  # counted in bounded pieces by exponent_histogram itself
            return
        mapped = zipfile.is_zipfile(path) and _is_mapped(tensor, path)
        for piece in tensor.reshape(-1).split(PIECE_BYTES // tensor.element_size()):
            yield piece
            if mapped:
                _release(piece)

    return StoredTensor(name, dtype, shape, nbytes, pieces)


def _unread_layout(tensor: torch.Tensor) -> str:
    if tensor.device.type == "meta":
        return "on the meta device, without data"
    return "quantized, which is not read" if tensor.is_quantized else f"layout {tensor.layout} is not read"


_MADV_DONTNEED = 4
_PAGE = 4096


def _is_mapped(tensor: torch.Tensor, path: Path) -> bool:
    """Whether all of ``tensor`` is a clean mapping of ``path`` (Linux): its pages can be dropped and read again."""
    maps = Path("/proc/self/maps")
    if not maps.is_file() or _swapped(path):
        return False
    first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
    for line in maps.read_text().splitlines():
        span, _, rest = line.partition(" ")
        start, _, end = span.partition("-")
        if int(start, 16) <= first and last <= int(end, 16):
            return rest.endswith(str(path.resolve()))
    return False


def _swapped(path: Path) -> bool:
    """Whether torch exchanged the bytes of a file from a machine of the other byte order: those pages are not clean."""
    with zipfile.ZipFile(path) as archive:
        orders = [archive.read(name).decode() for name in archive.namelist() if name.endswith("/byteorder")]
    return any(order != sys.byteorder for order in orders)


def _release(piece: torch.Tensor) -> None:
    """Let go of the whole pages under a mapped ``piece``; otherwise the file stays resident, page by page."""
    start = -(-piece.data_ptr() // _PAGE) * _PAGE
    end = (piece.data_ptr() + piece.numel() * piece.element_size()) // _PAGE * _PAGE
    if end > start:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)
