"""An environment is verified only as long as its files, its interpreter and what its loader finds stay as tested."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from envbuild.attest import keys_and_signatures, registry_attestations
from envbuild.audit import environment_file_hasher
from envbuild.audit.environment_file_hasher import EnvironmentFiles, InterpreterReport
from envbuild.evidence import environment_measurement
from envbuild.fetch import sha256_file_store
from envbuild.lock import lock_file
from envbuild.lock.lock_file import Lock
from envbuild.pipeline import environment_proof, push_save_and_load
from envbuild.pipeline.model import StepResult
from envbuild.registry import oci_types
from envbuild.registry.oci_types import Reference
from envbuild.registry.registry_client import Repository
from envbuild.repair import install_planner, lock_installer
from envbuild.resolve import plan_resolver
from envbuild.util import user_folders
from envbuild.util.errors import CheckFailed
from unit.evidence.runs import documents, judged, lines, passed_run, probe, run_on
from unit.registries import Registry, serving
from unit.repair.test_repair_run import recorded
from unit.site import new_key
from unit.support import PROFILE, CommandResult, envbuild, lock_for, plan_of, profile_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the lock is for Python 3.11"),
]
VARIABLES = (
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "LD_AUDIT",
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONPYCACHEPREFIX",
    "VIRTUAL_ENV",
)


HASH_ENVIRONMENT = environment_file_hasher.hash_environment
INTERPRETER_REPORT = environment_file_hasher._interpreter_report


def report_with_small_library(python: Path) -> InterpreterReport:
    """Return the interpreter's report with one package of the standard library instead of all its thousands of files,
    which no test changes."""
    return INTERPRETER_REPORT(python).model_copy(update={"standard_library": str(Path(json.__file__).parent)})


class Environment:
    """A virtual environment of the locked wheels, and what a test tries in this environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.site = folder / "lib" / "python3.11" / "site-packages"

    def record(self, *words: str) -> CommandResult:
        return envbuild("test", "sample", "--python", str(self.folder), "--record", *words)

    def status(self, *words: str) -> CommandResult:
        return envbuild("status", "sample", "--python", str(self.folder), *words)

    def verify(self, *words: str) -> CommandResult:
        (file,) = Path(os.environ["XDG_STATE_HOME"]).rglob("*.dsse.json")
        given = ("--evidence", str(file), "--key", "team.pub", *words)
        return envbuild("verify", "--python", str(self.folder), *given)


def install(lock: Lock, folder: Path) -> None:
    lock_installer.install_lock(install_planner.plan_for_lock("sample", "sample", lock, {}), folder, lambda text: None)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the project and of a copy of it. All tests use one path, because installed files contain it."""
    return tmp_path_factory.mktemp("proof")


@pytest.fixture
def project(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project folder, which is the working folder: empty, or a copy of the installed project."""
    folder, installed = shared / "project", shared / "installed"
    shutil.rmtree(folder, ignore_errors=True)
    if installed.exists():
        copy_project(installed, folder)
    else:
        (folder / "profiles").mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


def copy_project(source: Path, target: Path) -> None:
    """Copy the environment by hard links, so that its files keep their inode and time."""
    shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("venv"))
    shutil.copytree(source / "venv", target / "venv", symlinks=True, copy_function=os.link)


def create_project(project: Path) -> None:
    """Write the profile and its lock, create the wheels, and install them: torch and numpy, each one module and a
    library."""
    loaded, made = profile_of(project, PROFILE), lock_for(plan_of(project, PROFILE))
    wheels = []
    for item in made.wheels:
        name, folder = item.wheel.name, project / "wheels" / item.wheel.name
        stem = name.replace("-", "_")
        bundled = {f"{stem}/_vendor/other-1.dist-info/{name}": b"x" for name in ("RECORD", "METADATA")}
        files = {f"{stem}/__init__.py": b"", f"{stem}/lib/lib{stem}.so": b"x", **bundled}
        # the path of the environment is in the script of a command, and RECORD has the script's hash
        files[f"{stem}-{item.wheel.version}.dist-info/entry_points.txt"] = f"[console_scripts]\n{name} = x:y\n".encode()
        recorded(folder, name, item.wheel.version, files=files)
        (file,) = folder.iterdir()
        real = dataclasses.replace(item.wheel, file=file.name, sha256=sha256_file_store.file_digest(file))
        wheels.append(dataclasses.replace(item, wheel=real))
    made = dataclasses.replace(made, wheels=tuple(wheels))
    lock_file.write(made, loaded.lock_file, "sample")
    store_wheels(project, made)
    install(made, project / "venv")


def store_wheels(project: Path, lock: Lock) -> None:
    """Put copies of the wheels into the store, which takes the file away."""
    for item in lock.wheels:
        copy = shutil.copy(project / "wheels" / item.wheel.name / item.wheel.file, project / "wheels")
        sha256_file_store.wheel_store().put(Path(copy), item.wheel.sha256, item.wheel.file)


