"""Attacks by the author of a locked package, with small wheels and the real uv; and honest packages that must pass."""

from __future__ import annotations

import dataclasses
import hashlib
import py_compile
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from selftest.environments import Environment, virtual
from unit.conftest import forget
from unit.support import Index, plan_of, quick_pip, serving, write_wheel

from envbuild.audit import collected_environment, environment_audit
from envbuild.audit.environment_audit import Audit, Expected
from envbuild.facts import database
from envbuild.fetch import sha256_file_store
from envbuild.fetch.locked_wheel_types import LockedWheel, Wheel
from envbuild.lock import lock_creation_and_update, lock_file, wheel_conflicts, wheel_file_hashes_and_contents
from envbuild.lock.lock_entry_types import Overridden
from envbuild.lock.lock_file import Lock
from envbuild.lock.wheel_conflicts import OfferedListing
from envbuild.pipeline import build_downloads
from envbuild.pipeline.progress_events import Progress
from envbuild.profile.model import SelfTest
from envbuild.profile.value_types import StartupFile
from envbuild.resolve.plan_resolver import Plan
from envbuild.runners import host_runner
from envbuild.testrun import output_judge, selftest_job
from envbuild.testrun.selftest_job import Expectations, RunRequest
from envbuild.util import package_data, user_folders
from envbuild.util.errors import HashMismatch, LockError, ProfileError

AUTHOR = "author of a locked package"
FUNCTIONAL = "torch/nn/functional.py"
TORCH = {
    "torch/__init__.py": b"",
    FUNCTIONAL: b"right = True\n",
    "torch/nn/__init__.py": b"",
    "torch/lib/libc10.so": b"",
}
WRONG = b"right = None\n"
IMAGE = f"registry.example/debian@sha256:{'a' * 64}"
PRECEDENCE = (
    b"import os; var = 'SETUPTOOLS_USE_DISTUTILS'; enabled = os.environ.get(var, 'local') == 'local'; "
    b"enabled and __import__('_distutils_hack').add_shim(); \n"
)


class Silent:
    def say(self, text: str) -> None:
        pass

    def line(self, text: str) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """An index with pip and a torch of three files, which serves ranges."""
    quick_pip(monkeypatch)
    folder = tmp_path / "served"
    write_wheel(folder, "pip", "26.0")
    torch_wheel(folder)
    with serving(Index(folder, ranges=True)) as found:
        monkeypatch.setenv("PIP_INDEX_URL", found.address)
        yield found


def torch_wheel(folder: Path, files: Mapping[str, bytes] = TORCH) -> Path:
    """Return a wheel whose module is the package torch."""
    file = write_wheel(folder, "torch", "2.13.0", files=files)
    return without(file, "torch.py")


def without(file: Path, member: str) -> Path:
    with zipfile.ZipFile(file) as archive:
        kept = {info: archive.read(info) for info in archive.infolist() if info.filename != member}
    with zipfile.ZipFile(file, "w") as archive:
        for info, content in kept.items():
            archive.writestr(info, content)
    return file


def plan(project: Path, *packages: str, **more: Any) -> Plan:
    data = {"base": {"image": IMAGE}, "python": "3.11", "torch": "2.13.0", "packages": list(packages), **more}
    return plan_of(project, data)


def stored(*files: Path) -> tuple[LockedWheel, ...]:
    """Put wheels into the store, and return their entries for a lock that is edited by hand."""
    found = []
    for file in files:
        name, version = file.name.split("-")[:2]
        wheel = Wheel(name.replace("_", "-"), version, file.name, sha256_file_store.file_digest(file))
        content = file.read_bytes()
        sha256_file_store.wheel_store().put(file, wheel.sha256, wheel.file)
        found.append(LockedWheel(wheel, len(content), "python"))
    return tuple(found)


def locked(project: Path, wheels: tuple[LockedWheel, ...], **changes: Any) -> Lock:
    made = plan(project)
    found = Lock(
        made="20261121T000000Z", inputs=lock_file.inputs(made), platform=made.platform, python=made.python, suite=None,
        image=made.image, base=(), apt=(), wheels=wheels, environment=made.environment,
    )  # fmt: skip
    return dataclasses.replace(found, **changes)


# two packages that install the same file


@pytest.mark.attack(
    AUTHOR, "overwrites torch/nn/functional.py, index serves ranges", "refused by lock, nothing fetched"
)
def test_a_wheel_that_overwrites_a_file_of_torch_is_not_locked(index: Index, project: Path) -> None:
    write_wheel(index.folder, "evil", "1.0", files={FUNCTIONAL: WRONG})
    with pytest.raises(ProfileError, match=f"evil 1.0 and torch 2.13.0 both install site-packages/{FUNCTIONAL}"):
        lock_creation_and_update.update_lock(plan(project, "evil"), None)
    assert not list(sha256_file_store.wheel_store().folder.glob("*"))


def test_the_package_that_requires_a_conflicting_one_is_named(index: Index, project: Path) -> None:
    write_wheel(index.folder, "evil", "1.0", files={FUNCTIONAL: WRONG})
    write_wheel(index.folder, "carrier", "1.0", requires=["evil"])
    with pytest.raises(ProfileError) as caught:
        lock_creation_and_update.update_lock(plan(project, "carrier"), None)
    assert str(caught.value.hint).splitlines()[1:] == ["evil is required by carrier"]


