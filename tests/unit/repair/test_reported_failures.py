"""The failures that users reported, each from what the user has to an environment that works: with real pip, uv and
dynamic loader.

The real wheels have gigabytes. These have their names, versions, requirements, paths, sonames and RPATHs, and libraries
of a few kilobytes that report their versions.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from selftest.environments import SONAMES, TORCH, built, library, libtorch_cuda

from envbuild.facts import database
from unit.repair import test_repair_run
from unit.repair.test_repair_plan import LOG
from unit.repair.test_repair_run import UV, Venv, contents, hashes, libraries, recorded, run
from unit.support import envbuild

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc to build the libraries with"),
]
local_index = test_repair_run.local_index
OLDER_TORCH = "2.10.0"
CUBLAS = (
    "import ctypes, torch\nlib = ctypes.CDLL('libcublas.so.12'); v = ctypes.c_int()\n"
    "print(*[(lib.cublasGetProperty(n, ctypes.byref(v)), v.value)[1] for n in range(3)], sep='.')"
)
RUNPATH, CONDA = (
    ":".join(f"$ORIGIN/../../nvidia/{name}/lib" for name in ("cublas", "cudnn", "nccl")),
    "$ORIGIN/../../../..",
)


def torch(folder: Path, version: str, cuda: str | None, requires: Sequence[str], library_file: bytes = b"") -> None:
    """Write a wheel of torch."""
    own = version if "+" in version else f"{version}+cu{(cuda or '').replace('.', '')}"
    text = TORCH.format(version=own, cuda=cuda, architectures="sm_50 sm_80 sm_90")
    files = {"torch/__init__.py": text.encode(), **({"torch/lib/libtorch_cuda.so": library_file} if cuda else {})}
    recorded(folder, "torch", version, requires, files=files)


def linked_by(folders: str, tag: str) -> bytes:
    """Build torch's library with a search path of its own. `tag`: "enable" for RUNPATH, "disable" for RPATH."""
    needed = {SONAMES[kind]: library(kind, "1.0.0") for kind in ("cublasLt", "cublas", "cudnn", "nccl")}
    flags = [f"-Wl,--{tag}-new-dtags,-rpath,{folders}", *(f"-l:{name}" for name in needed)]
    return built("", "libtorch_cuda.so", *flags, linked=needed)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    for version in ("12.1.3.1", "12.4.5.8"):
        recorded(folder, "nvidia-cublas-cu12", version, files=libraries(version, "cublas", "cublasLt"))
    recorded(folder, "nvidia-cudnn-cu12", "9.1.0.70", files=libraries("9.1.0.70", "cudnn"))
    recorded(folder, "nvidia-nccl-cu12", "2.26.2", files=libraries("2.26.2", "nccl"))
    recorded(folder, "nvidia-nccl-cu13", "2.28.9", files=libraries("2.28.9", "nccl"))
    recorded(folder, "user-of-cuda-13", "1", ["nvidia-nccl-cu13==2.28.9"])
    plain = libtorch_cuda(("cublas", "cublasLt", "cudnn", "nccl"))
    torch(folder, "2.3.1", "12.1", test_repair_run.TORCH_REQUIRES, plain)
    torch(folder, "2.7.1", "12.6", ["nvidia-nccl-cu12==2.26.2"], libtorch_cuda(("nccl",)))
    torch(folder, "2.11.0", "13.0", ["nvidia-nccl-cu13==2.28.9"], libtorch_cuda(("nccl",)))
    torch(folder, OLDER_TORCH, "12.8", ["nvidia-nccl-cu12==2.26.2"], libtorch_cuda(("nccl",)))
    recorded(folder, "apex", "0.9.10.dev0", files={"apex/__init__.py": b"", "apex/views.py": b""})
    recorded(folder, "numpy", "2.3.1")
    recorded(folder, "torchvision", "0.18.1", ["torch==2.3.1"])
    recorded(folder, "torchvision", "0.22.0", ["torch==2.7.0"])
    recorded(folder, "torchvision", "0.22.1", ["torch==2.7.1", "numpy"])
    recorded(folder, "torchaudio", "2.7.1", ["torch==2.7.1"])
    recorded(folder, "torchaudio", "2.11.0")
    return folder


def installed_by_uv(prefix: Path, *requirements: str, more: Sequence[str | Path] = ()) -> None:
    run(UV, "pip", "install", "--quiet", "--link-mode", "hardlink", "--python", prefix, *more, *requirements)


