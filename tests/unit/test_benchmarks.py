"""The benchmark of builds, without an engine: its page, its memory measurement, the order of its builds, and how the
benchmark programs end."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

CHECKOUT = Path(__file__).parents[2]
sys.path.insert(0, str(CHECKOUT / "benchmarks"))

import build  # noqa: E402
import project_requirements  # noqa: E402
import recorded_uv  # noqa: E402
import rest  # noqa: E402
import several  # noqa: E402
import table  # noqa: E402
import watch  # noqa: E402
from options import positive  # noqa: E402
from stock import PINS, Stock  # noqa: E402
from ways import Ours  # noqa: E402

from envbuild.util.errors import EnvbuildError, Fault  # noqa: E402


def page(**changes: float) -> str:
    """Return the page of the committed figures with these disk speeds."""
    document = json.loads((CHECKOUT / "benchmarks" / "results" / "build.json").read_text(encoding="utf-8"))
    kept = {key: value for key, value in document.items() if key not in ("new_file", "disk", "memory")}
    return " ".join("\n".join(table.markdown({**kept, **changes})).split())


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ({"new_file": 9e8, "disk": 3e8, "memory": 4e9},
         "A new file took 900 MB/s (300 with its flush), in place again 4000 MB/s."),
        ({"disk": 3e8, "memory": 4e9}, "A new file took 300 MB/s with its flush, in place again 4000 MB/s."),
        ({"disk": 3e8}, "A new file took 300 MB/s with its flush."),
    ],
)  # fmt: skip
def test_the_page_says_what_a_file_took_as_far_as_it_was_measured(speeds: dict[str, float], expected: str) -> None:
    assert expected in page(**speeds)


def test_the_bytes_that_a_build_writes_are_those_of_its_wheels_and_layers() -> None:
    """The engine writes the layers of a loaded image to a temporary folder, and then unpacks them."""
    cases = {"size": {"envbuild": {"image": [5e9]}}}
    lines = list(table.streamed({"cases": cases, "disk": 1e9, "fetched": 3e9}))
    assert [line.split("|")[2:4] for line in lines if line.startswith("| envbuild")] == [
        [" 13.00 ", " 13.0 "],
        [" 10.00 ", " 10.0 "],
    ]


def test_a_file_is_timed_new_flushed_and_in_place(tmp_path: Path) -> None:
    found = rest.disk(tmp_path, 8 << 20)
    assert set(found) == {"new_file", "disk", "memory"} and found["new_file"] > found["disk"] > 0
    assert list(tmp_path.iterdir()) == []


_HOLDS = "import time; held = b'x' * (200 << 20); print(flush=True); time.sleep({})"


def test_memory_is_that_of_what_the_work_starts_alone(tmp_path: Path) -> None:
    """A registry that this process started earlier is not counted."""
    with subprocess.Popen([sys.executable, "-c", _HOLDS.format(60)], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout and other.stdout.readline()
            _, idle = watch.taken(lambda: time.sleep(0.5), [], tmp_path)
            _, named = watch.taken(lambda: time.sleep(0.5), [other.pid], tmp_path)
            _, used = watch.taken(lambda: subprocess.run([sys.executable, "-c", _HOLDS.format(0.8)]), [], tmp_path)
        finally:
            other.kill()
    assert idle.memory == 0
    assert 200 << 20 <= named.memory < 400 << 20 and 200 << 20 <= used.memory < 400 << 20


@pytest.mark.parametrize(
    ("only", "built"), [(["link"], 1), (["commands", "link"], 1), (["direct", "lock"], 0), (["plain"], 0)]
)
def test_the_starting_point_of_a_case_is_built(only: list[str], built: int, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    ours = Ours(MagicMock(), MagicMock())
    monkeypatch.setattr(ours, "build", done.append)
    for name in ("plain", "slow_link", "audit", "commands", "locks"):
        monkeypatch.setattr(rest, name, lambda *_: done.append("a case"))
    build._cases(MagicMock(), [ours], 1, only)
    assert done.count(PINS[0]) == built and "a case" not in done[:built]


def test_a_folder_with_files_of_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark removes folders with such names as `project`."""
    kept = tmp_path / "home" / "project" / "file"
    assert build._may_use(tmp_path / "home") and build._may_use(tmp_path)
    kept.parent.mkdir(parents=True)
    kept.touch()
    monkeypatch.setattr(build, "_measured", MagicMock())
    monkeypatch.setattr(sys, "argv", ["build.py", "--folder", str(tmp_path / "home")])
    with pytest.raises(SystemExit, match="2"):
        build.main()
    assert kept.is_file()
    (tmp_path / "home" / build._MARK).touch()
    assert build._may_use(tmp_path / "home")