@pytest.mark.attack(AUTHOR, "overwrites torch/nn/functional.py, index without ranges", "refused when fetched")
def test_without_ranges_it_is_refused_as_soon_as_it_is_fetched(index: Index, project: Path) -> None:
    index.ranges = False
    write_wheel(index.folder, "evil", "1.0", files={FUNCTIONAL: WRONG})
    current_plan = plan(project, "evil")
    made = lock_creation_and_update.update_lock(current_plan, None)
    with pytest.raises(LockError) as caught:
        build_downloads.fetch_image_parts(current_plan, made, cast(Progress, Silent()))
    assert f"torch 2.13.0 and evil 1.0 both install site-packages/{FUNCTIONAL}" in str(caught.value.faults[0])


@pytest.mark.attack(
    AUTHOR, "overwrites torch/nn/functional.py, lock edited by hand", "refused before the image is made"
)
def test_a_lock_that_was_edited_by_hand_makes_no_image(project: Path, tmp_path: Path) -> None:
    evil = write_wheel(tmp_path, "evil", "1.0", files={FUNCTIONAL: WRONG})
    made = locked(project, stored(torch_wheel(tmp_path), evil))
    with pytest.raises(LockError) as caught:
        build_downloads.fetch_image_parts(plan(project), made, cast(Progress, Silent()))
    assert f"both install site-packages/{FUNCTIONAL}" in str(caught.value.faults[0])


@pytest.mark.attack(AUTHOR, "gives the changed file torch's CRC and size", "refused by its bytes when fetched")
def test_a_forged_checksum_passes_the_lock_and_not_the_bytes(index: Index, project: Path) -> None:
    forged = with_crc(b"rigt = None#", zlib.crc32(TORCH[FUNCTIONAL]))
    longer = TORCH[FUNCTIONAL] + b"#" * (len(forged) - len(TORCH[FUNCTIONAL]))
    forged = with_crc(b"rigt = None#", zlib.crc32(longer))
    torch_wheel(index.folder, {**TORCH, FUNCTIONAL: longer})
    assert (zlib.crc32(forged), len(forged)) == (zlib.crc32(longer), len(longer)) and forged != longer
    write_wheel(index.folder, "evil", "1.0", files={FUNCTIONAL: forged})
    current_plan = plan(project, "evil")
    made = lock_creation_and_update.update_lock(current_plan, None)
    with pytest.raises(LockError) as caught:
        build_downloads.fetch_image_parts(current_plan, made, cast(Progress, Silent()))
    assert FUNCTIONAL in str(caught.value.faults[0])


def with_crc(content: bytes, wanted: int) -> bytes:
    """Return `content` with four more bytes that give it this CRC: the 32 bits are solutions of a linear system."""
    begin = zlib.crc32(content + bytes(4))
    columns = [zlib.crc32(content + (1 << bit).to_bytes(4, "little")) ^ begin for bit in range(32)]
    rows = [(column, 1 << bit) for bit, column in enumerate(columns)]
    solved: dict[int, tuple[int, int]] = {}
    for value, chosen in rows:
        for top, (other, more) in sorted(solved.items(), reverse=True):
            if value >> top & 1:
                value, chosen = value ^ other, chosen ^ more
        if value:
            solved[value.bit_length() - 1] = (value, chosen)
    left, found = wanted ^ begin, 0
    for top, (other, more) in sorted(solved.items(), reverse=True):
        if left >> top & 1:
            left, found = left ^ other, found ^ more
    return content + found.to_bytes(4, "little")


WAYS = {
    "torch/__init__.abi3.so": "hides torch/__init__.py behind an extension module",
    "torch.so": "puts torch.so next to the package torch",
    "torch/nn/functional/__init__.py": "makes a package of torch/nn/functional.py",
    "torch/nn/__pycache__/functional.cpython-311.pyc": "brings bytecode for torch/nn/functional.py",
    f"evil-1.0.data/purelib/{FUNCTIONAL}": "overwrites torch/nn/functional.py from a .data folder",
    f"evil-1.0.data/data/lib/python3.11/site-packages/{FUNCTIONAL}": "overwrites torch/nn/functional.py by its prefix",
    f"evil-1.0.data/data/lib64/python3.11/site-packages/{FUNCTIONAL}": "overwrites it through the link lib64",
    "torch/lib/glibc-hwcaps/x86-64-v2/libc10.so": "puts a library into torch/lib/glibc-hwcaps",
    "evil-1.0.data/purelib/nvidia/nccl/lib/glibc-hwcaps/x86-64-v4/libnccl.so.2": "puts one into nvidia/nccl/lib",
    "torch/lib/tls/libc10.so": "puts a library into torch/lib/tls, for glibc before 2.37",
    "torch/lib/haswell/x86_64/libc10.so": "puts a library into torch/lib/haswell/x86_64, for glibc before 2.37",
    "torch": "installs a file where torch has its folder",
    "torch-2.13.0.dist-info/METADATA": "overwrites torch's metadata",
    "torch-9.0.dist-info/METADATA": "brings metadata of another torch",
    "torch.egg-info": "brings old metadata of torch",
    f"torch/./nn/../{FUNCTIONAL}": "spells a path in another way",
    "evil-1.0.data/data/pyvenv.cfg": "replaces the environment's pyvenv.cfg",
    "evil-1.0.data/scripts/pyvenv.cfg": "makes bin/ look like an environment",
    "evil-1.0.data/data/bin/lib/python3.11/site-packages/torch/__init__.py": "brings packages for bin/",
    "evil-1.0.data/scripts/pybuilddir.txt": "replaces the standard library by pybuilddir.txt",
    "evil-1.0.data/scripts/python3": "replaces the environment's python3",
    "evil-1.0.data/data/bin/python3.11._pth": "replaces sys.path by a ._pth file",
}


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.attack(AUTHOR, tries, "refused")) for path, tries in WAYS.items()],
)
def test_no_other_way_leads_to_a_file_of_another_package(path: str, tmp_path: Path) -> None:
    evil = write_wheel(tmp_path, "evil", "1.0", files={path: WRONG})
    with pytest.raises(LockError) as caught:
        wheel_conflicts.refuse_stored(stored(torch_wheel(tmp_path), evil))
    assert any("evil 1.0" in fault.message for fault in caught.value.faults)


