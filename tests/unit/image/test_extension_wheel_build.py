"""The cache key of a compiled wheel, when a wheel is reused, and the error if a build leaves no wheel."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from envbuild.image import (
    build_context_folders,
    build_error_messages,
    buildx,
    extension_wheel_build,
    extension_wheel_check,
)
from envbuild.image.buildx import BuildOrder
from envbuild.image.docker_engine import Engine
from envbuild.image.extension_wheel_build import BuiltWheel
from envbuild.lock.lock_file import Lock
from envbuild.util import user_folders
from envbuild.util.errors import BuildError
from unit.image.extension_wheels import KERNELS, PROFILE_WITH_EXTENSION
from unit.support import deb, lock_for, plan_of, write_wheel

TAG = "cp311-cp311-linux_x86_64"


def key(lock: Lock) -> str:
    return extension_wheel_build.key(lock, lock.extensions[0])


@pytest.fixture
def locked(project: Path) -> Lock:
    return lock_for(plan_of(project, PROFILE_WITH_EXTENSION))


# the cache key


@pytest.mark.parametrize(
    "change",
    [
        {"gpus": ["h100"]},  # the same capability
        {"packages": ["scipy"]},
        {"env": {"GREETING": "goodbye"}},
        {"selftest": {"level": "full"}},
        {"extensions": [{**KERNELS, "git": "https://mirror.example/kernels"}]},
        {"variant": "devel"},
        {"driver": {"minimum": "550.54.14", "compat": {"sha256": "b" * 64}}},
    ],
)
def test_another_profile_with_the_same_ingredients_has_the_same_key(
    project: Path, locked: Lock, change: dict[str, Any]
) -> None:
    assert key(lock_for(plan_of(project, {**PROFILE_WITH_EXTENSION, **change}))) == key(locked)


@pytest.mark.parametrize(
    "change",
    [
        {"gpus": ["a100"]},
        {"gpus": ["h200", "a100"]},
        {"extensions": [{**KERNELS, "commit": "d" * 40}]},
        {"extensions": [{**KERNELS, "build": {"env": {"KERNELS_CUDA": "2"}}}]},
        {"extensions": [{**KERNELS, "build": {**KERNELS["build"], "settings": ["--build-option=--fast"]}}]},
        {"extensions": [{**KERNELS, "modules": ["kernels_cuda", "more"]}]},
        {"extensions": [{**KERNELS, "build": {**KERNELS["build"], "requires": ["cmake"]}}]},
        {"base": {"image": f"registry.example/cuda@sha256:{'a' * 64}"}, "apt": []},
    ],
)
def test_all_inputs_of_a_wheel_are_in_its_key(project: Path, locked: Lock, change: dict[str, Any]) -> None:
    assert key(lock_for(plan_of(project, {**PROFILE_WITH_EXTENSION, **change}))) != key(locked)


@pytest.mark.parametrize(
    ("name", "counts"), [("g++-12", True), ("libc6-dev", True), ("less", False), ("tzdata", False)]
)
def test_only_debian_packages_of_the_compiler_count(locked: Lock, name: str, counts: bool) -> None:
    one = dataclasses.replace(locked, base=(*locked.base, deb(name, "1")))
    other = dataclasses.replace(locked, base=(*locked.base, deb(name, "2")))
    assert (key(one) != key(other)) is counts


def test_python_and_the_wheels_of_torch_and_nvcc_count(locked: Lock) -> None:
    assert locked.builder
    torch = [item for item in locked.wheels if item.wheel.name == "torch"]
    tools = locked.builder.wheels
    for field, found in (("wheels", torch), ("builder", tools)):
        for item in found:
            other = dataclasses.replace(item, wheel=dataclasses.replace(item.wheel, sha256="0" * 64))
            if field == "wheels":
                changed = dataclasses.replace(locked, wheels=tuple(other if w == item else w for w in locked.wheels))
            else:
                new = tuple(other if w == item else w for w in tools)
                changed = dataclasses.replace(locked, builder=dataclasses.replace(locked.builder, wheels=new))
            assert key(changed) != key(locked), item.wheel.name
    assert key(dataclasses.replace(locked, python="3.13")) != key(locked)


# the build of a wheel


class Compiler:
    """Stands in for buildx: gives the answers in turn, and leaves a wheel if the answer is a success."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.answers: list[str] = []  # error output
        self.jobs: list[str] = []
        self.requires: list[str] = []
        self.tag = TAG
        self.after: Callable[[Path], object] = lambda out: None  # done by the extension after its wheel is written

    def __call__(self, order: BuildOrder, options: Sequence[str]) -> dict[str, Any]:
        self.jobs.append(next(word for word in options if word.startswith("MAX_JOBS=")).partition("=")[2])
        if self.answers:
            raise buildx.Failed("the image build failed", "", self.answers.pop(0))
        out = Path(next(word for word in options if word.startswith("type=local")).partition("dest=")[2])
        out.mkdir(exist_ok=True)
        shutil.copy(write_wheel(self.folder, "kernels", "0.1", self.requires, self.tag), out)
        self.after(out)
        return {}


