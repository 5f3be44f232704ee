"""Small environments that the dynamic loader accepts are collected and judged; documents that no collector can produce
are refused."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from selftest.environments import SONAMES, Environment, good, library, virtual
from selftest.named import CUBLASLT_SHADOW, NVJITLINK_SHADOW

from envbuild.audit import (
    collected_environment,
    environment_audit,
    file_findings,
    finding_types,
    library_and_distribution_findings,
)
from envbuild.audit.collected_environment import Holdings
from envbuild.audit.environment_audit import Audit, Expected
from envbuild.audit.finding_types import Finding, VersionMismatch
from envbuild.facts import database
from envbuild.lock.lock_file import Lock
from envbuild.runners import host_runner
from envbuild.testrun.run_result import RawOutput
from envbuild.util.errors import CheckFailed
from envbuild.util.json_output_types import plain
from unit import collected
from unit.support import envbuild

H20 = Expected(profile="h20", cli_words="h20", gpus=(database.gpus()["h20"],), driver="560.28.03")
LT = "nvidia/cublas/lib/libcublasLt.so.12"


@dataclasses.dataclass(frozen=True)
class Place:
    """A virtual environment to be filled, and a folder next to it for system libraries."""

    python: Path
    made: Environment
    foreign: Path

    def held(self) -> Holdings:
        return collected.collect(self.python, self.foreign.parent)

    def judged(self, wanted: Expected = H20) -> Audit:
        return environment_audit.assess("it", self.held(), wanted)

    def system(self, *kinds: str, version: str = "12.1.3.1") -> Path:
        for kind in kinds:
            self.made.put(self.foreign / SONAMES[kind], library(kind, version))
        return self.foreign


@pytest.fixture(autouse=True)
def no_loader_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    if not shutil.which("gcc"):
        pytest.skip("no gcc to build the libraries with")
    root = tmp_path.resolve()
    python, site = virtual(root / "venv")
    return Place(python, good(site), root / "system")


def ids(found: Audit, severity: str | None = None) -> set[str]:
    """Return the ids of the findings of one severity, by default all above a note."""
    kept = [f for f in found.findings if f.severity == severity or (severity is None and f.severity != "note")]
    return {finding.id for finding in kept}


def the(found: Audit, ident: str) -> Finding:
    (finding,) = [finding for finding in found.findings if finding.id == ident]
    return finding


def test_a_defect_ends_a_build(place: Place) -> None:
    clean = place.judged()
    clean.require()
    spoiled = dataclasses.replace(clean, findings=(Finding("two-copies", "defect", "two of it", "remove one"),))
    with pytest.raises(CheckFailed, match="it: 1 defect") as caught:
        spoiled.require()
    assert caught.value.hint == "two-copies: two of it; fix: remove one"
    assert caught.value.partial == plain(spoiled.document())


def test_nothing_is_found_in_a_clean_environment(place: Place) -> None:
    found = place.judged()
    assert (ids(found), found.clean, found.failed) == (set(), True, False)
    copies = {copy.library: copy for copy in found.held.libraries if str(place.made.site) in copy.path}
    assert {kind: (copy.version, copy.reported, copy.loaded) for kind, copy in copies.items()} == {
        "cublas": ("12.5.2.13", "12.5.2", True),
        "cublasLt": ("12.5.2.13", "12.5.2", True),
        "cudnn": ("9.1.0.70", "9.1.0", True),
        "nccl": ("2.26.2", "2.26.2", True),
    }
    assert copies["cublas"].runpath == "$ORIGIN" and len(copies["cublas"].build_id or "") == 40


def test_the_document_is_as_the_issue_has_it(place: Place) -> None:
    document: Any = plain(place.judged().document())
    assert document["state"] == "clean" and {row["state"] for row in document["advisories"]} == {"noted"}
    (cublas,) = [row for row in document["libraries"] if row["name"] == "cublas" and row["loaded"]]
    assert set(cublas) == {"name", "version", "path", "sha256", "loaded"}
    assert all(set(finding) == {"id", "severity", "message", "remedy", "versions"} for finding in document["findings"])


# each defect, seeded


def test_a_foreign_cublas_on_ld_library_path(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's RPATH applies and is reported; a program that loads libcublas first gets the foreign libcublasLt."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(place.system("cublas", "cublasLt")))
    found = place.judged()
    assert ids(found) >= {"several-copies", "ld-library-path", "cublaslt-order"}
    assert NVJITLINK_SHADOW not in ids(found), "it has no nvJitLink"
    assert f"{place.foreign}/libcublasLt.so.12 (12.1.3)" in the(found, "cublaslt-order").message
    assert "12.5.2.13, loaded" in the(found, "several-copies").message
    assert not found.failed
    loaded = found.held.loaded("cublas")
    assert loaded and loaded.version == "12.5.2.13"


def test_a_required_version_with_a_fault_is_not_advised(tmp_path: Path) -> None:
    python, site = virtual(tmp_path.resolve() / "venv")
    made = good(site)
    shutil.rmtree(next(site.glob("torch-*")))
    made.torch(requires=("nvidia-cublas-cu12==12.1.3.1",))
    held = collected.collect(python, tmp_path)
    finding = the(environment_audit.assess("it", held, dataclasses.replace(H20, image=False)), "requirement-unmet")
    assert "keep the installed version" in finding.remedy and "envbuild fix" in finding.remedy
    image = the(environment_audit.assess("it", held, H20), "requirement-unmet")
    assert "keep the installed version" in image.remedy and "envbuild fix" not in image.remedy
    other = the(
        environment_audit.assess("it", held, environment_audit.of_gpus([database.gpus()["v100"]], image=False)),
        "requirement-unmet",
    )
    assert "keep" not in other.remedy


def test_no_version_is_advised_that_is_refused_on_the_gpu(tmp_path: Path) -> None:
    python, site = virtual(tmp_path.resolve() / "venv")
    made = good(site)
    shutil.rmtree(next(site.glob("nvidia_cublas*")))
    made.cublas("12.1.3.1")
    found = environment_audit.assess("it", collected.collect(python, tmp_path), H20)
    assert "12.4.5.8" in the(found, "cublas-hopper-fpe").remedy
    remedy = the(found, "int-mm-cuda121u1").remedy
    assert "the first good one is not confirmed" in remedy and "install" not in remedy


def test_a_library_of_the_system_with_another_file_name_is_no_second_copy(place: Place) -> None:
    held = place.judged().held
    (cublas,) = [copy for copy in held.libraries if copy.library == "cublas"]
    other = cublas.model_copy(
        update={
            "path": "/usr/local/cuda/lib64/libcublas.so.13",
            "soname": "libcublas.so.13",
            "loaded": False,
            "ways": [],
        }
    )
    same = other.model_copy(update={"path": "/usr/local/cuda/lib64/libcublas.so.12", "soname": cublas.soname})
    for copy, expected in ((other, set()), (same, {"several-copies"})):
        more = held.model_copy(update={"libraries": [*held.libraries, copy]})
        found = {finding.id for finding in environment_audit.assess("it", more, H20).findings}
        assert found & {"several-copies"} == expected


def test_bytecode_that_pip_compiled_again_is_not_modified(place: Place) -> None:
    file = "mod/__pycache__/mod.cpython-311.pyc"
    place.made.wheel("mod", "1", {file: b"compiled by the author"})
    place.made.put(place.made.site / file, b"compiled by pip")
    assert "modified-file" in ids(place.judged())
    record = place.made.site / "mod-1.dist-info" / "RECORD"
    record.write_text(f"{file},,\n{record.read_text()}")  # pip sorts the rows
    assert "modified-file" not in ids(place.judged())


def test_a_foreign_nvjitlink_on_ld_library_path(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.made.put(place.foreign / "libnvJitLink.so.12", library("nccl", "12.1.105"))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(place.foreign))
    assert NVJITLINK_SHADOW in ids(place.judged(), "warn")


def test_torch_2_10_loads_the_foreign_cublaslt(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment imitates the load order of torch 2.10: libcublas by path, before any library with an RPATH."""
    init = place.made.site / "torch" / "__init__.py"
    cublas = place.made.site / "nvidia/cublas/lib/libcublas.so.12"
    first = f"import ctypes\nctypes.CDLL({str(cublas)!r})\n"
    init.write_text(first + init.read_text().replace("2.3.1", "2.10.0"))
    shutil.rmtree(place.made.site / "torch-2.3.1.dist-info")
    place.made.wheel("torch", "2.10.0", {})
    monkeypatch.setenv("LD_LIBRARY_PATH", str(place.system("cublasLt")))
    found = place.judged()
    assert ids(found, "defect") & {"mixed-cublas", "loaded-twice"}
    assert CUBLASLT_SHADOW in ids(found, "warn")
    lt = found.held.loaded("cublasLt")
    assert lt and lt.path.startswith(str(place.foreign))


