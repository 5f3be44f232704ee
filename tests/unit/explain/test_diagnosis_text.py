"""`explain`: the report, examples from users' reports, and the score that a maintainer can recompute."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from envbuild.cli.entry import cli
from envbuild.explain import cause_ranking, cause_scoring, diagnosis_text, log_reader_and_search
from envbuild.facts import log_signatures
from unit.explain import corpus
from unit.explain.corpus import piped

H20 = "PyTorch version: 2.3.0+cu121\nGPU 0: NVIDIA H20\npython train.py\n"


def explanation_of(text: str) -> cause_ranking.Explanation:
    return cause_ranking.explain(log_reader_and_search.Log(text.encode()))


def report(text: str, markdown: bool = False) -> list[str]:
    log = log_reader_and_search.Log(text.encode())
    return list(diagnosis_text.render(log, cause_ranking.explain(log), (), markdown))


def output_for_file(file: Path, *options: str) -> str:
    done = CliRunner().invoke(cli, ["explain", str(file), *options], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


# ---- the fix ----


def test_the_fix_names_the_command_for_the_users_environment(tmp_path: Path) -> None:
    file = tmp_path / f"{'long' * 15} log.txt"
    file.write_text(f"{H20}Signal 8 (SIGFPE) received by PID 4711\n", encoding="utf-8")
    command = f"envbuild fix '{file}' --here"
    output = output_for_file(file)
    assert command in " ".join(output.replace(" \\\n", " ").split())
    assert "# for your active environment; --apply runs the fix\n" in output
    assert json.loads(output_for_file(file, "--json"))["causes"][0]["fix_command"] == command
    text = file.read_text(encoding="utf-8")
    assert "envbuild fix LOG --here   # for your active environment; --apply runs the fix" in piped(text)
    assert "write its name for LOG" in piped(text)


def test_a_quoted_path_is_not_split() -> None:
    path = f"'/data/{'x' * 60}/dir with space/{'y' * 40}'"
    lines = list(diagnosis_text._command("  envbuild: ", f"envbuild fix {path} --here"))
    assert any(path in line for line in lines)


def test_a_long_path_leaves_the_quoted_line_readable() -> None:
    line = log_reader_and_search.Line(7, "the line that matters", f"/data/{'x' * 200}/train.log")
    shown = diagnosis_text._quoted(line)
    assert shown.endswith("the line that matters") and "train.log" in shown
    short = dataclasses.replace(line, file=f"/data/{'x' * 40}/train.log")
    assert diagnosis_text._quoted(short).startswith(short.file)


def test_a_backslash_continues_no_remark() -> None:
    for length in range(20, 100):
        lines = list(diagnosis_text._command("  envbuild: ", f"fix {'x' * length} --here   # a remark of some length"))
        assert lines[-1].endswith("# a remark of some length")
        assert not any(line.endswith("\\") for line in lines if "#" in line)
        assert all(len(line) <= 100 for line in lines if "xxx" not in line)


def test_a_fix_by_a_variable_belongs_in_the_job_script() -> None:
    text = "torch 2.10.0+cu128\nOSError: libcublas.so.12: undefined symbol: cublasLtGetEnvironmentMode\n"
    found = " ".join(piped(text).split())
    assert "--apply runs the fix" not in found
    assert "put the line that sets or unsets the variable into the job script" in found
    assert "envbuild fix LOG --here # prints the line for your job script" in found


def test_the_unrelated_apex_is_removed_before_anything_is_installed() -> None:
    text = (
        "torch 2.3.1\napex/normalization/fused_layer_norm.py, in FusedRMSNorm\n"
        "RuntimeError: expected scalar type Float but found Half\n"
    )
    found = " ".join(piped(text).replace(" \\\n", " ").split())
    assert "Fix: if apex is the unrelated package of that name" in found
    assert found.index("pip: pip uninstall apex") < found.index("pip install 'transformers>=5.8'")


NO_KERNEL = (
    "NVIDIA GeForce RTX 5090 with CUDA capability sm_120 is not compatible with the current PyTorch installation.\n"
    "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)


def test_a_missing_kernel_image_is_explained_without_a_debugger() -> None:
    found = " ".join(piped(NO_KERNEL).split())
    assert "compute-sanitizer" not in found and "CUDA_LAUNCH_BLOCKING" not in found
    assert "affected: torch before 2.7; or torch 2.7 or newer and before 2.8 from the package index" in found
    assert any("compute-sanitizer" in line for line in explanation_of("device-side assert triggered\n").advice)


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
        "AssertionError: Torch not compiled with CUDA enabled",
        "ImportError: cannot import name 'UnencryptedCookieSessionFactoryConfig' from 'pyramid.session'",
    ],
)
def test_a_cause_without_an_advisory_names_the_command_of_fix_if_packages_fix_it(line: str) -> None:
    assert "envbuild fix LOG --here   # shows the commands for your active environment" in piped(f"{line}\n")


def test_a_cause_that_no_version_fixes_has_no_command_of_fix() -> None:
    text = "one GPU works, three die with SIGSEGV (torchrun)\n"
    assert "envbuild fix" not in piped(text)
    assert json.loads(piped(text, "--json"))["causes"][0]["fix_command"] is None


@pytest.mark.parametrize(
    ("text", "conflicts"),
    [
        (f"{H20}Signal 8 (SIGFPE) received by PID 4711\n", True),
        ("PyTorch version: 2.9.0+cu128\nNVIDIA H100\nconv3d bfloat16: torch.OutOfMemoryError\n", True),
        (
            "torch 2.5.1, NVIDIA GeForce RTX 5090\nRuntimeError: CUDA error: no kernel image is available for "
            "execution on the device\n",
            False,
        ),
    ],
)
def test_a_conflict_with_the_version_that_torch_requires_is_announced(text: str, conflicts: bool) -> None:
    found = " ".join(piped(text).split())
    announced = "may bring the old version back: `envbuild fix --apply` also changes what torch requires"
    assert "pip install" in found and (announced in found) == conflicts


def test_torch_and_a_version_that_it_excludes_are_installed_by_two_commands() -> None:
    """In one command, pip and uv find no solution."""
    found = piped("PyTorch version: 2.9.0+cu128\nNVIDIA H100\nconv3d bfloat16: torch.OutOfMemoryError\n")
    assert "pip install torch==2.9.1 && pip install nvidia-cudnn-cu12==" in found.replace(" \\\n", " ")


@pytest.mark.parametrize(("driver", "runs"), [("570.124.06", False), ("580.65.06", True)])
def test_a_fault_of_the_library_path_is_fixed_by_the_variable_alone(driver: str, runs: bool) -> None:
    """The first torch without the fault is built for CUDA 13. Only a profile needs it: in an image, the variable does
    not come from a job script."""
    found = piped(
        f"NVIDIA A100-SXM4-80GB, driver {driver}\ntorch 2.10.0+cu128\nRuntimeError: CUDA error: "
        "CUBLAS_STATUS_INVALID_VALUE when calling `cublasGemmEx( handle, opa, opb, m, n, k )`\n"
    )
    assert "shell:" in found and "unset LD_LIBRARY_PATH" in found and "envbuild fix LOG --here" in found
    assert "pip install" not in found and "conda" not in found
    assert ("torch: 2.11.0" in found) == runs
    assert "does not run the CUDA" not in found, "the variable alone is enough"


def test_a_driver_that_runs_no_fixed_torch_is_reported() -> None:
    found = " ".join(piped("NVIDIA A100, driver 570.124.06\ntorch 2.10.0\navg_pool2d gives wrong gradients\n").split())
    assert "driver 570.124.06 does not run the CUDA 13.0 of torch 2.14.0" in found


def test_a_variable_of_a_package_is_printed_with_its_condition() -> None:
    found = piped("the unet of onediff in fp16 returns nan on A100, and is right on V100\n").replace(" \\\n", " ")
    line = "export ONEFLOW_ATTENTION_ALLOW_HALF_PRECISION_ACCUMULATION=0   # if the program uses oneflow"
    assert line in " ".join(found.split()).replace("=0 #", "=0   #")


# ---- reports of users, in their own words ----


@pytest.mark.parametrize(
    ("text", "cause", "fix"),
    [
        ("torch 2.3.0, NVIDIA H20\nSignal 8 (SIGFPE) received by PID 4711\n", "cublas-hopper-fpe", "12.4.5.8"),
        ("H20 单机训练 Signal 8 (SIGFPE)\n", "cublas-hopper-fpe", "12.4.5.8"),
        ("torch finds multiple versions of libcublas in this environment\n", "library-copies", "one copy only"),
        ("环境里 cublas 多版本冲突，训练报错\n", "library-copies", "one copy only"),
        ("one GPU works, three die with SIGSEGV (torchrun)\n", "multi-gpu-only", "nvidia-smi topo -m"),
        ("单卡正常，三卡段错误，torch 训练\n", "multi-gpu-only", "nvidia-smi topo -m"),
        (
            "the UNet of a video model gives NaN on A100 and A30 in half precision with OneDiff, not on V100\n",
            "half-attention-nan",
            "ONEFLOW_ATTENTION_ALLOW_HALF_PRECISION_ACCUMULATION=0",
        ),
        ("开启onediff优化后，A100上unet执行结果为nan，但是V100上unet计算结果正常\n", "half-attention-nan", "ONEFLOW_"),
        (
            "apex/normalization/fused_layer_norm.py, in FusedRMSNorm\n"
            "RuntimeError: expected scalar type Float but found Half\n",
            "apex-t5-mixed-dtype",
            "uninstall apex",
        ),
        (
            "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`\n",
            "cublas-not-initialized",
            "look at the free memory first",
        ),
    ],
)
def test_a_users_report_gets_its_cause_and_fix(text: str, cause: str, fix: str) -> None:
    assert explanation_of(text).matches[0].id == cause
    assert fix in " ".join(" ".join(report(text)).split())


@pytest.mark.parametrize(
    "line",
    ["loss 2.31, no nan, checkpoint saved", "No NaN or Inf detected", "skipped nan batches: 0", "OOM retries: 0",
     "loss nan count = 0", "without errors"],
)  # fmt: skip
def test_a_denied_failure_is_no_symptom(line: str) -> None:
    text = f"torch 2.3.1 on NVIDIA H20\n{line}\ntraining finished\n"
    assert not explanation_of(text).read.symptoms
    assert "no sign of a failure" in " ".join(report(text))


@pytest.mark.parametrize("line", ["loss: nan", "No checkpoint, loss is nan", "OOM retries: 10, CUDA out of memory"])
def test_a_failure_is_a_symptom(line: str) -> None:
    assert explanation_of(f"torch 2.3.1 on NVIDIA H20\n{line}\n").read.symptoms


def test_a_signal_with_frames_in_the_cpu_math_library_is_not_given_to_cublas() -> None:
    for signal in ("SIGFPE, Arithmetic exception", "SIGSEGV, Segmentation fault"):
        for library in ("libmkl_core.so.2", "libopenblas.so.0"):
            text = f"{H20}Program received signal {signal}.\n#0  0x1 in f () from /usr/lib/{library}\n"
            found = explanation_of(text)
            assert [match.id for match in found.matches] == ["cpu-math-library"]
            assert "cublas" not in " ".join(match.id for match in found.matches)


# ---- the score ----


def test_the_confidence_is_the_sum_of_weights() -> None:
    (match,) = explanation_of(f"{H20}Floating point exception (core dumped)\n").matches
    assert match.evidence == ("line", "holds")
    weights = log_signatures.weights()
    prior = log_signatures.signatures()[match.id].confidence
    total = cause_scoring.log_odds(prior) + weights["line"].weight + weights["holds"].weight
    assert match.confidence == round(cause_scoring.probability(total), 2)


def test_every_kind_of_evidence_has_a_weight() -> None:
    names = set(log_signatures.EvidenceName.__args__)  # type: ignore[attr-defined]
    assert set(log_signatures.weights()) == names


# ---- possible causes ----

BARE = {
    "hang": "torchrun train.py hangs at step 12",
    "illegal-access": "CUDA error: unspecified launch failure",
    "nan": "torch: loss: nan at step 3",
    "signal-abrt": "torch: received SIGABRT",
    "signal-bus": "python train.py with torch: Bus error",
    "signal-fpe": "python train.py with torch: Floating point exception",
    "signal-ill": "python train.py with torch: Illegal instruction (core dumped)",
    "signal-segv": "python train.py with torch: Segmentation fault",
    "slow": "training with torch is much slower on this GPU",
    "wrong-value": "torch gives wrong results on this GPU",
}


@pytest.mark.parametrize("symptom", BARE)
def test_where_no_cause_is_named_the_symptom_and_what_decides_are_shown(symptom: str) -> None:
    found = explanation_of(BARE[symptom] + "\n")
    assert found.unknown and symptom in found.read.symptoms
    assert 1 <= len(found.possible) <= cause_ranking.MOST_POSSIBLE
    row = next(row for row in log_signatures.symptoms() if row.symptom == symptom)
    assert row.decide in found.decide
    output = report(BARE[symptom])
    assert any(line.startswith("Possible cause: ") for line in output) and "Decide:" in output
    assert all(match.evidence for match in found.possible) and any(
        line.startswith("  - supporting: ") for line in output
    )


# ---- the report ----


def test_the_sections_of_a_cause() -> None:
    output = report(f"{H20}Floating point exception (core dumped)\nNVRM: Xid (PCI:0000:dc:00): 94, pid=1\n")
    heads = [line.partition(":")[0] for line in output if line[:1].isalpha()]
    cause = heads.index("Cause", heads.index("Cause") + 1) if heads.count("Cause") > 1 else heads.index("Cause")
    assert heads[cause : cause + 5] == ["Cause", "Found", "Fix", "Prove", "Sources"]
    text = "\n".join(output)
    assert "pip:      pip install nvidia-cublas-cu12==12.4.5.8" in text
    assert "uv:       uv pip install nvidia-cublas-cu12==12.4.5.8" in text
    assert "conda:    conda install libcublas=12.4.5.8" in text
    assert "profile:  pins: {cublas: 12.4.5.8}" in text
    assert "Xid 94 (line 5): contained ECC error; drain the node" in text


def test_an_xid_that_names_the_faulty_memory_is_explained() -> None:
    text = "\n".join(report("NVRM: Xid (PCI:0000:dc:00): 48, pid=1\nNVRM: Xid (PCI:0000:dc:00): 171, pid=1\n"))
    assert "Xid 171 (line 2): uncorrectable ECC error in DRAM, in addition to Xid 48; drain the node" in text


@pytest.mark.slow
@pytest.mark.parametrize("markdown", [False, True])
def test_lines_have_at_most_100_columns(markdown: bool) -> None:
    for case in corpus.cases()[::7]:
        for line in report(case.raw.decode(errors="replace"), markdown):
            assert diagnosis_text.display_width(line) <= diagnosis_text.COLUMNS, line


def test_markdown_has_the_same_cause() -> None:
    text = "EADDRINUSE ```\n"
    output = piped(text, "--markdown")
    assert "### Cause: port-in-use" in output and "EADDRINUSE '''" in output
    assert json.loads(piped(text, "--json"))["causes"][0]["id"] == "port-in-use"
