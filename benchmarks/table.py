"""Writes the values that benchmarks/build.py measured: as JSON, as a Markdown page with the targets, and as a plot."""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import machine

TITLES = {
    "hpccm": "HPCCM, pip in two steps", "pip": "pip, one layer, cache mount", "uv": "uv, one layer, cache mount",
    "envbuild": "envbuild build",
}  # fmt: skip
BUILDS = ("cold", "wheels here", "pin, wheel to fetch", "pin, wheel here", "second GPU", "nothing changed")
_ALONE = "the archive in memory"
DIRECT = ("registry, cold", "registry, pin changed", "layout, wheels here", "rebuild")
LOADED = ("engine's load, whole image", "engine's load, pin changed")
CONTAINERD = ("containerd's store, cold", "containerd's store, registry, cold")

_ABOUT = """
Machine: {machine}. Docker {engine}, a separate engine for the benchmark. Load average (1 min) {before:.1f} before and
{after:.1f} after, partly from the benchmark itself. {runs} runs of each tool, but one of tools slower than a minute;
{minutes:.0f} min in all. {wheels} wheels, {gb} GB, from an index on the machine; base {root} GB unpacked. {speeds}
cuBLAS {cublas}. Made by `make bench`.
"""
_AGAIN = """
Measured again in a run of {minutes:.0f} min: {cases}. Machine: {machine}. Load average {before:.1f} before and
{after:.1f} after. {runs} runs.
"""
_TIMED = """
The time is from the start of the command until the engine has the image. For envbuild it is the time of the whole
process, including Python's start, without the audit, which the other tools do not have. Locks and requirements are made
before. "Cold" means that the engine's data is removed, and for envbuild also the wheels, the digests of layers and uv's
cache. All tools take the root file system from this machine: the others pull it, compressed, from a registry; envbuild
has it compressed in its cache. The disk is synced before each case.
"""
_DIRECT = """
A registry on this machine. "Cold": without wheels, layers and image; then with one changed pin, whose wheel must be
fetched. The other tools build in the engine, and the engine pushes: `buildx build --push` does the same unless the
engine uses containerd's store. envbuild writes the layers that the registry lacks directly to it, without an engine.
Layout: `export oci` to a folder, with wheels on the host and without known layers. Rebuild: all layers are written
again and their digests compared, as by `verify --rebuild`.
"""
_TAKEN = """
The columns are: the peak of anonymous memory of the engine and the client; the bytes that any process wrote to the
disk; the size of the image; its layers; what the engine stores, including its cache; NVIDIA's libraries that are in a
second layer too, and their size; and the bytes that the registry stores for the image, and in addition after a pin
changed.
"""
_MINIMUM = """
Required work, each part measured alone. An engine with a graph driver writes the archive of an image to a temporary
folder, and unpacks it after the last byte: here the archive is complete in memory. The layers of a changed pin must be
written before the engine can unpack them; here they are written one after the other, and the bytes are discarded, with
Python's start included. `export oci` writes the same bytes as a rebuild. The last column is the time divided by that of
uv's build, as in the goal.
"""
_SHARED = """
One registry stores the images of profiles that differ in the GPU model and have one of three versions of cuBLAS.
"""
_STEPS = """
These are the steps that `build --json` reports. Downloads are part of the step `build`. The audit is not part of the
times above, and Python's start is not part of any step.
"""
_STREAM = """
The seconds are the bytes divided by the speed at which one stream writes and flushes a new file. They are not a lower
bound: several streams at once write faster, and writes that are not flushed need not wait for the disk. If writing a
file in place is much faster than writing a new file, the machine's memory limits the speed, not its disk: a virtual
machine that returns free memory gets each page of a new file from its host.
"""
_PLAIN = """
uv installs the wheels from the host into a folder on the host; then each installed file is hashed, as the files of
every layer are. To build an image, envbuild also writes the files as layers, and the engine unpacks the layers.
"""


