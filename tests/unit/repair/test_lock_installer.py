"""A lock becomes a virtual environment of this machine: the locked files, and overrides that hold with pip and uv."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from packaging.utils import parse_wheel_filename

from envbuild.fetch import sha256_file_store, wheel_resolution_and_download
from envbuild.fetch.locked_wheel_types import LockedWheel, Wheel
from envbuild.fetch.sha256_file_store import Store, file_digest
from envbuild.lock import lock_file
from envbuild.lock.lock_entry_types import Overridden
from envbuild.lock.lock_file import Lock
from envbuild.repair import install_planner, lock_installer
from envbuild.repair.lock_installer import InstalledLock
from envbuild.util import user_folders
from envbuild.util.errors import BuildError, FileError, HashMismatch, SystemFault
from unit.repair import test_repair_run
from unit.repair.test_repair_run import UV, Venv, contents, run
from unit.support import PROFILE, envbuild, lock_for, plan_of, profile_of

pytestmark = pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc to build the libraries with")
wheels, local_index = test_repair_run.wheels, test_repair_run.local_index
VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
HOSTILE = "a b $(touch hacked) `touch hacked` 'quoted'"
NAMES = ("torch-2.3.1", "nvidia_cublas_cu12-12.4.5.8", "nvidia_cudnn_cu12-9.1.0.70", "nvidia_nccl_cu12-2.26.2")


@pytest.fixture
def lock(wheels: Path, tmp_path: Path) -> Lock:
    """A lock of torch 2.3.1 with a cuBLAS that its metadata does not allow; the wheels are in the store."""
    store, listed = sha256_file_store.wheel_store(), []
    for file in sorted(wheels.glob("*.whl")):
        if file.name.startswith(NAMES):
            name, version, _, _ = parse_wheel_filename(file.name)
            sha256 = file_digest(file)
            target = store.path(sha256, file.name)
            target.parent.mkdir(parents=True)
            shutil.copy(file, target)
            listed.append(LockedWheel(Wheel(name, str(version), file.name, sha256), file.stat().st_size, "torch"))
    assert len(listed) == len(NAMES)
    override = Overridden("nvidia-cublas-cu12", "12.4.5.8", "==12.1.3.1")
    whole = lock_for(plan_of(tmp_path / "project", PROFILE))
    return dataclasses.replace(whole, python=VERSION, wheels=tuple(listed), overrides=(override,), extensions=())


def install(lock: Lock, folder: Path) -> InstalledLock:
    plan = install_planner.plan_for_lock("sample", "sample", lock, {"GREETING": HOSTILE})
    return lock_installer.install_lock(plan, folder, lambda text: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path.resolve() / "installed"


@pytest.mark.slow
def test_the_override_holds_with_pip_and_with_uv(lock: Lock, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = install(lock, folder)
    assert len(done.installed) == 4 and done.state == "installed"
    venv = Venv(folder, folder / "none")
    assert venv.cublas() == "12.4.5"
    pip = [sys.executable, "-m", "pip", "--python", venv.python]
    run(*pip, "install", "--quiet", "torchvision==0.18.1")
    run(*pip, "check")
    assert venv.cublas() == "12.4.5"
    run(UV, "pip", "install", "--quiet", "--python", venv.python, "--reinstall-package", "torchvision", "torchvision")
    run(
        UV,
        "pip",
        "install",
        "--quiet",
        "--python",
        venv.python,
        "-c",
        folder / "constraints.txt",
        "torchvision==0.18.1",
    )
    assert venv.cublas() == "12.4.5"
    older = [str(word) for word in (*pip, "install", "--quiet", "nvidia-cublas-cu12==12.1.3.1")]
    monkeypatch.delenv("PIP_CONFIG_FILE")
    refused = subprocess.run(older, capture_output=True, text=True)
    assert refused.returncode and "conflicting dependencies" in refused.stderr, "pip reads the constraints by itself"


@pytest.mark.slow
def test_the_audit_of_an_installed_lock_is_clean(project: Path, lock: Lock, folder: Path) -> None:
    """With the hashes of the locked wheels. A file that changed afterwards is reported."""
    loaded = profile_of(project, PROFILE)
    made = dataclasses.replace(lock, inputs=lock_file.inputs(plan_of(project, PROFILE)))
    lock_file.write(made, loaded.lock_file, "sample")
    assert envbuild("install", "sample", str(folder)).code == 0
    audited = envbuild("audit", "--python", str(folder), "--profile", "sample", "--json")
    assert (audited.code, audited.document["state"]) == (0, "clean"), audited.stdout
    assert envbuild("install", "sample", str(folder), "--json").document["state"] == "up-to-date"
    file = next(folder.glob("lib/python3.*/site-packages/torch/__init__.py"))
    text = file.read_text()
    file.unlink()
    file.write_text(f"{text}# changed\n")
    assert envbuild("audit", "--python", str(folder), "--profile", "sample").code == 5


def test_repeating_it_changes_only_what_differs(lock: Lock, folder: Path) -> None:
    install(lock, folder)
    venv = Venv(folder, folder / "none")
    before = venv.files()
    assert install(lock, folder).installed == ()
    assert venv.files() == before
    run(UV, "pip", "uninstall", "--quiet", "--python", venv.python, "nvidia-nccl-cu12")
    assert install(lock, folder).installed == ("nvidia-nccl-cu12",)
    assert contents(venv.files()) == contents(before)


def test_the_activation_sets_the_profiles_variables(lock: Lock, folder: Path, tmp_path: Path) -> None:
    install(lock, folder)
    activate = (folder / "bin" / "activate").read_text()
    install(lock, folder)
    script = '. "$1/bin/activate"; printf "%s\\n" "$GREETING" "$UV_CONSTRAINT"'
    done = subprocess.run(
        ["bash", "-c", script, "bash", folder], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout == f"{HOSTILE}\n{folder}/constraints.txt\n"
    assert not (tmp_path / "hacked").exists()
    assert (folder / "bin" / "activate").read_text() == activate


@pytest.mark.parametrize("shell", ["bash", "dash", "zsh"])
@pytest.mark.parametrize("before", ["", 'it\'s "$HOME"'], ids=["unset", "set"])
def test_deactivate_restores_the_variables(lock: Lock, folder: Path, shell: str, before: str) -> None:
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    install(lock, folder)
    script = 'set -u; . "$1/bin/activate"; . "$1/bin/activate"; deactivate; env'
    env = {"PATH": os.environ["PATH"], **({"GREETING": before} if before else {})}
    argv = [shell, "-c", script, shell, str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env=env)
    left = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    assert {name: value for name, value in left.items() if name not in ("PS1", "PWD", "OLDPWD", "SHLVL", "_")} == env


def stored_cublas(lock: Lock) -> Path:
    locked = next(one.wheel for one in lock.wheels if one.wheel.name == "nvidia-cublas-cu12")
    return sha256_file_store.wheel_store().path(locked.sha256, locked.file)


def test_a_wheel_that_is_not_the_locked_one_is_not_installed(lock: Lock, folder: Path, wheels: Path) -> None:
    shutil.copy(next(wheels.glob("nvidia_cublas_cu12-12.1.3.1-*")), stored_cublas(lock))
    with pytest.raises(HashMismatch, match="was damaged on this disk"):
        install(lock, folder)
    assert not folder.exists() and not stored_cublas(lock).exists()


def test_uv_checks_the_hash_too(lock: Lock, folder: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sha256_file_store, "check_changed", lambda *_: None)
    shutil.copy(next(wheels.glob("nvidia_cublas_cu12-12.1.3.1-*")), stored_cublas(lock))
    with pytest.raises(BuildError) as caught:
        install(lock, folder)
    assert "hash" in (caught.value.hint or "").lower()


@pytest.mark.parametrize("keeps_times", [False, True])
def test_a_wheel_damaged_since_the_last_installation_is_found(lock: Lock, folder: Path, keeps_times: bool) -> None:
    """uv has unpacked the wheel into its cache, and does not read the file again."""
    install(lock, folder)
    file = stored_cublas(lock)
    before = file.stat()
    with file.open("r+b") as stream:  # the size stays
        stream.seek(100)
        stream.write(b"damaged")
    if keeps_times:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(HashMismatch, match="was damaged on this disk"):
        install(lock, folder.with_name("second"))


def test_unchanged_wheels_are_not_read_again(lock: Lock, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(lock, folder)
    monkeypatch.setattr(Store, "check", lambda *_: pytest.fail("reads a wheel again"))
    assert len(install(lock, folder.with_name("second")).installed) == 4


def package_file(folder: Path) -> Path:
    return next(folder.glob("lib/python3.*/site-packages/torch/__init__.py"))


def metadata_of_torch(folder: Path) -> Path:
    return next(folder.glob("lib/python3.*/site-packages/torch-*.dist-info/METADATA"))


@pytest.mark.parametrize("lost", [[package_file], [package_file, metadata_of_torch]])
def test_what_an_interrupted_installation_left_is_installed_again(
    lock: Lock, folder: Path, monkeypatch: pytest.MonkeyPatch, lost: list[Callable[[Path], Path]]
) -> None:
    """uv was ended, or the disk was full, while the files of torch were written. uv then takes torch to be
    installed."""
    uv_command = lock_installer._uv

    def interrupted(*words: str) -> None:
        uv_command(*words)
        if words[0] == "pip":
            for file in lost:
                file(folder).unlink()
            raise BuildError("stop")

    monkeypatch.setattr(lock_installer, "_uv", interrupted)
    with pytest.raises(BuildError, match="stop"):
        install(lock, folder)
    monkeypatch.setattr(lock_installer, "_uv", uv_command)
    assert len(install(lock, folder).installed) == 4
    assert package_file(folder).is_file() and metadata_of_torch(folder).is_file()
    assert install(lock, folder).installed == ()


@pytest.mark.parametrize("lost", ["bin/activate", "lib64"])
def test_an_environment_whose_making_was_interrupted_is_completed(lock: Lock, folder: Path, lost: str) -> None:
    venv.create(folder, symlinks=True)
    for name in {lost, "bin/activate"}:  # written last
        (folder / name).unlink()
    assert len(install(lock, folder).installed) == 4
    assert Venv(folder, folder / "none").cublas() == "12.4.5" and (folder / lost).exists()
    assert (folder / ".gitignore").read_text() == "*\n"


def test_a_package_without_metadata_is_installed_again(lock: Lock, folder: Path) -> None:
    install(lock, folder)
    metadata_of_torch(folder).unlink()
    package_file(folder).unlink()
    assert install(lock, folder).installed == ("torch",)
    assert package_file(folder).is_file() and metadata_of_torch(folder).is_file()


def test_uvs_variables_leave_out_nothing(
    lock: Lock, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UV_EXCLUDE leaves out distributions without an error, and UV_VENV_SEED needs an index."""
    (tmp_path / "excluded").write_text("torch\n")
    monkeypatch.setenv("UV_EXCLUDE", str(tmp_path / "excluded"))
    monkeypatch.setenv("UV_VENV_SEED", "1")
    monkeypatch.setenv("UV_BUILD_CONSTRAINT", str(tmp_path / "missing"))
    install(lock, folder)
    assert package_file(folder).is_file()


