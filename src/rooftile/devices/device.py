"""The records: a device, its peaks by (input, accumulate), its memory, its links, its measured ceilings.

Units: FLOP/s (a multiply and an add are two), bytes, bytes per second. Peaks are dense. Dtypes are named as torch
spells them without ``torch.``; ``"tf32"`` is the fp32 product in TF32 mode.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from rooftile.errors import UsageError

__all__ = ["Ceiling", "Device", "DeviceClass", "Evidence", "Link", "Peak", "Provenance"]

DeviceClass = Literal["cuda", "rocm", "tpu", "cpu"]
DEVICE_CLASSES: tuple[DeviceClass, ...] = ("cuda", "rocm", "tpu", "cpu")

#: "declared": a source states it; "assumed": a stated default.
Evidence = Literal["declared", "assumed"]

#: Share of the nominal capacity that is taken to be visible where no visible figure is known.
ASSUMED_VISIBLE = 0.985


@dataclass(frozen=True, slots=True)
class Peak:
    """Dense rate of products of ``input`` accumulated in ``accumulate``, in FLOP/s."""

    input: str
    accumulate: str
    flops_per_s: float
    provenance: str


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What a well-shaped product of ``input`` was measured to reach, in FLOP/s: the second column beside a peak."""

    input: str
    flops_per_s: float
    provenance: str


@dataclass(frozen=True, slots=True)
class Link:
    """A link between devices. Data sheets add the two ways; bytes of a collective go one way."""

    name: str
    title: str
    both_directions: float
    provenance: str

    @property
    def one_direction(self) -> float:
        """Bytes per second one way: what a collective sees."""
        return self.both_directions / 2


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where the figures come from. Peaks, ceilings and links name their own."""

    capacity: str
    visible: str
    bandwidth: str
    chip: str = ""


@dataclass(frozen=True, slots=True)
class Device:
    """One machine that a step may run on.

    ``nominal_bytes`` is what it is sold with, ``visible_bytes <= nominal_bytes`` what its driver offers a process:
    what fits is decided by the visible figure. ``memory_bandwidth`` is at the device-memory boundary.
    ``on_chip_bytes`` is the fast memory of one SM (or compute unit), ``on_chip_usable_bytes`` what a kernel may take.
    """

    name: str
    title: str
    vendor: str
    device_class: DeviceClass
    peaks: tuple[Peak, ...]
    memory_bandwidth: float
    nominal_bytes: int
    visible_bytes: int
    visible_evidence: Evidence
    provenance: Provenance
    compute_capability: float | None = None
    sm_count: int | None = None
    on_chip_bytes: int | None = None
    on_chip_usable_bytes: int | None = None
    links: tuple[Link, ...] = ()
    measured: tuple[Ceiling, ...] = ()
    logical_devices: int = 1  # devices that software sees in one package
    notes: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        """Input dtypes with a peak, each once, in the order of the data."""
        return tuple(dict.fromkeys(peak.input for peak in self.peaks))

    @property
    def vector_peak(self) -> Peak | None:
        """Roof of elementwise arithmetic: fp32 outside the matrix units; None where it is not known."""
        return self._find("float32", "float32")

    def supports(self, input_dtype: str, accumulate: str = "float32") -> bool:
        """Whether there is a peak for products of ``input_dtype`` accumulated in ``accumulate``."""
        return self._find(input_dtype, accumulate) is not None

    def peak(self, input_dtype: str, accumulate: str = "float32", tf32: bool = False) -> Peak:
        """Dense peak for products of ``input_dtype`` accumulated in ``accumulate``.

        ``tf32`` allows TF32 for float32 inputs; a device without it multiplies in fp32, as torch does there.
        Raises UsageError, which names what the device has, where there is no such peak.
        """
        if tf32 and input_dtype == "float32":
            allowed = self._find("tf32", accumulate)
            if allowed is not None:
                return allowed
        found = self._find(input_dtype, accumulate)
        if found is None:
            have = ", ".join(f"{peak.input} ({peak.accumulate} accumulation)" for peak in self.peaks)
            raise UsageError(
                f"{self.name} has no peak for {input_dtype} products with {accumulate} accumulation; "
                f"choose a precision that it has ({have}) or another device"
            )
        return found

    def ceiling(self, input_dtype: str) -> Ceiling | None:
        """The measured ceiling for ``input_dtype``, None where there is none."""
        return next((ceiling for ceiling in self.measured if ceiling.input == input_dtype), None)

    def one_of_package(self) -> Device:
        """What one process sees: a package of several devices is divided by their number, any other is itself."""
        count = self.logical_devices
        if count == 1:
            return self
        return replace(
            self,
            peaks=tuple(replace(peak, flops_per_s=peak.flops_per_s / count) for peak in self.peaks),
            measured=tuple(replace(ceiling, flops_per_s=ceiling.flops_per_s / count) for ceiling in self.measured),
            memory_bandwidth=self.memory_bandwidth / count,
            nominal_bytes=self.nominal_bytes // count,
            visible_bytes=self.visible_bytes // count,
            sm_count=None if self.sm_count is None else self.sm_count // count,
            logical_devices=1,
            notes=(f"figures of one of the package's {count} devices, which is what a process sees",),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dictionaries, ready for JSON."""
        return asdict(self)

    def _find(self, input_dtype: str, accumulate: str) -> Peak | None:
        return next((p for p in self.peaks if (p.input, p.accumulate) == (input_dtype, accumulate)), None)
