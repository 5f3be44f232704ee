"""Real pip and uv fix environments from local wheels: the fix lasts, shared files stay, and everything can be
undone."""

from __future__ import annotations

import base64
import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from selftest.environments import SONAMES, TORCH, Environment, library, libtorch_cuda

from envbuild.cli import fix as fix_command
from envbuild.fetch import wheel_resolution_and_download
from envbuild.repair import file_backup, repair_output, repair_run, requirement_edits
from envbuild.repair.repair_plan import Command
from envbuild.runners import host_runner
from envbuild.testrun.run_result import RawOutput
from envbuild.testrun.selftest_job import Job
from envbuild.util import user_folders
from envbuild.util.errors import CheckFailed, FileError, HashMismatch
from unit.evidence.runs import documents, line, output, probe
from unit.repair.test_repair_plan import LOG
from unit.support import envbuild, is_locked, write_wheel

pytestmark = pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc to build the libraries with")
UV = str(wheel_resolution_and_download.uv_binary())
MARKER = 'platform_system == "Linux" and platform_machine == "x86_64"'
TORCH_REQUIRES = (f"nvidia-cublas-cu12==12.1.3.1 ; {MARKER}", "nvidia-cudnn-cu12==9.1.0.70", "nvidia-nccl-cu12==2.26.2")


def run(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True)


def libraries(version: str, *kinds: str) -> dict[str, bytes]:
    return {f"nvidia/{kinds[0]}/lib/{SONAMES[kind]}": library(kind, version) for kind in kinds}


