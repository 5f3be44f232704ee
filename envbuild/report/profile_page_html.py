"""Renders the page of a report as HTML: one file, no script, no external resources. Pure, except for reading the
template.

All contents are shown as text: jinja escapes them, and characters that would control the display are replaced.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import jinja2
from markupsafe import Markup

from envbuild.report.fingerprint_comparison import BREAKAGE, IDENTICAL, KINDS, PRECISION, ComparedOperation, Pass
from envbuild.report.profile_page_contents import Layers, Page
from envbuild.report.run_measurement_types import MeasuredProbe, MeasuredStage, Run, Speed
from envbuild.util.errors import printable

_TEMPLATES = Path(__file__).parent / "templates"

# The common scale for ratios of error to tolerance, in percent of a plot's width: zero, the decades in the range below,
# and values that are not numbers. Values outside the range are drawn at its ends.
_ZERO, _FIRST, _LAST, _BEYOND = 3.0, 11.0, 89.0, 96.0
_DECADES = (-6, 2)
_STEP = 0.5  # percent: values that are closer together are drawn as one mark, whose height shows their number
_FULL = 110.0  # percent of a datasheet's value that the full width of a speed's bar represents
_MOST_ROWS = 300  # limit for a table of operations
_MOST_NAMES = 3  # limit for the profiles listed next to each shared layer

_THREAD = re.compile(r"([A-Za-z0-9-]+/[A-Za-z0-9._-]+)#([0-9]+)")
_ADDRESS = re.compile(r"https://[A-Za-z0-9.-]+(/[^\s\"'<>]*)?")


def html(page: Page) -> str:
    """Render the complete document."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        number=three_digits,
        size=readable_size,
        percent=percent,
        place=scale_position,
        link=link,
        marks=marks,
        bar=bar,
        speed=speed,
    )
    style = (_TEMPLATES / "report.css").read_text(encoding="utf-8")
    return environment.get_template("report.html.j2").render(
        page=page,
        style=Markup(style),  # our own file
        style_hash=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
        axis=_axis(),
        groups=groups,
        skipped=skipped_by_reason,
        speeds_by_gpu=speeds_by_gpu,
        bare=bare,
        sharing=sharing_letters,
        differing=differing_operations,
        counts=counts_by_kind,
        bad=(PRECISION, BREAKAGE),
    )


def scale_position(share: float | None) -> float | None:
    """Return the position of an error ratio on the scale, in percent of its width; None for None."""
    if share is None:
        return None
    if not math.isfinite(share):
        return _BEYOND
    if share <= 0:
        return _ZERO
    first, last = _DECADES
    part = (math.log10(share) - first) / (last - first)
    return round(_FIRST + (_LAST - _FIRST) * min(1.0, max(0.0, part)), 2)


def marks(shares: Iterable[float]) -> list[tuple[float, float]]:
    """Return the position and height of each mark, one mark per position: height 1 for one value, 4 for a thousand."""
    found = Counter(round((scale_position(share) or 0.0) / _STEP) * _STEP for share in shares)
    return [(at, round(1 + math.log10(count), 2)) for at, count in sorted(found.items())]


def _axis() -> list[tuple[float, str, str]]:
    """Return (position, label, kind) of the scale's labels; `minor` labels are hidden if there is little space."""
    first, last = _DECADES
    powers = [
        (
            scale_position(10.0**power) or 0.0,
            "bound" if power == 0 else f"10{_raised(power)}",
            "bound" if power == 0 else "minor",
        )
        for power in range(first, last + 1, 2)
    ]
    return [(_ZERO, "0", "end"), *powers, (_BEYOND, "∞", "end")]


def _raised(power: int) -> str:
    return str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def three_digits(value: float | str | None) -> str:
    """Format a number with three digits, thousands with all digits; text from a record is read as a number."""
    try:
        found = float(value) if value not in (None, "") else None
    except ValueError:
        return str(value)
    if found is None:
        return "–"
    if math.isnan(found):
        return "no number"
    if math.isinf(found):
        return "infinite"
    return f"{found:,.0f}" if 1e3 <= abs(found) < 1e6 else f"{found:.3g}"