@pytest.mark.attack(AUTHOR, "installs a command of the name torchrun", "refused")
def test_two_packages_with_one_command(tmp_path: Path) -> None:
    def commands(name: str) -> dict[str, bytes]:
        return {"entry_points.txt": f"[console_scripts]\ntorchrun = {name}:main\n".encode()}

    real = torch_wheel(tmp_path, {**TORCH, **{f"torch-2.13.0.dist-info/{k}": v for k, v in commands("torch").items()}})
    evil = write_wheel(
        tmp_path, "evil", "1.0", files={f"evil-1.0.dist-info/{k}": v for k, v in commands("evil").items()}
    )
    with pytest.raises(LockError) as caught:
        wheel_conflicts.refuse_stored(stored(real, evil))
    assert [fault.message for fault in caught.value.faults] == ["torch 2.13.0 and evil 1.0 both install bin/torchrun"]


@pytest.mark.legitimate("a package", "has folders tls and x86_64 with its own modules and libraries", "accepted")
def test_folders_of_its_own_are_not_a_conflict(tmp_path: Path) -> None:
    files = {"mine/tls/__init__.py": b"", "mine/x86_64/libmine.so": b"", "mine/libmine.so": b""}
    wheel_conflicts.refuse_stored(stored(torch_wheel(tmp_path), write_wheel(tmp_path, "mine", "1.0", files=files)))


@pytest.mark.legitimate("two packages of one namespace", "install an identical __init__.py", "locked, and locked again "
                        "without a request")  # fmt: skip
def test_an_identical_file_of_a_namespace_is_not_a_conflict(index: Index, project: Path) -> None:
    for name in ("one", "two"):
        write_wheel(index.folder, name, "1.0", files={"shared/__init__.py": b"", f"shared/{name}.py": b"x = 1\n"})
    current_plan = plan(project, "one", "two")
    made = lock_creation_and_update.update_lock(current_plan, None)
    assert {item.wheel.name for item in made.wheels} == {"pip", "torch", "one", "two"}
    index.requests.clear()
    forget()
    wheel_conflicts.check_offered({item.wheel: "http://127.0.0.1:9/" for item in made.wheels})
    assert index.requests == [] and not list(sha256_file_store.wheel_store().folder.glob("*"))
    build_downloads.fetch_image_parts(current_plan, made, cast(Progress, Silent()))


@pytest.mark.legitimate(
    "two packages of one namespace", "install its __init__.py in two of the known forms", "accepted"
)
def test_the_known_forms_of_a_namespace_go_together(tmp_path: Path) -> None:
    forms = sorted(database.namespace_texts())[-2:]
    files = [write_wheel(tmp_path, f"n{at}", "1.0", files={"n/__init__.py": form}) for at, form in enumerate(forms)]
    assert forms[0] != forms[1]
    wheel_conflicts.refuse_stored(stored(*files))


@pytest.mark.legitimate("a cache", "a listing in it is damaged or of another form", "made again")
@pytest.mark.parametrize("content", ["", "[]", '{"names": {}}', '{"files": {"a": "0 1"}}'])
def test_a_damaged_listing_in_the_cache_is_made_again(content: str, index: Index, project: Path) -> None:
    current_plan = plan(project)
    made = lock_creation_and_update.update_lock(current_plan, None)
    for noted in user_folders.cache_folder("listings").iterdir():
        noted.write_text(content, encoding="utf-8")
    forget()
    assert lock_creation_and_update.update_lock(current_plan, None).wheels == made.wheels
    assert all(
        sha256_file_store.noted(noted, OfferedListing) for noted in user_folders.cache_folder("listings").iterdir()
    )


@pytest.mark.attack(AUTHOR, "packs entry points with LZMA, or a start-up file with a wrong checksum", "refused")
@pytest.mark.parametrize("path", ["evil-1.0.dist-info/entry_points.txt", "evil.pth"])
def test_a_member_that_cannot_be_read_is_refused(path: str, tmp_path: Path) -> None:
    evil = write_wheel(tmp_path, "evil", "1.0")
    with zipfile.ZipFile(evil, "a", zipfile.ZIP_LZMA if path.endswith(".txt") else zipfile.ZIP_STORED) as archive:
        archive.writestr(path, b"[console_scripts]\n" * 9)
    evil.write_bytes(evil.read_bytes().replace(b"[console_scripts]\n" * 9, b"import evil      \n" * 9))
    with pytest.raises(LockError, match=r"refused packages|cannot be read: Bad CRC-32"):
        wheel_conflicts.refuse_stored(stored(evil))


