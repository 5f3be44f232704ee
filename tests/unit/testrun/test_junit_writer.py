"""JUnit XML: parsed again, and compared with the format that CI systems accept."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest

from envbuild.testrun import junit_writer, run_result
from unit.evidence.runs import documents, judged, lines, passed_run, probe

# The relevant part of the schema of Jenkins's xunit plugin: required and optional attributes, children.
SCHEMA: dict[str, tuple[set[str], set[str], set[str]]] = {
    "testsuites": (set(), {"name", "time", "tests", "failures", "errors"}, {"testsuite"}),
    "testsuite": (
        {"name", "tests", "failures", "errors"},
        {"time", "skipped", "timestamp", "hostname", "id", "package"},
        {"properties", "testcase", "system-out", "system-err"},
    ),
    "properties": (set(), set(), {"property"}),
    "property": ({"name", "value"}, set(), set()),
    "testcase": ({"name"}, {"time", "classname", "group"}, {"skipped", "failure", "system-out", "system-err"}),
    "failure": (set(), {"type", "message"}, set()),
    "skipped": (set(), {"type", "message"}, set()),
    "system-out": (set(), set(), set()),
}


def conforms(element: Element) -> None:
    required, allowed, children = SCHEMA[element.tag]
    assert required <= set(element.attrib) <= required | allowed, element.tag
    assert {child.tag for child in element} <= children
    for key in {"tests", "failures", "errors", "skipped"} & set(element.attrib):
        assert element.attrib[key].isdecimal()
    if "time" in element.attrib:
        assert element.attrib["time"].replace(".", "", 1).isdecimal()
    for child in element:
        conforms(child)


def suite(run: run_result.TestRun, **properties: str) -> Element:
    """Return the only suite in a run's document, parsed as a CI system would."""
    root = ElementTree.fromstring(junit_writer.render("sample", run, properties).encode())
    conforms(root)
    (found,) = root
    return found


def cases(found: Element) -> dict[str, Element]:
    return {case.attrib["name"]: case for case in found.iter("testcase")}


def counts(found: Element) -> tuple[int, int, int]:
    return (int(found.attrib["tests"]), int(found.attrib["failures"]), int(found.attrib["skipped"]))


def test_a_case_for_each_probe() -> None:
    failed = probe("gemm.crash", "failed", detail="the stack")
    found = suite(passed_run(probe("env.libs"), failed, probe("train.step", "skipped")), image="sha256:1")
    testcases = cases(found)
    assert list(testcases) == ["env.libs", "gemm.crash", "train.step"]
    assert counts(found) == (3, 1, 1)
    assert list(testcases["env.libs"]) == []
    assert testcases["env.libs"].attrib == {"classname": "envbuild.sample", "name": "env.libs", "time": "0.250"}
    (failure,) = testcases["gemm.crash"]
    assert (failure.tag, failure.attrib["type"]) == ("failure", "cublas-hopper-fpe")
    assert failure.attrib["message"] == "signal at a step: why"
    assert failure.text is not None
    assert failure.text.splitlines()[0] == "advisory: cublas-hopper-fpe (envbuild advisories)"
    assert failure.text.endswith("signal at a step: why\nthe stack")
    assert testcases["train.step"][0].attrib == {"message": "skipped: why"}


def test_script_output_is_the_output_of_its_case() -> None:
    found = cases(suite(passed_run(probe("own.script", output="one\x1b[2J"), probe("env.libs"))))
    (output,) = found["own.script"]
    assert (output.tag, output.text) == ("system-out", "one\ufffd[2J")
    (end,) = cases(suite(passed_run(probe("own.script", output="one", output_cut=True))))["own.script"]
    assert end.text == "(the last 8 kB)\none"
    both = cases(suite(passed_run(probe("own.script", "failed", output="one"))))
    assert [part.tag for part in both["own.script"]] == ["failure", "system-out"]


def test_a_failure_that_no_advisory_knows_has_its_signal_or_none() -> None:
    segfault = probe("env.libs", "failed", signal="SIGSEGV")
    bound = probe("gemm.exact", "failed", signal=None, failure="bound")
    testcases = cases(suite(passed_run(segfault, bound)))
    assert [testcases[name][0].attrib["type"] for name in testcases] == ["SIGSEGV", "failed"]


def test_figures_and_what_is_known_of_the_run_are_properties() -> None:
    figure = {"case": "a", "dtype": "float32", "error": 1.5, "bound": 3.0, "ratio": 0.5, "seconds": 0.1}
    found = suite(passed_run(probe("gemm.exact", figures=[figure, {**figure, "ratio": "inf"}])), image="sha256:1")
    testcases = {item.attrib["name"]: item.attrib["value"] for item in found.iter("property")}
    assert (testcases["image"], testcases["torch"], testcases["level"]) == ("sha256:1", "2.13.0", "quick")
    assert testcases["gemm.exact: a float32"] == "error 1.5, bound 3.0, ratio 0.5, seconds 0.1"
    assert "ratio inf" in testcases["gemm.exact: a float32 (2)"]


def test_a_required_probe_that_was_skipped_says_so() -> None:
    found = documents(probe("env.libs"), probe("gemm.crash", "skipped", reason="needs a GPU"))
    testcases = cases(suite(judged(lines(found), ["gemm.crash"])))
    assert testcases["gemm.crash"][0].attrib["message"] == "required, and skipped: needs a GPU"


def test_with_a_fault_of_the_run_nothing_counts_as_passed() -> None:
    found = suite(judged(lines(documents())[:-1]))
    assert counts(found) == (4, 1, 3)
    testcases = cases(found)
    assert testcases["the run itself"][0].tag == "failure"
    assert all(
        "invalid because the run failed" in testcases[name][0].attrib["message"] for name in ("env.libs", "gemm.crash")
    )


def test_a_run_of_which_nothing_came_is_one_failed_case_with_its_log() -> None:
    found = suite(judged(b"", exit_code=139, stderr="x\nSegmentation \x1b[31mfault"))
    assert counts(found)[1] == counts(found)[0] > 0
    (failure, *_) = cases(found)["the run itself"]
    assert "exit code 139" in failure.attrib["message"] or "no frame" in failure.attrib["message"]
    assert "Segmentation" in str(failure.text)


HOSTILE = (
    "\0",
    "\x1b]0;x\x07",
    "\x0b",
    "\ud800",
    "\ufffe",
    "]]>",
    "<!ENTITY x>",
    "&amp;\"'<",
    "\x85\u2028",
    "\U0001f600",
)


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_any_text_from_an_image_gives_well_formed_xml(text: str) -> None:
    figure: dict[str, Any] = {"case": text, "dtype": text, "error": text, "ratio": text}
    failed = probe("gemm.crash", "failed", reason=text, detail=text, at=text[:500], figures=[figure])
    run = passed_run(probe("env.libs", "skipped", reason=text), failed)
    run = run_result.TestRun(**{**vars(run), "errors": (text,), "log": text, "start": {"torch": text}})
    found = suite(run, image=text)
    assert "\0" not in ElementTree.tostring(found, encoding="unicode")


def test_odd_times_are_times() -> None:
    found = suite(passed_run(probe("env.libs", seconds=-1.0), probe("gemm.exact", seconds=123456.7891)))
    assert [case.attrib["time"] for case in cases(found).values()] == ["0.000", "123456.789"]
