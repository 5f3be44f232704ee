"""One run of every seeded fault, for the tests and for the table of benchmarks/faults.py."""

import base64
import hashlib
import shutil
import subprocess
from pathlib import Path

from .reading import Frame, job, outcomes, run

# `divide` by zero makes the processor raise SIGFPE, as in cuBLAS's heuristic.
_LIBRARY = "int one(void) { return 1; }\nint divide(int a, int b) { return a / b; }\n"
_PATIENCE = {"gemm.exact:hangs": 2}  # seed -> time limit in seconds
_MEMORY_MB = 6000  # limit for a leak


def library(folder: Path) -> dict[str, str]:
    """Compile a library into a site-packages folder, as a file of the distribution torch_extra, whose RECORD has the
    hash of a different file. Return the environment variables that name the folder and the library. Raises
    FileNotFoundError if gcc is missing.
    """
    compiler = shutil.which("gcc")
    if compiler is None:
        raise FileNotFoundError("needs gcc")
    site = folder / "lib" / "site-packages"
    built = site / "torch_extra" / "libtorch_extra.so"
    record = site / "torch_extra-1.0.dist-info" / "RECORD"
    built.parent.mkdir(parents=True)
    record.parent.mkdir()
    source = record.parent / "one.c"
    source.write_text(_LIBRARY)
    subprocess.run([compiler, "-O0", "-shared", "-fPIC", "-o", built, source], check=True)
    value = base64.urlsafe_b64encode(hashlib.sha256(b"other").digest()).rstrip(b"=").decode()
    record.write_text(f"torch_extra/libtorch_extra.so,sha256={value},5\n")
    (record.parent / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_extra\nVersion: 1.0\n")
    return {"ENVBUILD_TEST_SITE": str(site), "ENVBUILD_TEST_LIBRARY": str(built)}


def kernels(folder: Path) -> dict[str, Frame]:
    """Return seed -> the self-test's result, for every wrong (and right) kernel of seeds."""
    document = job(threads=2, timeouts=_PATIENCE, memory_mb=_MEMORY_MB)
    frames, status, _ = run("seeds", document, folder / "kernels", **library(folder))
    assert status == 5
    return outcomes(frames)


def operations(folder: Path) -> dict[str, Frame]:
    """Return seed -> the self-test's result, for every wrong (and right) operation of seeds.operations."""
    frames, status, _ = run("seeds.operations", job(threads=2, memory_mb=_MEMORY_MB), folder / "operations")
    assert status == 5
    return outcomes(frames)


def apexes(folder: Path) -> dict[str, Frame]:
    """Return seed -> the result of norm.apex or optim.apex, for every stand-in for apex of standins.py."""
    frames, status, _ = run("standins", job(threads=2), folder / "apexes")
    assert status == 5
    return outcomes(frames)


def ranks(folder: Path) -> dict[str, Frame]:
    """Return seed -> the result of dist.staged, for every seed of lame.py, whose ranks fail."""
    frames, status, _ = run("lame", job(threads=2), folder / "ranks")
    assert status == 5
    return outcomes(frames)