@pytest.mark.attack("who can write to the store", "damages a stored wheel", "refused, removed and fetched again")
def test_a_wheel_that_was_damaged_in_the_store_is_removed(tmp_path: Path) -> None:
    (held,) = stored(write_wheel(tmp_path, "mine", "1.0"))
    file = sha256_file_store.wheel_store().path(held.wheel.sha256, held.wheel.file)
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(HashMismatch, match="was damaged on this disk"):
        wheel_conflicts.refuse_stored([held])
    assert not file.exists()


# code that runs when Python starts, or when torch is imported

STARTUP = {
    "evil.pth": (b"import evil\n", "a .pth file that imports"),
    "tabbed.pth": (b"# nothing\r\nimport\tevil\n", "a .pth file that imports, after a comment"),
    "marked.pth": (b"\xef\xbb\xbfimport evil\n", "a .pth file that imports, behind a byte order mark"),
    "long.pth": (b"# nothing\n" * 120_000 + b"import evil\n", "a .pth file that imports, after a megabyte of comments"),
    "sitecustomize.py": (b"import evil\n", "sitecustomize"),
    "usercustomize.py": (b"import evil\n", "usercustomize"),
    "sitecustomize/__init__.py": (b"import evil\n", "sitecustomize as a package"),
    "usercustomize/__init__.abi3.so": (b"\x7fELF", "usercustomize as a compiled package"),
    "apport_python_hook.py": (b"def install(): pass\n", "the module that Debian's own sitecustomize imports"),
    "distutils-precedence.pth": (PRECEDENCE, "setuptools' own .pth file, with another _distutils_hack"),
}
HIDDEN = {"hidden.pth": b"evil_folder\n", "evil_folder/sitecustomize.py": b"import evil\n"}


def cases(tried: str) -> list[Any]:
    mark = pytest.mark.attack
    return [pytest.param(path, marks=mark(AUTHOR, answer, tried)) for path, (_, answer) in STARTUP.items()]


@pytest.mark.parametrize("path", cases("refused before the image is made"))
def test_code_that_runs_at_the_start_of_python_is_not_installed(path: str, tmp_path: Path) -> None:
    evil = write_wheel(tmp_path, "evil", "1.0", files={path: STARTUP[path][0]})
    with pytest.raises(LockError) as caught:
        wheel_conflicts.refuse_stored(stored(evil))
    assert [f"evil 1.0 installs {path} " in fault.message for fault in caught.value.faults] == [True]


@pytest.mark.attack(AUTHOR, "a .pth file that adds a folder with a sitecustomize", "refused before the image is made")
def test_a_folder_that_a_pth_file_adds_is_not_installed(tmp_path: Path) -> None:
    with pytest.raises(LockError):
        wheel_conflicts.refuse_stored(stored(write_wheel(tmp_path, "evil", "1.0", files=HIDDEN)))


DEBIAN = {
    "lib/python3": "Debian's folder for all Python releases",
    "lib/python3.11": "Debian's old folder for this release",
    "lib64/python3.11": "the same through the link lib64",
    "local/lib/python3.11": "Debian's folder for local packages",
}
DATA_FILES = {
    "lib/python3/dist-packages/mine/evil.pth": b"import mine\n",
    "lib/python3/dist-packages/comment.pth": b"# import mine\n",
    "lib/python3/dist-packages/mine.json": b"{}",
    "share/mine/evil.pth": b"import mine\n",
    "share/mine/sitecustomize.py": b"import mine\n",
    "etc/mine.conf": b"a = 1\n",
}


@pytest.mark.parametrize(
    "folder",
    [
        pytest.param(folder, marks=pytest.mark.attack(AUTHOR, f"a start-up file in {what}, from .data/data", "refused"))
        for folder, what in DEBIAN.items()
    ],
)
@pytest.mark.parametrize("path", ["evil.pth", "sitecustomize.py", "usercustomize/__init__.py"])
def test_code_that_runs_at_the_start_of_python_is_not_installed_in_dist_packages(
    path: str, folder: str, tmp_path: Path
) -> None:
    files = {f"evil-1.0.data/data/{folder}/dist-packages/{path}": b"import evil\n"}
    with pytest.raises(LockError) as caught:
        wheel_conflicts.refuse_stored(stored(write_wheel(tmp_path, "evil", "1.0", files=files)))
    (fault,) = caught.value.faults
    assert f"evil 1.0 installs {folder.replace('lib64', 'lib')}/dist-packages/{path} (sha256 " in fault.message


@pytest.mark.attack(AUTHOR, "a .pth file in lib/python3/dist-packages, from .data/data", "refused before the image")
def test_a_pth_file_in_dist_packages_makes_no_image(project: Path, tmp_path: Path) -> None:
    files = {"evil-1.0.data/data/lib/python3/dist-packages/evil.pth": b"import evil\n"}
    made = locked(project, stored(write_wheel(tmp_path, "evil", "1.0", files=files)))
    with pytest.raises(LockError, match="refused packages"):
        build_downloads.fetch_image_parts(plan(project), made, cast(Progress, Silent()))


@pytest.mark.legitimate("a package", "installs data files by .data/data, also in dist-packages", "accepted")
def test_data_files_are_accepted(tmp_path: Path) -> None:
    files = {f"mine-1.0.data/data/{path}": content for path, content in DATA_FILES.items()}
    wheel_conflicts.refuse_stored(stored(write_wheel(tmp_path, "mine", "1.0", files=files)))