def environment(folder: Path, *requirements: str, log: str = LOG) -> Venv:
    run(UV, "venv", "--quiet", "--python", sys.executable, folder / "venv")
    installed_by_uv(folder / "venv", *requirements)
    (folder / "train.log").write_text(log)
    return Venv(folder / "venv", folder / "train.log")


def conda_environment(folder: Path, packages: Mapping[str, tuple[str, Sequence[str]]]) -> Venv:
    """Make an environment laid out as conda does: an interpreter of its own, which finds its standard library in the
    same folder, and `conda-meta` with the files of each package. `packages`: name -> (version, files)."""
    prefix, base = folder / "conda", Path(sys.base_prefix)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (prefix / "lib" / version / "site-packages").mkdir(parents=True)
    (prefix / "bin").mkdir()
    shutil.copy2(os.path.realpath(sys.executable), prefix / "bin" / "python")
    for item in (base / "lib" / version).iterdir():
        if item.name not in ("site-packages", "__pycache__", "EXTERNALLY-MANAGED"):
            (prefix / "lib" / version / item.name).symlink_to(item)
    code = "import site, sys; print(sys.prefix); print(*site.getsitepackages(), sep='\\n')"
    found = subprocess.run([prefix / "bin" / "python", "-c", code], capture_output=True, text=True)
    if found.stdout.splitlines() != [str(prefix), str(prefix / "lib" / version / "site-packages")]:
        pytest.skip("this machine's Python, once copied, does not keep its packages in its own site-packages")
    (prefix / "conda-meta").mkdir()
    for name, (number, files) in {"python": (sys.version.split()[0], ("bin/python",)), **packages}.items():
        row = {"name": name, "version": number, "depends": [], "files": list(files)}
        (prefix / "conda-meta" / f"{name}-{number}-0.json").write_text(json.dumps(row))
    (folder / "train.log").write_text(LOG)
    return Venv(prefix, folder / "train.log")


def condas_cublas(prefix: Path) -> None:
    for kind in ("cublas", "cublasLt"):
        (prefix / "lib" / SONAMES[kind]).write_bytes(library(kind, "12.1.3.1"))


CONDAS = {"libcublas": ("12.1.3.1", [f"lib/{SONAMES[kind]}" for kind in ("cublas", "cublasLt")])}


def started(venv: Venv, *prefix: str, code: str = CUBLAS) -> subprocess.CompletedProcess[str]:
    """Run a program with `envbuild run --with-fix`. `prefix`: a command that starts it."""
    run_it = [sys.executable, "-m", "envbuild", "run", "--with-fix", str(venv.log), "--"]
    return subprocess.run([*prefix, *run_it, str(venv.python), "-c", code], capture_output=True, text=True, timeout=120)


def refused(venv: Venv) -> str:
    """Run `fix --apply`, which must refuse and change nothing. Return the output."""
    before = hashes(venv.prefix)
    done = envbuild("fix", str(venv.log), "--python", str(venv.prefix), "--apply")
    assert done.code == 6 and hashes(venv.prefix) == before
    return done.stdout + done.stderr


# A floating point exception on an H20. test_repair_run.py has it for pip, for uv, and for a uv project.


def test_a_read_only_environment_runs_with_the_fix(tmp_path: Path) -> None:
    """The environment is mounted read-only, so that root cannot write to it either."""
    folder = tmp_path.resolve()
    venv = environment(folder, "torch==2.3.1")
    script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    mounted = ["unshare", "--mount", "--", "sh", "-c", script, str(venv.prefix)]
    if subprocess.run([*mounted, "true"], capture_output=True).returncode:
        pytest.skip("only root can mount a folder read-only")
    assert subprocess.run([*mounted, "touch", str(venv.prefix / "new")], capture_output=True).returncode
    before = hashes(venv.prefix)
    done = started(venv, *mounted)
    assert (done.returncode, done.stdout) == (0, "12.4.5\n"), done.stderr
    fix = [sys.executable, "-m", "envbuild", "fix", str(venv.log), "--python", str(venv.prefix), "--apply"]
    refusal = subprocess.run([*mounted, *fix], capture_output=True, text=True, timeout=120)
    assert refusal.returncode == 6 and "no permission to write to" in refusal.stderr
    assert f"envbuild run --with-fix {venv.log} --python {venv.python} -- PROGRAM" in refusal.stderr
    assert hashes(venv.prefix) == before