class FakeEngine:
    cpus, memory_bytes = 8, 64 << 30


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    found = Compiler(tmp_path / "built")
    monkeypatch.setattr(buildx, "build", found)
    monkeypatch.setattr(build_context_folders, "fill_builder", lambda lock, name, extension: None)
    monkeypatch.setattr(extension_wheel_check, "wheel_faults", lambda wheel, **arguments: [])
    return found


def made(lock: Lock, say: Callable[[str], None] = lambda text: None) -> BuiltWheel:
    engine = cast(Engine, FakeEngine())
    order = BuildOrder(engine, lock, "sample", "", say, lambda line: None)
    return extension_wheel_build.compile_wheel(order, lock.extensions[0])


def kept() -> list[str]:
    return sorted(path.name for path in user_folders.cache_folder("extensions").rglob("*") if path.is_file())


def test_it_is_made_once_and_says_what_it_was_made_from(locked: Lock, compiler: Compiler) -> None:
    assert extension_wheel_build.find_wheel(locked, locked.extensions[0]) is None
    first = made(locked)
    assert made(locked) == first == extension_wheel_build.find_wheel(locked, locked.extensions[0])
    assert len(compiler.jobs) == 1
    about = json.loads((first.path.parent / "built.json").read_text(encoding="utf-8"))
    assert about["from"] == json.loads(json.dumps(extension_wheel_build.wheel_inputs(locked, locked.extensions[0])))
    assert (about["sha256"], about["jobs"]) == (first.sha256, 8)
    assert first.compiled_record.roots == ("kernels-0.1.dist-info", "kernels.py")


@pytest.mark.parametrize("harm", ["change", "remove", "forget", "lie", "leave"])
def test_a_damaged_one_is_made_again(locked: Lock, compiler: Compiler, harm: str, tmp_path: Path) -> None:
    first = made(locked)
    about = first.path.parent / "built.json"
    if harm == "change":
        first.path.write_bytes(first.path.read_bytes() + b"x")
    elif harm == "remove":
        first.path.unlink()
    elif harm == "forget":
        about.write_text("{}", encoding="utf-8")
    elif harm == "lie":
        about.write_text("[", encoding="utf-8")
    else:  # a name that leads out of the folder
        shutil.copy(first.path, tmp_path / "out.whl")
        metadata = json.loads(about.read_text(encoding="utf-8"))
        about.write_text(json.dumps({**metadata, "file": str(tmp_path / "out.whl")}), encoding="utf-8")
    assert made(locked).sha256 == first.sha256
    assert len(compiler.jobs) == 2


def test_looking_for_a_wheel_removes_nothing(locked: Lock, compiler: Compiler) -> None:
    """`find_wheel` holds no process lock, so another process may be writing the unreadable file."""
    first = made(locked)
    (first.path.parent / "built.json").unlink()
    assert extension_wheel_build.find_wheel(locked, locked.extensions[0]) is None
    assert first.path.is_file()


