"""The parts of the audit's collector: limited search, work in forked processes, and the output."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from envbuild.selftest.harness import forked_work
from envbuild.selftest.inventory import cuda_library_finder, environment_collector, interpreter_and_distributions
from selftest.environments import good, library, virtual
from selftest.reading import environment

BOUNDS = cuda_library_finder.Bounds()
needs_gcc = pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc to build a library with")


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"library")
    return path


def found(*sites: Path, bounds: cuda_library_finder.Bounds = BOUNDS, **environ: str) -> "dict[str, set[str]]":
    copies = cuda_library_finder.search_libraries([str(site) for site in sites], [], environ, bounds).copies
    return {path: ways for path, ways in copies.items() if path.startswith(str(sites[0].parent))}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    path = tmp_path.resolve() / "site-packages"
    path.mkdir()
    return path


# the search


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("libcublas.so.12", "cublas"),
        ("libcublasLt.so", "cublasLt"),
        ("libcublas-1b2c3d4e.so.11", "cublas"),
        ("libcudnn_ops_infer.so.8.9.2", "cudnn_ops_infer"),
        ("libnvJitLink.so.12 (deleted)", "nvJitLink"),
        ("libnccl.so.2", "nccl"),
        ("libnccl-net.so", None),
        ("libcublas_static.a", None),
        ("libcublas.so.12.bak", None),
        ("libnvblas.so.12", None),
        ("xlibcublas.so.12", None),
    ],
)
def test_a_file_name_gives_the_library(name: str, kind: "str | None") -> None:
    assert cuda_library_finder.library_of_file(name) == kind


def test_copies_are_found_in_every_folder(site: Path) -> None:
    deep = put(site / "a" / "b" / "c.libs" / "libcublas-1b2c3d4e.so.11")
    put(site / "a" / "stubs" / "libcublas.so")
    put(site / "a" / "__pycache__" / "libcublas.so.12")
    assert found(site) == {str(deep): {cuda_library_finder.SITE}}


def test_one_file_with_many_names_is_one_copy(site: Path) -> None:
    real = put(site / "lib" / "libcublas.so.12.1.3.1")
    (site / "lib" / "libcublas.so.12").symlink_to(real)
    (site / "linked").symlink_to(site / "lib")
    assert found(site) == {str(real): {cuda_library_finder.SITE}}
    assert cuda_library_finder.own_digits(str(real)) == "12.1.3.1"


def test_circles_pipes_and_dangling_links_end(site: Path) -> None:
    for number in range(4):
        (site / f"round{number}").symlink_to(site)
    (site / "itself").symlink_to(site / "itself")
    (site / "libcublas.so.12").symlink_to(site / "nowhere")
    os.mkfifo(site / "libnccl.so.2")
    (site / "libcudnn.so.9").mkdir()
    begin = time.monotonic()
    assert found(site) == {}
    assert time.monotonic() - begin < 3


def test_the_kernels_file_systems_are_left_alone(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(site.parent / "proc" / "libcublas.so.12")
    (site / "linked").symlink_to(site.parent / "proc")
    assert len(found(site)) == 1
    monkeypatch.setattr(cuda_library_finder, "_KERNELS", (str(site.parent / "proc"),))
    assert found(site) == {}
    assert list(cuda_library_finder._Walk(BOUNDS).files("/", 3)) == []


def test_the_folder_of_the_loader_is_reported(site: Path) -> None:
    put(site / "nvidia" / "libcublas.so.12")
    other = put(site.parent / "cuda" / "libcublas.so.12")
    path = f":relative:{other.parent}:{site.parent / 'none'}"
    assert found(site, LD_LIBRARY_PATH=path)[str(other)] == {cuda_library_finder.LD_PATH}
    assert found(site, LD_PRELOAD=f"libx.so {other}")[str(other)] == {cuda_library_finder.LD_PRELOAD}


def test_a_large_tree_is_cut(site: Path) -> None:
    for number in range(50):
        put(site / f"p{number}" / "file")
    assert cuda_library_finder.search_libraries([str(site)], [], {}, cuda_library_finder.Bounds(entries=20)).cut
    assert cuda_library_finder.search_libraries([str(site)], [], {}, cuda_library_finder.Bounds(seconds=-1)).cut


def test_any_other_folder_of_the_path_is_not_searched_deep(tmp_path: Path) -> None:
    home = tmp_path.resolve() / "home"
    put(home / "1" / "2" / "3" / "4" / "libcublas.so.12")
    near = put(home / "libcublas.so.12")
    assert found(home) == {str(near): {cuda_library_finder.SITE}}


def test_a_loaders_cache_is_read_in_every_layout(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = put(site.parent / "cuda" / "libcudnn.so.9")
    cache = site.parent / "ld.so.cache"
    cache.write_bytes(b"glibc-ld.so.cache1.1\0\0\xff" + b"libcudnn.so.9\0" + os.fsencode(other) + b"\0/x/libm.so.6\0")
    monkeypatch.setattr(cuda_library_finder, "_CACHE", cache)
    assert found(site)[str(other)] == {cuda_library_finder.LD_CACHE}
    begin = time.monotonic()
    for hostile in (b"/" * 1_000_000, b"/\0" * 1_000_000, b"/libcublas.so.12" * 100_000):
        cache.write_bytes(hostile)
        assert found(site) == {}
    assert time.monotonic() - begin < 10


# work in a process of its own


def test_reported_values_come_back() -> None:
    ending = forked_work.run_forked(lambda tell: (tell("a", 1), tell("a", [2]))[0], 20)
    assert (dict(ending.reported), ending.failure) == ({"a": [2]}, None)


def divide(tell: forked_work.Tell) -> None:
    tell("before", True)
    os.kill(os.getpid(), signal.SIGFPE)


def hang(tell: forked_work.Tell) -> None:
    tell("before", True)
    time.sleep(600)


def flood(tell: forked_work.Tell) -> None:
    tell("before", True)
    while True:
        os.write(1, b"x" * 65536)


def talk(tell: forked_work.Tell) -> None:
    tell("before", True)
    while True:
        tell("more", "x" * 65536)


def fail(tell: forked_work.Tell) -> None:
    tell("before", True)
    raise OSError("libx.so: cannot open\nmore")


def leave(tell: forked_work.Tell) -> None:
    tell("before", True)
    os.write(2, b"fatal: no good\n")
    os._exit(3)


@pytest.mark.parametrize(
    ("work", "failure"),
    [
        (divide, "the process died of SIGFPE"),
        (hang, "not done after 0.5 s"),
        (flood, "not done after 0.5 s"),
        (talk, "it reported more than the limit"),
        (fail, "OSError: libx.so: cannot open"),
        (leave, "the process ended with status 3: fatal: no good"),
    ],
)
def test_values_reported_before_any_ending_are_kept(work: forked_work.Work, failure: str) -> None:
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    ending = forked_work.run_forked(work, 30 if work is talk else 0.5)
    assert ending.reported["before"] is True
    assert ending.failure == failure
    assert ending.seconds < 10
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_reported_values_and_printed_output_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_work, "_MOST_REPORTED", 1 << 20)
    ending = forked_work.run_forked(talk, 20)
    assert ending.failure == "it reported more than the limit" and ending.seconds < 10
    under_way = forked_work.ForkedWork(flood)
    under_way.finish(0.3)
    assert len(under_way._streams[under_way._heard]) <= 16384


# the document


def test_paths_may_hold_anything() -> None:
    raw = {"a\x1b[2J": ["/x\udcff\u202e", 1, None, True], "b": ("ü",)}
    assert environment_collector.printable_document(raw) == {
        "a\\x1b[2J": ["/x\\udcff\\u202e", 1, None, True],
        "b": ["ü"],
    }


@pytest.mark.parametrize(
    "job", [None, {}, {"version": 1}, {"version": 2, "nonce": "0" * 32}, {"version": 1, "nonce": "x"}]
)
def test_a_bad_job_is_refused(job: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert environment_collector.main(job) == 3
    assert "nonce" in capsys.readouterr().err


def test_the_marker_environment_is_packagings() -> None:
    markers = pytest.importorskip("packaging.markers")
    assert interpreter_and_distributions.python()["markers"] == dict(markers.default_environment())


@needs_gcc
def test_the_frame_is_the_only_thing_on_stdout(tmp_path: Path) -> None:
    """Packages that are imported may print to stdout."""
    python, site = virtual(tmp_path / "venv")
    good(site)
    init = site / "torch" / "__init__.py"
    init.write_text("print('hello')\nimport os; os.write(1, b'noise')\n" + init.read_text())
    code = (
        "import json, sys; from envbuild.selftest.inventory.environment_collector import main; "
        "sys.exit(main(json.loads(sys.argv[1])))"
    )
    job = json.dumps({"version": 1, "nonce": "0" * 32})
    spoiled = environment(LD_LIBRARY_PATH="/x\x1b[2J")
    done = subprocess.run([python, "-c", code, job], env=spoiled, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (line,) = io.StringIO(done.stdout).readlines()
    document = json.loads(line.split(" ", 4)[4])
    assert document["torch"]["version"] == "2.3.1+cu121"
    assert document["variables"]["LD_LIBRARY_PATH"] == "/x\\x1b[2J"


@needs_gcc
def test_the_collector_needs_neither_torch_nor_a_library(tmp_path: Path) -> None:
    python, _ = virtual(tmp_path / "venv")
    code = (
        "import json; from envbuild.selftest.inventory import environment_collector as audit; "
        "print(json.dumps(audit.collect()))"
    )
    done = subprocess.run([python, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    document = json.loads(done.stdout)
    assert (document["torch"], document["order"], document["apex"]) == (None, None, None)


@needs_gcc
def test_a_deleted_library_is_one_without_checksum(tmp_path: Path) -> None:
    path = tmp_path / "libnccl.so.2"
    path.write_bytes(library("nccl", "2.18.1"))
    code = (
        "import ctypes, json, os, sys; ctypes.CDLL(sys.argv[1]); os.remove(sys.argv[1]);"
        "from envbuild.selftest.inventory import loaded_library_versions as loading; found = loading._copies();"
        "print(json.dumps([found, loading.reported(found)]))"
    )
    done = subprocess.run([sys.executable, "-c", code, path], env=environment(), capture_output=True, text=True)
    assert json.loads(done.stdout) == [[f"{path} (deleted)"], {}]
