"""The check without probes: what it finds, how long it takes, and the examples of docs/guides/cluster.md.

torchrun is the real one; Slurm's srun and the kubelet are stand-ins.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from selftest import stubs

from envbuild.testrun import exported_check_script, standalone_lock_check
from unit.lock.overridden import CUBLAS, NEW, OLD, installed, overridden_lock, quiet, venv_with_pip, write_wheels
from unit.support import PROFILE, envbuild, lock_of_this_python, profile_of

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "cluster.md"
LINE = re.compile(
    r"envbuild check: sample(, rank \d on \S+)?: \d+ versions, \d+ libraries match the lock; no probes ran; \S+ s\n"
)


def started(
    file: Path, python: Path = Path(sys.executable), variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [str(python), str(file), "--no-probes"]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(variables or {})}, timeout=60)


@pytest.fixture
def right(project: Path) -> Path:
    """A check that this Python passes."""
    lock_of_this_python(project)
    assert envbuild("export", "check", "sample").code == 0
    return project / "check-sample.py"


@pytest.fixture
def wrong(project: Path) -> Path:
    """A check that this Python fails."""
    lock_of_this_python(project, packages=["nosuch==1"])
    assert envbuild("export", "check", "sample").code == 0
    return project / "check-sample.py"


def test_it_prints_one_line_and_imports_no_torch(right: Path) -> None:
    done = started(right, variables={"PYTHONPROFILEIMPORTTIME": "1"})
    assert done.returncode == 0 and LINE.fullmatch(done.stdout)
    assert "json" in done.stderr and "torch" not in done.stderr


@pytest.mark.slow
def test_eight_ranks_at_once_take_less_than_two_seconds_each_of_processor_time(right: Path) -> None:
    """Processor time, because other tests use the processors; the wall time is in docs/guides/cluster.md."""
    before = os.times()
    ranks = [
        subprocess.Popen(
            [sys.executable, right, "--no-probes"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "RANK": str(n)},
        )
        for n in range(8)
    ]
    lines = [rank.communicate(timeout=60)[0] for rank in ranks]
    after = os.times()
    assert all(LINE.fullmatch(line) for line in lines) and "rank 7 on" in lines[7]
    used = after.children_user + after.children_system - before.children_user - before.children_system
    assert used / 8 < 2


@pytest.mark.slow
def test_a_broken_pin_fails_and_the_printed_remedy_fixes_it(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = write_wheels(tmp_path / "wheels")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    lock = overridden_lock(project, wheels)
    file = project / "check.py"
    file.write_text(exported_check_script.render(profile_of(project, PROFILE), lock))
    venv = venv_with_pip(tmp_path.resolve() / "venv")
    python = venv / "bin" / "python"
    quiet([python, "-m", "pip", "install", "--no-deps", *(f"{name}=={v}" for name, v in lock.versions.items())])
    done = started(file, python)
    assert done.returncode == 0 and LINE.fullmatch(done.stdout), done.stderr
    quiet([python, "-m", "pip", "install", "torchvision"])
    assert installed(venv) == OLD, "pip brought torch's own version back"
    done = started(file, python)
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr == (
        "envbuild check: sample: does not match the lock\n"
        f"  {CUBLAS} is {OLD}, but {NEW} is locked\n"
        f"  fix: {python} -m pip install --no-deps {CUBLAS}=={NEW}\n"
    )
    quiet(["sh", "-c", done.stderr.rpartition("fix: ")[2]])
    assert started(file, python).returncode == 0


def test_the_gpu_and_the_libraries_of_torch_come_before_many_other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first faults are listed, so those that decide must not be behind a long list."""
    monkeypatch.setattr(standalone_lock_check, "gpu_faults", lambda models, drivers: [("the GPU is A30", "use an H20")])
    locked = {f"a{number:02}": "1" for number in range(20)} | {"nvidia-nosuch": "1", "torch-nosuch": "1"}
    code, text = standalone_lock_check.check_startup(
        {"profile": "sample", "job": {"device": "cuda", "expect": {"distributions": locked}}}
    )
    assert (code, text.splitlines()[1:4]) == (
        5,
        ["  the GPU is A30", "  nvidia-nosuch is absent, but 1 is locked", "  torch-nosuch is absent, but 1 is locked"],
    )