def test_a_missing_cublas_is_supplied_by_ld_library_path(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(place.made.site / "nvidia" / "cublas" / "lib")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(place.system("cublas", "cublasLt")))
    found = place.judged()
    assert "cublas-hopper-fpe" in ids(found, "refuse"), "judged by what is loaded, not by what pip says"
    remedy = the(found, "cublas-hopper-fpe").remedy
    assert "install nvidia" not in remedy, "the installed version is fixed, and pip would replace it by an older one"
    assert f"is loaded instead: unset LD_LIBRARY_PATH, or remove {place.foreign} from it" in remedy
    assert found.failed


def test_a_preloaded_library_shadows_the_locked_one(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.system("nccl", version="2.18.1")
    monkeypatch.setenv("LD_PRELOAD", str(place.foreign / SONAMES["nccl"]))
    found = place.judged(dataclasses.replace(H20, gpu_count=8))
    finding = the(found, "shadowed")
    assert finding.severity == "defect" and "by LD_PRELOAD" in finding.message and "2.26.2" in finding.message
    assert "nccl-2.18.1" in ids(found, "refuse")


def test_a_bundled_copy_that_is_loaded(place: Place) -> None:
    """Builds of torch outside the package index bundle libcublas: an installed nvidia-cublas-cu12 then has no
    effect."""
    site = place.made.site
    shutil.rmtree(site / "torch-2.3.1.dist-info")
    bundled = {f"torch/lib/{SONAMES[kind]}": library(kind, "12.1.3.1") for kind in ("cublas", "cublasLt")}
    place.made.torch(bundled=bundled)
    shutil.rmtree(site / "nvidia" / "cublas")
    files = {f"nvidia/cu12/lib/{SONAMES[kind]}": library(kind, "12.5.2.13") for kind in ("cublas", "cublasLt")}
    place.made.wheel("nvidia-cublas-cu12", "12.5.2.13", files)
    found = place.judged()
    finding = the(found, "bundled-copy")
    assert finding.severity == "warn" and "bundled by torch==2.3.1" in finding.message
    assert "torch loads them even if another version is installed" in finding.message
    assert "several-copies" in ids(found)


def test_a_wheel_that_only_bundles_is_not_a_fault(place: Place) -> None:
    shutil.rmtree(place.made.site / "nvidia")
    for info in place.made.site.glob("*.dist-info"):
        shutil.rmtree(info)
    numbers = {"cublas": "12.5.3", "cublasLt": "12.5.3", "cudnn": "9.1.0", "nccl": "2.26.2"}
    bundled = {f"torch/lib/{SONAMES[kind]}": library(kind, version) for kind, version in numbers.items()}
    place.made.torch("2.3.1+cu121", cuda="12.1", bundled=bundled, requires=())
    found = place.judged()
    assert found.clean
    assert the(found, "bundled-copy").severity == "note"
    cublas = found.held.loaded("cublas")
    assert cublas and (cublas.version, cublas.owner) == ("12.5.3", "torch==2.3.1+cu121")


def test_a_copy_that_an_upgrade_left(place: Place) -> None:
    place.made.put(place.made.site / "nvidia/cublas/lib/libcublas.so.11", library("cublas", "11.11.3.6"))
    found = place.judged()
    assert the(found, "left-behind").severity == "warn"
    assert "several-copies" in ids(found)


def test_two_dist_infos_of_one_distribution(place: Place) -> None:
    place.made.cublas("12.1.3.1")
    place.made.cublas("12.5.2.13")
    found = place.judged()
    assert ids(found, "defect") == {"duplicate-distribution"}
    assert "12.1.3.1" in the(found, "duplicate-distribution").message
    loaded = found.held.loaded("cublas")
    assert loaded and loaded.version == "12.5.2.13", "the RECORD whose checksum fits names the version"


def test_a_modified_library(place: Place) -> None:
    with (place.made.site / LT).open("ab") as file:
        file.write(b"patched")
    found = place.judged()
    assert ids(found, "defect") == {"modified-library"}
    lt = found.held.loaded("cublasLt")
    assert lt and lt.version == "12.5.2", "its distribution is not evidence of its version any longer"


def test_a_library_that_cannot_be_read_is_not_passed_over(place: Place) -> None:
    held = place.held()
    copy = held.libraries[0].model_copy(update={"record": False, "sha256": None})
    unread = collected_environment.Altered(
        path=copy.path, owner="nvidia-cublas-cu12==12.5.2.13", sha256=None, by="wheel"
    )
    spoiled = held.model_copy(update={"libraries": [copy], "altered": [unread], "unrecorded": []})
    found = list(file_findings.file_findings(spoiled, {}, built=True, strict=True))
    assert [(finding.id, copy.path in finding.message) for finding in found] == [("modified-file", True)]


def test_an_old_cublas_distribution(place: Place) -> None:
    shutil.rmtree(next(place.made.site.glob("nvidia_cublas*")))
    place.made.cublas("12.1.3.1")
    assert "cublas-hopper-fpe" in ids(place.judged(), "refuse")
    accepted = dataclasses.replace(H20, accepted={"cublas-hopper-fpe": "no such shapes"})
    taken_on = the(place.judged(accepted), "cublas-hopper-fpe")
    assert taken_on.severity == "note" and "accepted by h20 (no such shapes)" in taken_on.message
    unknown = the(place.judged(Expected()), "cublas-hopper-fpe")
    assert unknown.severity == "note" and "h20, " in unknown.message


def test_a_cublas_whose_version_differs_from_its_wheel(place: Place) -> None:
    shutil.rmtree(next(place.made.site.glob("nvidia_cublas*")))
    files = {f"nvidia/cublas/lib/{SONAMES[kind]}": library(kind, "12.1.3.1") for kind in ("cublas", "cublasLt")}
    place.made.wheel("nvidia-cublas-cu12", "12.5.2.13", files)
    assert ids(place.judged(), "defect") == {"version-disagrees"}
    found = [one for f in place.judged().findings if f.id == "version-disagrees" for one in map(row, f.versions)]
    assert ("cublas", "12.1.3", "12.5.2.13") in found


def test_torch_for_the_cpu_where_a_gpu_is_wanted(place: Place) -> None:
    shutil.rmtree(next(place.made.site.glob("torch-*")))
    place.made.torch("2.3.1+cpu", cuda=None)
    assert ids(place.judged(), "defect") == {"cpu-only"}
    assert place.judged(Expected()).clean


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architectures", "severity"),
    [("sm_80 sm_86", "defect"), ("sm_80 compute_80", "warn"), ("sm_90a", None), ("sm_90 sm_100", None), ("", None)],
)
def test_the_gpus_architecture(place: Place, architectures: str, severity: str | None) -> None:
    init = place.made.site / "torch" / "__init__.py"
    init.write_text(init.read_text().replace("sm_50 sm_80 sm_90", architectures))
    if not architectures:
        (place.made.site / "torch/lib/libtorch_cuda.so").touch()
    found = place.judged()
    assert [f.severity for f in found.findings if f.id == "no-kernel"] == ([severity] if severity else [])