class Figures:
    """Reads values from the cases of a document. If a value was not measured, `all` returns an empty list, and `median`
    and `ratio` return None."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.cases = document["cases"]

    def all(self, case: str, way: str, figure: str = "seconds") -> list[float]:
        return list(self.cases.get(case, {}).get(way, {}).get(figure, ()))

    def median(self, case: str, way: str, figure: str = "seconds") -> float | None:
        values = self.all(case, way, figure)
        return statistics.median(values) if values else None

    def ratio(self, one: tuple[str, ...], other: tuple[str, ...]) -> float | None:
        a, b = self.median(*one), self.median(*other)
        return a / b if a is not None and b else None


def write(document: Mapping[str, Any]) -> None:
    """Write benchmarks/results/build.{json,svg,md}."""
    (machine.RESULTS / "build.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (machine.RESULTS / "build.svg").write_text(plot(document), encoding="utf-8")
    machine.write("build", list(markdown(document)))


def _spread(values: list[float], digits: int = 1) -> str:
    if not values:
        return "-"
    least, middle, most = (f"{value:.{digits}f}" for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({least} - {most})" if len(values) > 1 else middle


def _gb(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e9:.2f}"


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def targets(document: Mapping[str, Any]) -> Iterator[tuple[str, float | None, float, str]]:
    """Yield (name, measured value, allowed maximum, unit)."""
    f = Figures(document)
    ours, uv, cold = "envbuild", "uv", ("cold", "uv")
    for case, most in (("registry, cold", 0.25), ("registry, pin changed", 0.06)):
        yield f"{case}, over uv's", f.ratio((case, ours), (case, uv)), most, ""
    containerd = "containerd's store, registry, cold"
    yield (
        f"registry, cold, over uv's with {containerd.partition(',')[0]}",
        f.ratio(("registry, cold", ours), (containerd, uv)),
        0.25,
        "",
    )
    yield "layout, wheels here, over uv's cold", f.ratio(("layout, wheels here", ours), cold), 0.30, ""
    yield "cold, over uv's", f.ratio(("cold", ours), cold), 0.90, ""
    yield "wheels here, over uv's cold", f.ratio(("wheels here", ours), cold), 0.75, ""
    for case, most in (("pin, wheel to fetch", 0.35), ("pin, wheel here", 0.30)):
        yield f"{case}, over uv's", f.ratio((case, ours), (case, uv)), most, ""
    yield "rebuild", f.median("rebuild", ours), 20, " s"
    yield "nothing changed, make", f.median("nothing changed", "make"), 0.5, " s"
    for name in sorted(f.cases.get("commands", {})):
        if name.startswith(("lock bench", "show bench")):
            yield name, f.median("commands", name), 0.35, " s"
    yield (
        "lock --upgrade, over its calls of uv",
        f.ratio(("lock", "with --upgrade"), ("lock", "its calls of uv")),
        1.3,
        "",
    )
    for count, most in (("4", 1.3), ("16", 1.8)):
        one, all_ = (("profiles on one torch", number, "stored") for number in ("1", count))
        yield f"{count} profiles on one torch, bytes over one", f.ratio(all_, one), most, ""
    link = ("100 Mbit/s", ours)
    yield "fetch at 100 Mbit/s, over the link's own time", f.ratio(link, (*link, "link")), 1.1, ""
    for command, seconds in (("--help", 0.15), ("audit", 15.0)):
        yield command, f.median("commands", command), seconds, " s"
    frame = f.ratio(("self-test", "cpu, standard"), ("self-test", "cpu, standard", "probes"))
    # If several probes ran at a time, their times add up to more than the self-test took, and show nothing.
    yield "self-test, what is not the probes' own work", 1 - 1 / frame if frame and frame > 1 else None, 0.15, ""


def minimum(f: Figures) -> list[list[str]]:
    """Return a table row for each goal: the time of the required work."""
    whole, pin = LOADED
    load, unpack = f.median(whole, _ALONE), f.median(pin, _ALONE, "unpack")
    layers, rebuild = f.median("changed layers", "envbuild"), f.median("rebuild", "envbuild")
    both = layers + unpack if layers is not None and unpack is not None else None
    rows = (
        ("cold; wheels here", "the engine's load of the whole image", load, "cold"),
        ("pin, wheel to fetch", "the changed layers, then the engine's unpacking", both, "pin, wheel to fetch"),
        ("pin, wheel here", "the changed layers, then the engine's unpacking", both, "pin, wheel here"),
        ("layout, wheels here", "a rebuild", rebuild, "cold"),
    )
    return [
        [goal, work, f"{found:.1f}", "-" if uv is None else f"{found / uv:.2f}"]
        for goal, work, found, case in rows
        if found is not None
        for uv in (f.median(case, "uv"),)
    ]


def markdown(document: Mapping[str, Any]) -> Iterator[str]:
    f = Figures(document)
    yield "# Time and space for building an image"
    yield from _paragraph(
        _ABOUT.format(
            **document, before=document["load"][0], after=document["load"][1], gb=_gb(document["fetched"]),
            root=_gb(document["base"]), cublas=", then ".join(document["pins"]), speeds=_speeds(document),
        )
    )  # fmt: skip
    for cases, run in document.get("again", {}).items():
        yield from _paragraph(_AGAIN.format(cases=cases, **run, before=run["load"][0], after=run["load"][1]))
    if "cut_short" in document:
        yield from _paragraph("The benchmark ended early, so cases are missing below or have fewer runs.")
    yield from _paragraph(_TIMED)
    cases = [case for case in BUILDS if case in f.cases]
    yield from _table(
        "Seconds, median (least - most)",
        ["way", *cases],
        [[title, *(_spread(f.all(case, way)) for case in cases)] for way, title in TITLES.items()],
    )
    yield from ("", "![seconds by way](build.svg)")
    direct = [case for case in (*DIRECT, *CONTAINERD) if case in f.cases]
    pushing = [way for way in TITLES if any(f.all(case, way) for case in direct)]
    yield from _table(
        "To a registry, to a folder, and with containerd's store: seconds, median (least - most)",
        ["way", *direct],
        [[TITLES[way], *(_spread(f.all(case, way)) for case in direct)] for way in pushing],
        _DIRECT,
    )
    yield from _table(
        "Minimum times on this machine", ["goal", "required work", "s", "over uv's"], minimum(f), _MINIMUM
    )
    yield from _table(
        "Pull and unpack, with an empty engine",
        ["image", "s"],
        [[TITLES.get(way, way), _spread(f.all("pull", way))] for way in f.cases.get("pull", {})],
    )
    yield from _table(
        "Profiles on one torch",
        ["profiles", "GB in the registry"],
        [
            [way, _gb(f.median("profiles on one torch", way, "stored"))]
            for way in f.cases.get("profiles on one torch", {})
        ],
        _SHARED,
    )
    yield from _table(
        "Memory and disk",
        ["way", "peak MB, cold", "GB written, cold", "image GB", "layers", "engine GB", "libraries twice", "GB of them",
         "registry GB", "more after a pin"],
        [_sizes(f, way, title) for way, title in TITLES.items()],
        _TAKEN,
    )  # fmt: skip
    steps = list(dict.fromkeys(key for case in cases for key in f.cases[case].get("envbuild", {}) if "step " in key))
    yield from _table(
        "Where envbuild's seconds go",
        ["step", *cases],
        [[step.removeprefix("step "), *(_spread(f.all(case, "envbuild", step)) for case in cases)] for step in steps],
        _STEPS,
    )
    rows = [
        [f"{case}: {way}" if case != "commands" else way, _spread(f.all(case, way), 2)]
        for case in ("commands", "lock", "nothing changed", "self-test", "100 Mbit/s")
        for way in f.cases.get(case, {})
    ]
    yield from _table("Commands", ["what", "s"], rows)
    yield from _table("Targets", ["what", "measured", "at most", ""], [_judged(*row) for row in targets(document)])
    yield from streamed(document)
    yield from others(f)


def _speeds(document: Mapping[str, Any]) -> str:
    """Return a sentence about the disk speeds. Documents of earlier versions do not have all of these speeds."""
    flushed, new_file, again = (f"{document.get(key, 0) / 1e6:.0f}" for key in ("disk", "new_file", "memory"))
    new = f"{new_file} MB/s ({flushed} with its flush)" if "new_file" in document else f"{flushed} MB/s with its flush"
    return f"A new file took {new}{f', in place again {again} MB/s' if 'memory' in document else ''}."


def _judged(what: str, measured: float | None, most: float, unit: str) -> list[str]:
    if measured is None:
        return [what, "not measured", f"{most:g}{unit}", ""]
    return [what, f"{measured:.2f}{unit}", f"{most:g}{unit}", "met" if measured <= most else "missed"]


def _sizes(f: Figures, way: str, title: str) -> list[str]:
    memory = f.median("cold", way, "memory")
    layers, twice = (f.median("size", way, figure) for figure in ("layers", "twice"))
    return [
        title, _whole(None if memory is None else memory / 1e6), _gb(f.median("cold", way, "written")),
        _gb(f.median("size", way, "image")), _whole(layers), _gb(f.median("size", way, "engine")), _whole(twice),
        _gb(f.median("size", way, "twice bytes")),
        # later runs find the blobs of the first one in the registry
        *(_gb(max(f.all(case, way, "stored"), default=None)) for case in DIRECT[:2]),
    ]  # fmt: skip


def streamed(document: Mapping[str, Any]) -> Iterator[str]:
    """Report how long one stream of the bytes that each tool writes would take, at the speed of writing a new file in
    the same run."""
    f, speed = Figures(document), document["disk"]
    fetched, unpacked = document["fetched"], f.median("size", "envbuild", "image")
    if unpacked is not None:
        rows = {
            "the image alone": unpacked,
            "envbuild, cold: wheels in its store, layers in the engine's temporary folder, and unpacked": (
                fetched + 2 * unpacked
            ),
            "envbuild, wheels here: layers in the engine's temporary folder, and unpacked": 2 * unpacked,
            "uv: unpacked into its cache, and copied from there": 2 * unpacked,
        }
        yield from _table(
            "Bytes written, and the time of one stream for them",
            ["what", "GB", "s"],
            [[what, _gb(size), f"{size / speed:.1f}"] for what, size in rows.items()],
            _STREAM,
        )


def others(f: Figures) -> Iterator[str]:
    """Yield the lower bound: installations without an image."""
    if "no image" in f.cases:
        yield from _table(
            "No image at all",
            ["what", "unpacked by uv, s", "hashed, s"],
            [
                [way, _spread(f.all("no image", way)), _spread(f.all("no image", way, "hashed"))]
                for way in f.cases["no image"]
            ],
            _PLAIN,
        )


def _table(title: str, head: list[str], rows: list[list[str]], text: str = "") -> Iterator[str]:
    yield from ("", f"## {title}")
    yield from _paragraph(text) if text else ()
    yield from ("", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}")
    yield from (f"| {' | '.join(row)} |" for row in rows)


def _paragraph(text: str) -> Iterator[str]:
    yield from ("", *textwrap.wrap(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False))


_COLOURS = {"hpccm": "#b0b7c3", "pip": "#8d99ae", "uv": "#457b9d", "envbuild": "#e07a1f"}


def plot(document: Mapping[str, Any]) -> str:
    """Plot median seconds as bars, one group for each case."""
    f = Figures(document)
    rows = [(case, way, f.median(case, way)) for case in BUILDS for way in TITLES]
    shown = [(case, way, value) for case, way, value in rows if value is not None]
    longest = max((value for _, _, value in shown), default=1.0)
    parts, y, last = [], 10, ""
    for case, way, value in shown:
        y += 14 if case != last else 0
        if case != last:
            parts.append(f'<text x="10" y="{y + 12}" font-weight="bold">{case}</text>')
            y += 20
        last = case
        width = max(1.0, 420 * value / longest)
        parts.append(f'<text x="200" y="{y + 12}" text-anchor="end">{TITLES[way]}</text>')
        parts.append(f'<rect x="210" y="{y}" width="{width:.1f}" height="15" fill="{_COLOURS[way]}"/>')
        parts.append(f'<text x="{216 + width:.1f}" y="{y + 12}">{value:.1f} s</text>')
        y += 19
    size = f'width="720" height="{y + 16}" font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"
