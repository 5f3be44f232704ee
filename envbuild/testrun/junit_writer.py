"""Renders a judged run as JUnit XML for CI systems, with a test case for each probe. Pure.

The output uses only elements from the schema of Jenkins's xunit plugin, which other tools also read. Therefore
measurements are properties of the test suite, not of a test case. A fault of the run itself, which makes all results
invalid, is a separate failed test case.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from envbuild.testrun.run_result import RunFailure, TestRun

# Characters that XML 1.0 does not allow, even escaped (section 2.2, Char).
_ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(name: str, run: TestRun, properties: Mapping[str, str]) -> str:
    """Return the XML document. `properties`: more data about the run, such as the image's id."""
    root = Element("testsuites")
    suite = SubElement(root, "testsuite", name=_clean(f"envbuild {name}"), time=_seconds(run.seconds))
    held = SubElement(suite, "properties")
    for key, value in {**properties, **run.subject, **dict(_figures(run))}.items():
        SubElement(held, "property", name=_clean(key), value=_clean(value))
    failures = {failure.probe: failure for failure in run.failures()}
    for result in run.results:
        case = _case(suite, name, result.probe, result.seconds)
        if result.status == "failed":
            _failure(case, failures[result.probe], result.detail)
        elif result.status == "skipped":
            required = "required, and " if result.probe in run.skipped_required else ""
            SubElement(case, "skipped", message=_clean(f"{required}skipped: {result.reason}"))
        elif run.errors:
            SubElement(case, "skipped", message=_clean(f"invalid because the run failed: {run.errors[0]}"))
        if result.output:
            cut = "(the last 8 kB)\n" if result.output_cut else ""
            SubElement(case, "system-out").text = _clean(cut + result.output)
    for error in run.errors:
        _failure(_case(suite, name, "the run itself", 0.0), RunFailure(None, None, None, error), run.log)
    counts = {
        "tests": len(suite.findall("testcase")),
        "failures": len(suite.findall("*/failure")),
        "errors": 0,
        "skipped": len(suite.findall("*/skipped")),
    }
    suite.attrib.update({key: str(count) for key, count in counts.items()})
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _case(suite: Element, name: str, probe: str, seconds: float) -> Element:
    return SubElement(suite, "testcase", classname=_clean(f"envbuild.{name}"), name=probe, time=_seconds(seconds))


def _failure(case: Element, failure: RunFailure, detail: str | None) -> None:
    kind = failure.advisory or failure.signal or "failed"
    found = SubElement(case, "failure", message=_clean(failure.detail), type=_clean(kind))
    advisory = f"advisory: {failure.advisory} (envbuild advisories)\n" if failure.advisory else ""
    found.text = _clean(f"{advisory}{failure.detail}\n{detail or ''}".strip())


def _figures(run: TestRun) -> Iterator[tuple[str, str]]:
    """Yield (name, values) of each measurement. The name has the probe, the case and the dtype, and a number if the
    measurement is repeated."""
    seen: dict[str, int] = {}
    for result in run.results:
        for figure in result.figures:
            key = f"{result.probe}: {figure.get('case')} {figure.get('dtype')}"
            seen[key] = seen.get(key, 0) + 1
            values = ", ".join(
                f"{part} {figure[part]}"
                for part in ("error", "bound", "beyond_rounding", "ratio", "seconds")
                if part in figure
            )
            yield key if seen[key] == 1 else f"{key} ({seen[key]})", values


def _seconds(value: float) -> str:
    return f"{max(0.0, value):.3f}"


def _clean(text: str) -> str:
    return _ILLEGAL.sub("\N{REPLACEMENT CHARACTER}", text)