def test_architecture_specific_code_serves_its_own_gpu_only() -> None:
    b300 = dataclasses.replace(database.gpus()["b200"], id="b300", compute_capability="10.3")
    found = list(environment_audit._kernels(b300, ["sm_100a"], "another torch"))
    assert [finding.severity for finding in found] == ["defect"]
    assert list(environment_audit._kernels(b300, ["sm_100"], "another torch")) == []


def test_a_torch_that_cannot_be_imported(place: Place) -> None:
    shutil.rmtree(place.made.site / "nvidia" / "nccl" / "lib")
    found = place.judged()
    finding = the(found, "torch-import")
    assert finding.severity == "defect" and "libnccl.so.2" in finding.message
    assert found.held.torch and found.held.torch.architectures == ["sm_50", "sm_80", "sm_90"], "read from its file"


def test_a_torch_whose_import_kills_the_process(place: Place) -> None:
    path = place.made.site / "nvidia/nccl/lib" / SONAMES["nccl"]
    path.write_bytes(library("nccl", "2.26.2", crash=True))
    found = place.judged()
    assert "died of SIG" in the(found, "torch-import").message
    assert "modified-library" in ids(found, "defect")


def test_a_torch_whose_import_is_killed_is_reported_as_out_of_memory(place: Place) -> None:
    """The audit takes every SIGKILL to be from the kernel's OOM killer. In this test, the process kills itself."""
    (place.made.site / "torch/__init__.py").write_text("import os\nos.kill(os.getpid(), 9)\n", encoding="utf-8")
    finding = the(place.judged(), "torch-import")
    assert finding.message.endswith("the process died of SIGKILL: out of memory, or over a memory limit")
    assert "the audit's container is limited to 4 GiB" in finding.remedy