class HashOnce:
    """Hashes an environment again only if a file of the project or a variable changed since: most commands of these
    tests read the same files. `results`: the results of all tests."""

    # What the tests write in the project folder and no environment contains.
    OTHER = frozenset(("profiles", "wheels", "kept", "team.pub", "other.pub", "page.html"))

    def __init__(self, project: Path, results: dict[object, EnvironmentFiles | CheckFailed]) -> None:
        self._project, self._results = project, results

    def __call__(self, python: Path) -> EnvironmentFiles:
        key = (python, tuple(map(os.environ.get, VARIABLES)), environment_file_hasher.LARGEST_TEXTS, self._files())
        if key not in self._results:
            try:
                self._results[key] = HASH_ENVIRONMENT(python)
            except CheckFailed as error:
                self._results[key] = error
        found = self._results[key]
        if isinstance(found, CheckFailed):
            raise found
        return found

    def _files(self) -> frozenset[tuple[object, ...]]:
        """The path, inode, mode, size and time of each file, and the path and mode of each folder."""
        left = [entry for entry in os.scandir(self._project) if entry.name not in self.OTHER]
        found: set[tuple[object, ...]] = set()
        while left:
            entry = left.pop()
            status = entry.stat(follow_symlinks=False)
            if entry.is_dir(follow_symlinks=False):
                left += os.scandir(entry)
                found.add((entry.path, status.st_mode))
            else:
                found.add((entry.path, status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns))
        return frozenset(found)


@pytest.fixture(scope="module")
def hash_results() -> dict[object, EnvironmentFiles | CheckFailed]:
    return {}


@pytest.fixture
def environment(
    shared: Path,
    project: Path,
    hash_results: dict[object, EnvironmentFiles | CheckFailed],
    monkeypatch: pytest.MonkeyPatch,
) -> Environment:
    """torch and numpy, each one module and a library, installed from a lock; the self-test passes."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is restored, whatever a test sets
        monkeypatch.delenv(name)
    installed = shared / "installed"
    if installed.exists():
        store_wheels(project, lock_file.required_lock(profile_of(project, PROFILE)))
    else:
        create_project(project)
        copy_project(project, installed)
    monkeypatch.setattr(environment_file_hasher, "hash_environment", HashOnce(project, hash_results))
    monkeypatch.setattr(environment_file_hasher, "_interpreter_report", report_with_small_library)
    monkeypatch.setattr(environment_proof, "test_on_one_node", lambda *given: StepResult(passed_run()))
    return Environment(project / "venv")


def sign_and_record(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> Environment:
    Path("team.pub").write_bytes(new_key(monkeypatch).pem)
    done = environment.record()
    assert done.code == 0, done.stderr
    return environment


@pytest.fixture
def verified(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """Proved, and signed with the key of team.pub."""
    return sign_and_record(environment, monkeypatch)


def test_the_document_names_the_signed_statement(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.record("--json").document["signed_statement"] is None
    new_key(monkeypatch)
    signed = environment.record("--json").document["signed_statement"]
    assert signed.endswith(".dsse.json") and Path(signed).is_file()


def test_a_proved_environment_is_verified(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these commands hashes the files again, and the whole standard library."""
    monkeypatch.setattr(environment_file_hasher, "hash_environment", HASH_ENVIRONMENT)
    monkeypatch.setattr(environment_file_hasher, "_interpreter_report", INTERPRETER_REPORT)
    verified = sign_and_record(environment, monkeypatch)
    found = verified.status("--json").document
    assert (found["state"], found["reasons"]) == ("verified", [])
    assert verified.status().stdout.startswith("sample: verified environment: ")
    done = verified.verify()
    assert (done.code, done.stdout.strip()) == (0, found["subject"]), done.stderr
    assert "verified environment on cpu" in done.stderr
    assert verified.verify("--json").document["environment"] == found["subject"]
    assert "image" not in done.stderr


def test_a_copy_elsewhere_is_verified_too(verified: Environment, project: Path) -> None:
    """The subject of the evidence is the content of the installation, not its path."""
    made = lock_file.required_lock(profile_of(project, PROFILE))
    for item in made.wheels:  # installed from a file with a different time, as on another machine
        os.utime(sha256_file_store.wheel_store().path(item.wheel.sha256, item.wheel.file))
    shutil.rmtree(user_folders.cache_folder("find-links"))
    install(made, project / "other")
    assert (project / "other" / "bin" / "pip").is_file()
    done = Environment(project / "other").status()
    assert done.code == 0, done.stdout


def test_the_record_says_what_was_measured(verified: Environment) -> None:
    (file,) = Path(os.environ["XDG_STATE_HOME"]).rglob("*.record.json")
    record = json.loads(file.read_text())
    assert "image" not in record
    measured = record["installed"]
    assert set(measured["distributions"]) == {"torch", "numpy"}, "pip may have any version"
    assert measured["interpreter"]["version"] == f"CPython {sys.version.split()[0]}"
    assert measured["libc"]["sha256"] and measured["path"] == ["{site}"]
    assert str(verified.folder) not in file.read_text()


