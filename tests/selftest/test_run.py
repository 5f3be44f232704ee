"""The self-test as users run it: from a zip, by module, with a job or without, on right kernels."""

import json
import os
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from selftest import torch_fork_server
from selftest.reading import ROOT, Frame, environment, job, outcomes, read

pytest.importorskip("torch")

from envbuild.selftest.probes.probe_catalogue import PROBES
from selftest.test_false_alarms import alarms

pytestmark = pytest.mark.slow

CATALOGUE = [probe.name for probe in PROBES]
QUICK = [probe.name for probe in PROBES if probe.level == "quick" and probe.needs != "script"]
ON_GPUS = [probe.name for probe in PROBES if probe.level == "quick" and probe.needs == "cuda"]
PYTHON = ".".join(map(str, sys.version_info[:3]))
REQUIRED = ["norm.torch", "train.step", "dist.staged"]  # probes of a higher level
BOOTSTRAP = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from envbuild.selftest.__main__ import main
print("printed before")
sys.exit(main(json.loads(sys.argv[2]), os.dup(1)))
"""


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("zip") / "selftest.zip"
    package = ROOT / "envbuild" / "selftest"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("envbuild/__init__.py", "")
        for source in sorted(package.rglob("*.py")):
            file.write(source, source.relative_to(ROOT))
    return path


def from_zip(archive: Path, document: Frame, folder: Path) -> "subprocess.CompletedProcess[bytes]":
    """Run the self-test as in a container: without checkout or home folder, from the zip only."""
    command = [sys.executable, "-c", BOOTSTRAP, str(archive), json.dumps(document)]
    variables = {name: value for name, value in os.environ.items() if name not in ("HOME", "PYTHONPATH")}
    return subprocess.run(command, capture_output=True, env=variables, cwd=folder, timeout=120)


def module(*arguments: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "envbuild.selftest", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), input=stdin, timeout=120)


def forked(*arguments: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    """Run the same command in a process in which torch is imported already."""
    function = "envbuild.selftest.__main__:command"
    return torch_fork_server.run(function, [list(arguments)], environment(), input=stdin.encode(), timeout=120)


def test_no_probe_is_imported_before_the_fork() -> None:
    """Otherwise a probe could share memory with the processes of other tests."""
    source = "import sys; print([name for name in sys.modules if name.startswith('envbuild.selftest.probes.')])"
    done = torch_fork_server.run("selftest.torch_fork_server:execute", [source], environment())
    assert done.stdout == "[]\n"


def clean(archive: Path, folder: Path) -> list[Frame]:
    expect = {"python": PYTHON.rpartition(".")[0], "distributions": {"torch": metadata.version("torch")}}
    document = job(expect=expect, require=REQUIRED)
    result = from_zip(archive, document, folder)
    printed, _, framed = result.stdout.partition(b"ENVBUILD")
    frames = read(b"ENVBUILD" + framed)
    assert result.returncode == 0, [frame for frame in frames if frame.get("status") == "failed"]
    assert printed in (b"", b"printed before\n")
    found = {name: alarms(frame) for name, frame in outcomes(frames).items() if alarms(frame)}
    # torch's own layer_norm sums its gradients of weights in half precision on a CPU.
    assert {name: of for name, of in found.items() if (name, of) != ("norm.torch", ["accumulates_in_half"])} == {}
    return frames


@pytest.fixture(scope="module")
def frames(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Frame]:
    return clean(archive, tmp_path_factory.mktemp("empty"))


def test_right_kernels_pass(frames: list[Frame]) -> None:
    results = outcomes(frames)
    assert list(results) == [name for name in CATALOGUE if name in {*QUICK, *REQUIRED}]
    passed = {name for name, frame in results.items() if frame["status"] == "passed"}
    assert passed == {*QUICK, *REQUIRED} - {*ON_GPUS}
    assert {results[name]["reason"] for name in ON_GPUS} == {"needs a GPU"}
    end = frames[-1]
    assert (end["passed"], end["failed"], end["skipped"]) == (len(passed), 0, len(ON_GPUS))


def test_every_figure_is_whole_and_within(frames: list[Frame]) -> None:
    figures = [figure for frame in frames if frame["kind"] == "probe" for figure in frame["figures"]]
    assert sum(figure["checks"] for figure in figures) > 1000
    for figure in figures:
        assert list(figure) == [
            "case",
            "dtype",
            "shape",
            "error",
            "bound",
            "ratio",
            "beyond_rounding",
            "seconds",
            "checks",
        ]
        assert figure["error"] <= figure["bound"] and figure["ratio"] <= 1 and figure["seconds"] >= 0
        assert figure["beyond_rounding"] is None or figure["beyond_rounding"] <= figure["ratio"] <= 1


def test_cases_left_out_on_the_cpu_are_declared(frames: list[Frame]) -> None:
    results = outcomes(frames)
    assert results["gemm.crash"]["traits"]["shapes"] == "cpu subset"
    assert results["attention.flash"]["traits"]["shapes"] == "cpu subset"


def test_the_libraries_are_listed_once_and_belong_to_torch(frames: list[Frame]) -> None:
    (inventory,) = (frame for frame in frames if frame["kind"] == "environment")
    libraries = {library["name"]: library for library in inventory["libraries"]}
    version = metadata.version("torch")
    assert libraries["libtorch_cpu.so"]["owner"] == f"torch=={version}"
    assert libraries["libtorch_cpu.so"]["record"] is True
    assert inventory["distributions"]["torch"] == version
    assert all(library["owner"] == "unowned" or library["sha256"] for library in libraries.values())


def test_a_second_run_from_the_command_line_has_the_same_figures(frames: list[Frame]) -> None:
    """It runs the probes of level quick, and raises no alarm either."""

    def stable(run: dict[str, Frame]) -> dict[str, Frame]:
        changing = {"kind", "seconds", "pid", "GB/s", "calls", "elements"}  # the work of repeat depends on the time
        return json.loads(  # type: ignore[no-any-return]
            json.dumps(run), object_hook=lambda item: {k: v for k, v in item.items() if k not in changing}
        )

    done = forked("--level", "quick", "--json")
    document = json.loads(done.stdout)
    found = {probe["probe"]: probe for probe in document["probes"]}
    assert (done.returncode, document["end"]["failed"]) == (0, 0), done.stderr
    assert list(found) == [name for name in CATALOGUE if name in QUICK]
    assert {name: alarms(probe) for name, probe in found.items() if alarms(probe)} == {}
    first = outcomes(frames)
    assert stable(found) == stable({name: first[name] for name in found})


def test_other_versions_than_locked_fail() -> None:
    expect = {"distributions": {"torch": "9.9.9", "no-such-thing": "1"}, "python": "3.1"}
    result = forked("--job", "-", stdin=json.dumps(job(expect=expect, probes=["env.libs"])))
    frame = outcomes(read(result.stdout.encode()))["env.libs"]
    assert (result.returncode, frame["failure"]) == (5, "version")
    assert frame["detail"].splitlines() == [
        f"Python is {PYTHON}, but 3.1 is locked",
        "no-such-thing is absent, but 1 is locked",
        f"torch is {metadata.version('torch')}, but 9.9.9 is locked",
    ]


def test_a_bad_job_is_refused_with_all_its_faults() -> None:
    result = forked("--job", "-", stdin=json.dumps(job(level="deep", probes=["gemm.exat"])))
    assert (result.returncode, result.stdout) == (3, "")
    assert "level: " in result.stderr and "unknown probe 'gemm.exat'" in result.stderr


@pytest.mark.parametrize("text", ["", "{", '{"version": 1', "\0"])
def test_a_job_of_invalid_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.json").write_text(text)
    result = module("--job", str(tmp_path / "job.json"))
    assert (result.returncode, result.stdout) == (3, "")


def test_a_missing_job_is_refused(tmp_path: Path) -> None:
    assert module("--job", str(tmp_path / "absent")).returncode == 3


def test_a_bare_run_shows_a_table() -> None:
    result = forked("--probe", "gemm.exact", "--probe", "attention.cudnn")
    assert result.returncode == 4, "a probe that was asked for did not run"
    lines = result.stdout.splitlines()
    assert lines[1].split() == ["skipped", "attention.cudnn", "0.00", "s", "needs", "a", "GPU"]
    assert lines[2].startswith("passed   gemm.exact")
    assert lines[3] == "1 passed, 0 failed, 1 skipped"


def test_the_exit_status_says_whether_anything_was_shown() -> None:
    assert forked("--probe", "own.script").returncode == 4
    help_text = " ".join(module("--help").stdout.split())
    assert (
        help_text.startswith("usage: python selftest.zip")
        and "4 torch is missing, no probe passed, or a probe given with --probe was skipped" in help_text
    )


@pytest.mark.parametrize("arguments", [(), ("--list",)])
def test_ctrl_c_while_torch_is_imported_is_quiet(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt", encoding="utf-8")
    command = [sys.executable, "-m", "envbuild.selftest", *arguments]
    variables = environment(PYTHONPATH=f"{tmp_path}:{ROOT}")
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_bare_run_as_json_is_one_document_and_its_seed_is_1() -> None:
    result = forked("--probe", "gemm.accuracy", "--json")
    document = json.loads(result.stdout)
    assert [probe["status"] for probe in document["probes"]] == ["passed"]
    assert (result.returncode, document["end"]["passed"], document["start"]["seed"]) == (0, 1, 1)


def test_an_unknown_probe_is_a_usage_error_with_the_nearest_name_or_all() -> None:
    done = forked("--probe", "gemm.exakt", "--probe", "gemm.exact", "--probe", "nix")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "unknown probe 'gemm.exakt' (did you mean gemm.exact?); unknown probe 'nix' (known: env.id"
    )


def test_the_list_names_every_probe() -> None:
    names = [line.split()[0] for line in forked("--list").stdout.splitlines()]
    assert names == CATALOGUE


def test_a_gpu_that_is_not_there_is_a_skip_with_its_reason() -> None:
    names = ["env.arch", "gemm.exact", "dist.staged"]
    result = forked("--device", "cuda", *(word for name in names for word in ("--probe", name)), "--json")
    document = json.loads(result.stdout)
    if any(probe["status"] == "passed" for probe in document["probes"]):
        pytest.skip("there is a GPU")
    assert (result.returncode, document["end"]["skipped"]) == (4, 3)
    assert [(probe["probe"], probe["status"]) for probe in document["probes"]] == [(name, "skipped") for name in names]
    assert all(probe["reason"].startswith("no GPU is visible to torch") for probe in document["probes"])


def test_the_self_test_imports_nothing_else_of_envbuild() -> None:
    sources = [path.read_text() for path in (ROOT / "envbuild" / "selftest").rglob("*.py")]
    lines = [line.split() for source in sources for line in source.splitlines()]
    imports = [line[1] for line in lines if line[:1] in (["from"], ["import"]) and line[1].startswith("envbuild")]
    assert imports and all(name.startswith("envbuild.selftest") for name in imports)


def test_a_seed_is_drawn_recorded_and_shown_with_the_command_that_repeats_it() -> None:
    drawn = forked("--seed", "random", "--probe", "env.libs", "--json")
    seed = json.loads(drawn.stdout)["start"]["seed"]
    repeating = f"python selftest.zip --level quick --device cpu --probe env.libs --seed {seed}"
    assert drawn.stderr.splitlines()[0] == f"seed {seed} was drawn; to repeat this run: {repeating}"
    assert module("--seed", "any").returncode == 2