@pytest.mark.parametrize("error", [ValueError("odd"), SystemExit("docker ended with 1"), KeyboardInterrupt()])
def test_measurements_are_kept_after_any_ending(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cases(rounds: Any, *_: object) -> None:
        rounds.note("cold", "uv", seconds=1.0)
        raise error

    pip = SimpleNamespace(bytes=1, wheel=SimpleNamespace(name="pip", sha256="0", file="pip.whl"))
    stocks = MagicMock(**{"kept.return_value": ([pip], {}), "images.return_value": ("base", "uv")})
    for name, stub in (("stocks", stocks), ("ways", lambda *_: []), ("_cases", cases)):
        monkeypatch.setattr(build, name, stub)
    for name in ("Mirror", "Registry", "Arena"):
        monkeypatch.setattr(build, name, MagicMock())
    monkeypatch.setattr(rest, "disk", lambda *_: {})
    found, facts, cut = build._measured(tmp_path, 1, ["builds"], None, lambda text: None)
    assert found == {"cold": {"uv": {"seconds": [1.0]}}} and (facts["cut_short"], cut) == (repr(error), error)


@pytest.mark.parametrize("text", ["0", "-3", "x", "1.5"])
def test_counts_are_from_one_on(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="at least 1"):
        positive(text)


_PROGRAM = """
import gc, signal, sys, tempfile, time
from options import program

def main():
    with tempfile.TemporaryDirectory(dir=sys.argv[1]):
        print(flush=True)
        if sys.argv[2:]:  # the signal comes in a callback of the garbage collector, where Python drops exceptions
            gc.callbacks.append(lambda phase, info: (gc.callbacks.clear(), time.sleep(60)))
            gc.collect()
        try:
            time.sleep(60)
        except (Exception, SystemExit):  # as in programs that continue after an error
            print("a fault")

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
program(main)
"""


@pytest.mark.parametrize("collecting", [[], ["collecting"]])
@pytest.mark.parametrize(("by", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_ends_with_one_line_and_cleans_up(
    tmp_path: Path, by: signal.Signals, code: int, collecting: list[str]
) -> None:
    running = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, tmp_path, *collecting], cwd=CHECKOUT / "benchmarks", text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert running.stdout and running.stdout.readline()
    time.sleep(0.1 if collecting else 0)
    running.send_signal(by)
    out, err = running.communicate(timeout=120)
    assert (running.returncode, out, err) == (code, "", f"interrupted by {by.name}\n")
    assert list(tmp_path.iterdir()) == []


_ENVBUILD = """
import os, pathlib, signal, sys, time

def ends(*_):
    time.sleep(0.5)
    pathlib.Path(f"ended-{sys.argv[-1]}").touch()
    sys.exit(130)

signal.signal(signal.SIGTERM, ends)
pathlib.Path(f"{os.getpgrp()}-group").touch()
pathlib.Path(f"begun-{sys.argv[-1]}").touch()
time.sleep(60)
"""


def test_processes_of_the_benchmark_end_before_it_does(tmp_path: Path) -> None:
    (tmp_path / "envbuild").mkdir()
    (tmp_path / "envbuild" / "__init__.py").touch()
    (tmp_path / "envbuild" / "__main__.py").write_text(_ENVBUILD, encoding="utf-8")
    made: list[str] = ["a", "b"]

    def interrupt() -> None:
        deadline = time.monotonic() + 30
        while not all((tmp_path / f"begun-{name}").exists() for name in made) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    kept = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            several.make(tmp_path, tmp_path, made, "build")
    finally:
        signal.signal(signal.SIGINT, kept)
    assert all((tmp_path / f"ended-{name}").exists() for name in made)
    assert not (tmp_path / f"{os.getpgrp()}-group").exists(), "in this process group, Ctrl-C would signal them twice"


def image(tag: str, *layers: str) -> dict[str, Any]:
    return {"Id": f"id-{tag}", "RepoTags": [tag] if tag else [], "RootFS": {"Layers": list(layers)}}


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (image("envbuild/cpu:verified", "base", "numpy"), "envbuild/cpu:verified"),
        (image("", "base"), "id-"),
        (image("debian:12", "debian"), None),
        (image("envbuild/bench-large-2:verified", "base"), "envbuild/bench-large-2:verified"),
    ],
)
def test_layers_of_other_images_prevent_the_measurement(
    other: dict[str, Any], named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine already has these layers, so envbuild would not load them."""
    images = [image("envbuild/bench-large:1", "base", "torch"), image("envbuild/bench-small:1", "base"), other]

    def docker(*arguments: str) -> str:
        return "a\na\nb\n" if arguments[1] == "ls" else json.dumps(images)

    monkeypatch.setattr(several, "docker", docker)
    if named is None:
        several.refuse_shared_layers(["bench-large", "bench-small"])
        return
    with pytest.raises(SystemExit, match=f"some of the layers: {named}"):
        several.refuse_shared_layers(["bench-large", "bench-small"])


def test_a_cold_build_knows_no_layer_but_the_base(tmp_path: Path) -> None:
    held = Stock(tmp_path, (), {}, MagicMock(), "base", "uv")
    cache = held.cache / "envbuild"
    for kind in ("wheels", "layers/blobs", "contexts", "bases"):
        (cache / kind).mkdir(parents=True)
    (cache / "layers" / "blobs" / "b1").touch()
    for key, digest in (("base", "b1"), ("torch", "c2")):
        (cache / "layers" / f"{key}.json").write_text(json.dumps({"digest": f"sha256:{digest}"}), encoding="utf-8")
    held.forget()
    kept = {str(file.relative_to(cache)) for file in cache.rglob("*")}
    assert kept == {"bases", "layers", "layers/blobs", "layers/blobs/b1", "layers/base.json"}


_UV = """#!{python}
import pathlib, sys
output = sys.argv[sys.argv.index("--output-file") + 1]
before = pathlib.Path(output).read_text()
with open({calls!r}, "a") as stream:
    stream.write(before + sys.stdin.read())
pathlib.Path(output).write_text("resolved")
sys.exit({code})
"""


@pytest.mark.parametrize("code", [0, 1])
def test_the_calls_of_uv_are_repeated_with_the_files_that_they_had(code: int, tmp_path: Path) -> None:
    """The file of results has the content from before the first call, and the caller gets uv's own result."""
    calls, uv, output = (tmp_path / name for name in ("calls.txt", "real-uv", "requirements.txt"))
    uv.write_text(_UV.format(python=sys.executable, calls=str(calls), code=code), encoding="utf-8")
    uv.chmod(0o755)
    output.write_text("numpy==1\n", encoding="utf-8")
    recorder = recorded_uv.recording(uv, tmp_path / "recorded")[-1]
    done = subprocess.run([recorder, "--output-file", output], input="torch\n", text=True)
    assert (done.returncode, output.read_text(encoding="utf-8")) == (code, "resolved")
    output.unlink()
    if code:
        with pytest.raises(SystemExit, match="each of the 1 recorded calls of uv fails"):
            recorded_uv.repeated(tmp_path / "recorded")
    else:
        assert recorded_uv.repeated(tmp_path / "recorded")[1] == 1
    assert calls.read_text(encoding="utf-8") == "numpy==1\ntorch\n" * 2


def test_a_recorded_command_runs_envbuild_with_the_recorder(tmp_path: Path) -> None:
    """It runs with all its arguments, and looks up the recorder in place of uv."""
    command = list(recorded_uv.recording(Path("uv"), tmp_path / "recorded"))
    command[2] = command[2].replace("main()", "print(wheels.uv_binary(), *sys.argv[1:])")
    done = subprocess.run([*command, "lock", "cpu"], capture_output=True, text=True, cwd=CHECKOUT)
    assert done.stdout.split() == [str(tmp_path / "recorded" / "uv"), "lock", "cpu"], done.stderr


def test_without_a_recorded_call_nothing_is_measured(tmp_path: Path) -> None:
    recorded_uv.recording(Path("uv"), tmp_path / "recorded")
    with pytest.raises(SystemExit, match="no call of uv was recorded"):
        recorded_uv.repeated(tmp_path / "recorded")


def test_every_timed_command_exists() -> None:
    """A name in the targets and in the times of imports is that of a command."""
    timed = {name.split()[2].rstrip(",") for name in rest.LIBRARIES}
    figures = {name: {"seconds": [1.0]} for name in ("lock bench", "show bench")}
    rows = [row[0] for row in table.targets({"cases": {"commands": figures}})]
    timed |= {name.split()[0] for name in rows if name.endswith(" bench")}
    assert timed == {"lock", "make", "show"}
    assert all((CHECKOUT / "envbuild" / "cli" / f"{name}.py").is_file() for name in timed)


PROGRAMS = [
    file
    for file in (*CHECKOUT.glob("benchmarks/*.py"), *CHECKOUT.glob("tests/*/campaign.py"))
    if "__main__" in file.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("file", PROGRAMS, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_every_program_ends_so(file: Path) -> None:
    assert file.read_text(encoding="utf-8").endswith('\nif __name__ == "__main__":\n    program(main)\n')


def test_the_requirements_that_an_error_names_are_left_out_with_the_reason() -> None:
    """Of a project's file: what has only source, what requires such a package, and an address."""
    remaining = [("alpha", 1), ("beta_b>=2", 1), ("gamma", 2), ("git+https://git.example/x", 3)]
    hint = (
        "Because delta<=0.1 has no usable wheels and beta-b depends on delta and you require beta-b, no.\n"
        "without a wheel for Python 3.9, glibc 2.31, x86_64: alpha 1.0, delta 0.1\nif they have no compiled code"
    )
    assert project_requirements.exceptions_of(EnvbuildError("no", hint=hint), remaining) == {
        "alpha": "only source on the index (1.0)",
        "beta_b>=2": "requires a package that has only source on the index: alpha or delta",
    }
    faults = [Fault("a URL cannot be locked: name a package", "env.sh", 3)]
    assert project_requirements.exceptions_of(EnvbuildError("no", faults=faults), remaining) == {
        "git+https://git.example/x": "a URL cannot be locked: name a package"
    }


def test_the_commits_of_the_projects_are_those_of_the_profiles() -> None:
    for one in project_requirements.PROJECTS:
        text = (CHECKOUT / "profiles" / "projects" / f"{one.profile}.yaml").read_text(encoding="utf-8")
        assert one.commit in text and one.repository in text