def edit(environment: Environment) -> None:
    file = environment.site / "torch" / "__init__.py"
    file.unlink()  # uv links files from its cache
    file.write_text("1\n")


def add_pth(environment: Environment) -> None:
    (environment.site / "late.pth").write_text("import os\n")


def add_distribution(environment: Environment) -> None:
    (environment.site / "other-1.dist-info").mkdir()
    (environment.site / "other-1.dist-info" / "METADATA").write_text("Name: other\n")
    (environment.site / "other.py").write_text("")


def add_module_to_a_package(environment: Environment) -> None:
    (environment.site / "torch" / "late.py").write_text("")


def add_bytecode_without_source(environment: Environment) -> None:
    (environment.site / "sitecustomize.pyc").write_bytes(b"x")


def add_second_name_of_a_package(environment: Environment) -> None:
    (environment.site / "aaa").symlink_to("torch")


def add_later_name_of_a_package(environment: Environment) -> None:
    (environment.site / "zzz").symlink_to("torch")


def remove(environment: Environment) -> None:
    (environment.site / "numpy" / "lib" / "libnumpy.so").unlink()


def other_pip(environment: Environment) -> None:
    (environment.site / "pip" / "late.py").write_text("")


def add_only_notes(environment: Environment) -> None:
    """Install a distribution without files, which `importlib.metadata` finds all the same."""
    folder = environment.site / "late-1.0.dist-info"
    folder.mkdir()
    for name in ("RECORD", "INSTALLER"):
        (folder / name).write_text("")


CHANGES: list[tuple[Callable[[Environment], None], str]] = [
    (edit, "files of the locked distributions changed"),
    (add_only_notes, "{site}/late-1.0.dist-info: files were added"),
    (add_pth, "{site}/late.pth: files were added"),
    (add_distribution, "{site}/other.py: files were added"),
    (add_module_to_a_package, "{site}/torch: files were added"),
    (add_bytecode_without_source, "{site}/sitecustomize.pyc: files were added"),
    (add_second_name_of_a_package, "{site}/aaa: files were added"),
    (add_later_name_of_a_package, "{site}/zzz: files were added"),
    (remove, "numpy/lib/libnumpy.so is missing"),
    (other_pip, "{site}/pip: files were added"),
]


def test_each_change_ends_the_proof(verified: Environment, project: Path) -> None:
    """The packages are restored after each change: to install and to test them takes longer."""
    shutil.copytree(verified.site, project / "kept", symlinks=True)
    for change, words in CHANGES:
        change(verified)
        done = verified.verify()
        assert done.code == 5 and words in done.stderr, (change, done.stderr)
        assert verified.status().code == (5 if change in (edit, remove) else 8), change
        shutil.rmtree(verified.site)
        shutil.copytree(project / "kept", verified.site, symlinks=True)
    assert verified.status().code == 0, "it is the tested one again"


def test_the_status_says_what_changed(verified: Environment) -> None:
    add_pth(verified)
    done = verified.status("--json")
    assert (done.code, done.document["state"]) == (8, "stale")
    assert "the environment changed since" in done.document["error"]["hint"]
    assert "{site}/late.pth" in done.document["error"]["hint"]
    assert f"run: envbuild test sample --python {verified.python} --record" in done.document["error"]["hint"]
    (verified.site / "late.pth").unlink()
    assert verified.status().code == 0, "it is the tested one again"


