"""Programs start with fixed libraries from a private folder; the environment is not changed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from selftest.environments import SONAMES, good, library

from envbuild.repair import fixed_library_folder_and_variables, mapped_library_watch
from envbuild.repair.required_changes import LibraryPin
from envbuild.util import host_processes, user_folders
from envbuild.util.errors import HashMismatch
from envbuild.util.host_processes import ProcessMissing
from unit.repair import test_repair_plan, test_repair_run
from unit.repair.test_repair_plan import LOG, Place, placed
from unit.support import envbuild

pytestmark = pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc to build the libraries with")
wheels, local_index = test_repair_run.wheels, test_repair_run.local_index
PROGRAM = (
    "import ctypes, sys, time, torch\nlib = ctypes.CDLL('libcublas.so.12'); v = ctypes.c_int()\n"
    "print(*[(lib.cublasGetProperty(n, ctypes.byref(v)), v.value)[1] for n in range(3)], sep='.')\n"
    "time.sleep(1)\nsys.exit(7)\n"
)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "train.log").write_text(LOG)
    (tmp_path / "train.py").write_text(PROGRAM)
    return placed(tmp_path, test_repair_plan.faulty)


def started(place: Place, *words: str) -> subprocess.CompletedProcess[str]:
    folder = place.prefix.parent
    command = [sys.executable, "-m", "envbuild", "run", "--with-fix", str(folder / "train.log"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_a_program_loads_the_fixed_library_although_torch_has_an_rpath(place: Place) -> None:
    before = test_repair_run.hashes(place.prefix)
    done = started(place, "--", str(place.python), str(place.prefix.parent / "train.py"))
    assert (done.returncode, done.stdout) == (7, "12.4.5\n"), done.stderr
    folder = user_folders.cache_folder("libraries") / "nvidia-cublas-cu12-12.4.5.8"
    assert "LD_PRELOAD=" in done.stderr and "LD_LIBRARY_PATH would have no effect: RPATH of" in done.stderr
    assert f": {folder}/libcublas.so.12\n" in done.stderr and "WARNING" not in done.stderr
    assert test_repair_run.hashes(place.prefix) == before
    damaged = folder / "libcublas.so.12"
    damaged.write_bytes(library("cublas", "12.1.3.1"))
    again = started(place, "--", str(place.python), str(place.prefix.parent / "train.py"))
    assert again.stdout == "12.4.5\n", "the folder is checked, and written again"


@pytest.mark.slow
def test_the_named_environments_programs_come_first(place: Place) -> None:
    done = started(place, "--python", str(place.prefix), "--", "python", str(place.prefix.parent / "train.py"))
    assert (done.returncode, done.stdout) == (7, "12.4.5\n"), done.stderr
    assert f"PATH={place.python.parent}:" in done.stderr


@pytest.mark.slow
def test_a_program_that_cannot_be_started_is_the_only_error(place: Place) -> None:
    done = started(place, "--python", str(place.prefix), "--", "no-such-program")
    assert done.returncode == 6 and "no-such-program is not installed or not on PATH" in done.stderr
    assert "not loaded" not in done.stderr


@pytest.mark.slow
def test_where_the_loader_follows_it_ld_library_path_is_enough(place: Place) -> None:
    test_repair_plan.with_runpath(place)
    done = started(place, "--python", str(place.prefix), "--json", "--", "program", "--its-option")
    document = json.loads(done.stdout)
    folder = user_folders.cache_folder("libraries") / "nvidia-cublas-cu12-12.4.5.8"
    assert document["variables"].pop("PATH").startswith(f"{place.python.parent}:")
    assert document["variables"] == {"LD_LIBRARY_PATH": str(folder)}
    assert document["libraries"]["libcublas.so.12"] == f"{folder}/libcublas.so.12"
    assert document["commands"][0]["argv"] == ["program", "--its-option"]


@pytest.mark.slow
def test_a_library_that_torch_bundles_is_replaced_too(place: Place) -> None:
    shutil.rmtree(place.site / "torch-2.3.1.dist-info")
    shutil.rmtree(next(place.site.glob("nvidia_cublas*")))
    shutil.rmtree(place.site / "nvidia" / "cublas")
    bundled = {f"torch/lib/{SONAMES[kind]}": library(kind, "12.1.3.1") for kind in ("cublas", "cublasLt")}
    place.made.torch("2.3.1", bundled=bundled, requires=())
    done = started(place, "--", str(place.python), str(place.prefix.parent / "train.py"))
    assert (done.returncode, done.stdout) == (7, "12.4.5\n"), done.stderr
    assert "LD_PRELOAD=" in done.stderr


@pytest.mark.slow
def test_another_file_that_is_loaded_is_a_warning(place: Place) -> None:
    """The program opens torch's own copy by its path."""
    path = place.site / "nvidia/cublas/lib/libcublas.so.12"
    code = f"import ctypes, time; ctypes.CDLL({str(path)!r}); time.sleep(1)"
    done = started(place, "--", str(place.python), "-c", code)
    assert f"WARNING: not the fixed file: {path}" in done.stderr