BACKENDS = {
    "evil-1.0.dist-info": (b"[torch.backends]\nevil = evil:start\n", "an entry point of torch.backends"),
    "evil-1.0.DIST-INFO": (b"[torch.backends]\nevil = evil:start\n", "the same in a .DIST-INFO folder"),
    "evil.egg-info": (b"\n \x0b[[torch.backends]]\nevil = evil:start\n", "the same in old metadata, written oddly"),
}


def backends(tried: str) -> list[Any]:
    mark = pytest.mark.attack
    return [pytest.param(folder, marks=mark(AUTHOR, answer, tried)) for folder, (_, answer) in BACKENDS.items()]


@pytest.mark.parametrize("folder", backends("refused before the image is made"))
def test_code_that_runs_when_torch_is_imported_is_not_installed(folder: str, tmp_path: Path) -> None:
    path = f"{folder}/entry_points.txt"
    evil = write_wheel(tmp_path, "evil", "1.0", files={path: BACKENDS[folder][0]})
    with pytest.raises(LockError) as caught:
        wheel_conflicts.refuse_stored(stored(evil))
    (fault,) = caught.value.faults
    assert f"evil 1.0 installs {path} " in fault.message and "whenever torch is imported" in fault.message


@pytest.mark.legitimate("author of a profile", "accepts an entry point of torch.backends by sha256", "accepted")
def test_an_accepted_backend_is_installed(project: Path, tmp_path: Path) -> None:
    path, content = "mine-1.0.dist-info/entry_points.txt", BACKENDS["evil-1.0.dist-info"][0]
    sha256 = hashlib.sha256(content).hexdigest()
    current_plan = plan(project, startup=[{"file": path, "sha256": sha256, "reason": "it is ours"}])
    wheel_conflicts.refuse_stored(
        stored(write_wheel(tmp_path, "mine", "1.0", files={path: content})), current_plan.startup
    )


@pytest.mark.legitimate("a package with commands", "entry points of other groups", "accepted")
def test_other_entry_points_are_accepted(tmp_path: Path) -> None:
    content = b"[console_scripts]\nmine = mine:torch\n[torch.backends.more]\n"
    files = {"mine-1.0.dist-info/entry_points.txt": content}
    wheel_conflicts.refuse_stored(stored(write_wheel(tmp_path, "mine", "1.0", files=files)))


@pytest.mark.legitimate("setuptools", "its distutils-precedence.pth", "accepted by its sha256 in the facts")
def test_the_pth_file_of_setuptools_is_known(tmp_path: Path) -> None:
    wheel_conflicts.refuse_stored(stored(write_wheel(tmp_path, "setuptools", "84.2.1", files={"d-p.pth": PRECEDENCE})))


@pytest.mark.legitimate(
    "author of a profile", "accepts a .pth file by name and sha256", "accepted, and the lock has it"
)
def test_a_profile_accepts_a_file_by_name_and_sha256(project: Path, tmp_path: Path) -> None:
    content = b"import mine\n"
    sha256 = hashlib.sha256(content).hexdigest()
    current_plan = plan(project, startup=[{"file": "mine.pth", "sha256": sha256, "reason": "it is ours"}])
    made = locked(project, stored(write_wheel(tmp_path, "mine", "1.0", files={"mine.pth": content})))
    made = dataclasses.replace(made, startup=current_plan.startup)
    wheel_conflicts.refuse_stored(made.wheels, made.startup)
    assert made.content["startup"] == [{"file": "mine.pth", "sha256": sha256}]
    file = project / "sample.lock.yaml"
    lock_file.write(made, file, "sample")
    assert lock_file.read(file) == made
    assert "startup" in locked(project, made.wheels).stale(current_plan)
    for other in (StartupFile("other.pth", sha256), StartupFile("mine.pth", "0" * 64)):
        with pytest.raises(LockError):
            wheel_conflicts.refuse_stored(made.wheels, [other])


# the audit of installed files


@dataclasses.dataclass(frozen=True)
class Installed:
    """A virtual environment with a torch that requires no library."""

    python: Path
    made: Environment

    def judged(self, wanted: Expected, wheels: Mapping[str, Mapping[str, str]] | None = None) -> Audit:
        job = environment_audit.collector_job("", "", wheels)
        return environment_audit.assess(
            "it", collected_environment.read(host_runner.run_on_host(self.python, job), job.nonce, "it"), wanted
        )

    def found(self, wheels: Mapping[str, Mapping[str, str]] | None = None) -> dict[str, list[str]]:
        messages: dict[str, list[str]] = {}
        for finding in self.judged(Expected(), wheels).findings:
            if finding.severity in ("refuse", "defect"):
                messages.setdefault(finding.id, []).append(finding.message)
        return messages


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    for name in ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHOME"):
        monkeypatch.delenv(name, raising=False)
    python, site = virtual(tmp_path.resolve() / "venv")
    made = Environment(site)
    made.torch("2.13.0", cuda=None)
    return Installed(python, made)


@pytest.mark.attack(
    AUTHOR, "a file of torch is overwritten; its own RECORD matches the changed file", "defect in the audit"
)
def test_a_record_that_matches_its_own_changed_file(environment: Installed) -> None:
    assert environment.found() == {}
    environment.made.wheel("evil", "1.0", {"torch/__init__.py": WRONG})
    (text,) = environment.found()["modified-file"]
    assert text.startswith("files of torch==2.13.0 differ from its RECORD: ") and "torch/__init__.py" in text