@pytest.mark.parametrize("variable", ["LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH"])
def test_a_library_or_module_from_elsewhere_ends_the_proof(
    verified: Environment, project: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    folder = project / "elsewhere"
    folder.mkdir()
    (folder / "libcublas.so.12").write_bytes(b"not a library")
    file = folder / "libcublas.so.12" if variable == "LD_PRELOAD" else folder
    monkeypatch.setenv(variable, str(file))
    done = verified.verify()
    assert done.code == 5 and "elsewhere" in done.stderr, done.stderr


def test_a_library_path_to_the_environments_own_folder_ends_the_proof(
    verified: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment's lib folder is always measured, but with LD_LIBRARY_PATH, this folder comes before the libraries
    of the wheels."""
    (verified.folder / "lib" / "libcublas.so.12").write_bytes(b"not a library")
    assert verified.record().code == 0
    monkeypatch.setenv("LD_LIBRARY_PATH", str(verified.folder / "lib"))
    done = verified.status()
    assert done.code == 8 and "LD_LIBRARY_PATH changed: empty, now {prefix}/lib" in done.stderr, done.stderr


def test_a_preloaded_file_of_a_package_ends_the_proof(verified: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", str(verified.site / "torch" / "lib" / "libtorch.so"))
    done = verified.verify()
    assert done.code == 5 and "LD_PRELOAD changed: empty, now {site}/torch/lib/libtorch.so" in done.stderr, done.stderr


@pytest.mark.parametrize("below", ["glibc-hwcaps/x86-64-v3", "tls/haswell"])
def test_a_library_for_a_newer_processor_ends_the_proof(verified: Environment, below: str) -> None:
    folder = verified.folder / "lib" / below
    folder.mkdir(parents=True)
    (folder / "libcublas.so.12").write_bytes(b"not a library")
    done = verified.verify()
    assert done.code == 5 and "{prefix}/lib: libraries were added" in done.stderr, done.stderr


def test_an_archive_on_the_path_ends_the_proof(verified: Environment, project: Path) -> None:
    (project / "more.egg").write_bytes(b"x")
    (verified.site / "more.pth").write_text(f"{project}/more.egg\n")
    assert verified.record().code == 0
    (project / "more.egg").write_bytes(b"y")
    done = verified.status()
    assert done.code == 8 and "more.egg: files were added, removed or changed" in done.stderr, done.stderr


def test_folders_are_searched_in_the_order_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's packages come after those of a virtual environment that also uses the system's."""
    venv.create(tmp_path / "venv", system_site_packages=True, symlinks=True)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("PYTHONNOUSERSITE", raising=False)
    monkeypatch.setenv("PYTHONUSERBASE", str(tmp_path / "user"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "first"))
    for base in ("venv", "user"):
        folder = tmp_path / base / "lib" / "python3.11" / "site-packages"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "more.pth").write_text(f"{tmp_path}/of_{base}\n")
    for name in ("first", "of_venv", "of_user"):
        (tmp_path / name).mkdir()
    python = tmp_path / "venv" / "bin" / "python"
    printed = subprocess.check_output([python, "-c", "import json, sys; print(json.dumps(sys.path))"], text=True)
    own = str(tmp_path)
    expected = [entry for entry in json.loads(printed) if entry.startswith(own)]
    found = INTERPRETER_REPORT(python).path
    assert [entry for entry in found if entry.startswith(own)] == expected and len(expected) == 5


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"LD_AUDIT": "/x.so"}, "LD_AUDIT is set"),
        ({"PYTHONPYCACHEPREFIX": "/tmp/x"}, "PYTHONPYCACHEPREFIX is set"),
        ({"LD_LIBRARY_PATH": "/opt/a b:"}, "LD_LIBRARY_PATH='/opt/a b'"),
        ({"LD_LIBRARY_PATH": "/opt/$LIB"}, "unset LD_LIBRARY_PATH"),
        ({"LD_LIBRARY_PATH": "lib"}, "not an absolute path: lib"),
        ({"PYTHONPATH": ":/opt/x"}, "an empty entry, which means the current folder"),
        ({"PYTHONPATH": "src"}, "not an absolute path: src"),
        ({"LD_PRELOAD": "libc.so.6"}, "LD_PRELOAD names libc.so.6"),
    ],
)
def test_variables_that_cannot_be_measured_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: str
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CheckFailed) as raised:
        environment_file_hasher.hash_environment(Path(sys.executable))
    assert words in "\n".join(raised.value.lines())


def test_a_preload_file_of_the_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ld.so.preload").write_text("/x.so\n")
    monkeypatch.setattr(environment_file_hasher, "PRELOADED", tmp_path / "ld.so.preload")
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(CheckFailed, match="preloads libraries"):
        environment_file_hasher.hash_environment(Path(sys.executable))


def test_records_that_are_too_large_together_are_refused(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_file_hasher, "LARGEST_TEXTS", 300)
    with pytest.raises(CheckFailed, match="the RECORD files have more than"):
        environment_file_hasher.hash_environment(environment.python)


def test_another_interpreter_ends_the_proof(verified: Environment, project: Path) -> None:
    """The interpreter is replaced by a copy that is one byte longer."""
    real = Path(os.path.realpath(verified.python))
    shutil.copy(real, real_copy := verified.folder / "bin" / "copied")
    with real_copy.open("ab") as file:
        file.write(b"\0")
    verified.python.unlink()
    real_copy.rename(verified.python)
    done = verified.verify()
    assert done.code == 5 and "interpreter" in done.stderr, done.stderr


def test_another_driver_ends_the_proof_of_a_gpu(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_proof, "test_on_one_node", lambda *given: StepResult(run_on("NVIDIA H20")))
    Path("team.pub").write_bytes(new_key(monkeypatch).pem)
    report_driver(monkeypatch, "550.54.15", "NVIDIA H20")
    assert environment.record().code == 4, "the profile is for the CPU"
    assert environment.verify().code == 0
    report_driver(monkeypatch, "999.1", "NVIDIA H100")
    done = environment.verify()
    assert done.code == 5 and "the driver changed: 550.54.15, now 999.1" in done.stderr, done.stderr
    assert "the GPU changed: NVIDIA H20, now NVIDIA H100" in done.stderr
    report_driver(monkeypatch, None)
    done = environment.verify()
    assert done.code == 5 and "cannot be read from /proc/driver/nvidia" in done.stderr, done.stderr