@pytest.mark.slow
def test_nothing_to_fix_starts_the_program_unchanged(tmp_path: Path) -> None:
    place = placed(tmp_path, good)
    (tmp_path / "train.log").write_text(LOG)
    done = started(place, "--", str(place.python), "-c", "import os; print(os.environ.get('LD_PRELOAD'))")
    assert (done.returncode, done.stdout) == (0, "None\n")
    assert "nothing to fix" in done.stderr and "no GPU was found" not in done.stderr
    (tmp_path / "train.log").write_text("torch 2.3.1+cu121\n")
    done = started(place, "--", str(place.python), "-c", "")
    assert "nothing to fix" in done.stderr and "no GPU was found on this machine or in a log" in done.stderr


@pytest.mark.slow
def test_a_fix_that_needs_another_torch_version_is_refused(place: Place) -> None:
    shutil.rmtree(next(place.site.glob("torch-*")))
    place.made.torch("2.7.1+cpu", cuda=None)
    done = started(place, "--python", str(place.prefix), "--", "true")
    assert done.returncode == 6 and "the fix must install torch 2.7.1" in done.stderr
    log = place.prefix.parent / "train.log"
    assert f"see: envbuild fix {log} --python {place.python}\n" in done.stderr


def test_several_logs_are_read_as_one(place: Place) -> None:
    """The GPU is named in the second log."""
    first = place.prefix.parent / "train.log"
    second = place.prefix.parent / "rank 1.log"
    second.write_text(first.read_text())
    first.write_text("step 1\n")
    done = started(place, "--with-fix", str(second), "--python", str(place.prefix), "--json", "--", "program")
    assert json.loads(done.stdout)["advisories"][0]["id"] == "cublas-hopper-fpe"


def test_the_option_is_needed() -> None:
    assert envbuild("run", "--", "true").code == 2


def test_a_wheel_that_differs_from_its_record_is_refused(wheels: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "nvidia_cublas_cu12-12.4.5.8-py3-none-any.whl"
    shutil.copy(wheels / wheel.name, wheel)
    with zipfile.ZipFile(wheel) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content + b"more" if name.endswith("libcublas.so.12") else content)
    with pytest.raises(HashMismatch, match=r"libcublas\.so\.12"):
        fixed_library_folder_and_variables.unpack_libraries(wheel, tmp_path / "out")


def test_the_private_folder_is_complete_or_written_again(wheels: Path) -> None:
    notes: list[str] = []
    pin = LibraryPin("cublas", "nvidia-cublas-cu12", "12.4.5.8", None)
    folder = fixed_library_folder_and_variables.library_folder(pin, "3.11", notes.append)
    assert {path.name for path in folder.glob("*.so*")} == {"libcublas.so.12", "libcublasLt.so.12"}
    assert notes
    notes.clear()
    assert fixed_library_folder_and_variables.library_folder(pin, "3.11", notes.append) == folder and notes == []
    (folder / "libevil.so").touch()
    fixed_library_folder_and_variables.library_folder(pin, "3.11", notes.append)
    assert notes and not (folder / "libevil.so").exists()


def test_programs_that_start_at_the_same_time_share_one_folder(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As several tasks of srun do with a shared home: each finds that the folder is missing."""
    is_intact, both_looked = fixed_library_folder_and_variables._is_intact, threading.Barrier(2)
    looked, notes = threading.local(), list[str]()

    def look(folder: Path) -> bool:
        found = is_intact(folder)
        if not hasattr(looked, "before"):
            looked.before = True
            both_looked.wait(timeout=30)
        return found

    monkeypatch.setattr(fixed_library_folder_and_variables, "_is_intact", look)
    pin = LibraryPin("cublas", "nvidia-cublas-cu12", "12.4.5.8", None)
    with ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(fixed_library_folder_and_variables.library_folder, pin, "3.11", notes.append) for _ in range(2)
        ]
        first, second = (call.result() for call in calls)
    assert first == second and is_intact(first)
    assert sum(note.startswith("unpacking ") for note in notes) == 1


def test_a_programs_exit_code_and_signals() -> None:
    assert host_processes.run_attached(["sh", "-c", "exit 9"]) == 9
    assert host_processes.run_attached(["sh", "-c", "kill -TERM $$"]) == 143
    assert host_processes.run_attached(["sh", "-c", 'test "$NAME" = "a b"'], env={"NAME": "a b"}) == 0
    with pytest.raises(ProcessMissing):
        host_processes.run_attached(["no-such-program"])


def test_child_processes_are_watched() -> None:
    """The library is mapped by the program's own child process."""
    seen: list[tuple[int, str]] = []
    watch = mapped_library_watch.LibraryWatch({"libc.so.6"}, lambda pid, path: seen.append((pid, path)))
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(1)'])"
    host_processes.run_attached([sys.executable, "-c", code], on_start=watch.start)
    assert watch.stop()
    assert len({pid for pid, _ in seen}) >= 2 and all("libc" in path for _, path in seen)
