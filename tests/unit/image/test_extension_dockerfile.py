"""The Dockerfile for extensions equals the golden files, and no text of a profile or lock becomes an instruction."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from envbuild.fetch.locked_wheel_types import LockedWheel
from envbuild.image import container_definition_export, extension_dockerfile
from envbuild.image.oci import image_description
from envbuild.lock import lock_file
from envbuild.lock.lock_file import PACKAGES, Lock
from envbuild.profile import model as profile_model
from envbuild.resolve import plan_resolver, profile_reader_and_overrides
from envbuild.util import package_data, strict_and_canonical_json
from envbuild.util.errors import EnvbuildError, LockError, ProfileError
from unit import oracle
from unit.oracle import Instruction
from unit.support import PROFILE, as_yaml, deb, lock_for, plan_of, wheel

GOLDEN = Path(__file__).parent.parent.parent / "golden"
CASES = sorted(folder.name for folder in GOLDEN.iterdir() if (folder / "Dockerfile").is_file())
IMAGE = f"registry.example:5000/library/debian@sha256:{'a' * 64}"
# nvcc and forward-compatibility libraries, as archives
ARCHIVES: dict[str, Any] = {
    **PROFILE, "torch": "2.7.1", "gpus": ["a100"], "variant": "devel", "toolchain": {"sha256": "a" * 64},
    "driver": {"minimum": "470.57.02", "compat": {"sha256": "b" * 64}},
}  # fmt: skip
# an extension from a commit, and one from an sdist
COMPILED: dict[str, Any] = {
    "name": "kernels", "git": "https://git.example/team/kernels", "commit": "c" * 40, "modules": ["kernels_cuda"],
    "build": {"env": {"KERNELS_CUDA": "1"}, "settings": ["--build-option=--fast"], "requires": ["packaging"]},
}  # fmt: skip
FROM_SDIST: dict[str, Any] = {
    "name": "other", "sdist": {"sha256": "e" * 64, "url": "https://mirror.example/other.tar.gz"}, "modules": ["other"],
}  # fmt: skip
DEBIAN: dict[str, Any] = {
    "base": {"bootstrap": "trixie"}, "python": "3.13", "torch": "2.6.0", "gpus": ["a100"], "toolchain": "debian",
}  # fmt: skip
EXTENDED: dict[str, Any] = {**PROFILE, "torch": "2.11.0", "gpus": ["h200"], "extensions": [COMPILED, FROM_SDIST]}

# golden folders


def test_there_are_golden_folders() -> None:
    assert {"cpu", "image-base", "apt-layer", "hostile-env", "devel-wheels", "devel-archive"} <= set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_a_golden_lock_renders_to_its_dockerfile(case: str) -> None:
    folder = GOLDEN / case
    found = lock_file.read(folder / "lock.yaml")
    assert found is not None
    assert extension_dockerfile.render(found) == (folder / "extension.Dockerfile").read_text(encoding="utf-8")
    text = container_definition_export.standalone_dockerfile(found, case)
    assert text == (folder / "Dockerfile").read_text(encoding="utf-8")


@pytest.mark.parametrize("case", CASES)
def test_a_golden_lock_is_its_profiles(case: str, tmp_path: Path) -> None:
    folder = GOLDEN / case
    plan = plan_resolver.resolve(profile_reader_and_overrides.load(str(folder / "profile.yaml")))
    found = lock_file.read(folder / "lock.yaml")
    assert found == lock_for(plan)
    lock_file.write(found, tmp_path / "lock.yaml", case)
    assert (tmp_path / "lock.yaml").read_bytes() == (folder / "lock.yaml").read_bytes()


def test_the_committed_dockerfiles_are_what_the_locks_give() -> None:
    files = sorted(package_data.PROFILES.rglob("*.lock.yaml"))
    assert files
    for file in files:
        name = file.name.removesuffix(".lock.yaml")
        found = lock_file.read(file)
        assert found is not None
        text = container_definition_export.standalone_dockerfile(found, name)
        assert text == (package_data.DOCKERFILES / f"{name}.Dockerfile").read_text(encoding="utf-8")


# the oracle itself


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FROM scratch\n", [("FROM", ("scratch",))]),
        ("# syntax=evil\nFROM x\n", [("#syntax", ("evil",)), ("FROM", ("x",))]),
        ("# note\n# syntax=evil\nFROM x\n", [("FROM", ("x",))]),
        ("RUN a \\\n  b\nRUN c\n", [("RUN", ("a", "b")), ("RUN", ("c",))]),
        ("RUN a \\\n# note\n\n  b\n", [("RUN", ("a", "b"))]),
        ("RUN a \\\\\nRUN b\n", [("RUN", ("a", "\\\\")), ("RUN", ("b",))]),
        ('RUN ["a", \\\n  "b c"]\n', [("RUN", ("a", "b c"))]),
        ("RUN <<EOF\nFROM evil\nEOF\nCMD x\n", [("RUN", ("<<EOF",)), ("CMD", ("x",))]),
        ('RUN ["<<EOF"]\nCMD x\n', [("RUN", ("<<EOF",)), ("CMD", ("x",))]),
        ('ENV A="b c"\n', [("ENV", ("A", "b c"))]),
        ('ENV A="b" C=d\n', [("ENV", ("A", "b", "C", "d"))]),
        (r'ENV A="q\"b\\s\$d\n"' + "\n", [("ENV", ("A", 'q"b\\s$d\\n'))]),
        ('ENV A="$HOME"\n', [("ENV", ("A", f"{oracle.EXPANDED}HOME"))]),
        ("ENV A='$HOME'\n", [("ENV", ("A", "$HOME"))]),
        ('ENV A="b\\\nc"\n', [("ENV", ("A", "bc"))]),
        ("ENV A=x\nRUN evil\n", [("ENV", ("A", "x")), ("RUN", ("evil",))]),
    ],
)
def test_the_oracle_reads_as_the_builder_does(text: str, expected: list[tuple[str, tuple[str, ...]]]) -> None:
    assert [(found.keyword, found.arguments) for found in oracle.parse(text)] == expected


# rendering


@cache
def instructions(text: str) -> list[Instruction]:
    return oracle.parse(text)


RENDERED: dict[tuple[str, str | None], str] = {}


def rendered(found: Lock) -> list[Instruction]:
    """Parse the Dockerfile as the builder does; each content is rendered once, because thousands of tests use the
    result."""
    key = (found.id, found.image)
    if key not in RENDERED:
        RENDERED[key] = extension_dockerfile.render(found)
    return instructions(RENDERED[key])


def both(found: Lock) -> list[Instruction]:
    """The instructions of the Dockerfile for extensions, and of the Dockerfile that stands alone."""
    return rendered(found) + instructions(container_definition_export.standalone_dockerfile(found, "sample"))


@pytest.fixture
def sample(project: Path) -> Lock:
    return lock_for(plan_of(project, PROFILE))


def test_a_bootstrap_base_is_added_to_nothing(sample: Lock) -> None:
    first, second, *rest = rendered(sample)
    assert (first.keyword, first.arguments) == ("FROM", ("scratch", "AS", "builder"))
    assert (second.keyword, second.arguments) == ("ADD", ("base.tar", "/"))
    assert {found.keyword for found in rest} == {"RUN"}


def test_an_image_base_is_taken_by_digest(project: Path) -> None:
    found = rendered(lock_for(plan_of(project, {**PROFILE, "base": {"image": IMAGE}, "apt": []})))
    assert (found[0].keyword, found[0].arguments) == ("FROM", (IMAGE, "AS", "builder"))
    assert "ADD" not in {instruction.keyword for instruction in found}


def test_every_run_is_hermetic_and_no_shell_reads_it(sample: Lock) -> None:
    runs = [found for found in rendered(sample) if found.keyword == "RUN"]
    assert len(runs) == 4
    for run in runs:
        assert run.form == "json"
        assert "--network=none" in run.flags
        assert run.arguments[:2] == ("/bin/sh", "/mnt/bin/install")


def test_the_order_is_base_debian_environment_then_layers(sample: Lock) -> None:
    """Debian packages come first, because their installation removes bytecode, and the virtual environment's layer
    contains some."""
    runs = [found for found in rendered(sample) if found.keyword == "RUN"]
    assert [run.arguments[2] for run in runs] == ["debs", "venv", "wheels", "wheels"]
    sources = [
        flag.split("=wheels-")[1].partition(",")[0] for run in runs[2:] for flag in run.flags if "=wheels-" in flag
    ]
    assert sources == ["python", "torch"], "the profile's own packages are not needed to compile"


def folders(found: Lock) -> list[str]:
    """Return the folder or context that each RUN mounts in addition to the installer, in order."""
    flags = [flag for run in rendered(found) if run.keyword == "RUN" for flag in run.flags]
    words = (word for flag in flags for word in flag.split(","))
    return [word for word in words if word.startswith(("source=", "from=")) and word != "source=bin"]


def test_an_archive_is_unpacked_by_its_hash(project: Path) -> None:
    found = [run.arguments[2:] for run in rendered(lock_for(plan_of(project, ARCHIVES))) if "archive" in run.arguments]
    assert found == [
        ("archive", "1704067200", "cuda-toolkit", "a" * 64, "/usr/local/cuda"),
        ("archive", "1704067200", "cuda-compat", "b" * 64, "/usr/local/cuda/compat"),
    ]


def test_every_wheel_is_installed_once_by_its_hash(sample: Lock) -> None:
    arguments = [argument for run in rendered(sample) if run.keyword == "RUN" for argument in run.arguments]
    for locked in (one for one in sample.wheels if one.layer != PACKAGES):
        wanted = f"{locked.wheel.name}=={locked.wheel.version} --hash=sha256:{locked.wheel.sha256}"
        assert arguments.count(wanted) == 1


def test_without_debian_packages_the_layer_is_missing(project: Path) -> None:
    found = rendered(lock_for(plan_of(project, {**PROFILE, "apt": []})))
    assert not [run for run in found if "debs" in run.arguments]


def test_the_compiler_gets_the_flags_for_reproducible_output(project: Path) -> None:
    """Otherwise the names of nvcc's intermediate files are part of its output. A profile's own flags are kept."""
    build = {"env": {"NVCC_APPEND_FLAGS": "--threads 2"}}
    entries = [{**COMPILED, "build": build}, FROM_SDIST]
    found = rendered(lock_for(plan_of(project, {**EXTENDED, "extensions": entries})))
    settings = [word for item in found for word in item.arguments if word.startswith("NVCC_APPEND_FLAGS=")]
    assert settings == ["NVCC_APPEND_FLAGS=--threads 2 --objdir-as-tempdir", "NVCC_APPEND_FLAGS=--objdir-as-tempdir"]


def test_rendering_is_a_function_of_the_content(sample: Lock) -> None:
    other = dataclasses.replace(sample, made="20300101T000000Z", inputs={})
    assert extension_dockerfile.render(sample) == extension_dockerfile.render(other)


def many(sample: Lock, number: int) -> Lock:
    wheels = tuple(LockedWheel(wheel(f"library-{i}"), 50_000_000, f"library-{i}") for i in range(number))
    return dataclasses.replace(sample, wheels=wheels)


def test_many_layers_fit(sample: Lock) -> None:
    assert len(rendered(many(sample, image_description.MAX_LAYERS - 4))) > 90


def test_too_many_layers_are_refused_or_shared(sample: Lock) -> None:
    try:
        found = rendered(many(sample, 130))
    except EnvbuildError:
        return
    assert len([item for item in found if item.keyword in ("RUN", "ADD")]) <= image_description.MAX_LAYERS


# hostile strings in a profile

HOSTILE = [
    "\n", "\r", "\0", "\N{LINE SEPARATOR}", "\N{PARAGRAPH SEPARATOR}", "\x85", "\x1b[2J", "\x7f", '"', "'", "\\",
    "$(touch /tmp/x)", "`id`", "--flag", "# syntax=evil", "ends in \\", "<<EOF", "${HOME}", "$HOME", '"\nRUN evil',
    "\\\nRUN evil", "; rm -rf /",
    "{{ 7 * 7 }}", "{% raw %}", "%s %n", "a b", "\t", " ", "--hash=sha256:0", '", "evil', "\N{ROCKET}",
]  # fmt: skip

Change = Callable[[dict[str, Any], str], None]


def string_fields() -> Iterator[tuple[str, Change]]:
    """Yield every place of a profile where its schema allows text, with a function that sets the value there."""
    schema = profile_model.schema()

    def walk(found: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, Change]]:
        if "$ref" in found:
            yield from walk(schema["$defs"][found["$ref"].rpartition("/")[2]], path)
        for option in (*found.get("anyOf", ()), *found.get("oneOf", ())):
            yield from walk(option, path)
        if found.get("type") == "string":
            yield ".".join(path), lambda data, value: put(data, path, value)
        if found.get("type") == "array":
            yield from walk(found["items"], (*path, "[]"))
        for name, inner in found.get("properties", {}).items():
            yield from walk(inner, (*path, name))
        for inner in found.get("patternProperties", {}).values():
            yield from walk(inner, (*path, "{}"))
            yield ".".join((*path, "{key}")), lambda data, value: put(data, (*path, "{key}"), value)

    root = {key: value for key, value in schema.items() if key != "anyOf"}
    yield from walk(root, ())


def put(data: dict[str, Any], path: tuple[str, ...], value: str) -> None:
    if path == ("base", "image"):
        data["base"], data["apt"] = {}, []
    if path == ("selftest", "transport"):
        data["gpus"], data["torch"] = ["h200"], "2.13.0"
    if path[0] in ("cuda", "gpus", "pins", "variant", "toolchain", "driver"):
        data["torch"] = "2.13.0"  # they do not apply to a build without CUDA
    if path[0] in ("variant", "toolchain", "driver"):
        data["gpus"], data["variant"] = ["h200"], "devel"
    if path[0] == "extensions":
        data["gpus"], data["torch"] = ["h200"], "2.11.0"
        whole = FROM_SDIST if "sdist" in path else {"name": "kernels", "none": "no"} if "none" in path else COMPILED
        data["extensions"] = [copy.deepcopy(whole)]
        inside(data, path, value)
        return
    if path[:2] == ("selftest", "shapes"):
        data["selftest"]["shapes"] = [{"m": 1, "k": 1, "n": 1, "dtype": "bf16", "layout": "nn"}]
        inside(data, path, value)
        return
    if path[0] in COMPANIONS and path[0] not in data and len(path) > 1:
        data[path[0]] = copy.deepcopy(COMPANIONS[path[0]])
        inside(data[path[0]], path[1:], value)
        return
    *outer, last = path
    for name in outer:
        data = data.setdefault(name, [] if last == "[]" else {})
    if last == "[]":
        assert isinstance(data, list)
        data.append(value)
    elif last == "{key}":
        data[value] = "harmless"
    else:
        data["HOSTILE" if last == "{}" else last] = value


# Fields that are valid only together with others: a complete value, in which one part is then replaced.
COMPANIONS: dict[str, Any] = {
    "accept": [{"advisory": "cublas-hopper-fpe", "reason": "harmless"}],
    "pins": {"cublas": {"version": "13.1.1.3", "reason": "harmless"}},
    "startup": [{"file": "mine.pth", "sha256": "0" * 64, "reason": "harmless"}],
    "why": {"torch": "harmless"},
    "driver": {"minimum": "580.65.06", "compat": {"url": "https://mirror.example/compat.tar", "sha256": "0" * 64}},
    "toolchain": {"url": "https://mirror.example/cuda.tar", "sha256": "0" * 64},
}


def inside(data: Any, path: tuple[str, ...], value: str) -> None:
    """Replace what `path` names: "[]" the first entry, "{}" the first value, "{key}" the first key."""
    for position, part in enumerate(path):
        key: Any = 0 if part == "[]" else next(iter(data)) if part in ("{}", "{key}") else part
        if part == "{key}":
            data[value] = data.pop(key)
        elif position == len(path) - 1:
            data[key] = value
        else:
            data = data[key]


FIELDS = dict(string_fields())
HARMLESS = {
    "base.image": IMAGE,
    "base.bootstrap": "bookworm",
    "python": "3.11",
    "torch": "2.13.0",
    "packages.[]": "scipy",
    "apt.[]": "zip",
    "env.{key}": "HARMLESS",
    "platform": "linux/amd64",
    "selftest.level": "quick",
    "selftest.require.[]": "env.libs",
    "selftest.transport": "p2p",
    "selftest.shapes.[].dtype": "bf16",
    "selftest.shapes.[].layout": "nn",
    "selftest.script": "smoke.py",
    "extends": "parent",
    "gpus.[]": "h200",
    "cuda": "13.0",
    "features.[]": "bf16",
    "accept.[].advisory": "cublas-hopper-fpe",
    "startup.[].file": "mine.pth",
    "startup.[].sha256": "0" * 64,
    "why.{key}": "torch",
    "pins.{key}": "cublas",
    "pins.{}": "13.1.1.3",
    "pins.{}.version": "13.1.1.3",
    "driver.minimum": "580.65.06",
    "driver.compat.url": "https://mirror.example/compat.tar",
    "driver.compat.sha256": "0" * 64,
    "variant": "devel",
    "toolchain": "wheels",
    "toolchain.url": "https://mirror.example/cuda.tar",
    "toolchain.sha256": "0" * 64,
    "extensions.[].name": "kernels",
    "extensions.[].git": COMPILED["git"],
    "extensions.[].commit": "c" * 40,
    "extensions.[].submodules": "omit",
    "extensions.[].sdist.url": "https://mirror.example/other.tar.gz",
    "extensions.[].sdist.sha256": "e" * 64,
    "extensions.[].build.env.{key}": "KERNELS_CUDA",
    "extensions.[].build.settings.[]": "--build-option=--fast",
    "extensions.[].build.requires.[]": "packaging",
    "extensions.[].modules.[]": "kernels_cuda",
}
FREE = {
    "description",
    "partial.[]",
    "env.{}",
    "accept.[].reason",
    "startup.[].reason",
    "pins.{}.reason",
    "why.{}",
    "extensions.[].none",
}
FREE |= {"extensions.[].build.env.{}"}
# A setting of pip has the form NAME=VALUE, so this one is harmless.
SETTING = "extensions.[].build.settings.[]", "--hash=sha256:0"


def test_the_walk_finds_every_string_field() -> None:
    assert set(FIELDS) == {*HARMLESS, *FREE}


REFUSED: dict[tuple[str, str], bool] = {}


def outcome(folder: Path, field: str, value: str) -> list[Instruction] | ProfileError:
    found = _outcome(folder, field, value)
    REFUSED[field, value] = isinstance(found, ProfileError)
    return found


def is_refused(folder: Path, field: str, value: str) -> bool:
    """Whether a profile with the value is refused; each value of a field is tried once."""
    if (field, value) not in REFUSED:
        outcome(folder, field, value)
    return REFUSED[field, value]


def _outcome(folder: Path, field: str, value: str) -> list[Instruction] | ProfileError:
    data = copy.deepcopy(PROFILE)
    FIELDS[field](data, value)
    try:
        return both(lock_for(plan_of(folder, data)))
    except ProfileError as error:
        return error


def shape(found: list[Instruction]) -> list[tuple[object, ...]]:
    """Return everything except the values that may differ: the environment's values, and the lock's id."""
    return [
        (
            item.keyword,
            item.flags,
            item.arguments[::2] if item.keyword in ("ENV", "LABEL") else item.arguments,
            item.form,
        )
        for item in found
    ]


@pytest.mark.slow
@pytest.mark.parametrize("field", FIELDS)
def test_a_hostile_value_is_refused_or_stays_a_value(project: Path, field: str) -> None:
    (project / "profiles" / "parent.yaml").write_text("description: parent\n", encoding="utf-8")
    (project / "profiles" / "smoke.py").write_text("step('one')\n", encoding="utf-8")
    start = HARMLESS.get(field, "harmless")
    harmless = outcome(project, field, start)
    assert not isinstance(harmless, ProfileError), harmless.faults
    values = [text for hostile in HOSTILE for text in (hostile, start + hostile, hostile + start)]
    for value in values:
        found = outcome(project, field, value)
        if isinstance(found, ProfileError):
            assert {fault.file for fault in found.faults} == {"profiles/sample.yaml"}
            continue
        if field == "env.{}":
            settings = {item.arguments[0]: item.arguments[1] for item in found if item.keyword == "ENV"}
            assert settings["HOSTILE"] == value
            assert shape(found) == shape(harmless)
        elif field == "extensions.[].build.env.{}":
            (setting,) = [word for item in found for word in item.arguments if word.startswith("KERNELS_CUDA=")]
            assert setting == f"KERNELS_CUDA={value}"
            assert [(i.keyword, i.flags, i.form) for i in found] == [(i.keyword, i.flags, i.form) for i in harmless]
        elif field in ("description", "extensions.[].none"):
            assert shape(found) == shape(harmless)
        else:  # names and versions: accepted values consist of one word
            words = {word for item in found for word in item.arguments} - {w for i in harmless for w in i.arguments}
            assert [(i.keyword, i.flags, i.form) for i in found] == [(i.keyword, i.flags, i.form) for i in harmless]
            assert not any(set(word) & set("\n\r\0\"'`$;\\") for word in words)


@pytest.mark.slow
@pytest.mark.parametrize("field", sorted(set(FIELDS) - FREE))
def test_only_descriptions_and_environment_values_are_free_text(project: Path, field: str) -> None:
    accepted = [value for value in HOSTILE if not is_refused(project, field, value)]
    assert [value for value in accepted if (field, value) != SETTING] == []


# hostile strings in a lock


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Return the paths of all texts in a lock; of a list, only those of the first entry."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list):
        yield from leaves(value[0], (*path, 0)) if value else ()
    elif isinstance(value, str):
        yield path


def on(data: Any, path: tuple[str | int, ...]) -> Any:
    for part in path:
        data = data[part]
    return data


def document_of(found: Lock, folder: Path) -> dict[str, Any]:
    lock_file.write(found, folder / "lock.yaml", "sample")
    data: dict[str, Any] = yaml.load((folder / "lock.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
    return data


def read_again(data: dict[str, Any], folder: Path) -> Lock | LockError:
    """Read a lock that was edited by hand, with its id recomputed."""
    if data["id"].startswith("sha256:"):
        data["id"] = f"sha256:{strict_and_canonical_json.canonical_digest(data['content'])}"
    file = folder / "lock.yaml"
    file.write_text(as_yaml(data, indent=None), encoding="utf-8")
    try:
        found = lock_file.read(file)
    except LockError as error:
        return error
    assert found is not None
    return found


def locks(folder: Path) -> Iterator[Lock]:
    plain = lock_for(plan_of(folder, PROFILE))
    yield dataclasses.replace(plain, apt=(deb("less"),))
    yield lock_for(plan_of(folder, {**PROFILE, "startup": COMPANIONS["startup"]}))
    yield lock_for(plan_of(folder, {**PROFILE, "base": {"image": IMAGE}, "apt": []}))
    yield lock_for(plan_of(folder, {**PROFILE, "base": {"image": "registry.example/python:3.11"}, "apt": []}))
    yield lock_for(plan_of(folder, ARCHIVES))
    yield lock_for(plan_of(folder, EXTENDED))
    yield lock_for(plan_of(folder, {**EXTENDED, "extensions": [FROM_SDIST], "toolchain": {"sha256": "a" * 64}}))
    yield lock_for(plan_of(folder, {**EXTENDED, **DEBIAN}))


SAMPLES: list[tuple[Lock, dict[str, Any]]] = []


def samples(folder: Path) -> list[tuple[Lock, dict[str, Any]]]:
    """The locks with their documents, made once."""
    if not SAMPLES:
        SAMPLES.extend((sample, document_of(sample, folder)) for sample in locks(folder))
    return SAMPLES


def same_but_for(found: list[Instruction], before: list[Instruction], value: str) -> bool:
    """Both Dockerfiles must have the same instructions with the same number of words; a word that differs must contain
    the value, or be the lock id."""
    if [(i.keyword, i.form, len(i.flags)) for i in found] != [(i.keyword, i.form, len(i.flags)) for i in before]:
        return False
    for now, then in zip(found, before, strict=True):
        pairs = [*zip(now.flags, then.flags, strict=True), *zip(now.arguments, then.arguments, strict=True)]
        if now.keyword != "LABEL" and not all(
            a == b or (value in a and (now.keyword != "ENV" or a == value)) for a, b in pairs
        ):
            return False
    return True


FURTHER = ("GREETING", "PYTHONHOME", "PYTHONPATH", "CUDA_HOME", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_VISIBLE_DEVICES",
           "TORCH_CUDA_ARCH_LIST")  # fmt: skip


def lock_fields() -> list[str]:
    wanted = ["made", "id", "inputs.base", "inputs.apt", "inputs.wheels", "inputs.environment", "content.platform",
              "content.python", "content.base.bootstrap", "content.base.image", "content.base.tag", "inputs.archives",
              "content.archives.0.name", "content.archives.0.version", "content.archives.0.sha256",
              "content.nvcc.home", "content.nvcc.release", "inputs.extensions", "content.builder.arch",
              "content.builder.nvcc.home", "content.builder.nvcc.release",
              "inputs.startup", "content.startup.0.file", "content.startup.0.sha256"]  # fmt: skip
    wanted += [f"content.extensions.0.{name}" for name in ("name", "git", "tree", "sdist", "env.KERNELS_CUDA",
                                                           "settings.0", "modules.0")]  # fmt: skip
    wanted += [f"content.builder.archives.0.{name}" for name in ("name", "version", "sha256")]
    wanted += [f"content.builder.environment.{name}" for name in ("CC", "CXX")]
    for part in ("base.packages", "apt", "builder.debs"):
        wanted += [f"content.{part}.0.{name}" for name in ("name", "version", "sha256", "path")]
    for part in ("wheels", "builder.wheels"):
        wanted += [f"content.{part}.0.{name}" for name in ("name", "version", "file", "sha256", "layer")]
    return [
        *wanted,
        *(f"content.environment.{name}" for name in (*plan_resolver.ENVIRONMENT, *FURTHER)),
    ]


def test_the_walk_finds_every_text_of_a_lock(project: Path) -> None:
    found = {".".join(map(str, path)) for _, data in samples(project) for path in leaves(data)}
    assert found == set(lock_fields())


@pytest.mark.slow
@pytest.mark.parametrize("field", [f for f in lock_fields() if "environment." not in f or f.endswith("LANG")])
def test_a_hostile_lock_is_refused_or_renders_to_the_same_instructions(project: Path, field: str) -> None:
    for sample, data in samples(project):
        path = next((p for p in leaves(data) if ".".join(map(str, p)) == field), None)
        if path is None:
            continue
        before, old, pickled = rendered(sample), on(data, path), pickle.dumps(data)
        for value in (*HOSTILE, *(f"{old}{hostile}" for hostile in HOSTILE if field.startswith("content"))):
            changed = pickle.loads(pickled)  # faster than copy.deepcopy
            on(changed, path[:-1])[path[-1]] = value
            found = read_again(changed, project)
            if not isinstance(found, LockError):
                assert same_but_for(rendered(found), before, value)
        return
    pytest.fail("no lock has this field")


@pytest.mark.parametrize("key", ["A B", "A=B", "", "1", "A\nRUN", "$(id)", "--x", "é"])
def test_a_hostile_name_of_a_variable_is_refused(project: Path, key: str) -> None:
    data = document_of(lock_for(plan_of(project, PROFILE)), project)
    data["content"]["environment"][key] = "x"
    found = read_again(data, project)
    if not isinstance(found, LockError):
        rendered(found)
        pytest.fail("accepted")


def test_an_argument_with_any_content_stays_one_argument(project: Path) -> None:
    """This is the second line of defence, for a lock that was never checked."""
    sample = lock_for(plan_of(project, PROFILE))
    for value in HOSTILE:
        odd = dataclasses.replace(sample.apt[0], path=f"pool/{value.replace('/', '')}.deb")
        found = rendered(dataclasses.replace(sample, python=value, apt=(odd,)))
        assert [item.keyword for item in found] == [item.keyword for item in rendered(sample)]
        arguments = [item.arguments for item in found if item.keyword == "RUN"]
        assert arguments[1][-1] == value
        assert arguments[0][-1] == odd.file


def test_the_first_comment_names_the_lock(project: Path) -> None:
    lock = lock_for(plan_of(project, PROFILE))
    assert extension_dockerfile.render(lock).splitlines()[0] == f"# Compiles the extensions of the lock {lock.id}."
