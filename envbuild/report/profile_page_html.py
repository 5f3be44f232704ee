"""Renders a profile's page as HTML: one file without scripts or external resources. Pure, except that it reads the
template files.

All contents are shown as text: jinja escapes them, and control characters are replaced.
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

# The scale for ratios of error to tolerance, in percent of a plot's width: the positions of zero, of the first and the
# last power of ten in _DECADES, and of infinite and NaN values. Values outside that range are drawn at its ends.
_ZERO, _FIRST, _LAST, _BEYOND = 3.0, 11.0, 89.0, 96.0
_DECADES = (-6, 2)
_STEP = 0.5  # percent of the width: closer values are drawn as one mark, whose height shows their number
_FULL = 110.0  # the full width of a speed's bar, in percent of the datasheet's value
_MOST_ROWS = 300  # of a table of operations
_MOST_NAMES = 3  # of profiles that are listed next to a shared layer

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
        style=Markup(style),  # envbuild's own file, so it needs no escaping
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
    """Return (position, height) of each mark, one mark per position. The height is 1 for one value and 4 for a
    thousand."""
    found = Counter(round((scale_position(share) or 0.0) / _STEP) * _STEP for share in shares)
    return [(at, round(1 + math.log10(count), 2)) for at, count in sorted(found.items())]


def _axis() -> list[tuple[float, str, str]]:
    """Return (position, label, kind) of each label of the scale. Labels of kind `minor` are hidden on narrow
    screens."""
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
    """Format a number with three significant digits, or with all digits before the point if it is between 1,000 and
    1,000,000. Text from a record is converted to a number first."""
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
    """Return `part` in percent of `whole`, as the width of a bar."""
    return round(100 * part / whole, 2) if whole else 0.0


def speed(part: float) -> float:
    """Return the width of a bar that shows a fraction of a datasheet's value, at most 100 percent."""
    return round(min(100.0, 100 * 100 * part / _FULL), 2)


def link(cited: str) -> Markup:
    """Return a cited source as a link if it is a URL or a GitHub thread such as OWNER/NAME#1, otherwise as text."""
    thread = _THREAD.fullmatch(cited)
    address = f"https://github.com/{thread[1]}/issues/{thread[2]}" if thread else cited
    if not _ADDRESS.fullmatch(address):
        return Markup("{}").format(printable(cited))
    return Markup('<a href="{}" rel="noreferrer">{}</a>').format(address, printable(cited))


def groups(run: Run) -> Mapping[str, list[MeasuredStage]]:
    """Group the stages of the probe dist.staged by kind, in the order in which they ran."""
    found: dict[str, list[MeasuredStage]] = {}
    for stage in run.stages:
        found.setdefault(stage.kind, []).append(stage)
    return found


def speeds_by_gpu(run: Run) -> list[tuple[str, list[Speed]]]:
    """Group the speeds by GPU. The names of GPUs of the same model get the GPU's index."""
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
    """Return the probes that passed and measured no error."""
    return [probe for probe in run.by_status("passed") if not probe.shares]


def sharing_letters(layers: Layers) -> dict[tuple[str, ...], str]:
    """Assign a letter to each set of profiles that share a layer and are too many to list next to the layer."""
    found = dict.fromkeys(layer.shared for layer in layers.layers if len(layer.shared) > _MOST_NAMES)
    return {names: _letter(number) for number, names in enumerate(found)}


def _letter(number: int) -> str:
    """Return A, B, ... Z, A1, B1, ..."""
    return chr(ord("A") + number % 26) + (str(number // 26) if number >= 26 else "")


def differing_operations(rows: Iterable[ComparedOperation], name: str) -> tuple[list[Pass], int]:
    """Return the operations of one pass that are not identical, up to the page's limit, and the number of the
    others."""
    found = [one for row in rows for one in row.passes if one.name == name and one.kind != IDENTICAL]
    return found[:_MOST_ROWS], max(0, len(found) - _MOST_ROWS)


def counts_by_kind(rows: Iterable[ComparedOperation]) -> list[tuple[str, int]]:
    """Return the number of operations of each kind."""
    found = Counter[str](row.kind or "not compared" for row in rows)
    return [(kind, found[kind]) for kind in (*KINDS, "not compared") if found[kind]]