def test_an_import_that_is_not_done_in_time_may_be_a_busy_machines(place: Place) -> None:
    found = place.judged()
    assert found.held.torch
    late = found.held.torch.model_copy(update={"imported": False, "failure": "not done after 300 s"})
    (finding,) = environment_audit._torch(found.held.model_copy(update={"torch": late}), found.wanted)
    assert finding.remedy.startswith("run it again when the machine is less busy; if it hangs again: reinstall torch")


def test_an_apex_that_is_not_nvidias(place: Place) -> None:
    place.made.wheel(
        "apex", "0.9.10.dev0", {"apex/__init__.py": b"", "apex/lib/libapex.py": b"", "apex/models.py": b""}
    )
    assert ids(place.judged(), "defect") == {"wrong-apex"}


def test_nvidias_apex(place: Place) -> None:
    parts = {f"apex/{part}/__init__.py": b"" for part in ("normalization", "multi_tensor_apply", "amp")}
    place.made.wheel("apex", "0.1", {"apex/__init__.py": b"raise ImportError", **parts})
    assert ids(place.judged()) == {"apex-not-compiled"}
    place.made.put(place.made.site / "amp_C.py", b"")
    assert place.judged().clean
    place.made.wheel("transformers", "5.0.0", {})
    assert "apex-t5-mixed-dtype" in ids(place.judged())


