"""The check that every rank runs before training: the device that the check uses, and the check's message about a
result."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from selftest import torch_fork_server
from selftest.reading import environment, job

pytest.importorskip("torch")

from envbuild.selftest import pretraining_environment_check

FPE = {"when": {"probe": "gemm.crash", "signal": "SIGFPE"}, "remedy": "a newer cuBLAS"}
ANY = {"when": {}, "remedy": "look"}


def result(**changes: Any) -> dict[str, Any]:
    base = {"probe": "gemm.crash", "status": "failed", "failure": "signal", "signal": "SIGFPE", "at": "a step"}
    return {**base, "reason": "died of SIGFPE", "detail": None, "traits": {"cublas": "12.3.4"}, **changes}


@pytest.mark.parametrize(
    ("variables", "chosen"),
    [
        ({}, None),
        ({"LOCAL_RANK": "0"}, "0"),
        ({"LOCAL_RANK": "3"}, "3"),
        ({"SLURM_LOCALID": "2"}, "2"),
        ({"LOCAL_RANK": "1", "SLURM_LOCALID": "2"}, "1"),
        ({"LOCAL_RANK": "x"}, None),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "4, 6"}, "6"),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "GPU-a,MIG-b"}, "MIG-b"),
        ({"LOCAL_RANK": "5", "CUDA_VISIBLE_DEVICES": "7"}, None),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": ""}, None),
        ({"CUDA_VISIBLE_DEVICES": "4,6"}, None),
    ],
)
def test_each_rank_takes_its_own_device(variables: dict[str, str], chosen: "str | None") -> None:
    assert pretraining_environment_check.visible(variables) == chosen


def test_more_ranks_than_devices_are_refused() -> None:
    with pytest.raises(LookupError, match="local rank 2 has no device of its own: CUDA_VISIBLE_DEVICES is 0,1"):
        pretraining_environment_check.visible({"LOCAL_RANK": "2", "CUDA_VISIBLE_DEVICES": "0,1"})


@pytest.mark.parametrize(
    ("status", "required", "wrong"),
    [("passed", True, False), ("failed", False, True), ("skipped", False, False), ("skipped", True, True)],
)
def test_a_skip_of_what_is_required_is_wrong(status: str, required: bool, wrong: bool) -> None:
    assert pretraining_environment_check.is_wrong(result(status=status), ["gemm.crash"] if required else []) is wrong


@pytest.mark.parametrize(
    ("when", "fits"),
    [
        ({"reason": "died of SIG.{0,9}"}, True),
        ({"reason": "died"}, False),
        ({"cublas": r"12\.3\.[0-9]"}, True),
        ({"cublas": "12"}, False),
        ({"nccl": ".{0,9}"}, False),
        ({"probe": "gemm.crash", "detail": ".{0,9}"}, False),
    ],
)
def test_a_remedy_is_found_by_patterns_and_in_traits(when: dict[str, str], fits: bool) -> None:
    assert (
        pretraining_environment_check.failure_lines(result(), [{"when": when, "remedy": "this"}])[-1] == "  fix: this"
    ) is fits


def test_the_first_remedy_that_fits_is_printed() -> None:
    assert pretraining_environment_check.failure_lines(result(), [FPE, ANY]) == [
        "gemm.crash: signal SIGFPE at a step", "  died of SIGFPE", "  fix: a newer cuBLAS",
    ]  # fmt: skip
    assert pretraining_environment_check.failure_lines(result(signal="SIGSEGV"), [FPE, ANY])[-1] == "  fix: look"
    assert pretraining_environment_check.failure_lines(result(), []) == [
        "gemm.crash: signal SIGFPE at a step",
        "  died of SIGFPE",
    ]


def test_a_remedy_may_name_traits_and_several_values() -> None:
    row = {"when": {"failure": "signal|hang", "nccl": r"2\.18\.1"}, "remedy": "a newer NCCL"}
    assert (
        pretraining_environment_check.failure_lines(result(traits={"nccl": "2.18.1"}), [row])[-1]
        == "  fix: a newer NCCL"
    )
    assert (
        pretraining_environment_check.failure_lines(result(traits={"nccl": "2.18.3"}), [row])[-1] == "  died of SIGFPE"
    )
    assert (
        pretraining_environment_check.failure_lines(result(traits={"nccl": "2.18.1"}, failure="bound"), [row])[-1]
        == "  died of SIGFPE"
    )


def test_the_same_result_of_several_probes_is_printed_once() -> None:
    skip = {"status": "skipped", "failure": None, "signal": None, "at": None, "reason": "no GPU"}
    wrong = [result(probe="a", **skip), result(), result(probe="b", **skip)]
    assert pretraining_environment_check.report(wrong, [FPE, ANY]) == [
        "gemm.crash: signal SIGFPE at a step", "  died of SIGFPE", "  fix: a newer cuBLAS",
        "a, b: skipped", "  no GPU", "  fix: look",
    ]  # fmt: skip


def test_a_failed_probe_comes_before_the_versions_that_differ_and_these_before_skips() -> None:
    """The failed probe is named first, because the list of versions is long and the failed probe decides the result."""
    versions = result(probe="env.libs", failure="version", signal=None, detail="numpy is 1, but 2 is locked")
    skip = {"status": "skipped", "failure": None, "signal": None, "at": None, "reason": "no GPU"}
    lines = pretraining_environment_check.report([result(probe="conv", **skip), versions, result()], [FPE])
    heads = [line.partition(":")[0] for line in lines if not line.startswith(" ")]
    assert heads == ["gemm.crash", "env.libs", "conv"]


def test_up_to_a_dozen_differing_versions_are_listed() -> None:
    detail = "\n".join(f"p{number} is 1, but 2 is locked" for number in range(20))
    lines = pretraining_environment_check.failure_lines(
        result(failure="version", signal=None, at=None, detail=detail), []
    )
    assert lines[0] == "gemm.crash: version"
    assert lines[1:3] == ["  p0 is 1, but 2 is locked", "  p1 is 1, but 2 is locked"]
    assert (len(lines), lines[-1]) == (14, "  and 8 more")


def test_torch_and_its_libraries_come_first_among_the_differing_versions() -> None:
    others = [f"p{number} is 1, but 2 is locked" for number in range(20)]
    detail = "\n".join(["Python is 3.9, but 3.11 is locked", *others, "nvidia-cublas-cu12 is 1, but 2 is locked"])
    lines = pretraining_environment_check.failure_lines(result(failure="version", detail=detail), [])
    assert lines[1:4] == [
        "  Python is 3.9, but 3.11 is locked", "  nvidia-cublas-cu12 is 1, but 2 is locked", f"  {others[0]}",
    ]  # fmt: skip


def test_a_stack_is_not_printed() -> None:
    assert "Current thread" not in "".join(
        pretraining_environment_check.failure_lines(result(detail="Current thread 0x1"), [])
    )


def run(document: dict[str, Any], new: bool = False, **variables: str) -> "subprocess.CompletedProcess[str]":
    """`new`: in a new process, not in one in which torch is imported already."""
    own = {name: value for name, value in environment().items() if name != "CUDA_VISIBLE_DEVICES"}
    module = "envbuild.selftest.pretraining_environment_check"
    if not new:
        return torch_fork_server.run(f"{module}:main", [document], {**own, **variables}, timeout=120)
    code = f"import sys, json; from {module} import main; sys.exit(main(json.loads(sys.argv[1])))"
    command = [sys.executable, "-c", code, json.dumps(document)]
    return subprocess.run(command, capture_output=True, text=True, env={**own, **variables}, timeout=120)


def document(**changes: Any) -> dict[str, Any]:
    return {"profile": "sample", "lock": "0" * 12, "job": job(**changes), "remedies": [ANY]}


@pytest.mark.slow
def test_one_line_where_all_is_well() -> None:
    done = run(document(probes=["gemm.exact", "attention.cudnn"], require=["gemm.exact"]), new=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("envbuild check: sample: 1 passed, 1 skipped, ")
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.slow
def test_a_rank_says_which_it_is_and_takes_its_share_of_the_processors() -> None:
    done = run(document(probes=["gemm.exact"]), RANK="7", LOCAL_RANK="3", LOCAL_WORLD_SIZE=str(os.cpu_count()))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("envbuild check: sample, rank 7 on ")


@pytest.mark.slow
def test_faults_go_to_stderr_with_a_remedy() -> None:
    done = run(document(probes=["env.libs"], expect={"distributions": {"torch": "9.9"}}), RANK="0")
    assert (done.returncode, done.stdout) == (5, "")
    first, second, third, *_, last = done.stderr.splitlines()
    assert first.startswith("envbuild check: sample, rank 0 on ") and first.endswith(": check failed")
    assert second.startswith("  env.libs: version at ") and third.endswith(", but 9.9 is locked")
    assert last == "    fix: look"


@pytest.mark.slow
def test_where_nothing_passed_nothing_is_well() -> None:
    done = run(document(probes=["attention.cudnn"]))
    assert (done.returncode, done.stdout) == (5, "")
    assert "  attention.cudnn: skipped\n    needs a GPU" in done.stderr


@pytest.mark.slow
def test_a_required_gpu_that_is_not_there_is_wrong() -> None:
    done = run(document(device="cuda", probes=["env.identity"], require=["env.identity"]), CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (5, "")
    assert "  env.identity: skipped\n    no GPU is visible to torch" in done.stderr


def test_ranks_without_a_device_are_refused_before_torch_is_loaded() -> None:
    done = run(document(device="cuda"), new=True, CUDA_VISIBLE_DEVICES="0,1", LOCAL_RANK="2")
    assert done.returncode == 5
    assert "local rank 2 has no device of its own" in done.stderr


def test_threads_that_wait_do_not_spin(tmp_path: Path) -> None:
    """With threads that spin, a check took ten times as long on a shared machine (measured). torch reads the variable
    when it is imported; here a module of this name prints it."""
    (tmp_path / "torch.py").write_text("import os; print(os.environ.get('OMP_WAIT_POLICY'))", encoding="utf-8")
    code = "from envbuild.selftest.pretraining_environment_check import torch_fault; torch_fault()"
    own = {name: value for name, value in environment().items() if name != "OMP_WAIT_POLICY"}
    own["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{own['PYTHONPATH']}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=own, timeout=60)
    assert done.stdout == "PASSIVE\n", done.stderr
