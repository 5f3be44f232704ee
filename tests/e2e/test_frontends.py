"""`test` in its many forms, the exported check and `bisect`, on a real image."""

from __future__ import annotations

import base64
import contextlib
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from envbuild.image.docker_engine import Engine
from envbuild.lock import lock_file
from envbuild.runners import docker_runner
from envbuild.util.errors import NotProved

from .support import REQUIRED, Proved, docker

pytestmark = pytest.mark.engine


def images(made: Proved) -> list[str]:
    """Return the images, sorted: the engine lists images of equal age in arbitrary order."""
    form = "{{.Repository}}:{{.Tag}} {{.ID}}"
    return sorted(docker("image", "ls", "--no-trunc", "--format", form, f"envbuild/{made.name}").splitlines())


def shell(made: Proved, command: str, stdin: str) -> str:
    """Return the output of a shell command in a container of the image."""
    run = ["run", "--rm", "--interactive", "--network=none", "--entrypoint", "sh", made.tag, "-c"]
    return docker(*run, command, stdin=stdin)


def test_only_what_is_asked_for_runs_and_must_pass(quick: Proved, tmp_path: Path) -> None:
    report = tmp_path / "junit.xml"
    options = ["--probe", "gemm.exact", "--probe", "gemm.accuracy"]
    done = quick.project.run("test", quick.name, *options, "--junit", str(report), "--json")
    assert done.code == 0, done.stderr
    assert [row["name"] for row in done.document["probes"]] == ["gemm.exact", "gemm.accuracy"]
    (suite,) = ElementTree.parse(report).getroot()
    assert [case.attrib["name"] for case in suite.iter("testcase")] == ["gemm.exact", "gemm.accuracy"]
    assert quick.id in {item.attrib["value"] for item in suite.iter("property")}
    shown = [line.split()[:2] for line in done.stderr.splitlines()]
    assert ["passed", "gemm.exact"] in shown, "each probe is reported as it ends"


def test_a_probe_that_cannot_run_does_not_pass(quick: Proved) -> None:
    done = quick.project.run("test", quick.name, "--probe", "attention.cudnn", "--json")
    assert (done.code, done.error["kind"]) == (4, "not-proved")
    assert done.error["hint"] == "attention.cudnn: needs a GPU"


def test_the_exported_check_passes_in_the_image_and_not_elsewhere(quick: Proved) -> None:
    """The check runs only the probes that the profile requires: `make` runs those of the level in this image."""
    project = quick.with_required_alone().project
    assert project.run("export", "check", quick.name, "-o", "check.py").code == 0
    text = (project.folder / "check.py").read_text(encoding="utf-8")
    output = shell(quick, "cat > /tmp/check.py && python /tmp/check.py", text)
    assert output.startswith(f"envbuild check: {quick.name}: {len(REQUIRED)} passed, ")
    assert len(output.splitlines()) == 1
    spoil = "rm -r /opt/venv/lib/python3.11/site-packages/sympy-*"
    output = shell(quick, f"cat > /tmp/check.py; {spoil}; python /tmp/check.py 2>&1; echo exit $?", text)
    assert "sympy is absent, but " in output and "fix: run in the image of " in output
    assert output.endswith("exit 5\n")


def test_bisect_finds_the_version_and_leaves_everything_as_it_was(quick: Proved, tmp_path: Path) -> None:
    """The newest tried version is that of the existing image; this image is used, and stays. Unit tests show the order
    in which the versions between the two ends are tried."""
    project = quick.project
    locked = lock_file.read(project.lock(quick.name))
    assert locked
    newest = locked.versions["numpy"]
    head, _, patch = newest.rpartition(".")
    oldest = f"{head}.{int(patch) - 1}"
    script = tmp_path / "needs.py"
    script.write_text(
        f"import numpy, os, sys\nassert __file__ == sys.argv[0] and os.getuid() == 65534\n"
        f"sys.exit(0 if numpy.__version__ == {newest!r} else 'too old: ' + numpy.__version__)\n"
    )
    files = {file: file.read_bytes() for file in (project.lock(quick.name), project.dockerfile(quick.name))}
    before = images(quick)
    done = project.run(
        "bisect", quick.name, "--pin", "numpy", "--script", str(script), "--from", oldest, "--to", newest, "--json"
    )
    assert done.code == 0, done.stderr
    document = done.document
    assert (document["passing_version"], document["change"]) == (newest, {"before": oldest, "after": newest})
    assert [row["version"] for row in document["tries"]] == [oldest, newest]
    assert document["tries"][0]["reason"] == f"own.script: exit: the script ended: too old: {oldest}"
    assert f" {oldest}: self-test\n" in done.stderr
    assert not (project.cached("contexts") / quick.name).exists()
    assert images(quick) == before
    assert {file: file.read_bytes() for file in files} == files


def test_bisect_searches_the_gpu_first_and_leaves_nothing_behind(quick: Proved) -> None:
    done = quick.project.run("bisect", "h20", "--pin", "cublas", "--probe", "gemm.crash", "--from", "9999")
    if done.code == 2:
        pytest.skip("this engine has a GPU: bisect continued to the versions, which do not exist")
    assert done.code == 4, done.stderr
    assert "run the same command on a machine with the GPU" in done.stderr
    assert docker("image", "ls", "--quiet", "envbuild-look-*") == ""
    assert docker("container", "ls", "--all", "--quiet", "--filter", "name=envbuild-look-") == ""


def test_leftovers_of_a_killed_gpu_search_are_swept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, pid, _ = docker_runner._owner().rsplit(":", 2)
    engine = Engine()
    with monkeypatch.context() as patch:
        patch.setattr(docker_runner, "_owner", lambda: f"{place}:{pid}:0")  # another process has the id by now
        patch.setattr(engine, "remove", lambda name: None)  # it is killed before that
        with contextlib.suppress(NotProved):
            docker_runner.look_for_gpu(engine)
    assert docker("image", "ls", "--quiet", "envbuild-look-*") != ""
    docker_runner.sweep_containers(engine)
    assert docker("image", "ls", "--quiet", "envbuild-look-*") == ""


def test_the_selftest_as_a_zip(quick: Proved) -> None:
    assert quick.project.run("export", "selftest").code == 0
    done = quick.project.run("test", quick.name, "--python", sys.executable, "--probe", "gemm.exact")
    assert done.code == 0, done.stderr
    archive = (quick.project.folder / "selftest.zip").read_bytes()
    text = base64.b64encode(archive).decode()
    command = "base64 -d > /tmp/s.zip && python /tmp/s.zip --probe gemm.exact"
    assert "1 passed, 0 failed, 0 skipped" in shell(quick, command, text)