def test_links_into_an_earlier_place_of_the_cache_are_replaced(lock: Lock, folder: Path) -> None:
    install(lock, folder)
    links = user_folders.cache_folder("find-links") / lock.id.removeprefix("sha256:")[:12]
    for link in list(links.iterdir()):
        link.unlink()
        link.symlink_to(f"/nonexistent/{link.name}")
    assert len(install(lock, folder.with_name("second")).installed) == 4
    assert sorted(link.name for link in links.iterdir()) == sorted(one.wheel.file for one in lock.wheels)
    assert all(link.is_file() for link in links.iterdir())


def test_another_installation_in_the_same_folder_waits(
    lock: Lock, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two installations at once: the second installation begins when the first has ended, and finds a complete
    environment."""
    plan = install_planner.plan_for_lock("sample", "sample", lock, {})
    done, waits = list[InstalledLock](), threading.Event()

    def say(text: str) -> None:
        assert "another envbuild changes" in text
        waits.set()

    second = threading.Thread(target=lambda: done.append(lock_installer.install_lock(plan, folder, say)))
    uv_command = lock_installer._uv

    def slow(*words: str) -> None:
        if words[0] == "pip":
            second.start()
            assert waits.wait(60)
        uv_command(*words)

    monkeypatch.setattr(lock_installer, "_uv", slow)
    first = lock_installer.install_lock(plan, folder, lambda text: None)
    second.join(60)
    assert [len(first.installed), *(len(one.installed) for one in done)] == [4, 0]


def test_a_damaged_wheel_in_a_store_of_another_user_is_not_installed(
    lock: Lock, folder: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(next(wheels.glob("nvidia_cublas_cu12-12.1.3.1-*")), stored_cublas(lock))

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(HashMismatch, match="was damaged on this disk") as caught:
        install(lock, folder)
    assert str(stored_cublas(lock)) in (caught.value.hint or "") and not folder.exists()


def test_a_folder_that_is_something_else_is_left(lock: Lock, folder: Path) -> None:
    folder.mkdir()
    (folder / "mine").write_text("x")
    with pytest.raises(FileError, match="is not a virtual environment"):
        install(lock, folder)
    assert [path.name for path in folder.iterdir()] == ["mine"]


def test_without_the_locks_python_it_says_what_to_do(lock: Lock, folder: Path) -> None:
    with pytest.raises(SystemFault, match=r"needs Python 3\.99") as caught:
        install(dataclasses.replace(lock, python="3.99"), folder)
    assert "uv python install 3.99" in (caught.value.hint or "")
    assert not folder.exists()


def test_wheels_of_a_lock_on_a_base_image_fit_the_glibc_of_its_plan(
    project: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def fetch(locked: Sequence[LockedWheel], python: str, glibc: str, *_: object) -> None:
        seen.append(glibc)
        raise BuildError("stop")

    monkeypatch.setattr(wheel_resolution_and_download, "fetch_wheels", fetch)
    plan = plan_of(project, {**PROFILE, "base": {"image": f"registry.example/base@sha256:{'a' * 64}"}, "apt": []})
    with pytest.raises(BuildError, match="stop"):
        install(dataclasses.replace(lock_for(plan), python=VERSION), folder)
    assert seen == [plan.glibc]


def test_the_command_needs_a_lock(project: Path) -> None:
    (project / "profiles" / "sample.yaml").write_text(json.dumps(PROFILE))
    done = envbuild("install", "sample", str(project / "venv"))
    assert done.code == 8 and not (project / "venv").exists()