def test_it_runs_with_the_oldest_python(wrong: Path) -> None:
    found = shutil.which("python3.9")
    if not found or subprocess.run([found, "-V"], capture_output=True).returncode:
        pytest.skip("no Python 3.9 on this machine")
    done = started(wrong, Path(found))
    assert done.returncode == 5 and "\n  Python is 3.9." in done.stderr and "nosuch is absent" in done.stderr


def test_a_damaged_file_and_another_argument_are_refused(right: Path) -> None:
    right.write_text(right.read_text().replace("#* import shlex", "#* import shelx"))
    assert started(right).returncode == 3


# libraries

OWNERS = {"nvidia/cublas/lib/libcublas.so.12": f"{CUBLAS}=={NEW}", "torch/lib/libtorch_cuda.so": "torch==2.3.1"}


def linked(tmp_path: Path, tags: str = "--enable-new-dtags") -> dict[str, str]:
    """A torch library that needs libcublas, which it finds by RUNPATH; with `--disable-new-dtags` by RPATH."""
    if not shutil.which("gcc"):
        pytest.skip("no gcc to build the libraries with")
    site = tmp_path / "site"
    for folder in ("torch/lib", "nvidia/cublas/lib"):
        (site / folder).mkdir(parents=True)
    (tmp_path / "empty.c").write_text("int nothing(void) { return 0; }\n")
    cublas, torch = site / "nvidia/cublas/lib/libcublas.so.12", site / "torch/lib/libtorch_cuda.so"
    build = ["gcc", "-shared", "-fPIC", tmp_path / "empty.c", "-Wl,--no-as-needed"]
    quiet([*build, "-Wl,-soname,libcublas.so.12", "-o", cublas])
    quiet([*build, f"-Wl,{tags},-rpath,$ORIGIN/../../nvidia/cublas/lib", "-o", torch, cublas])
    return {str(file.relative_to(site)): str(file.resolve()) for file in (cublas, torch)}


def other_copy(folder: Path) -> Path:
    folder.mkdir()
    (folder / "libcublas.so.12").write_bytes(b"another")
    return folder


def test_a_copy_in_ld_library_path_is_a_fault(tmp_path: Path) -> None:
    libraries = linked(tmp_path)
    assert list(standalone_lock_check.loader_faults(libraries, OWNERS, {})) == []
    other = other_copy(tmp_path / "other")
    own = str(Path(libraries["nvidia/cublas/lib/libcublas.so.12"]).parent)
    [(fault, remedy)] = standalone_lock_check.loader_faults(
        libraries, OWNERS, {"LD_LIBRARY_PATH": f"/nonexistent:{other}"}
    )
    assert fault.startswith(f"LD_LIBRARY_PATH loads {other}/libcublas.so.12 instead of {own}")
    assert remedy == f"remove {other} from LD_LIBRARY_PATH"
    assert list(standalone_lock_check.loader_faults(libraries, OWNERS, {"LD_LIBRARY_PATH": f"{own}:{other}"})) == []


def test_ld_library_path_changes_nothing_with_an_rpath(tmp_path: Path) -> None:
    libraries = linked(tmp_path, "--disable-new-dtags")
    other = other_copy(tmp_path / "other")
    assert list(standalone_lock_check.loader_faults(libraries, OWNERS, {"LD_LIBRARY_PATH": str(other)})) == []
    [(fault, _)] = standalone_lock_check.loader_faults(libraries, OWNERS, {"LD_PRELOAD": f"{other}/libcublas.so.12"})
    assert fault.startswith(f"LD_PRELOAD loads {other}/libcublas.so.12 instead of")