# Two copies of a library


def test_pips_cublas_in_a_conda_environment_is_fixed_and_condas_stays(tmp_path: Path) -> None:
    venv = conda_environment(tmp_path.resolve(), CONDAS)
    condas_cublas(venv.prefix)
    installed_by_uv(venv.prefix, "torch==2.3.1")
    before, condas = contents(venv.files()), hashes(venv.prefix / "lib")["libcublas.so.12"]
    assert venv.cublas() == "12.1.3"
    document = venv.fix("--apply")
    assert (document["manager"], document["state"]) == ("conda", "fixed")
    assert venv.cublas() == "12.4.5"
    assert hashes(venv.prefix / "lib")["libcublas.so.12"] == condas
    installed_by_uv(venv.prefix, "torchvision==0.18.1")
    assert venv.cublas() == "12.4.5"
    run(UV, "pip", "uninstall", "--quiet", "--python", venv.prefix, "torchvision")
    assert envbuild("fix", "--python", str(venv.prefix), "--undo").code == 0
    assert contents(venv.files()) == before


def test_ld_library_path_to_condas_old_copy_hides_pips_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv = conda_environment(tmp_path.resolve(), CONDAS)
    condas_cublas(venv.prefix)
    own = tmp_path / "own"
    own.mkdir()
    torch(own, "2.3.1", "12.1", ["nvidia-cublas-cu12"], linked_by(RUNPATH, "enable"))
    others = ("nvidia-cublas-cu12==12.4.5.8", "nvidia-cudnn-cu12", "nvidia-nccl-cu12")
    installed_by_uv(venv.prefix, *others, str(next(own.glob("*.whl"))))
    assert venv.fix()["state"] == "healthy" and venv.cublas() == "12.4.5"
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{venv.prefix}/lib:/opt/other")
    assert venv.cublas() == "12.1.3"
    document = venv.fix()
    assert [row["text"] for row in document["commands"]] == ["export LD_LIBRARY_PATH=/opt/other"]
    row = next(row for row in document["libraries"] if row["library"] == "libcublas.so.12")
    assert (row["before"], row["before_way"]) == (f"{venv.prefix}/lib/libcublas.so.12", "LD_LIBRARY_PATH")
    assert row["after"].endswith("site-packages/nvidia/cublas/lib/libcublas.so.12")
    assert "the fix only changes shell variables" in refused(venv)
    done = started(venv)
    assert done.stdout == "12.4.5\n", done.stderr
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/other")
    assert venv.cublas() == "12.4.5" and venv.fix()["state"] == "healthy"


def test_a_torch_of_conda_gets_condas_command_or_runs_with_the_fix(tmp_path: Path) -> None:
    """conda's torch takes cuBLAS from the environment's lib folder. conda itself is not installed here."""
    folder = tmp_path.resolve()
    venv = conda_environment(folder, {})
    condas_cublas(venv.prefix)
    for kind, version in (("cudnn", "9.1.0.70"), ("nccl", "2.26.2")):
        (venv.prefix / "lib" / SONAMES[kind]).write_bytes(library(kind, version))
    own = folder / "own"
    own.mkdir()
    torch(own, "2.3.1", "12.1", [], linked_by(CONDA, "disable"))
    installed_by_uv(venv.prefix, str(next(own.glob("*.whl"))))
    files = [path.relative_to(venv.prefix).as_posix() for path in venv.site.glob("torch*/**/*") if path.is_file()]
    for name, version, listed in (("pytorch", "2.3.1", files), ("libcublas", *CONDAS["libcublas"])):
        row = {"name": name, "version": version, "depends": [], "files": listed}
        (venv.prefix / "conda-meta" / f"{name}-{version}-0.json").write_text(json.dumps(row))
    assert venv.cublas() == "12.1.3"
    printed = refused(venv)
    assert f"install --prefix {venv.prefix} libcublas=12.4.5.8" in printed
    assert "conda owns" in printed and "envbuild run --with-fix" in printed
    done = started(venv)
    assert done.stdout == "12.4.5\n", done.stderr