def test_a_wheel_that_fails_its_check_is_not_kept(
    locked: Lock, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faults(wheel: Path, *, name: str, modules: Sequence[str], arch: str, python: str) -> list[str]:
        assert (name, tuple(modules), arch, python) == ("kernels", ("kernels_cuda",), "9.0", "3.11")
        return ["the module kernels_cuda is not in it", "its tag is py3-none-any"]

    monkeypatch.setattr(extension_wheel_check, "wheel_faults", faults)
    with pytest.raises(BuildError) as caught:
        made(locked)
    for words in ("kernels_cuda", "py3-none-any", "KERNELS_CUDA=1", "build.env"):
        assert words in str(caught.value.hint)
    assert kept() == []


def test_requirements_of_a_wheel_must_be_locked(locked: Lock, compiler: Compiler) -> None:
    """The wheel is installed without dependencies, so its requirements were not resolved. It is kept: its compilation
    may have taken an hour, and adding a package to the lock does not change it."""
    compiler.requires = ["numpy>=1", "einops>0.8", "torch>=99", 'tomli; python_version < "3.11"', 'x; extra == "dev"']
    wheel = made(locked)
    with pytest.raises(BuildError) as caught:
        extension_wheel_build.refuse_unlocked_requirements([wheel], locked)
    lines = str(caught.value.hint).splitlines()
    assert len(lines) == 3
    assert "einops>0.8" in lines[0] and "packages" in lines[0] and "torch>=99" in lines[1]
    assert extension_wheel_build.find_wheel(locked, locked.extensions[0]) == wheel


@pytest.mark.parametrize("left", ["link next to it", "file next to it", "folder", "link", "nothing"])
def test_a_build_leaves_one_wheel_and_no_link(locked: Lock, compiler: Compiler, tmp_path: Path, left: str) -> None:
    """A link with the name of one of our files would redirect our writes."""
    mine = tmp_path / "mine"
    mine.write_text("before", encoding="utf-8")

    def hostile(out: Path) -> None:
        (wheel,) = out.iterdir()
        if left == "link next to it":
            (out / "built.json").symlink_to(mine)
        elif left == "file next to it":
            (out / "\x1b[2J").touch()
        else:
            wheel.unlink()
        if left == "folder":
            wheel.mkdir()
        elif left == "link":
            wheel.symlink_to(mine)

    compiler.after = hostile
    with pytest.raises(BuildError, match="did not produce exactly one wheel") as caught:
        made(locked)
    assert "\x1b" not in str(caught.value.hint)
    assert mine.read_text(encoding="utf-8") == "before"
    assert kept() == []


def test_an_interrupted_one_leaves_nothing(locked: Lock, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(extension_wheel_build, "write_atomically", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made(locked)
    assert list(user_folders.cache_folder("extensions").iterdir()) == []
    assert made(locked).path.is_file()


# memory and the number of parallel compilers


@pytest.mark.parametrize(
    ("cpus", "memory_bytes", "jobs"), [(2, 64 << 30, 2), (64, 12 << 30, 4), (4, 1 << 30, 1), (1, 0, 1)]
)
def test_there_are_as_many_jobs_as_the_machine_has_room_for(cpus: int, memory_bytes: int, jobs: int) -> None:
    assert extension_wheel_build.jobs_for(cpus, memory_bytes) == jobs


@pytest.mark.parametrize(
    "output",
    [
        "#14 123.4 g++: fatal error: Killed signal terminated program cc1plus",
        "nvcc error   : 'cicc' died due to signal 9 (Kill signal)",
        "cc1plus: out of memory allocating 65536 bytes after a total of 59940864 bytes",
        "virtual memory exhausted: Cannot allocate memory",
        '#14 ERROR: process "/bin/sh" did not complete successfully: exit code: 137',
    ],
)
def test_out_of_memory_is_tried_again_with_half_the_jobs(locked: Lock, compiler: Compiler, output: str) -> None:
    compiler.answers = [output, output]
    messages: list[str] = []
    assert made(locked, messages.append).jobs == 2
    assert compiler.jobs == ["8", "4", "2"]
    assert messages == [
        "kernels: the compiler ran out of memory with 8 jobs; retrying with 4",
        "kernels: the compiler ran out of memory with 4 jobs; retrying with 2",
    ]


def test_one_job_without_memory_is_the_end(locked: Lock, compiler: Compiler) -> None:
    compiler.answers = ["virtual memory exhausted"] * 9
    with pytest.raises(BuildError, match="more memory than the engine has"):
        made(locked)
    assert compiler.jobs == ["8", "4", "2", "1"]


# other errors of a build


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (
            "#9 0.3 install: /usr/local/cuda/bin/nvcc is of CUDA 12.4, torch of 12.6",
            ("CUDA 12.4", "12.6", "toolchain:"),
        ),
        ("/x/host_config.h:1: error: #error -- unsupported GNU version! gcc later than 13", ("older g++", "gcc later")),
        ("greater than the maximum required version by CUDA 12.1. Please", ("older g++", "12.1")),
        ("#9 4.2   error: option --fmha not recognized", ("--fmha", "setup.py", "build.settings")),
        ("#9 1.0 a line\n#9 2.0 x.cu(3): error: expected a ;\n#9 ERROR: failed", ("x.cu(3): error: expected a ;",)),
        ("k.cpp:7: error: bad\n  catch (const std::bad_alloc& e) {}", ("k.cpp:7: error: bad",)),
        ("nothing that anybody knows", ("nothing that anybody knows",)),
    ],
)
def test_a_known_complaint_says_what_to_do(
    locked: Lock, compiler: Compiler, output: str, words: tuple[str, ...]
) -> None:
    assert not build_error_messages.is_out_of_memory(output)
    compiler.answers = [output]
    with pytest.raises(BuildError) as caught:
        made(locked)
    assert caught.value.message == "kernels cannot be compiled"
    for word in words:
        assert word in str(caught.value.hint)
    assert len(compiler.jobs) == 1


def test_the_error_of_a_step_is_reported_else_that_of_buildkit() -> None:
    own = "#9 ERROR: process did not complete successfully: exit code: 1"
    summary = "------\n > [2/3] RUN it:\n2.004 x.cu(3): error: expected a ;\n------\nERROR: failed to solve: process"
    output = f"#9 1.0 a line\n#9 2.004 x.cu(3): error: expected a ;\n{own}\n{summary}"
    assert build_error_messages.first_errors(output) == ["x.cu(3): error: expected a ;"]
    assert build_error_messages.builders(output) == [own.removeprefix("#9 "), "ERROR: failed to solve: process"]
    assert build_error_messages.first_errors(f"#9 1.0 a line\n{own}") == [own.removeprefix("#9 ")]
    assert (
        build_error_messages.first_errors("one\n\ntwo") == ["one", "two"]
        and build_error_messages.first_errors("") == []
    )


def test_unreadable_requirements_of_a_wheel_are_refused_without_escapes(locked: Lock, compiler: Compiler) -> None:
    """The requirements of a wheel are untrusted text."""
    compiler.requires = ["\x1b[2Jevil @@", 'numpy; os_name ~= "x"', "evil @ file:///\x1b[2J"]
    with pytest.raises(BuildError) as caught:
        made(locked)
    assert "os_name" in str(caught.value.hint)
    assert "\x1b" not in str(caught.value.hint) and "invalid requirement" in str(caught.value.hint)


def test_the_requirements_of_a_wheel_are_read_up_to_a_limit(
    locked: Lock, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extension_wheel_build, "_MOST_METADATA", 1 << 10)
    compiler.requires = [f"numpy>{n / 1000}" for n in range(100)]
    with pytest.raises(BuildError) as caught:
        made(locked)
    assert "METADATA is larger" in str(caught.value.hint)


def test_a_file_that_is_not_a_wheel_is_not_opened_again(
    locked: Lock, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extension_wheel_check, "wheel_faults", lambda wheel, **arguments: ["it is damaged"])
    compiler.after = lambda out: [wheel.write_bytes(b"no zip") for wheel in out.iterdir()]
    with pytest.raises(BuildError) as caught:
        made(locked)
    assert "it is damaged" in str(caught.value.hint)