def test_a_requirement_that_is_not_met(place: Place) -> None:
    place.made.wheel("needy", "1", {}, ["nvidia-nccl-cu12==2.20.5", "absent>1", 'absent2; python_version < "3"',
                                        'absent3; extra == "x"', "parent[kid]", "Broken >>"])  # fmt: skip
    place.made.wheel("parent", "1", {}, ['grandchild; extra == "kid"', 'other; extra == "adult"'])
    found = place.judged()
    messages = sorted(f.message for f in found.findings if f.id == "requirement-unmet")
    assert [message.split(" requires ")[1] for message in messages] == [
        "absent>1, but it is not installed",
        "nvidia-nccl-cu12==2.20.5, but installed is 2.26.2",
        'grandchild; extra == "kid", but it is not installed',
    ]
    versions = sorted(one for f in found.findings if f.id == "requirement-unmet" for one in map(row, f.versions))
    assert versions == [
        ("absent", None, ">1"), ("grandchild", None, ""), ("nvidia-nccl-cu12", "2.26.2", "==2.20.5")
    ]  # fmt: skip


def test_no_torch(place: Place) -> None:
    for path in place.made.site.glob("torch*"):
        shutil.rmtree(path)
    assert the(place.judged(Expected()), "no-torch").severity == "note"
    assert ids(place.judged(), "defect") == {"no-torch"}


def test_torch_of_another_version_than_its_distribution(place: Place) -> None:
    (place.made.site / "torch-2.3.1.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.3.0\n")
    assert list(map(row, the(place.judged(), "torch-version").versions)) == [("torch", "2.3.1+cu121", "2.3.0")]
    assert "torch-version" in ids(place.judged(), "defect")


def row(mismatch: VersionMismatch) -> tuple[str, str | None, str]:
    return mismatch.name, mismatch.found, mismatch.expected


def lock(**versions: str) -> Lock:
    """A lock with only the attributes that an audit reads."""
    return cast(Lock, SimpleNamespace(python="3.4", versions=versions))