def test_a_folder_that_an_upgrade_left_is_replaced(tmp_path: Path) -> None:
    """The upgrade removed the old metadata, kept the files, and was interrupted before the new version."""
    venv = environment(tmp_path.resolve(), "torch==2.3.1")
    shutil.rmtree(next(venv.site.glob("nvidia_cublas_cu12-*.dist-info")))
    before = contents(venv.files())
    assert venv.cublas() == "12.1.3"
    assert venv.fix("--apply")["state"] == "fixed"
    assert venv.cublas() == "12.4.5"
    assert venv.fix()["state"] == "healthy"
    assert envbuild("fix", "--python", str(venv.prefix), "--undo").code == 0
    assert contents(venv.files()) == before


NCCL = (
    "import ctypes, torch\nlib = ctypes.CDLL('libnccl.so.2'); v = ctypes.c_int()\n"
    "lib.ncclGetVersion(ctypes.byref(v)); print(v.value)"
)


def nccl(venv: Venv) -> str:
    return subprocess.run([venv.python, "-c", NCCL], capture_output=True, text=True, check=True).stdout.strip()


def test_a_wheel_for_cuda_13_that_overwrote_the_one_for_cuda_12_is_removed(tmp_path: Path) -> None:
    """Both contain nvidia/nccl/lib/libnccl.so.2. No log is needed: torch requires the one that was overwritten."""
    venv = environment(tmp_path.resolve(), "torch==2.3.1", "nvidia-cublas-cu12==12.1.3.1")
    installed_by_uv(venv.prefix, "nvidia-nccl-cu13==2.28.9")
    assert nccl(venv) == "22809"
    audited = envbuild("audit", "--python", str(venv.prefix), "--gpu", "a100")
    assert audited.code == 5 and "overwritten-library" in audited.stdout and "modified-file" not in audited.stdout
    fix = ("fix", "--python", str(venv.prefix), "--gpu", "a100", "--json")
    before = contents(venv.files())
    document = envbuild(*fix, "--apply").document
    words = [row["argv"] for row in document["commands"]]
    assert [row[:3] + row[-1:] for row in words] == [
        ["uv", "pip", "uninstall", "nvidia-nccl-cu13"],
        ["uv", "pip", "install", "nvidia-nccl-cu12==2.26.2"],
    ]
    assert [row["id"] for row in document["problems"]] == ["overwritten-library"]
    assert nccl(venv) == "22602"
    assert envbuild(*fix).document["state"] == "healthy"
    assert envbuild("fix", "--python", str(venv.prefix), "--undo").code == 0
    assert contents(venv.files()) == before


def test_a_wheel_for_cuda_13_that_a_package_requires_is_kept(tmp_path: Path) -> None:
    venv = environment(tmp_path.resolve(), "torch==2.3.1")
    installed_by_uv(venv.prefix, "user-of-cuda-13")
    document = envbuild("fix", "--python", str(venv.prefix), "--gpu", "a100", "--apply", "--json").document
    assert [row["argv"][2] for row in document["commands"]] == ["install"]
    assert any("user-of-cuda-13 requires nvidia-nccl-cu13" in note for note in document["notes"])
    assert nccl(venv) == "22602"
    assert next(venv.site.glob("nvidia_nccl_cu13-*.dist-info")).is_dir()


def test_a_wheel_for_cuda_13_that_was_overwritten_itself_is_left(tmp_path: Path) -> None:
    venv = environment(tmp_path.resolve(), "nvidia-nccl-cu13==2.28.9")
    installed_by_uv(venv.prefix, "torch==2.3.1")
    assert nccl(venv) == "22602"
    fix = envbuild("fix", "--python", str(venv.prefix), "--gpu", "a100", "--json")
    assert fix.document["state"] == "healthy"


# A wrong package


def test_the_unrelated_apex_is_removed_and_the_real_one_named(tmp_path: Path) -> None:
    venv = environment(tmp_path.resolve(), "torch==2.7.1", "apex", log="torch 2.7.1\nNVIDIA H20, driver 570.86.10\n")
    before = contents(venv.files())
    document = venv.fix("--apply")
    assert [row["argv"][-1] for row in document["commands"]] == ["apex"]
    assert [row["id"] for row in document["problems"]] == ["wrong-apex"]
    assert document["state"] == "fixed"
    assert any("git+https://github.com/NVIDIA/apex" in note for note in document["notes"])
    assert not (venv.site / "apex").exists() and not list(venv.site.glob("apex-*"))
    assert envbuild("fix", "--python", str(venv.prefix), "--undo").code == 0
    assert contents(venv.files()) == before