def test_a_missing_library_is_a_fault(tmp_path: Path) -> None:
    libraries = linked(tmp_path)
    Path(libraries["nvidia/cublas/lib/libcublas.so.12"]).unlink()
    [(fault, remedy)] = standalone_lock_check.loader_faults(libraries, OWNERS, {})
    assert fault == "nvidia/cublas/lib/libcublas.so.12 is missing or unreadable"
    assert remedy == f"{sys.executable} -m pip install --force-reinstall --no-deps {CUBLAS}=={NEW}"


def test_the_remedy_of_a_missing_library_names_its_distribution(wrong: Path, tmp_path: Path) -> None:
    done = started(wrong, variables=package(tmp_path / "site", b"nosuch/libnosuch.so,,\n"))
    assert done.returncode == 5
    assert "\n  nosuch/libnosuch.so is missing or unreadable\n" in done.stderr
    assert f"\n  fix: {sys.executable} -m pip install --force-reinstall --no-deps nosuch==1\n" in done.stderr


# damaged installations, which the documented exit code reports


def package(folder: Path, record: bytes, version: str = "1") -> dict[str, str]:
    """Install `nosuch` with this RECORD into a folder; returns the variables with which Python finds it."""
    own = folder / "nosuch-1.dist-info"
    own.mkdir(parents=True)
    (own / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nosuch\nVersion: {version}\n")
    (own / "RECORD").write_bytes(record)
    return {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize(
    "record",
    [b"nosuch.so," + b"x" * 200_000 + b",\n", b"no\0such.so,,\n", b"\xff.so,,\n"],
    ids=["long", "null", "not-utf-8"],
)
def test_a_damaged_record_is_a_fault(wrong: Path, tmp_path: Path, record: bytes) -> None:
    done = started(wrong, variables=package(tmp_path / "site", record))
    assert (done.returncode, done.stdout) == (5, ""), done.stderr
    assert "\n  the RECORD of nosuch is damaged: " in done.stderr
    assert f"\n  fix: {sys.executable} -m pip install --force-reinstall --no-deps nosuch==1\n" in done.stderr


def test_an_unreadable_description_of_a_package_is_a_fault(wrong: Path, tmp_path: Path) -> None:
    variables = package(tmp_path / "site", b"")
    (tmp_path / "site" / "nosuch-1.dist-info" / "METADATA").write_bytes(b"Name: nosuch\xff\n")
    done = started(wrong, variables=variables)
    assert (done.returncode, done.stdout) == (5, "") and "the installed packages cannot be read: " in done.stderr


def test_a_library_in_an_unreadable_folder_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """root reads every folder, so stat refuses here."""

    def refused(*_: object, **__: object) -> None:
        raise PermissionError("refused")

    library = {"a/liba.so": str(tmp_path / "liba.so")}
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", refused)
        faults = list(standalone_lock_check.loader_faults(library, {"a/liba.so": "a==1"}, {}))
    assert [fault for fault, _ in faults] == ["a/liba.so is missing or unreadable"]


def test_control_characters_of_a_package_are_escaped(wrong: Path, tmp_path: Path) -> None:
    done = started(wrong, variables=package(tmp_path / "site", b"", version="2\x1b[2J"))
    assert done.returncode == 5 and "\n  nosuch is 2\\x1b[2J, but 1 is locked\n" in done.stderr


def test_the_remedy_quotes_the_path_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/my envs/a;b/python")
    [(_, remedy)] = standalone_lock_check.version_faults({"nosuch": "1"}, {}, None)
    assert remedy == "'/my envs/a;b/python' -m pip install --no-deps nosuch==1"


# the GPU, from a stand-in of NVML


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cards", "expected"),
    [
        ("name=NVIDIA H20", None),
        ("name=NVIDIA A100-SXM4-80GB", "the GPU is NVIDIA A100-SXM4-80GB"),
        ("name=NVIDIA A100-SXM4-80GB;name=NVIDIA H20", None),
        (None, "no usable GPU: "),
        ("name=NVIDIA H20,error=15", "no usable GPU: nvmlDeviceGetHandleByIndex_v2: GPU is lost"),
        ("name=NVIDIA H20,error=999", "no usable GPU: nvmlDeviceGetHandleByIndex_v2: Unknown Error"),
    ],
)
def test_the_gpu_model_is_compared(project: Path, tmp_path: Path, cards: str | None, expected: str | None) -> None:
    data = {**PROFILE, "torch": "2.7.1", "gpus": ["h20"]}
    lock = lock_of_this_python(project)
    (project / "check.py").write_text(exported_check_script.render(profile_of(project, data), lock))
    variables = {**stubs.build(tmp_path / "stubs"), "STUB_CARDS": cards} if cards else {}
    done = started(project / "check.py", variables=variables)
    if expected is None:
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == 5 and f"\n  {expected}" in done.stderr
    assert "\n  fix: " in done.stderr


def test_an_old_driver_is_a_fault(project: Path, tmp_path: Path) -> None:
    data = {**PROFILE, "torch": "2.7.1", "gpus": ["h20"], "driver": {"minimum": "560.35.15"}}
    lock = lock_of_this_python(project)
    (project / "check.py").write_text(exported_check_script.render(profile_of(project, data), lock))
    variables = {**stubs.build(tmp_path / "stubs"), "STUB_CARDS": "name=NVIDIA H20"}
    done = started(project / "check.py", variables=variables)
    assert done.returncode == 5
    assert "the driver is 550.54.15, 560.35.15 or newer is needed\n  fix: install driver 560.35.15" in done.stderr


def test_an_unknown_driver_version_is_a_fault(project: Path, tmp_path: Path) -> None:
    lock = lock_of_this_python(project)
    loaded = profile_of(project, {**PROFILE, "torch": "2.7.1", "gpus": ["h20"]})
    (project / "check.py").write_text(exported_check_script.render(loaded, lock))
    variables = {**stubs.build(tmp_path / "stubs"), "STUB_CARDS": "name=NVIDIA H20", "STUB_DRIVER": ""}
    done = started(project / "check.py", variables=variables)
    assert done.returncode == 5 and "no usable GPU: NVML does not report the driver's version" in done.stderr


def test_forward_compatibility_libraries_satisfy_cudas_minimum(project: Path, tmp_path: Path) -> None:
    """The host has driver 470, and the libcuda that the loader takes is of 550.54.15."""
    data = {**PROFILE, "torch": "2.7.1", "gpus": ["h20"]}
    lock = lock_of_this_python(project)
    file = project / "check.py"
    file.write_text(exported_check_script.render(profile_of(project, data), lock))
    variables = {**stubs.build(tmp_path / "stubs"), "STUB_CARDS": "name=NVIDIA H20", "STUB_DRIVER": "470.82.01"}
    done = started(file, variables=variables)
    assert done.returncode == 0, done.stderr
    old = {**variables, **stubs.build(tmp_path / "old", release="470.82.01")}
    done = started(file, variables=old)
    assert done.returncode == 5 and "the driver is 470.82.01, 525.60.13 or newer is needed" in done.stderr


@pytest.mark.parametrize(
    ("host", "library", "minimum", "expected"),
    [
        ("470.82.01", "550.54.15", {"cuda": "525.60.13"}, None),
        ("470.82.01", None, {"cuda": "525.60.13"}, "the driver is 470.82.01, 525.60.13 or newer is needed"),
        ("470.82.01", "550.54.15", {"profile": "525.60.13"}, "the driver is 470.82.01, 525.60.13 or newer is needed"),
        ("550.54.15", "470.82.01", {"cuda": "525.60.13", "profile": "535.1"}, None),
        ("450.1", "450.1", {"cuda": "525.60.13", "profile": "535.1"}, "the driver is 450.1, 535.1 or newer is needed"),
    ],
)
def test_each_minimum_is_compared_with_its_driver(
    host: str, library: str | None, minimum: Mapping[str, str], expected: str | None
) -> None:
    found = [fault for fault, _ in standalone_lock_check.startup_driver_faults(host, library, minimum)]
    assert found == ([expected] if expected else [])


# the examples of the guide


def examples(language: str, word: str) -> list[str]:
    blocks = re.findall(rf"^```{language}\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [block for block in blocks if word in block]


def executable(file: Path, text: str) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put this Python and the real torchrun on PATH, and a `train.py` that leaves a mark into the working folder."""
    folder = tmp_path / "bin"
    executable(folder / "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    executable(folder / "torchrun", f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    Path("train.py").write_text("import pathlib\npathlib.Path('trained').touch()\n")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("state", "trained"), [("right", True), ("wrong", False)])
def test_the_torchrun_examples(
    state: str, trained: bool, project: Path, programs: Path, request: pytest.FixtureRequest
) -> None:
    file: Path = request.getfixturevalue(state)
    file.rename("check-step-video.py")
    ranks, node = (text for text in examples("bash", "torchrun") if "--no-probes" in text)
    for text, most in ((ranks, 2), (node, 1)):
        done = subprocess.run(["bash", "-c", text.replace("per-node 8", "per-node 2")], capture_output=True, text=True)
        assert (done.returncode == 0) == trained == Path("trained").exists(), done.stderr
        if trained:
            assert len(LINE.findall(done.stdout)) == most and len(done.stdout.splitlines()) == most
            Path("trained").unlink()
        else:
            assert (
                "nosuch is absent, but 1 is locked" in done.stderr
                and "-m pip install --no-deps nosuch==1" in done.stderr
            )


SRUN = """#!{python}
# A stand-in: runs the task prolog as slurmstepd does, then the task.
import os, subprocess, sys
prolog = sys.argv[1].partition("=")[2].replace("/shared", os.environ["SHARED"])
done = subprocess.run([prolog], stdout=subprocess.PIPE, text=True)
for line in done.stdout.splitlines():
    if line.startswith("print "):
        print(line[6:], flush=True)
sys.exit(done.returncode or subprocess.run(sys.argv[2:]).returncode)
"""


@pytest.mark.parametrize(("state", "trained"), [("right", True), ("wrong", False)])
def test_the_slurm_prolog(
    state: str, trained: bool, project: Path, programs: Path, request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    file: Path = request.getfixturevalue(state)
    file.rename("check-step-video.py")
    [prolog], [start] = examples("sh", "no-probes"), examples("bash", "task-prolog")
    executable(Path("check-prolog.sh"), prolog.replace("/shared", str(project)).replace("/opt/venv/bin/", ""))
    executable(programs / "srun", SRUN.format(python=sys.executable))
    monkeypatch.setenv("SHARED", str(project))
    monkeypatch.setenv("SLURM_PROCID", "3")
    done = subprocess.run(["bash", "-c", start], capture_output=True, text=True)
    assert done.returncode == (0 if trained else 5), done.stderr
    assert Path("trained").exists() == trained
    if trained:
        assert LINE.fullmatch(done.stdout)
    else:
        assert "rank 3 on" in done.stdout and "-m pip install --no-deps nosuch==1" in done.stdout


@pytest.mark.parametrize(("state", "trained"), [("right", True), ("wrong", False)])
def test_the_init_container(
    state: str, trained: bool, project: Path, programs: Path, request: pytest.FixtureRequest
) -> None:
    """The kubelet's order: the containers are started only if the init container ends with 0."""
    file: Path = request.getfixturevalue(state)
    file.rename("check-step-video.py")
    assert Path("check-step-video.py").stat().st_size < 1 << 20, "a ConfigMap has at most 1 MiB"
    [text] = examples("yaml", "initContainers")
    pod = yaml.safe_load(text)
    validate = pytest.importorskip("kubernetes_validate")
    validate.validate(pod, "1.33", strict=True)
    [check], [train] = pod["spec"]["initContainers"], pod["spec"]["containers"]
    assert check["image"] == train["image"] and check["resources"] == train["resources"]
    command = [word.replace("/check/", f"{project}/") for word in check["command"]]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode == 0) == trained
    assert bool(LINE.fullmatch(done.stdout)) == trained == ("fix: " not in done.stderr)
