"""Broken images are refused, each with the reason that names its defect."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from .broken import Workshop
from .support import Proved, Result, handle, inspect

pytestmark = pytest.mark.engine


@pytest.fixture
def refused(quick: Proved, broken: Workshop) -> Any:
    """Return a function that tests the image with a fault, with the named probes or, without names, with all of the
    level. The function checks that the test is refused, moves no tag and writes no evidence, and returns the result."""

    def run(fault: str, *probes: str) -> Result:
        before, statements = handle(quick.verified), quick.project.statements()
        done = quick.project.run("test", quick.name, "--image", broken.image(fault), *only(probes), "--json")
        assert done.code == 5, f"{done.stdout}\n{done.stderr}"
        assert handle(quick.verified) == before == inspect(quick.tag)["Id"]
        assert quick.project.statements() == statements
        return done

    return run


def only(probes: Iterable[str]) -> list[str]:
    return [word for probe in probes for word in ("--probe", probe)]


def failures(done: Result) -> dict[str, Mapping[str, Any]]:
    return {str(item["probe"]): item for item in done.document["selftest"]["failures"]}


def test_a_division_by_zero(refused: Any) -> None:
    """Only probes that must fail run, and two that do not call the changed function."""
    found = failures(
        refused("divides", "env.libs", "gemm.crash", "gemm.exact", "gemm.cases", "attention.math", "conv.cases")
    )
    assert (found["gemm.crash"]["signal"], found["gemm.crash"]["advisory"]) == ("SIGFPE", "cublas-hopper-fpe")
    assert "died of SIGFPE" in found["gemm.crash"]["detail"]
    assert "2x1024x18432" in found["gemm.crash"]["detail"]  # at the first published shape
    assert {"env.libs", "gemm.crash", "gemm.exact", "gemm.cases"} <= set(found)
    assert not [name for name in found if name.startswith(("attention.math", "conv"))]  # the rest ran on


def test_a_segmentation_fault(refused: Any) -> None:
    found = failures(refused("segfaults", "gemm.crash"))
    assert (found["gemm.crash"]["signal"], found["gemm.crash"]["advisory"]) == ("SIGSEGV", None)
    assert "died of SIGSEGV" in found["gemm.crash"]["detail"]


@pytest.fixture(scope="module")
def hung(quick: Proved, broken: Workshop) -> Result:
    name = quick.name.replace("quick", "hang")
    return strict(quick, broken, name, "hangs", ["env.libs", "gemm.exact"], timeout=30)


def strict(quick: Proved, broken: Workshop, name: str, fault: str, probes: Iterable[str], **selftest: Any) -> Result:
    """Run the self-test of a profile with stricter limits and the same lock."""
    project = quick.project
    project.write(name, extends=quick.name, selftest=selftest)
    project.lock(name).write_bytes(project.lock(quick.name).read_bytes())
    return project.run("test", name, "--image", broken.image(fault), *only(probes), "--json")


def test_a_hang_ends_with_the_time_of_the_selftest(hung: Result) -> None:
    assert hung.code == 5
    assert hung.seconds < 150
    of_the_run = [item["detail"] for item in hung.document["selftest"]["failures"] if item["probe"] is None]
    # plus the time that a busy machine takes to stop it
    assert any(re.fullmatch(r"the self-test was stopped after [34][0-9] s", text) for text in of_the_run)
    assert hung.document["selftest"]["passed"] == 0


def test_a_hang_names_the_probe(hung: Result) -> None:
    first = hung.document["selftest"]["failures"][0]
    assert (first["probe"], first["detail"][:5]) == ("gemm.exact", "hang:"), first
    assert "gemm.exact" in hung.error["message"]


def test_no_memory_left(quick: Proved, broken: Workshop) -> None:
    done = strict(quick, broken, quick.name.replace("quick", "memory"), "hogs", ["gemm.exact"], memory_gb=1)
    found = failures(done)
    assert done.code == 5
    assert found["gemm.exact"]["signal"] == "SIGKILL"
    assert "out of memory" in found["gemm.exact"]["detail"]


def test_nan_from_attention(refused: Any) -> None:
    attention = {"attention.math", "attention.flash", "attention.cases"}
    found = failures(refused("nan", *attention, "gemm.crash", "gemm.accumulator", "gemm.fp8", "conv.cases"))
    assert attention <= set(found), found
    assert not [name for name in found if name.startswith(("gemm", "conv"))]
    assert "nonfinite" in found["attention.math"]["detail"]


def test_one_wrong_element(refused: Any) -> None:
    found = failures(refused("element", "gemm.exact", "gemm.cases", "attention.math", "conv.cases"))
    assert {"gemm.exact", "gemm.cases"} <= set(found), found
    assert not [name for name in found if name.startswith(("attention.math", "conv"))]
    assert "mismatch" in found["gemm.exact"]["detail"] and "bmm" in found["gemm.exact"]["detail"]


def test_another_torch_than_the_locked(refused: Any) -> None:
    quickest = ("init.alloc", "transfer", "gemm.crash", "gemm.fp8", "tf32.mode", "attention.math", "norm.cases")
    found = failures(refused("version", "env.libs", *quickest))
    assert set(found) == {"env.libs"}
    assert "version" in found["env.libs"]["detail"]
    assert "torch is 2.12.1+cpu, but 2.13.0+cpu is locked" in found["env.libs"]["detail"]


def test_forged_frames(refused: Any) -> None:
    done = refused("forged")
    assert done.document["selftest"]["passed"] == 0
    assert "belongs to a different run" in done.document["selftest"]["failures"][0]["detail"]