@pytest.mark.attack(
    AUTHOR, "changes a file of torch and torch's RECORD with it", "defect in the audit, by the wheel's bytes"
)
def test_a_record_that_was_changed_too_is_shown_by_the_wheel(environment: Installed) -> None:
    made = environment.made
    wheel = {"torch/__init__.py": hashlib.sha256((made.site / "torch/__init__.py").read_bytes()).hexdigest()}
    assert environment.found({"torch==2.13.0": wheel}) == {}
    made.wheel("torch", "2.13.0", {"torch/__init__.py": WRONG, "torch/more.py": WRONG})
    assert "modified-file" not in environment.found()
    (text,) = environment.found({"torch==2.13.0": wheel})["modified-file"]
    assert "differ from its wheel" in text and "torch/__init__.py" in text and "torch/more.py" in text


@pytest.mark.attack(
    AUTHOR, "changes a file of torch and leaves metadata of another torch that lists it", "defect in the audit"
)
def test_another_record_does_not_excuse_a_changed_file(environment: Installed) -> None:
    made = environment.made
    wheel = {"torch/__init__.py": hashlib.sha256((made.site / "torch/__init__.py").read_bytes()).hexdigest()}
    made.wheel("torch", "9.9", {"torch/__init__.py": WRONG})
    found = environment.found({"torch==2.13.0": wheel})["modified-file"]
    assert any("differ from its wheel" in text and "torch/__init__.py" in text for text in found)


OUTSIDE = ("bin/tool", "share/mine/table.json", "etc/mine.conf")


@pytest.mark.parametrize("path", OUTSIDE)
@pytest.mark.attack(AUTHOR, "changes another package's command or data file outside site-packages", "defect")
def test_a_changed_file_outside_site_packages_is_a_defect(path: str, environment: Installed) -> None:
    """RECORD lists such files by relative paths, as installers write them; the wheel's hashes cover only
    site-packages."""
    made, prefix = environment.made, environment.python.parents[1]
    above = "/".join([".."] * len(made.site.relative_to(prefix).parts))
    made.wheel("mine", "1.0", {f"{above}/{name}": b"right = True\n" for name in OUTSIDE} | {"mine.py": b""})
    wheel = {"mine==1.0": {"mine.py": hashlib.sha256(b"").hexdigest()}}
    assert (prefix / path).is_file() and environment.found() == environment.found(wheel) == {}
    (prefix / path).write_bytes(WRONG)
    for wheels in (None, wheel):
        (text,) = environment.found(wheels)["modified-file"]
        assert text == f"files of mine==1.0 differ from its RECORD: {prefix / path}"