def report_driver(monkeypatch: pytest.MonkeyPatch, driver: str | None, *gpus: str) -> None:
    """Let the interpreter report this driver and these GPUs."""
    before = environment_file_hasher.hash_environment

    def measured(python: Path) -> EnvironmentFiles:
        found = before(python)
        report = found.report.model_copy(update={"driver": driver, "gpus": list(gpus)})
        return dataclasses.replace(found, report=report)

    monkeypatch.setattr(environment_file_hasher, "hash_environment", measured)


def test_a_gpu_that_cannot_be_measured_gives_no_evidence(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_proof, "test_on_one_node", lambda *given: StepResult(run_on("NVIDIA H20")))
    report_driver(monkeypatch, None)
    done = environment.record()
    assert done.code == 4 and "cannot be read from /proc/driver/nvidia" in done.stderr, done.stderr
    assert not list(Path(os.environ["XDG_STATE_HOME"]).rglob("*.statement.json"))


def test_files_that_are_not_locked_are_listed(environment: Environment) -> None:
    (environment.site / "late.py").write_text("")
    done = environment.record()
    assert done.code == 0 and "; not locked: " in done.stderr and "late.py" in done.stderr, done.stderr


def test_a_statement_about_an_environment_proves_no_image(verified: Environment) -> None:
    (file,) = Path(os.environ["XDG_STATE_HOME"]).rglob("*.dsse.json")
    done = envbuild("verify", "--evidence", str(file), "--key", "team.pub", "--json")
    assert (done.code, done.document["image"]) == (0, None)
    done = envbuild("show", "sample", "--json")
    assert done.document["state"] != "verified"


def test_without_a_key_nothing_is_verified(verified: Environment) -> None:
    (file,) = Path(os.environ["XDG_STATE_HOME"]).rglob("*.dsse.json")
    done = envbuild("verify", "--python", str(verified.folder), "--evidence", str(file))
    assert done.code == 5 and "key" in done.stderr


# the page of a profile


