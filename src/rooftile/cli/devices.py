"""``rooftile devices``: what each machine can do, and where the figures come from."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator

import typer

from rooftile import devices as catalog
from rooftile.cli.options import DeviceFileOption, DeviceName, JsonOption
from rooftile.cli.output import STDOUT, check_writable, next_command, write_json
from rooftile.cli.tables import WIDTH, gigabytes, number, table
from rooftile.devices import Device
from rooftile.errors import UsageError

__all__ = ["register"]

_verb = typer.Typer(rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.add_typer(_verb, name="devices", short_help="List devices, or show one.")


@_verb.callback(invoke_without_command=True)
def devices(ctx: typer.Context, json: JsonOption = None, device_file: DeviceFileOption = None) -> None:
    """List the devices that an audit can be asked for, with their dense peaks, bandwidth and memory."""
    if ctx.invoked_subcommand is not None:
        if json is not None or device_file is not None:
            raise UsageError("--json and --device-file belong after the name: rooftile devices show NAME --json PATH")
        return
    check_writable(json)
    listed = [catalog.load(name, device_file) for name in catalog.names(device_file)]
    if json != STDOUT:
        typer.echo(_listing(listed))
        again = f"rooftile devices show {listed[0].name}{_own(device_file)}"
        typer.echo(next_command(again, "sources, links, measured ceilings"))
    if json is not None:
        write_json(json, {"schema": "rooftile.devices/1", "devices": [device.to_dict() for device in listed]})


@_verb.command()
def show(name: DeviceName, json: JsonOption = None, device_file: DeviceFileOption = None) -> None:
    """Show one device: every figure with its source."""
    check_writable(json)
    device = catalog.load(name, device_file)
    if json != STDOUT:
        typer.echo("\n".join(_details(device)))
        again = f"rooftile audit llama-3.1-8b --device {device.name}{_own(device_file)}"
        typer.echo(next_command(again, "read a step on it"))
    if json is not None:
        write_json(json, {"schema": "rooftile.device/1", "device": device.to_dict(), "ridge": _ridges(device)})


def _own(device_file: str | None) -> str:
    """The option that finds a device of one's own again."""
    return f" --device-file {shlex.quote(device_file)}" if device_file else ""


def _listing(listed: list[Device]) -> str:
    rows = []
    for device in (each.one_of_package() for each in listed):
        half = _tera(device, "bfloat16", "float16")
        ridge = None if half is None else half * 1e12 / device.memory_bandwidth
        rows.append(
            (
                device.name,
                number(half),
                number(_tera(device, "float8_e4m3fn", "float8_e4m3fnuz")),
                number(_tera(device, "tf32")),
                number(_tera(device, "float32")),
                number(device.memory_bandwidth / 1e9, 0),
                f"{ridge:,.1f}" if ridge else "-",
                f"{device.visible_bytes / 2**30:.2f}{'' if device.visible_evidence == 'declared' else '*'}".ljust(7),
            )
        )
    header = ("device", "16-bit", "fp8", "tf32", "fp32", "GB/s", "ridge", "GiB    ")
    return (
        "What a process sees: dense TFLOP/s, fp32 accumulation; ridge in FLOP/B (16-bit); GiB (* assumed)\n\n"
        + table(header, rows)
        + "\n"
    )


def _tera(device: Device, *inputs: str) -> float | None:
    """Peak in TFLOP/s of the first of ``inputs`` that the device has."""
    return next((device.peak(dtype).flops_per_s / 1e12 for dtype in inputs if device.supports(dtype)), None)


def _ridges(device: Device) -> dict[str, float]:
    from rooftile.roofline import ridges

    return ridges(device)


def _details(device: Device) -> Iterator[str]:
    capability = f", compute capability {device.compute_capability}" if device.compute_capability else ""
    yield f"{device.name}: {device.title} ({device.device_class}{capability})\n"
    yield _peak_table(device) + "\n"
    yield from _figure("bandwidth", f"{number(device.memory_bandwidth / 1e9)} GB/s", device.provenance.bandwidth)
    yield from _figure("nominal", gigabytes(device.nominal_bytes), device.provenance.capacity)
    visible = f"{gigabytes(device.visible_bytes)} {device.visible_evidence}"
    yield from _figure("visible", visible, device.provenance.visible)
    chip = []
    if device.sm_count is not None:
        chip.append(f"{device.sm_count} SMs")
    if device.on_chip_bytes is not None:
        usable = f" ({device.on_chip_usable_bytes // 1024} usable)" if device.on_chip_usable_bytes else ""
        chip.append(f"{device.on_chip_bytes // 1024} KiB each{usable}")
    if chip:
        yield from _figure("chip", ", ".join(chip), device.provenance.chip)
    for link in device.links:
        yield from _figure("link", f"{link.name}, {number(link.one_direction / 1e9)} GB/s each way", link.provenance)
    for note in device.notes:
        yield from textwrap.wrap(f"note: {note}", WIDTH)
    yield ""


def _peak_table(device: Device) -> str:
    rows = []
    for peak in device.peaks:
        ceiling = device.ceiling(peak.input) if peak.accumulate == "float32" else None
        measured = ceiling.flops_per_s / 1e12 if ceiling else None
        share = f"{ceiling.flops_per_s / peak.flops_per_s:.1%}" if ceiling else "-"
        ridge = peak.flops_per_s / device.memory_bandwidth
        tera = number(peak.flops_per_s / 1e12)
        rows.append((peak.input, peak.accumulate, tera, f"{ridge:,.1f}", number(measured), share))
    header = ("input", "accumulate", "dense TFLOP/s", "ridge FLOP/B", "measured", "share")
    told = dict.fromkeys(peak.provenance for peak in device.peaks)
    told |= dict.fromkeys(ceiling.provenance for ceiling in device.measured)
    sources = "\n".join(line for text in told for line in textwrap.wrap(f"source: {text}", WIDTH))
    return f"{table(header, rows, left=2)}\n{sources}"


def _figure(label: str, value: str, provenance: str) -> Iterator[str]:
    """``label value   source``, the source on lines of its own where it does not fit."""
    line = f"{label:<10} {value:<41} {provenance}"
    if len(line) <= WIDTH:
        yield line
        return
    yield f"{label:<10} {value}"
    yield from textwrap.wrap(provenance, WIDTH, initial_indent=" " * 11, subsequent_indent=" " * 11)