@pytest.mark.slow
def test_differences_from_the_lock_are_reported(place: Place) -> None:
    wanted = dataclasses.replace(H20, lock=lock(torch="2.3.0", numpy="2.0.0"))
    text = the(place.judged(wanted), "not-as-locked").message
    assert "Python is 3." in text and "but 3.4 is locked" in text
    assert "numpy is absent, but 2.0.0 is locked; torch is 2.3.1, but 2.3.0 is locked" in text
    python, *others = map(row, the(place.judged(wanted), "not-as-locked").versions)
    assert python == ("Python", place.held().python.version, "3.4")
    assert others == [("numpy", None, "2.0.0"), ("torch", "2.3.1", "2.3.0")]
    claimed = place.judged(dataclasses.replace(wanted, claimed=True))
    assert the(claimed, "not-as-locked").severity == "defect"
    assert the(claimed, "not-as-locked").remedy == "envbuild make h20"
    environment = the(place.judged(dataclasses.replace(wanted, image=False)), "not-as-locked").remedy
    program = place.held().python.executable
    assert f"pip install --python {program} --no-deps numpy==2.0.0 torch==2.3.0" in environment
    assert "envbuild export requirements h20" in environment
    foreign = the(place.judged(wanted), "not-as-locked").remedy
    assert f"in the Dockerfile: RUN uv pip install --python {program} --no-deps numpy==2.0.0 torch==2.3.0" in foreign
    assert "envbuild make" not in environment + foreign and "envbuild build" not in environment + foreign


def test_the_remedy_of_an_advisory_fits_what_is_audited(place: Place) -> None:
    old = place.held()
    held = old.model_copy(
        update={"distributions": [item.model_copy(update={"version": "12.1.3.1"}) if "cublas" in item.name else item
                                  for item in old.distributions], "libraries": []}
    )  # fmt: skip

    def remedy(changed: Expected) -> str:
        return the(environment_audit.assess("it", held, changed), "cublas-hopper-fpe").remedy

    pinned = "--no-deps nvidia-cublas-cu12==12.4.5.8"
    assert f"in the Dockerfile: RUN uv pip install --python {held.python.executable} {pinned}" in remedy(H20)
    environment = remedy(dataclasses.replace(H20, image=False))
    assert f"; uv pip install --python {held.python.executable} {pinned}" in environment
    made = remedy(dataclasses.replace(H20, claimed=True))
    assert made.endswith("; in the profile: pins: {cublas: 12.4.5.8}; then: envbuild make h20")
    pip = held.model_copy(update={"distributions": [*held.distributions, _distribution("pip")]})
    assert (
        environment_audit.install(pip, False, ["torch==2.7.1"])
        == f"{held.python.executable} -m pip install torch==2.7.1"
    )


def _distribution(name: str) -> collected_environment.Distribution:
    return collected_environment.Distribution(name=name, version="1.0", folder="/", requires=[])


# the command `audit` on environments


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An environment without torch; no environment is active."""
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    python, _ = virtual(tmp_path.resolve() / "bare")
    yield python


def of_envbuild(monkeypatch: pytest.MonkeyPatch, python: Path) -> None:
    """Make envbuild believe that it is installed in this environment, which has no torch."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "torch" else find(name, *more))
    monkeypatch.setattr(sys, "prefix", str(python.parent.parent))


def test_an_environment_without_torch_has_nothing_to_audit(bare: Path) -> None:
    done = envbuild("audit", "--python", str(bare))
    assert (done.code, done.stdout.splitlines()[-1]) == (3, environment_audit.NOTHING)
    assert f"{bare}: torch is not installed; " in done.stderr and "clean" not in done.stdout
    result = envbuild("audit", "--python", str(bare), "--json")
    assert (result.code, result.document["error"]["code"], result.document["target"]) == (3, 3, str(bare))


def test_without_torch_the_distributions_are_listed(bare: Path) -> None:
    site = next(bare.parent.parent.glob("lib/python*/site-packages"))
    (site / "sample-1.5.dist-info").mkdir()
    (site / "sample-1.5.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: sample\nVersion: 1.5\n")
    lines = [line.split() for line in envbuild("audit", "--python", str(bare)).stdout.splitlines()]
    assert ["sample", "1.5"] in lines
    assert envbuild("audit", "--python", str(bare), "--json").document["distributions"]["sample"] == "1.5"