def test_the_page_lists_the_tested_environments(verified: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run in a changed environment replaces the row of the first; a failed run is shown as such."""
    subject = verified.status("--json").document["subject"]

    def rows() -> list[dict[str, object]]:
        done = envbuild("show", "sample", "--html", "page.html", "--json")
        assert done.code == 0, done.stderr
        return list(done.document["environments"])

    (row,) = rows()
    assert (row["subject"], row["model"], row["state"], row["driver"]) == (subject, "cpu", "verified", None)
    text = Path("page.html").read_text(encoding="utf-8")
    assert "✓ verified environment" in text and subject in text and "Tested environments" in text
    assert "verified image" not in text and envbuild("show", "sample", "--json").document["state"] != "verified"
    failed = passed_run(probe("env.libs", "failed"))
    monkeypatch.setattr(environment_proof, "test_on_one_node", lambda *given: StepResult(failed))
    add_pth(verified)
    time.sleep(1.1)  # evidence has its time in whole seconds
    assert verified.record().code == 5
    (row,) = rows()
    assert row["state"] == "failed" and "env.libs" in str(row["reason"])
    assert "✗ failed environment" in Path("page.html").read_text(encoding="utf-8")


def test_evidence_of_another_lock_is_not_on_the_page(verified: Environment, project: Path) -> None:
    loaded = profile_of(project, PROFILE)
    lock = lock_file.required_lock(loaded)
    changed = dataclasses.replace(lock, environment={**lock.environment, "MORE": "1"})
    lock_file.write(changed, loaded.lock_file, "sample")
    other = lock_file.required_lock(loaded)
    document = envbuild("show", "sample", "--html", "page.html", "--json").document
    assert other.id == document["lock"] != lock.id and document["environments"] == []
    assert "Tested environments" not in Path("page.html").read_text(encoding="utf-8")


# evidence in a registry


@pytest.fixture
def registry() -> Iterator[Registry]:
    with serving(Registry()) as found:
        yield found


def push(environment: Environment, registry: Registry, *words: str) -> CommandResult:
    return envbuild("push", "sample", f"{registry.host}/team/sample", "--python", str(environment.folder), *words)


def verify(environment: Environment, registry: Registry, *words: str, tag: str = "") -> CommandResult:
    reference = f"{registry.host}/team/sample{tag}"
    return envbuild("verify", reference, "--python", str(environment.folder), "--key", "team.pub", *words)


def test_pushed_evidence_verifies_a_copy_without_an_image(
    verified: Environment, registry: Registry, project: Path
) -> None:
    """Another machine has neither the profile's evidence nor the signed file."""
    lock = lock_file.required_lock(profile_of(project, PROFILE))
    done = push(verified, registry, "--json")
    assert done.code == 0, done.stderr
    tags = [f"{registry.host}/team/sample:environment{end}" for end in (f"-{lock.short}", "")]
    subject = verified.status("--json").document["subject"]
    document = done.document
    assert (document["tags"], document["statements"], document["image"]) == (tags, 1, None)
    assert (document["environment"], document["state"]) == (subject, "complete")
    shutil.rmtree(os.environ["XDG_STATE_HOME"])
    install(lock, project / "other")
    for tag in ("", f":environment-{lock.short}", f"@{document['digest']}"):
        found = verify(Environment(project / "other"), registry, "--profile", "sample", tag=tag)
        assert (found.code, found.stdout.strip()) == (0, subject), found.stderr
    assert push(verified, registry).code == 4, "this machine has lost its evidence"
    add_pth(Environment(project / "other"))
    changed = verify(Environment(project / "other"), registry)
    assert changed.code == 5 and "{site}/late.pth: files were added" in changed.stderr


def test_pushed_again_nothing_is_written(verified: Environment, registry: Registry) -> None:
    assert push(verified, registry).code == 0
    registry.requests.clear()
    done = push(verified, registry)
    assert (done.code, registry.written()) == (0, [])
    assert done.stdout.startswith(f"{registry.host}/team/sample:environment-")


def test_a_push_that_fails_at_the_second_tag_names_the_first(verified: Environment, registry: Registry) -> None:
    registry.refuse = "PUT /v2/.*/manifests/environment"
    done = push(verified, registry, "--json")
    (tag,) = done.document["tags"]
    assert (done.code, done.document["state"]) == (7, "incomplete") and ":environment-" in tag


def test_statements_of_others_stay_and_do_not_count(
    verified: Environment, registry: Registry, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two keys publish at one tag. Each verifies the environment by its own statement."""
    assert push(verified, registry).code == 0
    Path("other.pub").write_bytes(new_key(monkeypatch).pem)
    refused = envbuild("verify", f"{registry.host}/team/sample", "--python", str(verified.folder), "--key", "other.pub")
    assert refused.code == 5 and "signature" in refused.stderr, refused.stderr
    assert push(verified, registry).code == 0
    for key in ("other.pub", "team.pub"):
        words = ("verify", f"{registry.host}/team/sample", "--python", str(verified.folder), "--key", key)
        assert envbuild(*words).code == 0
    assert verify(verified, registry, "--profile", "another").code == 5
    assert verify(verified, registry, "--gpu", "h20").code == 5


def record_a_failure(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = passed_run(probe("env.libs", "failed"))
    monkeypatch.setattr(environment_proof, "test_on_one_node", lambda *given: StepResult(failed))
    assert environment.record().code == 5


def test_a_later_failure_is_pushed_too_and_ends_the_proof(
    verified: Environment, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert push(verified, registry).code == 0
    record_a_failure(verified, monkeypatch)
    refused = push(verified, registry)
    assert refused.code == 4 and "nothing is published" in refused.stderr and "--record" in refused.stderr
    monkeypatch.setattr(environment_proof, "test_on_one_node", lambda *given: StepResult(passed_run()))
    assert verified.record().code == 0
    assert push(verified, registry, "--json").document["statements"] == 3
    assert verify(verified, registry).code == 0, "the later pass counts"


def test_the_newest_failure_in_a_registry_counts(
    verified: Environment, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The passed and the failed run are both at the tag, as if two machines had published them."""
    assert push(verified, registry).code == 0
    record_a_failure(verified, monkeypatch)
    loaded = profile_of(Path(), PROFILE)
    lock = lock_file.required_lock(loaded)
    files = environment_file_hasher.hash_environment(verified.python)
    measured = environment_measurement.measure_environment(files, plan_resolver.computing(lock.versions))
    statements = push_save_and_load.environment_statements(measured, loaded, lock)
    assert len(statements) == 2
    place = Repository(Reference.parse(f"{registry.host}/team/sample"))
    signer = keys_and_signatures.configured_signer()
    registry_attestations.publish_without_image(place, "environment", statements, signer)
    done = verify(verified, registry)
    assert done.code == 5 and "the self-test failed" in done.stderr, done.stderr


def test_without_a_key_no_registry_is_asked(verified: Environment, registry: Registry) -> None:
    assert push(verified, registry).code == 0
    registry.requests.clear()
    done = envbuild("verify", f"{registry.host}/team/sample", "--python", str(verified.folder))
    assert done.code == 5 and "key" in done.stderr and registry.requests == []


@pytest.mark.parametrize("raw", [b"{", b"[]", b'{"layers": 1}', b'{"manifests": [], "layers": []}'])
def test_an_invalid_manifest_is_a_reason(verified: Environment, registry: Registry, raw: bytes) -> None:
    """A valid file still verifies the environment, so that nobody who writes to a registry can prevent that."""
    registry.manifests["environment"] = (oci_types.MANIFEST, raw)
    done = verify(verified, registry, "--json")
    assert (done.code, [one["id"] for one in done.document["reasons"]]) == (5, ["malformed"]), done.stderr
    (file,) = Path(os.environ["XDG_STATE_HOME"]).rglob("*.dsse.json")
    assert verify(verified, registry, "--evidence", str(file)).code == 0


def test_an_image_is_not_verified_by_an_environments_tag(verified: Environment, registry: Registry) -> None:
    assert push(verified, registry).code == 0
    done = envbuild("verify", f"{registry.host}/team/sample:environment", "--key", "team.pub")
    assert done.code == 5, done.stderr
    missing = verify(verified, registry, tag=":verified")
    assert missing.code == 7 and "push NAME REGISTRY/NAME --python PATH" in missing.stderr, missing.stderr
    assert push(verified, registry, "--zstd").code == 2


# what is refused before the self-test


def test_an_environment_that_differs_from_its_wheels_is_not_tested(environment: Environment) -> None:
    edit(environment)
    done = environment.record()
    assert done.code == 5 and "torch/__init__.py differs from its wheel" in done.stderr, done.stderr


def lie_about_a_file(environment: Environment) -> None:
    """The file is changed, and RECORD has no row of it."""
    edit(environment)
    (record,) = environment.site.glob("torch-*.dist-info/RECORD")
    rows = [row for row in record.read_text().splitlines() if not row.startswith("torch/__init__")]
    record.unlink()
    record.write_text("\n".join([*rows, ""]))


def lie_about_another(environment: Environment) -> None:
    """RECORD claims a file that its wheel does not have."""
    (environment.site / "torch" / "more.py").write_text("")
    (record,) = environment.site.glob("torch-*.dist-info/RECORD")
    text = record.read_text()
    record.unlink()
    record.write_text(f"{text}torch/more.py,,\n")


def break_record(environment: Environment) -> None:
    (record,) = environment.site.glob("torch-*.dist-info/RECORD")
    record.unlink()
    record.write_text('torch/__init__.py,"\n')


def link_a_file(environment: Environment) -> None:
    file = environment.site / "torch" / "__init__.py"
    shutil.copy(file, environment.folder / "copy.py")
    file.unlink()
    file.symlink_to(environment.folder / "copy.py")


def link_a_folder(environment: Environment) -> None:
    (environment.site / "torch").rename(environment.folder / "torch")
    (environment.site / "torch").symlink_to(environment.folder / "torch")


def link_in_a_circle(environment: Environment) -> None:
    """A link to site-packages and a link to itself do not make the search endless."""
    (environment.site / "torch" / "again").symlink_to(environment.site)
    (environment.site / "itself").symlink_to("itself")
    link_a_file(environment)


def huge(environment: Environment) -> None:
    file = environment.site / "torch" / "__init__.py"
    file.unlink()
    with file.open("wb") as stream:
        stream.truncate(1 << 50 if os.uname().sysname != "Linux" else 1 << 40)


def fifo(environment: Environment) -> None:
    (environment.site / "torch" / "__init__.py").unlink()
    os.mkfifo(environment.site / "torch" / "__init__.py")


def fifo_as_record(environment: Environment) -> None:
    (record,) = environment.site.glob("torch-*.dist-info/RECORD")
    record.unlink()
    os.mkfifo(record)


def unchecked_bytecode(environment: Environment) -> None:
    folder = environment.site / "torch" / "__pycache__"
    folder.mkdir(exist_ok=True)
    (folder / "late.cpython-311.pyc").write_bytes(b"\0\0\0\0\1\0\0\0" + b"x" * 8)


def editable_installation(environment: Environment) -> None:
    (environment.site / "__editable__.x-1.pth").write_text("import __editable___x_finder\n")


def extension_next_to_a_module(environment: Environment) -> None:
    (environment.site / "torch" / "__init__.cpython-311-x86_64-linux-gnu.so").write_bytes(b"x")


def module_in_an_earlier_folder(environment: Environment) -> None:
    os.environ["PYTHONPATH"] = str(environment.folder / "first")  # the fixture restores it
    (environment.folder / "first").mkdir()
    (environment.folder / "first" / "numpy.py").write_text("")


def archive_in_an_earlier_folder(environment: Environment) -> None:
    os.environ["PYTHONPATH"] = str(environment.folder / "first.zip")
    (environment.folder / "first.zip").write_text("")


def second_version(environment: Environment) -> None:
    (record,) = environment.site.glob("torch-*.dist-info/RECORD")
    shutil.copytree(record.parent, environment.site / "torch-1.0.dist-info")


def empty(environment: Environment) -> None:
    shutil.rmtree(environment.site)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lie_about_a_file, "torch/__init__.py is missing, or RECORD does not list it"),
        (lie_about_another, "torch/more.py is not in the wheel whose RECORD lists it"),
        (break_record, "invalid RECORD of torch-"),
        (link_a_file, "torch/__init__.py is a symbolic link"),
        (link_a_folder, "torch/__init__.py is a symbolic link, or below one"),
        (link_in_a_circle, "torch/__init__.py is a symbolic link"),
        (huge, "more than 8 GiB"),
        (fifo, "torch/__init__.py is not a regular file"),
        (fifo_as_record, "RECORD is not a regular file"),
        (unchecked_bytecode, "without comparing it with its source"),
        (editable_installation, "imports sources that are not on sys.path"),
        (extension_next_to_a_module, "torch/__init__.cpython-311-x86_64-linux-gnu.so is not locked, and hides"),
        (module_in_an_earlier_folder, "venv/first/numpy.py is not locked, and hides a locked module"),
        (archive_in_an_earlier_folder, "first.zip comes before site-packages, and is not a folder"),
        (second_version, "torch is 1.0 and 2.13.0+cpu"),
        (empty, "none of the locked distributions is installed"),
    ],
)
def test_a_hostile_environment_is_refused(
    environment: Environment, spoil: Callable[[Environment], None], words: str
) -> None:
    spoil(environment)
    done = environment.record()
    assert done.code == 5 and words in done.stderr.replace("2.13.0+cpu and 1.0", "1.0 and 2.13.0+cpu"), done.stderr
    assert not list(Path(os.environ["XDG_STATE_HOME"]).rglob("*.statement.json"))
    assert environment.status().code in (4, 5)


