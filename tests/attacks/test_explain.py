"""Hostile logs, given to `explain`."""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from envbuild.explain import cause_ranking, log_reader_and_search
from envbuild.explain.cause_ranking import MissingFact, ScoredCause
from envbuild.explain.cause_scoring import CauseLines
from envbuild.facts import database, log_signatures
from envbuild.facts.advisory_model import Advisory

LIMIT = 512 << 20
"""Bytes of memory that `explain` stays within, whatever the log."""
# VmHWM, not getrusage(): on Linux the ru_maxrss of a child begins at the value of the process that started it.
_MEASURED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
from click.testing import CliRunner
from envbuild.cli.entry import cli
done = CliRunner().invoke(cli, ["explain", *sys.argv[1:]])
print(done.stdout)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
sys.exit(done.exit_code)
"""

FIND_LOADED = MissingFact("which cublas is loaded", "envbuild audit --here")


def explained(*names: object) -> tuple[str, int]:
    """Run `explain` in a separate process, which must end. Return its output and its peak memory in bytes."""
    command = [sys.executable, "-c", _MEASURED, *map(str, names)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    output, _, peak = done.stdout.rstrip().rpartition("\n")
    return output, int(peak) << 10


# ---- memory ----


@pytest.mark.attack("author of a log", "32 MB of newlines in 31 KB of gzip", "lines are bounded; the cut is reported")
def test_a_bomb_of_newlines_stays_within_the_memory(tmp_path: Path) -> None:
    file = tmp_path / "train.log"
    file.write_bytes(gzip.compress(b"EADDRINUSE\n" + b"\n" * (32 << 20) + b"CUDA out of memory\n"))
    output, peak = explained(file)
    assert peak < LIMIT
    assert f"{file}: too large: its beginning (" in output and "were read, not the middle (33" in output
    assert "Cause: port-in-use" in output and "Cause: gpu-memory" in output, "its beginning and its end are read"


@pytest.mark.attack("author of a log", "one line of 64 MB, packed", "it is read in pieces; the cut is reported")
def test_an_endless_line_stays_within_the_memory(tmp_path: Path) -> None:
    file = tmp_path / "train.log"
    file.write_bytes(gzip.compress(b"x" * (64 << 20) + b" EADDRINUSE"))
    output, peak = explained(file)
    assert peak < LIMIT
    assert "too large: its beginning (0 lines, 8.4 MB) and end (0 lines, 25.2 MB) were read" in output
    assert "Cause: port-in-use" in output


@pytest.mark.attack("author of a log", "32 MB of carriage returns", "they count as lines")
def test_a_bomb_of_carriage_returns_stays_within_the_memory(tmp_path: Path) -> None:
    file = tmp_path / "train.log"
    file.write_bytes(gzip.compress(b"x\r" * (16 << 20) + b"\nEADDRINUSE\n"))
    output, peak = explained(file)
    assert peak < LIMIT and "too large" in output and "Cause: port-in-use" in output


@pytest.mark.legitimate(
    "user", "a log of 8 MB: versions first, the crash last", "read whole; same diagnosis as a short one"
)
def test_a_long_log_keeps_its_diagnosis(tmp_path: Path) -> None:
    file = tmp_path / "train.log"
    steps = b"".join(b"step %d loss %.4f grad_norm 1.2345\n" % (step, 1 / (step + 1)) for step in range(200_000))
    begin, end = b"PyTorch version: 2.3.1+cu121\nGPU 0: NVIDIA H20\n", b"Floating point exception (core dumped)\n"
    file.write_bytes(begin + steps + end)
    output, peak = explained(file)
    assert peak < LIMIT and "too large" not in output
    assert "cublas-hopper-fpe" in output and "200003: Floating point exception" in output


# ---- a folder ----


@pytest.mark.attack(
    "author of a folder of logs",
    "FIFOs, a link to /dev/zero, a link to its own folder",
    "skipped; the skip is reported",
)
def test_a_file_that_is_not_regular_is_skipped_and_reported(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("EADDRINUSE\n", encoding="utf-8")
    for number in range(5):
        os.mkfifo(tmp_path / f"rank{number}")
    (tmp_path / "zero.log").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "gone.log").symlink_to(tmp_path / "nowhere")
    output, _ = explained(tmp_path)
    assert "Cause: port-in-use" in output and "Log: 1 line;" in output
    assert f"{tmp_path}: 5 FIFOs skipped: rank0, rank1, rank2, ..." in output
    for skipped in (
        "1 device skipped: zero.log",
        "1 link to a folder skipped: loop",
        "1 broken link skipped: gone.log",
    ):
        assert f"{tmp_path}: {skipped}" in output


@pytest.mark.attack("author of a folder of logs", "1,100 folders within each other", "read to the innermost one")
def test_deeply_nested_folders_are_read(tmp_path: Path) -> None:
    folder = tmp_path
    for _ in range(1100):
        folder /= "a"
        folder.mkdir()
    (folder / "train.log").write_text("EADDRINUSE\n", encoding="utf-8")
    try:
        output, _ = explained(tmp_path)
    finally:  # pytest's own cleaning ends with a RecursionError at this depth
        subprocess.run(["rm", "-r", str(tmp_path / "a")], check=True)
    assert "Cause: port-in-use" in output


@pytest.mark.attack("author of a folder of logs", "a folder of FIFOs alone", "an error that names them")
def test_a_folder_of_fifos_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank0")
    command = [sys.executable, "-m", "envbuild", "explain", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3 and "1 FIFO skipped: rank0" in done.stderr


@pytest.mark.legitimate("user", "a FIFO that the command line names, as <(...) does", "read to its end")
def test_a_fifo_that_is_named_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=("EADDRINUSE\n",), daemon=True)
    writer.start()
    output, _ = explained(tmp_path / "pipe")
    assert "Cause: port-in-use" in output


@pytest.mark.legitimate("user", "a folder with a link to a log elsewhere", "the log is read")
def test_a_link_to_a_regular_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.log").write_text("EADDRINUSE\n", encoding="utf-8")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "train.log").symlink_to(tmp_path / "elsewhere.log")
    output, _ = explained(tmp_path / "run")
    assert "Cause: port-in-use" in output and "skipped" not in output


# ---- versions that are only mentioned ----

H20 = "NVIDIA H20, torch 2.3.1+cu121\npython train.py\nFloating point exception (core dumped)\n"


def diagnosis(text: str) -> cause_ranking.Explanation:
    return cause_ranking.explain(log_reader_and_search.Log(text.encode()))


MENTIONS = (
    "I saw that pip install nvidia-cublas-cu12==12.4.5.8 may help",
    "$ pip install -U nvidia-cudnn-cu12==9.1.0.70 nvidia-cublas-cu12==12.4.5.8",
    "vllm 0.5.0 requires nvidia-cublas-cu12==12.4.5.8",
    "nvidia-cublas-cu12==12.4.5.8 is required",
    "solved by nvidia-cublas-cu12==12.4.5.8",
    "upgrade to nvidia-cublas-cu12==12.4.5.8",
    "fixed in cublas 12.4.5.8",
    "Collecting nvidia-cublas-cu12==12.4.5.8",
    "Found existing installation: nvidia-cublas-cu12 12.4.5.8",
    "  nvidia-cublas-cu12 12.4.5.8 or newer is recommended",
    "建议安装 nvidia-cublas-cu12==12.4.5.8",
    "升级到 torch 2.6.0 可以解决",
    "upgrade to torch==2.6.0 and it is gone",
    "requirements.txt:\ntorch==2.6.0\nnvidia-cublas-cu12==12.4.5.8",
    "torch==2.6.0\nnumpy>=1.26\nnvidia-cublas-cu12==12.4.5.8",
)


@pytest.mark.attack("author of a report", "a version that is only recommended, required or downloaded", "not evidence")
@pytest.mark.parametrize("mention", MENTIONS)
@pytest.mark.parametrize("first", [False, True], ids=["after", "before"])
def test_a_mentioned_version_does_not_rule_out_the_cause(mention: str, first: bool) -> None:
    found = diagnosis(f"{mention}\n\n{H20}" if first else f"{H20}\n{mention}\n")
    assert [(match.id, match.standing) for match in found.matches] == [("cublas-hopper-fpe", "holds")]
    assert not found.ruled_out and found.read.situation.libraries["cublas"] == "12.1.3.1"


@pytest.mark.attack(
    "author of a report", "a fixed version, in words that no rule knows", "the cause is named, less sure"
)
def test_an_unknown_way_to_mention_a_version_does_not_rule_out_the_cause() -> None:
    found = diagnosis(f"{H20}\nlast week somewhere: nvidia-cublas-cu12==12.4.5.8, cublas 12.4.5.8\n")
    assert [(match.id, match.standing) for match in found.matches] == [("cublas-hopper-fpe", "fits")]
    assert found.read.candidates["cublas"] == ("12.4.5.8", "12.1.3.1")


INSTALLED = (
    "nvidia-cublas-cu12==12.4.5.8",
    "[pip3] nvidia-cublas-cu12==12.4.5.8",
    "nvidia-cublas-cu12        12.4.5.8                 pypi_0    pypi",
    "Successfully installed nvidia-cublas-cu12-12.4.5.8 nvidia-cudnn-cu12-8.9.2.26",
    "torch 2.3.1 requires nvidia-cublas-cu12==12.1.3.1, but you have nvidia-cublas-cu12 12.4.5.8 (incompatible).",
    "Requirement already satisfied: nvidia-cublas-cu12==12.4.5.8 in ./lib/python3.11/site-packages (12.4.5.8)",
    " + nvidia-cublas-cu12==12.4.5.8",
)


@pytest.mark.legitimate(
    "user", "a fixed cuBLAS is installed, the loaded one is unknown", "possible; says what to check"
)
@pytest.mark.parametrize("line", INSTALLED)
def test_an_installed_version_leaves_the_cause_possible(line: str) -> None:
    found = diagnosis(f"{H20}\n{line}\n")
    assert found.read.situation.libraries["cublas"] == "12.4.5.8"
    assert (found.matches, found.ruled_out) == ((), ())
    match = found.possible[0]
    assert (match.id, match.find_out) == ("cublas-hopper-fpe", (FIND_LOADED,))
    assert match.confidence < cause_ranking.NAMED


LOADED = (
    "  cublas    12.4.5.8  loaded  /venv/nvidia/cublas/lib/libcublas.so.12",
    "7f0a00000000-7f0a10000000 r-xp 00000000 08:01 42  /usr/local/cuda/lib64/libcublasLt.so.12.4.5.8",
    "#2 0x00007f0a in cublasLtMatmulAlgoGetHeuristic () from /usr/local/cuda/lib64/libcublasLt.so.12.4.5.8",
    "/usr/local/cuda/lib64/libcublasLt.so.12.4.5.8(+0x1234) [0x7f0a]",
)


@pytest.mark.legitimate("user", "the log shows that a fixed cuBLAS is loaded", "the cause is ruled out")
@pytest.mark.parametrize("line", LOADED)
def test_a_loaded_version_rules_out_the_cause(line: str) -> None:
    found = diagnosis(f"{H20}\n{line}\n")
    assert "cublas-hopper-fpe" not in {match.id for match in (*found.matches, *found.possible)}
    assert [ruled.advisory.id for ruled in found.ruled_out] == ["cublas-hopper-fpe"]


@pytest.mark.legitimate(
    "user", "pip and conda have installed different versions", "named, less sure; says what to check"
)
def test_conda_together_with_pip_leaves_both_versions_possible() -> None:
    listing = (
        "libcublas                 12.4.5.8                      0    nvidia\n"
        "nvidia-cublas-cu12        12.1.3.1                 pypi_0    pypi\n"
    )
    found = diagnosis(H20 + listing)
    assert found.read.candidates == {"cublas": ("12.1.3.1", "12.4.5.8")}
    (match,) = found.matches
    assert match.standing == "fits" and match.find_out == (FIND_LOADED,)


# ---- changes that nothing in the log asks for ----


@pytest.mark.attack("author of a log", "an undefined symbol, and no version of torch", "no change of torch or CUDA")
def test_no_other_torch_is_proposed_where_torch_is_unknown() -> None:
    line = "OSError: /v/libcublas.so.12: undefined symbol: cublasLtGetEnvironmentMode, version libcublasLt.so.12\n"
    (match,) = diagnosis(line).matches
    assert match.id == "cublaslt-shadow-runpath"
    assert (match.write, match.change.torch) == ({}, None)
    assert re.match(r"depends on torch.s version \(affected: torch 2\.9\.1 or newer and before 2\.11\)", match.remedy)
    assert match.find_out[0] == cause_ranking.FIND_TORCH


@pytest.mark.legitimate("user", "the same symbol, with torch 2.10.0", "torch 2.11 is proposed")
def test_another_torch_is_proposed_where_torch_is_known() -> None:
    line = "OSError: /v/libcublas.so.12: undefined symbol: cublasLtGetEnvironmentMode, version libcublasLt.so.12\n"
    (match,) = diagnosis(f"torch 2.10.0\n{line}").matches
    assert (match.write["torch"], match.find_out) == ("2.11.0", ())


@pytest.mark.parametrize("advisory", database.advisories(), ids=lambda advisory: advisory.id)
def test_no_cause_changes_a_torch_that_is_unknown(advisory: Advisory) -> None:
    known = diagnosis("nothing").read
    signature = log_signatures.signatures()[advisory.id]
    match = cause_ranking._match(ScoredCause(signature, advisory, CauseLines(()), "open", ()), known)
    assert match.change.torch is None and not {"torch", "cuda"} & set(match.write)
    assert (cause_ranking.FIND_TORCH in match.find_out) == (
        advisory.change.torch is not None or bool(re.search(r"\btorch \d", advisory.remedy))
    )
