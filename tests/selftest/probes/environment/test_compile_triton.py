"""compile.triton in images without a compiler, and its summary of long compiler errors."""

import ast
import contextlib
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from envbuild.selftest.harness.job_document import JobDocument
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.harness.probe_outcome_and_figures import ProbeFailure, Skip
from envbuild.selftest.probes.environment import compile_triton
from selftest.seeds.training import BF16, PTXAS


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compile_triton.shutil, "which", lambda name: None)


@pytest.mark.usefixtures("bare")
def test_an_image_for_the_cpu_need_not_have_a_compiler() -> None:
    with pytest.raises(Skip, match=r"the image has no g\+\+ \(apt: \[g\+\+\]\)"):
        compile_triton.compile_triton(Context(JobDocument("0" * 32)))


@pytest.mark.usefixtures("bare")
def test_an_image_for_gpus_must_have_one() -> None:
    with pytest.raises(ProbeFailure, match=r"the image has no g\+\+ and no gcc: Triton and torch.compile need it"):
        compile_triton.compile_triton(Context(JobDocument("0" * 32, device="cuda")))


@pytest.mark.parametrize(
    "words",
    [
        "Dynamo is not supported on Python 3.12+",
        "Python 3.11+ not yet supported for torch.compile",
        "torch.compile is not supported on Python 3.14+",
    ],
)
def test_a_torch_that_cannot_compile_on_this_python_is_a_skip(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    def refuse(function: object) -> object:
        raise RuntimeError(words)

    monkeypatch.setattr(torch, "compile", refuse)
    monkeypatch.setattr(compile_triton.shutil, "which", lambda name: name)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", *compile_triton._VARIABLES):
        monkeypatch.setenv(name, "")
    with pytest.raises(Skip, match=r"Python 3\.1"):
        compile_triton.compile_triton(Context(JobDocument("0" * 32)))


def test_files_built_by_triton_are_not_counted_for_torch_compile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "scale.cubin").touch()
    monkeypatch.setattr(compile_triton.tempfile, "TemporaryDirectory", lambda: contextlib.nullcontext(str(tmp_path)))
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(compile_triton.shutil, "which", lambda name: name)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", *compile_triton._VARIABLES):
        monkeypatch.setenv(name, "")
    context = Context(JobDocument("0" * 32))
    compile_triton.compile_triton(context)
    (fault,) = context.faults
    assert fault.reason.startswith("torch.compile has compiled nothing")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (PTXAS, "ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'"),
        (BF16, "ptxas /tmp/x.ptx, line 63; error   : Feature '.bf16' requires .target sm_80 or higher"),
        ("C++ compile error\n\nOutput:\n/tmp/a.cpp:1: fatal error: omp.h: No such file", "/tmp/a.cpp:1: fatal error"),
        (
            "CalledProcessError\n/tmp/main.c:5:10: fatal error: Python.h: No such file or directory\n",
            "/tmp/main.c:5:10",
        ),
        ("backend failed", "backend failed"),
        ("", "no message"),
    ],
)
def test_the_line_with_the_error_is_found(text: str, line: str) -> None:
    assert compile_triton.error_line(RuntimeError(text)).startswith(f"RuntimeError: {line}")


def test_the_kernel_is_python_and_is_loaded_from_a_file(tmp_path: Path) -> None:
    """Whether the kernel runs can be tested only with Triton."""
    ast.parse(compile_triton.KERNEL)
    pytest.importorskip("triton")
    assert hasattr(compile_triton.load_kernel(tmp_path), "scale")