def test_an_interpreter_that_lies_about_its_form_is_refused(environment: Environment) -> None:
    environment.python.unlink()
    environment.python.write_text(
        f"#!/bin/sh\n[ $# = 3 ] && exec {sys.executable} \"$@\"\necho 'ENVBUILD 1 2 3 4'; exit 0\n"
    )
    environment.python.chmod(0o755)
    done = environment.record()
    assert done.code == 5 and "did not report its folders" in done.stderr, done.stderr


def test_a_change_during_the_selftest_is_noticed(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    def meanwhile(*given: object) -> StepResult[object]:
        add_pth(environment)
        return StepResult(passed_run())

    monkeypatch.setattr(environment_proof, "test_on_one_node", meanwhile)
    done = environment.record()
    assert done.code == 5 and "changed during the self-test" in done.stderr and "late.pth" in done.stderr


def test_a_failed_selftest_is_evidence_too(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = judged(lines(documents(probe("env.libs", "failed"))), exit_code=5)
    monkeypatch.setattr(environment_proof, "test_on_one_node", lambda *given: StepResult(failed))
    done = environment.record("--json")
    assert (done.code, done.document["state"]) == (5, "failed")
    assert environment.status().code == 5
    monkeypatch.setattr(environment_proof, "test_on_one_node", lambda *given: StepResult(passed_run()))
    assert environment.record("--json").document["state"] == "verified"


def test_a_failed_selftest_that_changes_a_file_is_evidence_too(
    verified: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile(*given: object) -> StepResult[object]:
        edit(verified)
        return StepResult(judged(lines(documents(probe("env.libs", "failed"))), exit_code=5))

    monkeypatch.setattr(environment_proof, "test_on_one_node", meanwhile)
    before = len(list(Path(os.environ["XDG_STATE_HOME"]).rglob("*.statement.json")))
    done = verified.record("--json")
    assert (done.code, done.document["state"]) == (5, "failed")
    assert len(list(Path(os.environ["XDG_STATE_HOME"]).rglob("*.statement.json"))) == before + 1


def test_a_changed_environment_is_not_reported_as_verified(
    verified: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile(*given: object) -> StepResult[object]:
        add_pth(verified)
        return StepResult(passed_run())

    monkeypatch.setattr(environment_proof, "test_on_one_node", meanwhile)
    done = verified.record("--json")
    assert (done.code, done.document["state"]) == (5, "unverified")


def test_the_status_of_a_changed_locked_file_has_a_document(verified: Environment) -> None:
    edit(verified)
    done = verified.status("--json")
    assert (done.code, done.document["profile"], done.document["state"]) == (5, "sample", "failed")
    assert "torch/__init__.py differs from its wheel" in [reason["detail"] for reason in done.document["reasons"]]


def test_commands_quote_the_path(verified: Environment) -> None:
    folder = verified.folder.rename(verified.folder.parent / "my venv")
    done = envbuild("status", "sample", "--python", str(folder), "--json")
    assert done.document["next_command"] == f"'{folder}/bin/python'", done.document


def test_a_run_outside_a_container_is_recorded_as_such(verified: Environment) -> None:
    assert verified.verify("--json").document["unconfined"] == ["no container"]
    assert verified.status("--json").document["evidence"][0]["unconfined"] == ["no container"]


def test_options_that_do_not_fit_are_refused(environment: Environment) -> None:
    assert envbuild("status", "--python", str(environment.folder)).code == 2
    assert envbuild("verify", "--python", str(environment.folder)).code == 2
    for words in (("--rebuild",), ("--base", "host/y"), ("--from", "host/y")):
        assert envbuild("verify", "host/x", "--python", str(environment.folder), *words).code == 2
    assert environment.record("--level", "quick").code == 2
