"""Compiled extensions of small environments that the dynamic loader accepts: what they contain, and each fault that the
audit can find in them."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from selftest.environments import Environment, built, extension, good, virtual
from selftest.reading import environment

from envbuild.audit import collected_environment, environment_audit
from envbuild.audit.collected_environment import Holdings
from envbuild.audit.environment_audit import Audit, Expected
from envbuild.facts import database
from envbuild.runners import host_runner
from envbuild.util.json_output_types import plain

H20 = Expected(profile="h20", gpus=(database.gpus()["h20"],), driver="560.28.03")
ASKED = Expected(**{**vars(H20), "modules": {"own": ("kernels", "own.host")}})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Environment]:
    if not shutil.which("gcc"):
        pytest.skip("no gcc to build the libraries with")
    python, site = virtual(tmp_path_factory.mktemp("place").resolve() / "venv")
    return python, good(site)


def held(place: tuple[Path, Environment], files: Mapping[str, bytes]) -> Holdings:
    """Return the collected contents of an environment in which a distribution `own` has these files. A file with empty
    content is listed in RECORD but does not exist."""
    python, made = place
    for old in made.site.glob("own*"):
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    for old in made.site.glob("*.so"):
        old.unlink()
    made.wheel("own", "1.0", files)
    for path, content in files.items():
        if not content:
            (made.site / path).unlink()
    job = environment_audit.collector_job("", "")
    return collected_environment.read(host_runner.run_on_host(python, job), job.nonce, "it")


def found(judged: Audit) -> dict[str, str]:
    return {item.id: item.severity for item in judged.findings if item.id.startswith("extension")}


def test_the_contents_of_an_extension(place: tuple[Path, Environment]) -> None:
    there = held(
        place, {"kernels.abi3.so": extension("kernels", "sm_90", "compute_90a"), "own/host.so": extension("host")}
    )
    judged = environment_audit.assess("it", there, ASKED)
    assert (found(judged), judged.clean) == ({}, True)
    document: Any = plain(judged.document())
    (row,) = document["extensions"]
    assert row == {
        "name": "own",
        "version": "1.0",
        "modules": [
            {"name": "kernels", "path": "kernels.abi3.so", "architectures": ["sm_90", "compute_90a"]},
            {"name": "own.host", "path": "own/host.so", "architectures": None},
        ],
    }
    assert [(file.tried, file.failure) for file in there.extensions] == [(True, None)] * 2


def kernels(*architectures: str, **changes: str) -> dict[str, bytes]:
    return {"kernels.so": extension("kernels", *architectures, **changes), "own/host.so": extension("host")}


def test_a_symbol_that_this_torch_does_not_have(place: tuple[Path, Environment]) -> None:
    more = "extern void _ZN3c105ErrorC2E(void);"
    judged = environment_audit.assess("it", held(place, kernels("sm_90", more=more, first="_ZN3c105ErrorC2E()")), H20)
    assert found(judged) == {"extension-symbol": "defect"} and judged.failed
    assert "undefined symbol: _ZN3c105ErrorC2E" in judged.findings[0].message


def test_a_file_that_is_gone(place: tuple[Path, Environment]) -> None:
    there = held(place, {**kernels("sm_90"), "other.so": b""})
    assert found(environment_audit.assess("it", there, H20)) == {"extension-files": "defect"}


def test_modules_that_the_profile_asks_for(place: tuple[Path, Environment]) -> None:
    there = held(place, {"kernels.so": extension("kernels", "sm_90")})
    judged = environment_audit.assess("it", there, ASKED)
    assert found(judged) == {"extension-modules": "defect"}
    assert judged.findings[0].message == "own lacks modules that the profile requires: own.host"
    without = there.model_copy(update={"extensions": []})
    assert "kernels, own.host" in environment_audit.assess("it", without, ASKED).findings[0].message
    rest = [item for item in there.distributions if item.name != "own"]
    absent = without.model_copy(update={"distributions": rest})
    message = environment_audit.assess("it", absent, ASKED).findings[0].message
    assert message == "own, which the profile requires, is not installed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architectures", "wanted", "severity"),
    [("sm_80", H20, "warn"), ("sm_80", ASKED, "defect"), ("compute_80", H20, "warn"), ("sm_80", Expected(), None)],
)
def test_code_for_another_gpu(
    architectures: str, wanted: Expected, severity: str | None, place: tuple[Path, Environment]
) -> None:
    judged = environment_audit.assess("it", held(place, kernels(architectures)), wanted)
    assert found(judged).get("extension-kernel") == severity


def test_an_extension_that_kills_its_process_is_named_and_the_others_are_tried(place: tuple[Path, Environment]) -> None:
    there = held(place, {**kernels("sm_90", first="abort()"), "own/kernels.so": extension("kernels", "sm_90")})
    judged = environment_audit.assess("it", there, H20)
    assert found(judged) == {"extension-load": "warn"}
    assert {file.path: file.failure for file in there.extensions} == {
        "kernels.so": "the process died of SIGABRT",
        "own/host.so": None,
        "own/kernels.so": None,
    }


def test_an_untried_import_is_reported_as_untried(place: tuple[Path, Environment]) -> None:
    """After three crashes, the other modules are not imported."""
    crashing = {f"crash{n}.so": extension(f"crash{n}", "sm_90", first="abort()") for n in range(3)}
    there = held(place, {**crashing, **kernels("sm_90")})
    assert {file.path: (file.tried, file.failure) for file in there.extensions if "crash" not in file.path} == {
        "kernels.so": (False, "others crashed"),
        "own/host.so": (False, "others crashed"),
    }
    texts = [
        item.message for item in environment_audit.assess("it", there, H20).findings if item.id == "extension-untried"
    ]
    assert texts == [
        f"loading {path} of own 1.0 was not tried: others crashed" for path in ("kernels.so", "own/host.so")
    ]


@pytest.mark.parametrize(("bound", "count"), [("_MOST_KEPT", 2), ("_MOST_FILES", 3)])
def test_files_that_a_bound_leaves_out_are_not_left_out_in_silence(tmp_path: Path, bound: str, count: int) -> None:
    if not shutil.which("gcc"):
        pytest.skip("no gcc to build the libraries with")
    python, site = virtual(tmp_path.resolve() / "venv")
    for name in ("one", "two"):
        Environment(site).wheel(name, "1.0", {f"{name}{n}.so": extension(f"{name}{n}") for n in range(2)})
    code = (
        "import json, sys; "
        "from envbuild.selftest.inventory import compiled_extension_list_and_load_test, environment_collector;"
        "rows = [environment_collector.collect()];"
        f"compiled_extension_list_and_load_test.{bound} = {count}; rows += [environment_collector.collect()];"
        "print(json.dumps([[len(row['extensions']), row['cut']] for row in rows]))"
    )
    done = subprocess.run([python, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout) == [[4, False], [2, True]]


def test_a_library_that_is_not_there(place: tuple[Path, Environment]) -> None:
    judged = environment_audit.assess("it", held(place, kernels("sm_90", needs="libabsent.so.3")), H20)
    assert found(judged) == {"extension-load": "warn"}


def test_a_library_of_the_package_that_it_loads_first_is_not_missing(place: tuple[Path, Environment]) -> None:
    """As in torchaudio 2.0, whose Python code loads libtorchaudio.so before the modules that need it."""
    following = built("", "libnext.so", linked={})
    own = built("", "libown.so", "-l:libnext.so", linked={"libnext.so": following})
    files = {**kernels("sm_90", needs="libown.so"), "libown.so": own}
    present = held(place, {**files, "libnext.so": following})
    judged = environment_audit.assess("it", present, H20)
    assert found(judged) == {"extension-load": "note"}
    assert "loaded after libnext.so, libown.so of the same folder" in judged.findings[0].message
    (place[1].site / "libnext.so").unlink()
    assert found(environment_audit.assess("it", held(place, files), H20)) == {"extension-load": "warn"}


def test_code_that_needs_the_driver_is_not_a_fault_without_one(place: tuple[Path, Environment]) -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        expected = {"extension-untried": "note"}
    else:
        expected = {}
    judged = environment_audit.assess("it", held(place, kernels("sm_90", needs="libcuda.so.1")), H20)
    assert (found(judged), judged.clean) == (expected, True)


def test_a_file_that_is_not_a_library(place: tuple[Path, Environment]) -> None:
    judged = environment_audit.assess("it", held(place, {**kernels("sm_90"), "own/text.so": b"text"}), H20)
    assert found(judged) == {}, "what is neither built against torch nor for a GPU is not an extension's"


def test_an_environment_without_torch_has_its_extensions_tried_too(tmp_path: Path) -> None:
    if not shutil.which("gcc"):
        pytest.skip("no gcc to build the libraries with")
    python, site = virtual(tmp_path.resolve() / "venv")
    there = held((python, Environment(site)), kernels("sm_90"))
    assert [file.failure and "libtorch_cuda.so: cannot open" in file.failure for file in there.extensions] == [True] * 2
