"""What a measurement stands on: the processor, its memory, and the versions of everything that ran. Needs no torch."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

__all__ = ["Cache", "Hardware", "Versions", "hardware", "versions"]

#: Instruction sets that decide which code path can run.
_ISA = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_bf16", "amx_int8", "amx_fp16", "asimd", "asimdhp", "bf16", "sve", "sve2", "sme",
)  # fmt: skip

_CPU = Path("/sys/devices/system/cpu/cpu0/cache")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True, slots=True)
class Cache:
    """One cache that data goes through; ``shared_by`` processors use the same one."""

    level: int
    nbytes: int
    shared_by: int


@dataclass(frozen=True, slots=True)
class Hardware:
    """The machine as this process sees it; an empty text or 0 is unknown.

    ``memory_gib`` is in steps of a tenth: what the system keeps for itself differs from boot to boot. ``huge_pages`` is
    the setting of transparent huge pages.
    """

    cpu: str
    cores: int
    logical_cpus: int
    isa: tuple[str, ...]
    caches: tuple[Cache, ...]
    memory_gib: float
    huge_pages: str
    system: str

    def cache_bytes(self, level: int) -> int:
        """Bytes of the data cache of ``level``; 0 where it is unknown."""
        return next((cache.nbytes for cache in self.caches if cache.level == level), 0)


@dataclass(frozen=True, slots=True)
class Versions:
    """Releases of what ran. ``native_core`` is the C++ core's instruction set and the digest of its file."""

    python: str
    torch: str
    rooftile: str
    native_core: str


def hardware() -> Hardware:
    """The machine that this process runs on."""
    return _hardware(_allowed_cpus())


@functools.cache
def _hardware(allowed: frozenset[int]) -> Hardware:
    described = _processors(_text(Path("/proc/cpuinfo")))
    mine = [one for number, one in enumerate(described) if number in allowed] or described
    first = mine[0] if mine else {}
    flags = set((first.get("flags") or first.get("Features") or "").split())
    places = {(one.get("physical id", "0"), one["core id"]) for one in mine if "core id" in one}
    return Hardware(
        cpu=first.get("model name") or platform.processor() or platform.machine(),
        cores=len(places) or len(allowed),
        logical_cpus=len(allowed),
        isa=tuple(name for name in _ISA if name in flags),
        caches=_caches(),
        memory_gib=_memory_gib(),
        huge_pages=_text(_HUGE_PAGES).partition("[")[2].partition("]")[0],
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
    )


def _allowed_cpus() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _processors(cpuinfo: str) -> list[dict[str, str]]:
    found = []
    for block in cpuinfo.split("\n\n"):
        pairs = (line.partition(":") for line in block.splitlines())
        fields = {key.strip(): value.strip() for key, _, value in pairs}
        if "processor" in fields:
            found.append(fields)
    return found


def _caches() -> tuple[Cache, ...]:
    found = []
    for index in sorted(_CPU.glob("index*")):
        size = _text(index / "size")
        if _text(index / "type") == "Instruction" or not size[:-1].isdigit():
            continue
        nbytes = int(size[:-1]) * {"K": 1 << 10, "M": 1 << 20}[size[-1]]
        found.append(Cache(int(_text(index / "level")), nbytes, _listed(_text(index / "shared_cpu_list"))))
    return tuple(found)


def _listed(cpus: str) -> int:
    """How many processors ``0-3,8`` names."""
    ends = (part.partition("-") for part in cpus.split(",") if part)
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends)


def _memory_gib() -> float:
    try:
        nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0.0
    return round(nbytes / 2**30, 1)


def versions() -> Versions:
    """What runs in this process."""
    return Versions(platform.python_version(), _release("torch"), _release("rooftile"), _native_core())


def _release(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "run from its source"


@functools.cache
def _native_core() -> str:
    from rooftile.formats import native  # imports torch

    state = native.status()
    if not state.available:
        return "none"
    digest = hashlib.sha256(Path(state.path).read_bytes()).hexdigest()
    return f"{state.isa}, sha256 {digest[:12]}"