def recorded(
    folder: Path,
    name: str,
    version: str,
    requires: Sequence[str] = (),
    files: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """A wheel whose RECORD lists every file."""
    file = write_wheel(folder, name, version, requires, files=files)
    with zipfile.ZipFile(file) as archive:
        members = {item: archive.read(item) for item in archive.namelist()}
    record = next(item for item in members if item.endswith("/RECORD"))
    rows = [
        f"{item},sha256={base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b'=').decode()},{len(content)}"
        for item, content in members.items()
    ]
    members[record] = "\n".join([*(row for row in rows if not row.startswith(record)), f"{record},,", ""]).encode()
    with zipfile.ZipFile(file, "w") as archive:
        for item, content in members.items():
            archive.writestr(zipfile.ZipInfo(item), content)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    for version in ("12.1.3.1", "12.4.5.8"):
        recorded(folder, "nvidia-cublas-cu12", version, files=libraries(version, "cublas", "cublasLt"))
    recorded(folder, "nvidia-cudnn-cu12", "9.1.0.70", files=libraries("9.1.0.70", "cudnn"))
    recorded(folder, "nvidia-nccl-cu12", "2.26.2", files=libraries("2.26.2", "nccl"))
    text = TORCH.format(version="2.3.1+cu121", cuda="12.1", architectures="sm_50 sm_80 sm_90")
    files = {
        "torch/__init__.py": text.encode(),
        "torch/lib/libtorch_cuda.so": libtorch_cuda(("cublas", "cublasLt", "cudnn", "nccl")),
    }
    recorded(folder, "torch", "2.3.1", TORCH_REQUIRES, files=files)
    recorded(folder, "torchvision", "0.18.1", ["torch==2.3.1"])
    return folder


@pytest.fixture(autouse=True)
def local_index(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (tmp_path / "uv.toml").write_text(f'no-index = true\nfind-links = ["{wheels}"]\n')
    monkeypatch.delenv("UV_NO_CONFIG")
    monkeypatch.setenv("UV_CONFIG_FILE", str(tmp_path / "uv.toml"))


@dataclass(frozen=True)
class Venv:
    prefix: Path
    log: Path

    @property
    def python(self) -> Path:
        return self.prefix / "bin" / "python"

    @property
    def site(self) -> Path:
        return next((self.prefix / "lib").glob("python3.*/site-packages"))

    def fix(self, *words: str) -> Mapping[str, Any]:
        done = envbuild("fix", str(self.log), "--python", str(self.prefix), *words, "--json")
        assert done.code == 0, done.stderr + done.stdout
        document: Mapping[str, Any] = json.loads(done.stdout)
        return document

    def cublas(self) -> str:
        """Return the version that the loaded library reports."""
        code = (
            "import ctypes, torch\nlib = ctypes.CDLL('libcublas.so.12'); v = ctypes.c_int()\n"
            "print(*[(lib.cublasGetProperty(n, ctypes.byref(v)), v.value)[1] for n in range(3)], sep='.')"
        )
        done = subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def files(self) -> dict[str, tuple[str, int]]:
        """Return sha256 and inode of every file, except bytecode."""
        return hashes(self.prefix)


def hashes(folder: Path) -> dict[str, tuple[str, int]]:
    return {
        str(path.relative_to(folder)): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_ino)
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and "__pycache__" not in path.parts
    }


def contents(found: Mapping[str, tuple[str, int]]) -> dict[str, str]:
    return {name: sha256 for name, (sha256, _) in found.items()}


def made_by_uv(folder: Path, name: str = "venv") -> Venv:
    run(UV, "venv", "--quiet", "--python", sys.executable, folder / name)
    command: list[object] = [
        UV,
        "pip",
        "install",
        "--quiet",
        "--link-mode",
        "hardlink",
        "--python",
        folder / name,
        "torch==2.3.1",
    ]
    run(*command)
    log = folder / "train.log"
    log.write_text(LOG)
    return Venv(folder / name, log)


@pytest.fixture
def venv(tmp_path: Path) -> Venv:
    return made_by_uv(tmp_path.resolve())


@pytest.mark.slow
def test_uv_fixes_it_and_undo_restores_every_file(venv: Venv, tmp_path: Path) -> None:
    """A second environment with the same hard links is not changed."""
    second = made_by_uv(tmp_path.resolve(), "second")
    library = next(venv.site.glob("nvidia/cublas/lib/libcublas.so.12"))
    assert library.stat().st_nlink > 1, "the two share it"
    before, other = venv.files(), second.files()
    assert venv.cublas() == "12.1.3"
    document = venv.fix("--apply")
    assert (document["state"], [row["id"] for row in document["advisories"]]) == ("fixed", ["cublas-hopper-fpe"])
    assert venv.cublas() == "12.4.5"
    assert second.files() == other
    assert "nvidia-cublas-cu12==12.4.5.8" in (venv.site / "torch-2.3.1.dist-info" / "METADATA").read_text()
    assert venv.fix()["state"] == "healthy"
    run(UV, "pip", "install", "--quiet", "--python", venv.prefix, "torchvision==0.18.1")
    assert venv.cublas() == "12.4.5", "a later installation leaves it"
    run(UV, "pip", "uninstall", "--quiet", "--python", venv.prefix, "torchvision")
    undone = envbuild("fix", "--python", str(venv.prefix), "--undo")
    assert undone.code == 0 and "nvidia-cublas-cu12" in undone.stdout
    after = venv.files()
    assert contents(after) == contents(before)
    touched = {name for name in before if "cublas" in name}
    assert touched and {after[name] for name in touched} == {before[name] for name in touched}, "the original files"
    assert second.files() == other
    assert not (venv.prefix / file_backup.FOLDER).exists()
    assert venv.cublas() == "12.1.3"


@pytest.fixture(scope="module")
def with_pip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pip") / "venv"
    run(sys.executable, "-m", "venv", folder)
    return folder


@pytest.mark.slow
def test_pip_fixes_it_and_a_later_pip_install_leaves_it(with_pip: Path, wheels: Path, tmp_path: Path) -> None:
    python = with_pip / "bin" / "python"
    pip: list[object] = [python, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", wheels]
    run(*pip, "torch==2.3.1")
    (tmp_path / "train.log").write_text(LOG)
    venv = Venv(with_pip, tmp_path / "train.log")
    before = contents(venv.files())
    document = venv.fix("--apply")
    rows = document["commands"]
    assert isinstance(rows, list)
    assert rows[0]["argv"][1:4] == ["-m", "pip", "install"]
    assert venv.cublas() == "12.4.5"
    run(*pip, "torchvision==0.18.1")
    assert venv.cublas() == "12.4.5"
    run(python, "-m", "pip", "check")
    run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision")
    assert envbuild("fix", "--python", str(with_pip), "--undo").code == 0
    assert contents(venv.files()) == before
    run(*pip, "torchvision==0.18.1")
    assert venv.cublas() == "12.1.3", "without the fix, torch's own version is back"


@pytest.fixture
def project(tmp_path: Path) -> Venv:
    folder = tmp_path.resolve() / "project"
    folder.mkdir()
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    head = f'[project]\nname = "mine"  # kept\nversion = "1"\nrequires-python = ">={version}"\n'
    (folder / "pyproject.toml").write_text(f'{head}dependencies = ["torch==2.3.1"]\n')
    command: list[object] = [
        UV,
        "sync",
        "--quiet",
        "--project",
        folder,
        "--python",
        sys.executable,
        "--no-install-project",
    ]
    run(*command)
    log = tmp_path / "train.log"
    log.write_text(LOG)
    return Venv(folder / ".venv", log)


@pytest.mark.slow
def test_a_uv_project_is_fixed_and_stays_fixed(project: Venv) -> None:
    folder = project.prefix.parent
    before = contents(hashes(folder))
    document = project.fix("--apply")
    assert (document["manager"], document["state"]) == ("uv-project", "fixed")
    assert project.cublas() == "12.4.5"
    text = (folder / "pyproject.toml").read_text()
    assert 'name = "mine"  # kept' in text
    # with torch's own marker: the library does not exist for other platforms
    assert tomllib.loads(text)["tool"]["uv"]["override-dependencies"] == [f"nvidia-cublas-cu12==12.4.5.8 ; {MARKER}"]
    run(UV, "sync", "--quiet", "--project", folder)
    assert project.cublas() == "12.4.5"
    undone = envbuild("fix", "--python", str(project.prefix), "--undo")
    assert undone.code == 0 and f"{folder}/pyproject.toml, {folder}/uv.lock" in undone.stdout
    assert contents(hashes(folder)) == before
    assert project.cublas() == "12.1.3"


@pytest.mark.slow
@pytest.mark.parametrize("other_disk", [False, True])
def test_project_files_that_are_links_are_restored(
    project: Venv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other_disk: bool
) -> None:
    """The commands write into the file to which the link leads."""
    folder, shared = project.prefix.parent, tmp_path.resolve() / "shared"
    shared.mkdir()
    for name in file_backup.PROJECT_FILES:
        (folder / name).rename(shared / name)
        (folder / name).symlink_to(Path("..") / "shared" / name)
    before = [(shared / name).read_bytes() for name in file_backup.PROJECT_FILES]
    project.fix("--apply")
    assert (shared / "pyproject.toml").read_bytes() != before[0]
    if other_disk:
        replace = Path.replace

        def replaced(file: Path, target: str | Path) -> Path:
            if Path(target).parent == shared and not file.is_relative_to(shared):
                raise OSError(errno.EXDEV, "Invalid cross-device link")
            return replace(file, target)

        monkeypatch.setattr(Path, "replace", replaced)
    backup = file_backup.latest_backup(project.prefix)
    assert backup
    assert file_backup.restore(backup).left == ()
    assert [(shared / name).read_bytes() for name in file_backup.PROJECT_FILES] == before
    links = [(folder / name).readlink() for name in file_backup.PROJECT_FILES]
    assert links == [Path("..") / "shared" / name for name in file_backup.PROJECT_FILES]


@pytest.mark.slow
def test_a_project_file_that_was_changed_since_is_left(project: Venv) -> None:
    project.fix("--apply")
    file = project.prefix.parent / "pyproject.toml"
    file.write_text(file.read_text() + "# mine\n")
    done = envbuild("fix", "--python", str(project.prefix), "--undo")
    assert done.code == 0 and f"Not restored, because it was changed after --apply: {file}" in done.stdout
    assert file.read_text().endswith("# mine\n")
    assert project.cublas() == "12.1.3"


def test_a_project_file_that_the_fix_did_not_change_may_be_edited_before_the_undo(project: Venv) -> None:
    files = [project.prefix.parent / name for name in file_backup.PROJECT_FILES]
    backup = file_backup.take_backup(project.prefix, [str(project.site)], files)
    files[1].unlink()
    files[1].write_text("changed by the fix")
    backup = file_backup.finish_backup(backup, files)
    assert list(backup.content.project) == [str(files[1])]
    files[0].write_text("edited later")
    assert file_backup.restore(backup).left == ()
    assert files[0].read_text() == "edited later" and files[1].read_text() != "changed by the fix"


def test_a_project_file_may_be_written_in_place(project: Venv) -> None:
    """`uv add` writes into pyproject.toml, while `uv sync` replaces uv.lock."""
    files = [project.prefix.parent / name for name in file_backup.PROJECT_FILES]
    before = [file.read_bytes() for file in files]
    backup = file_backup.take_backup(project.prefix, [str(project.site)], project=files)
    for file in files:
        with file.open("a") as stream:
            stream.write("# added")
    assert file_backup.written_into(backup, files) == []
    backup = file_backup.finish_backup(backup, files)
    assert sorted(backup.content.project) == sorted(map(str, files))
    assert file_backup.restore(backup).left == ()
    assert [file.read_bytes() for file in files] == before


def test_a_command_that_fails_changes_nothing(venv: Venv, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "uv.toml").write_text("no-index = true\n")
    before = venv.files()
    done = envbuild("fix", str(venv.log), "--python", str(venv.prefix), "--apply")
    assert done.code == 6 and "the environment is as before" in done.stderr
    assert venv.files() == before


def test_a_distribution_that_only_shares_a_file_is_not_undone(tmp_path: Path) -> None:
    """Each of NVIDIA's wheels contains nvidia/__init__.py, and pip replaces it with each of them."""
    prefix, shared = tmp_path.resolve(), "nvidia/__init__.py"
    made = Environment(prefix / "site-packages")
    made.wheel("nvidia-a", "1", {shared: b"", "nvidia/a.so": b"1"})
    made.wheel("nvidia-b", "1", {shared: b"", "nvidia/b.so": b"1"})
    backup = file_backup.take_backup(prefix, [str(made.site)])
    for name in (shared, "nvidia/a.so"):
        (made.site / name).unlink()
        (made.site / name).write_bytes(b"2")
    backup = file_backup.finish_backup(backup)
    assert backup.content.names == {"nvidia-a"}
    (made.site / "nvidia/b.so").unlink()
    (made.site / "nvidia/b.so").write_bytes(b"installed by the user")
    assert file_backup.restore(backup).distributions == {"nvidia-a"}
    assert [(made.site / name).read_bytes() for name in (shared, "nvidia/a.so")] == [b"", b"1"]
    assert (made.site / "nvidia/b.so").read_bytes() == b"installed by the user"


def test_an_interrupted_fix_is_undone_by_the_user(venv: Venv) -> None:
    """After SIGKILL the backup exists, and the changes are incomplete."""
    before = contents(venv.files())
    file_backup.take_backup(venv.prefix, [str(venv.site)])
    command: list[object] = [
        UV,
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--python",
        venv.prefix,
        "nvidia-cublas-cu12==12.4.5.8",
    ]
    run(*command)
    shutil.rmtree(venv.site / "nvidia" / "nccl")
    shutil.rmtree(next(venv.site.glob("nvidia_cublas_cu12*.dist-info")))
    with pytest.raises(FileError, match="interrupted"):
        file_backup.take_backup(venv.prefix, [str(venv.site)])
    assert envbuild("fix", "--python", str(venv.prefix), "--undo").code == 0
    assert contents(venv.files()) == before


@pytest.mark.slow
@pytest.mark.parametrize("path", ["../outside", "/etc/outside", "venv/../../outside", "linked/outside"])
def test_a_backup_of_another_author_cannot_reach_other_files(venv: Venv, tmp_path: Path, path: str) -> None:
    """An environment that was unpacked from an archive may contain a forged backup."""
    venv.fix("--apply")
    (venv.prefix / "linked").symlink_to(tmp_path)
    manifest = next((venv.prefix / file_backup.FOLDER).glob("*/backup.json"))
    content = json.loads(manifest.read_text())
    outside = tmp_path / "outside"
    outside.write_text("mine")
    content["added"].append(str(venv.prefix / path) if not path.startswith("/") else path)
    manifest.write_text(json.dumps(content))
    done = envbuild("fix", "--python", str(venv.prefix), "--undo")
    assert done.code == 3 and "is not a file of this environment" in done.stderr
    assert outside.read_text() == "mine"
    assert venv.cublas() == "12.4.5"


@pytest.mark.slow
def test_without_hard_links_what_is_replaced_is_copied(venv: Venv, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(95, "Operation not supported")

    before = contents(venv.files())
    monkeypatch.setattr(os, "link", refuse)
    document = venv.fix("--apply")
    kept = list(Path(str(document["backup"]), "files").iterdir())
    assert kept and not any(
        file.read_bytes() == (venv.site / "nvidia/nccl/lib/libnccl.so.2").read_bytes() for file in kept
    )
    assert envbuild("fix", "--python", str(venv.prefix), "--undo").code == 0
    assert contents(venv.files()) == before


def test_a_kept_file_that_was_changed_is_not_restored(venv: Venv) -> None:
    venv.fix("--apply")
    backup = file_backup.latest_backup(venv.prefix)
    assert backup
    kept = next(
        backup.kept(file) for files in backup.content.files.values() for file in files if "libcublas.so" in file.path
    )
    content = kept.read_bytes() + b"changed"
    kept.unlink()
    kept.write_bytes(content)
    before = venv.files()
    with pytest.raises(HashMismatch):
        file_backup.restore(backup)
    assert venv.files() == before


def test_a_program_that_writes_into_a_file_is_noticed(venv: Venv) -> None:
    backup = file_backup.take_backup(venv.prefix, [str(venv.site)])
    assert file_backup.written_into(backup) == []
    time.sleep(0.01)
    file = venv.site / "torch" / "__init__.py"
    with file.open("ab") as stream:
        stream.write(b"# more\n")
    assert file_backup.written_into(backup) == [str(file)]


def test_a_log_that_another_program_writes_does_not_fail_the_fix(venv: Venv) -> None:
    """Such a file belongs to no distribution. The undo leaves it as it is."""
    log, leftover = venv.site / "cache.log", venv.site / "leftover.so"
    log.write_text("1\n")
    leftover.write_text("1\n")
    backup = file_backup.take_backup(venv.prefix, [str(venv.site)], [leftover])
    time.sleep(0.01)
    for file in (log, leftover):
        with file.open("a") as stream:
            stream.write("2\n")
    assert file_backup.written_into(backup) == []
    assert file_backup.written_into(backup, [leftover]) == [str(leftover)]
    backup = file_backup.finish_backup(backup)
    log.write_text("1\n2\n3\n")
    file_backup.restore(backup)
    assert log.read_text() == "1\n2\n3\n"


@pytest.mark.slow
def test_an_environment_below_a_symlinked_folder_is_backed_up(venv: Venv) -> None:
    """Also if the undo names the real folder."""
    before = contents(venv.files())
    linked = venv.prefix.parent / "linked"
    linked.symlink_to(venv.prefix.parent)
    Venv(linked / "venv", venv.log).fix("--apply")
    backup = file_backup.latest_backup(linked / "venv")
    assert backup and backup.content.names == {"nvidia-cublas-cu12", "torch"}
    assert any("nvidia_cublas_cu12-12.4.5.8" in path for path in backup.content.added)
    assert envbuild("fix", "--python", str(venv.prefix), "--undo").code == 0
    assert contents(venv.files()) == before


def test_there_is_nothing_to_undo(venv: Venv) -> None:
    done = envbuild("fix", "--python", str(venv.prefix), "--undo")
    assert done.code == 3 and "has no fix to undo" in done.stderr
    assert envbuild("fix", str(venv.log), "--python", str(venv.prefix), "--undo").code == 2


@pytest.fixture
def sleeper(venv: Venv) -> Iterator[subprocess.Popen[str]]:
    code = "import torch, sys, time; print('loaded', flush=True); time.sleep(600)"
    process = subprocess.Popen([venv.python, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "loaded\n"
    yield process
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_files_in_use_are_not_replaced(venv: Venv, sleeper: subprocess.Popen[str]) -> None:
    before = venv.files()
    done = envbuild("fix", str(venv.log), "--python", str(venv.prefix), "--apply")
    assert done.code == 6 and f"({sleeper.pid}) has " in done.stderr
    assert venv.files() == before


def test_what_is_left_to_the_user_is_named_and_not_called_fixed(
    venv: Venv, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable of the user's shell is still as before, so that another library may still be loaded: the fix need
    not be undone. requirements.txt still has the old version."""

    def another_is_loaded(*_: object) -> None:
        raise CheckFailed("another cuBLAS is loaded")

    monkeypatch.setattr(repair_run, "require_loaded", another_is_loaded)
    (venv.prefix.parent / "requirements.txt").write_text("numpy\nnvidia-cublas-cu12==12.1.3.1  # of torch\n")
    line = "requirements.txt:2 still requires nvidia-cublas-cu12==12.1.3.1: write nvidia-cublas-cu12==12.4.5.8"
    preview = envbuild("fix", str(venv.log), "--python", str(venv.prefix))
    assert re.search(f"Not changed by these commands: .*/{re.escape(line)}", preview.stdout)
    plan, held = fix_command.planned_repair((str(venv.log),), str(venv.prefix), ())
    left = Command("in the job script", ("unset", "LD_LIBRARY_PATH"), True)
    plan = dataclasses.replace(plan, commands=(*plan.commands, left))
    document = fix_command._apply(plan, held, repair_output.repair_document(plan, [], None), False)
    printed = capsys.readouterr().out
    assert document.state == "by-hand" and venv.cublas() == "12.4.5"
    assert "Changed, but not yet fixed" in printed and "Fixed" not in printed
    assert "Still to do: in the job script: unset LD_LIBRARY_PATH" in printed
    assert line in printed and any(line in note for note in document.notes)


@pytest.mark.slow
def test_a_plan_from_before_another_fix_is_refused(venv: Venv) -> None:
    """Two fixes begin at the same time: the second waits for the first, and the plan of the second is then outdated."""
    plan, held = fix_command.planned_repair((str(venv.log),), str(venv.prefix), ())
    venv.fix("--apply")
    before = venv.files()
    with pytest.raises(
        repair_run.RepairRefused, match="changed after the fix was planned: nvidia-cublas-cu12"
    ) as caught:
        repair_run.apply_repair(plan, held, print)
    assert "run the command again" in str(caught.value.hint)
    assert venv.files() == before


@pytest.mark.slow
def test_the_environment_is_checked_while_no_other_fix_runs(venv: Venv, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that began to use the files while this fix waited is noticed."""
    check, held = repair_run.require_changeable, list[bool]()

    def watched(*arguments: Any) -> None:
        held.append(any(is_locked(file) for file in user_folders.cache_folder("locks").glob("_environment-*.lock")))
        check(*arguments)

    monkeypatch.setattr(repair_run, "require_changeable", watched)
    venv.fix("--apply")
    assert held == [False, True], "first without waiting, then while other fixes wait"


def test_without_permission_nothing_is_tried(venv: Venv, monkeypatch: pytest.MonkeyPatch) -> None:
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK | os.X_OK and access(path, mode))
    done = envbuild("fix", str(venv.log), "--python", str(venv.prefix), "--apply")
    assert done.code == 6 and "no permission to write to" in done.stderr


def test_a_full_disk_is_noticed_before_anything_changes(venv: Venv, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(venv.prefix)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    done = envbuild("fix", str(venv.log), "--python", str(venv.prefix), "--apply")
    assert done.code == 6 and "the repair needs about" in done.stderr
    assert not (venv.prefix / file_backup.FOLDER).exists()


def test_conda_poetry_and_the_system_are_refused(venv: Venv) -> None:
    (venv.prefix.parent / "poetry.lock").touch()
    done = envbuild("fix", str(venv.log), "--python", str(venv.prefix), "--apply")
    assert done.code == 6 and "Poetry manages this environment" in done.stderr
    assert "uv pip install" in done.stdout, "the commands are printed all the same"


def test_the_probes_run_where_there_is_a_gpu(venv: Venv) -> None:
    """This machine has no GPU, so the command for the machine with the GPU is printed."""
    done = envbuild("fix", str(venv.log), "--python", str(venv.prefix), "--apply")
    assert done.code == 0, done.stderr
    command = f"envbuild test h20 --python {venv.python} --probe gemm.crash"
    assert f"Fixed; not tested: this machine has no GPU; on the GPU machine run: {command}" in done.stdout
    assert "MB of disk" not in done.stderr, "less than 1 MB"
    assert f"Loaded now: {venv.site}/nvidia/cublas/lib/libcublas.so.12 (12.4.5.8, loaded)" in done.stdout


@pytest.mark.parametrize(
    "text",
    [
        "",
        '[project]\nname = "a"\n',
        '[tool.uv]\ndev-dependencies = ["a]"]\n[tool.other]\nx = 1\n',
        '[tool.uv] # mine\noverride-dependencies = ["a[b]==1", # one\n  "Nvidia_cublas-cu12==1"]\nx = [1]\n',
        '[tool.uv.sources]\nx = {path = "y"}\n',
    ],
)
def test_overrides_are_added_and_nothing_else_changes(text: str) -> None:
    before, after = (
        tomllib.loads(text),
        tomllib.loads(requirement_edits.with_overrides(text, ["nvidia-cublas-cu12==12.4.5.8"])),
    )
    values = after["tool"]["uv"].pop("override-dependencies")
    assert values[-1] == "nvidia-cublas-cu12==12.4.5.8" and len(values) == (2 if "a[b]" in text else 1)
    before.get("tool", {}).get("uv", {}).pop("override-dependencies", None)
    before.setdefault("tool", {}).setdefault("uv", {})
    assert after == before


def test_a_form_that_is_not_understood_is_left_to_the_user(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text("tool = {uv = {x = 1}}\n")
    with pytest.raises(FileError) as caught:
        requirement_edits.override_project(file, ["a==1"])
    assert "add by hand, under [tool.uv]" in (caught.value.hint or "")
    assert file.read_text() == "tool = {uv = {x = 1}}\n"


def test_processes_are_found_by_the_files_that_they_use() -> None:
    maps = {path for line in Path("/proc/self/maps").read_text().splitlines() if (path := line[73:].strip())}
    assert all(one.pid != os.getpid() for one in repair_run.processes_using(maps))


@pytest.mark.parametrize("status", ["passed", "failed"])
def test_the_probes_of_the_advisories_decide_whether_the_environment_is_fixed(
    monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    """The self-test's process is a stand-in, because it needs the GPU."""
    started: list[str] = []

    def run(python: Path, job: Job) -> RawOutput:
        started.append(str(python))
        found = documents(probe("gemm.crash", status))
        text = [line(json.dumps(document).encode(), number, job.nonce) for number, document in enumerate(found)]
        return output(text, exit_code=0 if status == "passed" else 5)

    monkeypatch.setattr(host_runner, "run_on_host", run)
    held: Any = SimpleNamespace(
        torch=SimpleNamespace(imported=True),
        machine=SimpleNamespace(gpus=("NVIDIA H20",)),
        python=SimpleNamespace(version="3.11.7", executable="/venv/bin/python"),
    )
    plan: Any = SimpleNamespace(
        diagnosis=SimpleNamespace(probes=("gemm.crash",)), manager=SimpleNamespace(prefix=Path("/venv"))
    )
    done = repair_run.run_probes(plan, held)
    assert not isinstance(done, str) and started == ["/venv/bin/python"]
    if status == "passed":
        repair_run.require_probes_passed(done, plan)
        return
    with pytest.raises(CheckFailed) as caught:
        repair_run.require_probes_passed(done, plan)
    assert "gemm.crash: signal" in str(caught.value.hint) and "--undo" in str(caught.value.hint)