def test_an_image_without_torch_has_nothing_to_audit(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = environment_audit.collector_job("", str(bare))
    held = collected_environment.read(host_runner.run_on_host(bare, job), job.nonce, "it")
    image = SimpleNamespace(labels={})
    monkeypatch.setattr("envbuild.image.docker_engine.Engine", lambda: SimpleNamespace(get=lambda reference: image))
    monkeypatch.setattr("envbuild.audit.image_collector.collect_from_image", lambda *arguments: held)
    done = envbuild("audit", "an/image:1")
    assert (done.code, done.stdout.splitlines()[-1]) == (3, environment_audit.NOTHING)
    assert "an/image:1: torch is not installed; " in done.stderr and "envbuild audit IMAGE" in done.stderr
    result = envbuild("audit", "an/image:1", "--json")
    assert (result.code, result.document["error"]["code"], result.document["target"]) == (3, 3, "an/image:1")


@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_the_active_environment_is_audited(
    place: Place, bare: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    of_envbuild(monkeypatch, bare)
    monkeypatch.setenv("PATH", str(bare.parent))
    monkeypatch.setenv("VIRTUAL_ENV", str(bare.parent.parent))
    monkeypatch.setenv(variable, str(place.python.parent.parent))
    done = envbuild("audit", "--here")
    assert (done.code, done.stdout.startswith(f"{place.python}: ")) == (0, True), done.stderr


def test_envbuilds_own_environment_is_skipped_for_the_next_python(
    place: Place, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_envbuild(monkeypatch, bare)
    if not (place.python.parent / "python3").exists():
        (place.python.parent / "python3").symlink_to("python")
    monkeypatch.setenv("VIRTUAL_ENV", str(bare.parent.parent))
    monkeypatch.setenv("PATH", f"{bare.parent}:{place.python.parent}")
    done = envbuild("audit", "--here")
    assert (done.code, done.stdout.startswith(f"{place.python.parent}/python3: ")) == (0, True), done.stderr


def test_without_another_python_nothing_is_audited(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_envbuild(monkeypatch, bare)
    monkeypatch.setenv("PATH", str(bare.parent))
    monkeypatch.setenv("VIRTUAL_ENV", str(bare.parent.parent))
    done = envbuild("audit", "--here")
    assert (done.code, "nothing to audit: " in done.stderr) == (3, True)


def test_envbuilds_own_environment_is_audited_where_it_has_torch(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: object())
    monkeypatch.setattr(sys, "prefix", str(place.python.parent.parent))
    monkeypatch.setenv("VIRTUAL_ENV", str(place.python.parent.parent))
    assert envbuild("audit", "--here").stdout.startswith(f"{place.python}: ")


def test_a_system_cudnn_in_addition_to_the_wheels(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.made.put(place.foreign / "libcudnn_graph.so.9", library("cudnn", "9.23.0"))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(place.foreign))
    assert {"system-cudnn", "ld-library-path"} <= environment_audit.held_situation(place.held(), H20).environment
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert "ld-library-path" not in environment_audit.held_situation(place.held(), H20).environment


def test_nothing_is_left_behind_and_nothing_written(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr("tempfile.tempdir", None)
    before = sorted(place.made.site.rglob("*"))
    place.held()
    assert (list(scratch.iterdir()), sorted(place.made.site.rglob("*"))) == ([], before)


# an audit for the GPUs of this machine


def test_the_gpus_of_this_machine_count_where_no_profile_is_given() -> None:
    held = holding(machine={"gpus": ["NVIDIA H20", "NVIDIA H20", "Something new"], "driver": "560.28.03"})
    wanted = environment_audit.of_machine(held)
    assert ([gpu.id for gpu in wanted.gpus], wanted.gpu_count, wanted.driver) == (["h20"], 2, "560.28.03")


# findings about contents that no collector has reported


def holding(**changes: Any) -> Holdings:
    document: dict[str, Any] = {
        "kind": "holdings",
        "python": {"version": "3.11.2", "executable": "/p", "prefix": "/", "markers": {}},
        "distributions": [], "torch": None, "libraries": [], "order": None, "apex": None, "variables": {},
        "compat": [], "machine": {"gpus": [], "driver": None}, "cut": False, "seconds": {},
    }  # fmt: skip
    return Holdings.model_validate({**document, **changes})


def copy(path: str, **changes: Any) -> dict[str, Any]:
    name = path.rpartition("/")[2]
    kind = name.removeprefix("lib").partition(".")[0]
    return {"library": kind, "name": name, "path": path, "version": "12.1.3", "reported": None, "sha256": "0" * 64,
            "owner": "unowned", "record": None, "loaded": False, "ways": [], **changes}  # fmt: skip


def test_copies_of_the_system_alone_are_a_note() -> None:
    held = holding(libraries=[copy("/usr/lib/libcublas.so.11"), copy("/usr/local/cuda/lib64/libcublas.so.12")])
    assert [(f.id, f.severity) for f in library_and_distribution_findings.cuda_library_findings(held)] == [
        ("several-copies", "note")
    ]


def test_parts_of_cudnn_from_two_folders() -> None:
    parts = [copy("/a/libcudnn.so.9", loaded=True), copy("/b/libcudnn_ops.so.9", loaded=True)]
    assert [f.id for f in library_and_distribution_findings.cuda_library_findings(holding(libraries=parts))] == [
        "mixed-cudnn"
    ]


def test_libraries_of_conda_are_not_reported_as_leftovers() -> None:
    rows = [
        copy(f"/opt/conda/lib/{name}", loaded=True, ways=["environment"])
        for name in ("libcublas.so.12", "libnccl.so.2")
    ]
    assert list(library_and_distribution_findings.cuda_library_findings(holding(libraries=rows))) == []


def test_a_truncated_search_is_reported() -> None:
    assert "search-cut" in {f.id for f in environment_audit.assess("it", holding(cut=True), Expected()).findings}


def test_the_counts_name_the_worst_first() -> None:
    found = environment_audit.assess("it", holding(), dataclasses.replace(H20))
    assert list(found.counts) == [s for s in finding_types.SEVERITIES if s in found.counts]


# the output of an image is not trusted

NONCE = "0" * 32


def output(*documents: Any, nonce: str = NONCE, **changes: Any) -> RawOutput:
    lines = []
    for number, document in enumerate(documents):
        body = json.dumps(document).encode()
        lines.append(f"ENVBUILD {nonce} {number} {zlib.crc32(body):08x} ".encode() + body)
    return RawOutput(
        **{"stdout": b"\n".join([*lines, b""]), "stderr": "boom\x1b[2J", "exit_code": 0, "seconds": 1.0, **changes}
    )


DOCUMENT = holding().model_dump()


def test_a_document_is_read() -> None:
    assert collected_environment.read(output(DOCUMENT), NONCE, "it") == holding()


HOSTILE: dict[str, RawOutput] = {
    "nothing": output(),
    "two documents": output(DOCUMENT, DOCUMENT),
    "another nonce": output(DOCUMENT, nonce="1" * 32),
    "an exit code": output(DOCUMENT, exit_code=1),
    "killed": output(exit_code=137, out_of_memory=True),
    "too slow": output(exit_code=None, timed_out=True),
    "too long": output(DOCUMENT, too_long=True),
    "no holdings": output({"kind": "holdings"}),
    "an escape sequence": output({**DOCUMENT, "compat": ["/x\x1b[2J"]}),
    "a lone surrogate": output({**DOCUMENT, "compat": ["/x\udc80"]}),
    "a long path": output({**DOCUMENT, "compat": ["/" * 5000]}),
    "many libraries": output({**DOCUMENT, "libraries": [copy("/libcublas.so.12")] * 1001}),
    "a wrong type": output({**DOCUMENT, "cut": "yes"}),
    **{
        f"Python {version!r}": output({**DOCUMENT, "python": {**DOCUMENT["python"], "version": version}})
        for version in ("", "3", "3.x", ".11", "3.11\n")
    },
    "a deep document": RawOutput(b"ENVBUILD " + NONCE.encode() + b" 0 0 " + b"[" * 100000 + b"\n", "", 0, 1.0),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_output_is_refused(case: str) -> None:
    with pytest.raises(CheckFailed) as caught:
        collected_environment.read(HOSTILE[case], NONCE, "it")
    assert caught.value.message.isprintable()  # the hint has its last output, which is cleaned when printed


def test_hostile_requirements_end_soon() -> None:
    texts = [
        "(" * 4000,
        "a" * 4096,
        "a; " + "(" * 1000 + "os_name=='x'" + ")" * 1000,
        "x[" + "a," * 2000 + "]",
        "x>=" + "1." * 2000,
    ]
    rows = [{"name": f"n{n}", "version": "x y z", "folder": "/", "requires": texts} for n in range(20)]
    list(library_and_distribution_findings.distribution_findings(holding(distributions=rows), {}))


# the runner without a container


def test_a_path_that_is_not_a_python(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\necho hello\n")
    script.chmod(0o755)
    for path in (script, tmp_path, tmp_path / "absent", Path("/bin/ls"), Path("/etc/passwd")):
        assert host_runner.version(path) is None


def test_the_python_of_this_shell_is_one(place: Place) -> None:
    assert host_runner.version(place.python) == f"{sys.version_info[0]}.{sys.version_info[1]}"