def test_a_program_that_uses_nvidias_apex_still_needs_it(tmp_path: Path, wheels: Path) -> None:
    log = "torch 2.7.1\nNVIDIA H20, driver 570.86.10\nModuleNotFoundError: No module named 'apex.optimizers'\n"
    venv = environment(tmp_path.resolve(), "torch==2.7.1", "apex", log=log)
    document = venv.fix("--apply")
    assert document["state"] == "by-hand"
    assert any("git+https://github.com/NVIDIA/apex" in row["remedy"] for row in document["by_hand"])
    assert not any("NVIDIA/apex" in note or "apex requires" in note for note in document["notes"])


CPU_LOG = "NVIDIA H20, driver 570.86.10\ntorch 2.7.1+cpu\nCUDA available: False\n"
WITHOUT_CUDA = "AssertionError: Torch not compiled with CUDA enabled\n"


def cuda_of(venv: Venv) -> str:
    code = "import torch; print(torch.__version__, torch.version.cuda)"
    return subprocess.run([venv.python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("message", ["", WITHOUT_CUDA], ids=["version", "exception"])
def test_torch_for_the_cpu_is_replaced_on_a_machine_with_a_gpu(tmp_path: Path, wheels: Path, message: str) -> None:
    own = tmp_path / "own"
    own.mkdir()
    torch(own, "2.7.1+cpu", None, [])
    venv = environment(tmp_path.resolve(), str(next(own.glob("*.whl"))), log=CPU_LOG + message)
    assert cuda_of(venv) == "2.7.1+cpu None"
    assert venv.fix("--apply")["state"] == "fixed"
    assert cuda_of(venv) == "2.7.1+cu126 12.6"
    again = venv.fix()
    assert again["state"] == "healthy"
    assert any("the log shows torch-without-cuda" in note for note in again["notes"]) == bool(message)


def test_torchvision_and_torchaudio_for_the_cpu_are_replaced_with_torch(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    torch(own, "2.7.1+cpu", None, [])
    for name, version in (("torchvision", "0.22.1+cpu"), ("torchaudio", "2.7.1+cpu")):
        recorded(own, name, version, ["torch==2.7.1"])
    venv = environment(tmp_path.resolve(), *map(str, own.glob("*.whl")), log=CPU_LOG)
    before = contents(venv.files())
    assert venv.fix("--apply")["state"] == "fixed"
    found = {path.name.removesuffix(".dist-info") for path in venv.site.glob("torch*.dist-info")}
    assert found == {"torch-2.7.1", "torchvision-0.22.1", "torchaudio-2.7.1"}
    assert venv.fix()["state"] == "healthy"
    assert envbuild("fix", "--python", str(venv.prefix), "--undo").code == 0
    assert contents(venv.files()) == before


def test_pip_replaces_torchvision_for_the_cpu_and_keeps_numpy(tmp_path: Path, wheels: Path) -> None:
    """The package index has a newer numpy, which --force-reinstall would install."""
    own = tmp_path / "own"
    own.mkdir()
    torch(own, "2.7.1+cpu", None, ["numpy"])
    recorded(own, "torchvision", "0.22.1+cpu", ["torch==2.7.1", "numpy"])
    recorded(own, "numpy", "1.26.4")
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    installed_by_uv(tmp_path / "venv", *map(str, own.glob("*.whl")))
    (tmp_path / "train.log").write_text(CPU_LOG)
    venv = Venv((tmp_path / "venv").resolve(), tmp_path / "train.log")
    before = contents(venv.files())
    document = venv.fix("--apply")
    assert [row["argv"][3] for row in document["commands"]] == ["uninstall", "install"]
    found = {path.name.removesuffix(".dist-info") for path in venv.site.glob("[tn]*.dist-info")}
    assert found == {"torch-2.7.1", "torchvision-0.22.1", "numpy-1.26.4", "nvidia_nccl_cu12-2.26.2"}
    assert envbuild("fix", "--python", str(venv.prefix), "--undo").code == 0
    assert contents(venv.files()) == before


OLD_DRIVER_LOG = (
    "NVIDIA A100-SXM4-80GB, driver 550.54.15\nRuntimeError: The NVIDIA driver on your system is too old "
    "(found version 12040).\n"
)


def test_a_line_for_this_driver_that_is_not_written_yet_is_written_and_locked_first(
    tmp_path: Path, project: Path
) -> None:
    venv = environment(tmp_path.resolve(), "torch==2.11.0", log=OLD_DRIVER_LOG.replace("A100-SXM4-80GB", "L20"))
    assert envbuild("init", "l20").code == 0
    printed = envbuild("fix", str(venv.log), "--python", str(venv.prefix)).stdout
    commands = "envbuild init l20-cu12; envbuild lock l20-cu12; envbuild install l20-cu12 NEW_FOLDER"
    assert f"a profile for this driver: {commands}\n" in printed


def test_a_torch_that_is_too_new_for_the_driver_is_replaced_by_one_that_fits(tmp_path: Path) -> None:
    venv = environment(tmp_path.resolve(), "torch==2.11.0", log=OLD_DRIVER_LOG)
    assert cuda_of(venv) == "2.11.0+cu130 13.0"
    printed = envbuild("fix", str(venv.log), "--python", str(venv.prefix)).stdout
    assert "Found: driver-too-old: driver 550.54.15 does not run CUDA 13.0, for which torch 2.11.0 was built" in printed
    assert f"torch {OLDER_TORCH} is built for CUDA 12.8" in printed
    assert "a profile for this driver: envbuild install a100-cu12 NEW_FOLDER" in printed
    assert venv.fix("--apply")["state"] == "fixed"
    assert cuda_of(venv) == f"{OLDER_TORCH}+cu128 12.8"
    release = database.torch_release(OLDER_TORCH)
    assert release and release.cuda == "12.8", "the wheel of this test is like the real one"


def test_a_cause_that_the_planned_torch_excludes_is_not_left_to_do(tmp_path: Path, wheels: Path) -> None:
    log = (
        "NVIDIA A100-SXM4-80GB, driver 470.82.01\ntorch 2.7.1\nRuntimeError: The NVIDIA driver on your system is too "
        "old (found version 11040).\n"
    )
    document = environment(tmp_path.resolve(), "torch==2.7.1", log=log).fix()
    assert [row["id"] for row in document["problems"]] == ["driver-too-old"]
    assert document["commands"][0]["argv"][-1] == "nvidia-nccl-cu12", "torch 2.0.1 requires nvidia-nccl-cu11"
    assert "torch==2.0.1" in document["commands"][1]["argv"] and document["by_hand"] == []


def test_a_damaged_library_of_the_replaced_torch_does_not_come_back(tmp_path: Path) -> None:
    """The wheels for CUDA 12 and CUDA 13 contain the same path."""
    venv = environment(tmp_path.resolve(), "torch==2.11.0", log=OLD_DRIVER_LOG)
    file = venv.site / "nvidia/nccl/lib" / SONAMES["nccl"]
    content = file.read_bytes()
    file.unlink()  # other environments share it
    file.write_bytes(content + b"damaged")
    assert nccl(venv) == "22809"
    assert venv.fix("--apply")["state"] == "fixed"
    assert cuda_of(venv) == f"{OLDER_TORCH}+cu128 12.8"
    assert nccl(venv) == "22602"
    assert not list(venv.site.glob("nvidia_*_cu13-*.dist-info")), "the libraries of the old torch are removed"
    assert venv.fix()["state"] == "healthy"


def test_a_library_of_the_old_cuda_that_another_package_requires_stays(tmp_path: Path) -> None:
    venv = environment(tmp_path.resolve(), "torch==2.11.0", "user-of-cuda-13", log=OLD_DRIVER_LOG)
    document = venv.fix()
    assert any(f"torch=={OLDER_TORCH}" in command["argv"] for command in document["commands"])
    assert not [command for command in document["commands"] if "nvidia-nccl-cu13" in command["argv"]]


def test_without_torch_the_environment_of_the_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = environment(tmp_path.resolve(), "numpy")
    near = tmp_path / "project" / ".venv"
    run(UV, "venv", "--quiet", "--python", sys.executable, near)
    monkeypatch.chdir(near.parent)
    done = envbuild("fix", str(other.log), "--python", str(other.prefix))
    assert done.code == 3 and f"envbuild fix {other.log} --python .venv" in done.stderr
    done = envbuild("fix", str(other.log), "--python", str(near))
    assert done.code == 3 and f"envbuild fix {other.log} --python ENV" in done.stderr


def test_a_uv_project_gets_an_older_torch_and_gets_its_files_back(tmp_path: Path) -> None:
    """`uv add` writes into pyproject.toml."""
    folder, log = tmp_path.resolve() / "project", tmp_path / "train.log"
    folder.mkdir()
    head = f'[project]\nname = "mine"\nversion = "1"\nrequires-python = ">=3.{sys.version_info[1]}"\n'
    (folder / "pyproject.toml").write_text(f'{head}dependencies = ["torch>=2.11"]\n')
    run(UV, "sync", "--quiet", "--project", folder, "--python", sys.executable, "--no-install-project")
    log.write_text(OLD_DRIVER_LOG)
    before = contents(hashes(folder))
    venv = Venv(folder / ".venv", log)
    assert venv.fix("--apply")["state"] == "fixed"
    assert cuda_of(venv) == f"{OLDER_TORCH}+cu128 12.8" and nccl(venv) == "22602"
    run(UV, "sync", "--quiet", "--project", folder)
    assert cuda_of(venv) == f"{OLDER_TORCH}+cu128 12.8"
    assert envbuild("fix", "--python", str(venv.prefix), "--undo").code == 0
    assert contents(hashes(folder)) == before


def test_a_uv_project_that_requires_torch_in_a_group(tmp_path: Path) -> None:
    """`uv sync` without --group does not install the group's packages."""
    folder, log = tmp_path.resolve() / "project", tmp_path / "train.log"
    folder.mkdir()
    head = f'[project]\nname = "mine"\nversion = "1"\nrequires-python = ">=3.{sys.version_info[1]}"\n'
    (folder / "pyproject.toml").write_text(f'{head}[dependency-groups]\ngpu = ["torch==2.3.1"]\n')
    sync = [UV, "sync", "--quiet", "--project", folder, "--group", "gpu", "--no-install-project"]
    run(*sync, "--python", sys.executable)
    log.write_text(LOG)
    venv = Venv(folder / ".venv", log)
    assert venv.cublas() == "12.1.3"
    assert venv.fix("--apply")["state"] == "fixed"
    assert venv.cublas() == "12.4.5"
    run(*sync)
    assert venv.cublas() == "12.4.5"


@pytest.mark.parametrize(
    ("requirements", "written"),
    [
        ("""dependencies = ["torch==2.11.0; sys_platform == 'linux'"]""", 'torch==2.10.0; sys_platform == "linux"'),
        ('dependencies = []\n[dependency-groups]\ngpu = ["torch==2.11.0"]', "torch==2.10.0"),
        ('dependencies = []\n[project.optional-dependencies]\ngpu = ["torch==2.11.0"]', "torch==2.10.0"),
    ],
)
def test_a_requirement_that_uv_add_does_not_change_is_left_to_the_user(
    tmp_path: Path, requirements: str, written: str
) -> None:
    """`uv add` would find no solution, and its message names no line."""
    folder, log = tmp_path.resolve() / "project", tmp_path / "train.log"
    folder.mkdir()
    head = f'[project]\nname = "mine"\nversion = "1"\nrequires-python = ">=3.{sys.version_info[1]}"\n'
    file = folder / "pyproject.toml"
    file.write_text(f"{head}{requirements}\n")
    sync = [UV, "sync", "--quiet", "--project", folder, "--all-extras", "--all-groups"]
    run(*sync, "--python", sys.executable)
    log.write_text(OLD_DRIVER_LOG)
    venv = Venv(folder / ".venv", log)
    number = 5 + requirements.count("\n")
    found = refused(venv)
    assert f"`uv add` does not change these requirements: {file}:{number} still requires torch==2.11.0" in found
    assert f": write {written}" in found and "change them, then run `uv sync`" in found
    file.write_text(file.read_text().replace("2.11.0", "2.10.0"))
    run(*sync)
    assert cuda_of(venv) == f"{OLDER_TORCH}+cu128 12.8"
    assert venv.fix()["problems"] == []


# Environments without a fault


def test_apply_changes_nothing_in_an_environment_without_faults(tmp_path: Path) -> None:
    venv = environment(tmp_path.resolve(), "torch==2.7.1", log="torch 2.7.1\nNVIDIA A100, driver 570.86.10\nstep 1\n")
    before = hashes(venv.prefix)
    done = envbuild("fix", str(venv.log), "--python", str(venv.prefix), "--apply")
    assert done.code == 0 and done.stdout.splitlines()[-1] == "Nothing to fix."
    assert hashes(venv.prefix) == before