@pytest.mark.attack(AUTHOR, "brings bin/pyvenv.cfg and a torch for it", "the self-test imports the environment's own")
def test_a_pyvenv_cfg_next_to_the_interpreter_changes_nothing(environment: Installed) -> None:
    bin_folder = environment.python.parent
    planted = bin_folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages" / "torch"
    planted.mkdir(parents=True)
    (planted / "__init__.py").write_text("", encoding="utf-8")
    (bin_folder / "pyvenv.cfg").write_text("home = /usr/bin\n", encoding="utf-8")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from envbuild.selftest.inventory import startup_code_suppression\n"
        "startup_code_suppression.extend_path(False)\nimport importlib.util as u; print(u.find_spec('torch').origin)"
    )
    command = [str(environment.python), "-I", "-S", "-c", code, str(Path(__file__).parents[2])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(environment.made.site / "torch" / "__init__.py")


@pytest.mark.legitimate("author of a profile", "overrides a library: torch's METADATA and RECORD change", "clean")
def test_metadata_that_asks_for_an_override_is_clean(environment: Installed, project: Path, tmp_path: Path) -> None:
    made = locked(project, stored(write_wheel(tmp_path, "torch", "2.13.0", ["nvidia-cublas-cu12==1"])))
    override = Overridden("nvidia-cublas-cu12", "2", "==1")
    metadata = "torch-2.13.0.dist-info/METADATA"
    (plain,) = wheel_file_hashes_and_contents.wheel_hashes(made).values()
    (overridden,) = wheel_file_hashes_and_contents.wheel_hashes(
        dataclasses.replace(made, overrides=(override,))
    ).values()
    assert set(plain) - set(overridden) == {metadata}
    with zipfile.ZipFile(
        sha256_file_store.wheel_store().path(made.wheels[0].wheel.sha256, made.wheels[0].wheel.file)
    ) as wheel:
        files = {name: wheel.read(name) for name in plain}
    environment.made.wheel("torch", "2.13.0", files, ["nvidia-cublas-cu12==1"])
    before = (environment.made.site / metadata).read_bytes()
    repin, folder = package_data.DOCKERFILES / "repin", environment.python.parents[1]
    subprocess.run([environment.python, "-I", "-S", "-B", repin, folder, "nvidia-cublas-cu12==2"], check=True)
    assert (environment.made.site / metadata).read_bytes() != before
    assert "modified-file" not in environment.found({"torch==2.13.0": overridden})


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.attack(AUTHOR, "puts libraries into folders that the loader searches first", "defect in the audit")
def test_folders_that_the_loader_searches_first_are_a_defect(recorded: bool, environment: Installed) -> None:
    made = environment.made
    made.wheel("core", "1.0", {"torch/lib/libc10.so": b"", "core/x86_64/libcore.so": b"", "core/libcore.so": b""})
    assert environment.found() == {}
    evil = {"torch/lib/glibc-hwcaps/x86-64-v2/libc10.so": b"", "torch/lib/tls/x86_64/libc10.so": b""}
    made.wheel("evil", "1.0", evil if recorded else {})
    for path, content in evil.items():
        made.put(made.site / path, content)
    (made.site / "core/glibc-hwcaps").symlink_to(made.site / "torch")
    (text,) = environment.found()["loader-folder"]
    assert all(path in text for path in (*evil, "core/glibc-hwcaps"))


def added(environment: Installed) -> list[str]:
    """Return the audit's findings about files in an image of ours that no distribution installed."""
    findings = environment.judged(Expected(claimed=True)).findings
    return [finding.message for finding in findings if finding.id == "foreign-file"]


@pytest.mark.attack(AUTHOR, "links that look like those of linkers, to other files", "defect in the audit of an image")
def test_a_file_that_nothing_brought_is_a_defect(environment: Installed) -> None:
    environment.made.wheel("core", "1.0", {"core/libcore.so.1": b"", "core/libcore.py": b""})
    assert added(environment) == []
    folder = environment.made.site / "core"
    (folder / "libstray.so.1").write_bytes(b"")
    links = {"libother.so": "libcore.so.1", "libstray.so": "libstray.so.1", "libcore.so.py": "libcore.py"}
    for link, target in links.items():
        (folder / link).symlink_to(target)
    (text,) = added(environment)
    assert all(f"core/{name}" in text for name in ("libstray.so.1", *links))


@pytest.mark.legitimate("nvcc's wheels in an image", "links libx.so to libx.so.1, for linkers", "accepted")
def test_the_links_that_linkers_need_are_accepted(environment: Installed) -> None:
    environment.made.wheel("core", "1.0", {"core/libcore.so.1": b""})
    (environment.made.site / "core/libcore.so").symlink_to("libcore.so.1")
    assert added(environment) == []


def bytecode(environment: Installed, mode: py_compile.PycInvalidationMode) -> Path:
    """Replace torch's bytecode by bytecode compiled from a different source."""
    made = environment.made.site / "torch/__pycache__" / f"__init__.{sys.implementation.cache_tag}.pyc"
    other = environment.made.put(environment.made.site.parent / "other.py", b"wrong = True\n")
    py_compile.compile(str(other), str(made), invalidation_mode=mode, doraise=True)
    return made


@pytest.mark.attack(AUTHOR, "bytecode for torch that Python does not compare with its source", "defect in the audit")
def test_unchecked_bytecode_is_a_defect(environment: Installed) -> None:
    made = bytecode(environment, py_compile.PycInvalidationMode.UNCHECKED_HASH)
    (text,) = environment.found()["unchecked-bytecode"]
    assert str(made.relative_to(environment.made.site)) in text


@pytest.mark.legitimate("Python", "bytecode of an older source, by mtime and size or by a checked hash", "accepted")
@pytest.mark.parametrize("mode", ["TIMESTAMP", "CHECKED_HASH"])
def test_bytecode_that_python_compiles_again_is_accepted(mode: str, environment: Installed) -> None:
    bytecode(environment, py_compile.PycInvalidationMode[mode])
    assert environment.found() == {}


@pytest.mark.parametrize("path", cases("refused by the audit"))
def test_code_that_runs_at_the_start_of_python_is_refused_by_the_audit(path: str, environment: Installed) -> None:
    environment.made.wheel("evil", "1.0", {path: STARTUP[path][0], "evil.py": b""})
    (text,) = environment.found()["startup-code"]
    assert path in text and "(evil)" in text


@pytest.mark.parametrize("folder", backends("refused by the audit"))
def test_code_that_runs_when_torch_is_imported_is_refused_by_the_audit(folder: str, environment: Installed) -> None:
    path = f"{folder}/entry_points.txt"
    environment.made.wheel("evil", "1.0", {path: BACKENDS[folder][0], "evil.py": b""})
    (text,) = environment.found()["startup-code"]
    assert path in text and "(evil) runs code whenever torch is imported" in text


@pytest.mark.attack(AUTHOR, "an entry point of torch.backends, and the audit imports torch", "not run")
def test_the_audit_runs_no_backend(environment: Installed) -> None:
    init = environment.made.site / "torch/__init__.py"
    autoload = 'import os\nif os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":\n    import evil\n'
    environment.made.put(init, autoload.encode() + init.read_bytes())
    ran = environment.made.site / "ran"
    environment.made.wheel("evil", "1.0", {"evil.py": f"open({str(ran)!r}, 'w').close()\n".encode()})
    assert "modified-file" in environment.found()
    assert not ran.exists()


@pytest.mark.attack(AUTHOR, "a .pth file that adds a folder with a sitecustomize", "refused by the audit")
def test_a_folder_that_a_pth_file_adds_is_searched(environment: Installed) -> None:
    environment.made.wheel("evil", "1.0", {**HIDDEN, "evil.py": b""})
    (text,) = environment.found()["startup-code"]
    assert "evil_folder/sitecustomize.py" in text


@pytest.mark.legitimate("Debian's Python", "its sitecustomize.py in the standard library", "accepted by the audit")
def test_the_sitecustomize_of_debian_is_known(environment: Installed) -> None:
    text = (
        "# install the apport exception handler if available\ntry:\n    import apport_python_hook\n"
        "except ImportError:\n    pass\nelse:\n    apport_python_hook.install()\n"
    )
    environment.made.put(environment.made.site / "sitecustomize.py", text.encode())
    assert environment.found() == {}


@pytest.mark.legitimate("setuptools", "its distutils-precedence.pth, installed", "accepted by the audit")
def test_the_installed_pth_file_of_setuptools_is_known(environment: Installed) -> None:
    files = {"distutils-precedence.pth": PRECEDENCE, "_distutils_hack/__init__.py": b"def add_shim(): pass\n"}
    environment.made.wheel("setuptools", "84.2.1", files)
    assert environment.found() == {}


@pytest.mark.legitimate(
    "author of a profile", "accepts an installed .pth file by name and sha256", "a note in the audit"
)
def test_an_accepted_file_is_a_note(environment: Installed) -> None:
    content = b"import mine\n"
    environment.made.wheel("mine", "1.0", {"mine.pth": content, "mine.py": b""})
    accepted = {StartupFile("mine.pth", hashlib.sha256(content).hexdigest()): "it is ours"}
    found = [f for f in environment.judged(Expected(startup=accepted)).findings if f.id == "startup-code"]
    assert [(f.severity, "it is ours" in f.message) for f in found] == [("note", True)]


@pytest.mark.legitimate(
    "a developer", "an edited file and an editable install, no profile", "warned of by audit --here"
)
def test_a_developer_s_environment_is_not_refused(environment: Installed) -> None:
    environment.made.wheel("mine", "1.0", {"__editable__.mine.pth": b"import mine\n", "mine.py": b""})
    (environment.made.site / "mine.py").write_bytes(b"# changed\n")
    done = environment.judged(Expected(image=False))
    assert (done.failed, done.counts.get("warn")) == (False, 2)


# attacks on the self-test

FORGER = """
import subprocess
import sys
payload, honest, marker = sys.orig_argv[-1], {honest!r}, {marker!r}
try:
    with open(payload, "rb") as file:
        sizes = [int(part) for part in file.readline(64).split()]
        file.read(sizes[0])
        import json
        nonce = json.loads(file.read(sizes[1]))["nonce"]
except (OSError, ValueError, IndexError):
    pass
else:
    import os
    open(marker, "w").close()
    with open(honest) as file:
        os.write(1, file.read().replace("0" * 32, nonce).encode())
    os._exit(0)
"""


def quick(nonce: str | None = None) -> selftest_job.Job:
    return selftest_job.make_job(
        "",
        SelfTest(),
        Expectations({}, "3.11"),
        request=RunRequest(probes=("tf32.mode",)),
        nonce=nonce,
    )


@pytest.mark.attack(AUTHOR, "a .pth file that forges every frame of the self-test", "its code does not run; not passed")
def test_a_pth_file_forges_no_frames(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    first = quick("0" * 32)
    honest = host_runner.run_on_host(Path(sys.executable), first)
    assert output_judge.judge_output(honest, first.nonce, first.require).passed, honest.stderr
    (tmp_path / "honest").write_bytes(honest.stdout)
    python, site = virtual(tmp_path.resolve() / "venv")
    forger = FORGER.format(honest=str(tmp_path / "honest"), marker=str(tmp_path / "ran"))
    (site / "evil.py").write_text(forger, encoding="utf-8")
    (site / "evil.pth").write_text("import evil\n", encoding="utf-8")
    second = quick()
    judged = output_judge.judge_output(host_runner.run_on_host(python, second), second.nonce, second.require)
    assert not judged.passed, "it has no torch"
    assert not (tmp_path / "ran").exists()


@pytest.mark.attack(AUTHOR, "an entry point of torch.backends, and the self-test imports torch", "not run")
def test_the_self_test_runs_no_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", minversion="2.5")
    python, site = virtual(tmp_path.resolve() / "venv")
    (site / "evil.py").write_text(f"def start(): open({str(tmp_path / 'ran')!r}, 'w').close()\n", encoding="utf-8")
    (site / "evil-1.0.dist-info").mkdir()
    (site / "evil-1.0.dist-info/entry_points.txt").write_bytes(BACKENDS["evil-1.0.dist-info"][0])
    monkeypatch.setenv("PYTHONPATH", str(Path(torch.__file__).parents[1]))
    job = quick()
    done = host_runner.run_on_host(python, job)
    assert output_judge.judge_output(done, job.nonce, job.require).passed, done.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.legitimate("a user", "tests an environment that finds torch by PYTHONPATH or a .pth folder", "passed")
@pytest.mark.parametrize("way", ["variable", "pth"])
def test_an_environment_that_borrows_torch_is_tested(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    python, site = virtual(tmp_path.resolve() / "venv")
    folder = str(Path(torch.__file__).parents[1])
    if way == "variable":
        monkeypatch.setenv("PYTHONPATH", folder)
    else:
        (site / "borrowed.pth").write_text(f"{folder}\n", encoding="utf-8")
    job = quick()
    done = host_runner.run_on_host(python, job)
    assert output_judge.judge_output(done, job.nonce, job.require).passed, done.stderr


def test_every_runner_starts_python_so_that_no_package_runs_first() -> None:
    assert selftest_job.make_job("sha256:0", SelfTest(), Expectations({}, "3.11")).argv[:4] == (
        "python",
        "-I",
        "-S",
        "-c",
    )
    assert environment_audit.collector_job("sha256:0").argv[:4] == ("python", "-I", "-S", "-c")
    assert environment_audit.collector_job("", "python").argv[:3] == ("python", "-S", "-c")