def readable_size(count: int | None) -> str:
    if count is None:
        return "not known"
    return f"{count / 1e6:,.0f} MB" if count >= 1e6 else f"{count / 1e3:,.0f} kB" if count else "0"


def percent(part: float | None) -> str:
    return "–" if part is None else f"{part:.0%}"


def bar(part: float, whole: float) -> float:
    """Return the width of a bar in percent of the largest."""
    return round(100 * part / whole, 2) if whole else 0.0


def speed(part: float) -> float:
    """Return the width that represents a fraction of a datasheet's value; larger values fill the bar."""
    return round(min(100.0, 100 * 100 * part / _FULL), 2)


def link(cited: str) -> Markup:
    """Return a source as a link if it is an address or a GitHub thread; else as text."""
    thread = _THREAD.fullmatch(cited)
    address = f"https://github.com/{thread[1]}/issues/{thread[2]}" if thread else cited
    if not _ADDRESS.fullmatch(address):
        return Markup("{}").format(printable(cited))
    return Markup('<a href="{}" rel="noreferrer">{}</a>').format(address, printable(cited))


def groups(run: Run) -> Mapping[str, list[MeasuredStage]]:
    """Group the stages of dist.staged by kind, in the order in which they ran."""
    found: dict[str, list[MeasuredStage]] = {}
    for stage in run.stages:
        found.setdefault(stage.kind, []).append(stage)
    return found


def speeds_by_gpu(run: Run) -> list[tuple[str, list[Speed]]]:
    """Group the speeds by GPU; GPUs with the same name are numbered by their index."""
    found: dict[tuple[str, int], list[Speed]] = {}
    for speed in run.speeds:
        found.setdefault((speed.gpu, speed.index), []).append(speed)
    names = Counter(gpu for gpu, _ in found)
    return [(f"{gpu} ({run.unit} {index})" if names[gpu] > 1 else gpu, found[gpu, index]) for gpu, index in found]


def skipped_by_reason(run: Run) -> Mapping[str, list[MeasuredProbe]]:
    """Group the skipped probes by reason."""
    found: dict[str, list[MeasuredProbe]] = {}
    for probe in run.by_status("skipped"):
        found.setdefault(probe.reason or "no reason given", []).append(probe)
    return found


def bare(run: Run) -> list[MeasuredProbe]:
    """Return the probes that passed and have no errors to show."""
    return [probe for probe in run.by_status("passed") if not probe.shares]


def sharing_letters(layers: Layers) -> dict[tuple[str, ...], str]:
    """Assign a letter to each set of profiles that is too long to be listed with every layer that it shares."""
    found = dict.fromkeys(layer.shared for layer in layers.layers if len(layer.shared) > _MOST_NAMES)
    return {names: _letter(number) for number, names in enumerate(found)}


def _letter(number: int) -> str:
    """Return A, B, ... Z, A1, B1, ..."""
    return chr(ord("A") + number % 26) + (str(number // 26) if number >= 26 else "")


def differing_operations(rows: Iterable[ComparedOperation], name: str) -> tuple[list[Pass], int]:
    """Return the operations of one pass that are not identical, and the number of those beyond the page's limit."""
    found = [one for row in rows for one in row.passes if one.name == name and one.kind != IDENTICAL]
    return found[:_MOST_ROWS], max(0, len(found) - _MOST_ROWS)


def counts_by_kind(rows: Iterable[ComparedOperation]) -> list[tuple[str, int]]:
    """Return the number of operations of each kind."""
    found = Counter[str](row.kind or "not compared" for row in rows)
    return [(kind, found[kind]) for kind in (*KINDS, "not compared") if found[kind]]
