from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from envbuild.lock import lock_file
from envbuild.profile import model as profile_model
from envbuild.profile import profile_and_lock_name_lookup, project_test_shapes_and_script, value_types
from envbuild.resolve import plan_resolver, profile_reader_and_overrides
from envbuild.util import package_data, yaml_and_project_paths
from envbuild.util.errors import Fault, LockError, ProfileError
from unit.support import PROFILE, as_yaml, lock_for, profile_of, write_profile

DIGEST = "0" * 64


def faults_of(folder: Path, text: str) -> list[Fault]:
    file = folder / "profiles" / "sample.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ProfileError) as caught:
        profile_reader_and_overrides.load("sample")
    return list(caught.value.faults)


GOOD = "base: {bootstrap: bookworm}\npython: '3.11'\ntorch: '2.13.0'\n"


@pytest.mark.parametrize(
    ("text", "line", "field", "words"),
    [
        (GOOD + "torh: 1\n", 4, "torh", "unknown key (did you mean torch?)"),
        (GOOD + "zzzzzz: 1\n", 4, "zzzzzz", "unknown key (known: accept, apt, base"),
        (GOOD + "extend: cpu\n", 4, "extend", "did you mean extends?"),
        (GOOD + "'[x]': 1\n", 4, "[x]", "unknown key (known: accept, apt, base"),
        (GOOD + "selftest:\n  '[shape]': 1\n", 5, "selftest.[shape]", "unknown key"),
        (GOOD + "selftest:\n  levle: quick\n", 5, "selftest.levle", "did you mean level?"),
        ("base: {bootstrap: bookworm, imge: x}\n" + GOOD[28:], 1, "base.imge", "did you mean image?"),
        (GOOD.replace("'2.13.0'", "2.13"), 3, "torch", "must be text"),
        (GOOD.replace("'3.11'", "3.11"), 2, "python", "must be text"),
        (GOOD.replace("'2.13.0'", "[1]"), 3, "torch", "must be text"),
        (GOOD.replace("'2.13.0'", ""), 3, "torch", "must be text"),
        (GOOD.replace("'2.13.0'", "newest"), 3, "torch", "'newest' is not a version"),
        (GOOD.replace("'2.13.0'", "2.13.0-"), 3, "torch", "is not a version"),
        (GOOD.replace("'2.13.0'", "2.13.*"), 3, "torch", "is not a version"),
        (GOOD.replace("torch: '2.13.0'\n", ""), 1, "torch", "missing"),
        (GOOD + "packages: numpy\n", 4, "packages", "must be a list"),
        (GOOD + "packages:\n- numpy\n- '???'\n", 6, "packages[1]", "is not a requirement"),
        (GOOD + "packages: ['apex']\n", 4, "packages[0]", "unrelated package"),
        (GOOD + "packages: ['APEX==0.1']\n", 4, "packages[0]", "unrelated package"),
        (GOOD + "packages: ['x @ file:///etc/passwd']\n", 4, "packages[0]", "URL"),
        (GOOD + "packages: ['-r /etc/passwd']\n", 4, "packages[0]", "is not a requirement"),
        (GOOD + "packages: ['--index-url=x']\n", 4, "packages[0]", "is not a requirement"),
        (GOOD + "packages: [{numpy: 2}]\n", 4, "packages[0]", "must be text"),
        (GOOD + "apt: git\n", 4, "apt", "must be a list: [git]"),
        (GOOD + "selftest: {memory_gb: 64GB}\n", 4, "selftest.memory_gb", "must be a number"),
        (GOOD + "apt: [Less]\n", 4, "apt[0]", "'Less' is not allowed"),
        (GOOD + "apt: [less, '--reinstall']\n", 4, "apt[1]", "not allowed"),
        (GOOD + "apt: [less-]\n", 4, "apt[0]", "'less-' is not allowed here: a package's name"),
        (GOOD + "apt: [less=590]\n", 4, "apt[0]", "not allowed"),
        (GOOD + "env:\n  A B: x\n", 5, "env.A B", "not allowed"),
        (GOOD + "env:\n  A: 1\n", 5, "env.A", "must be text"),
        (GOOD + "env: [A=1]\n", 4, "env", "mapping"),
        (GOOD + 'env:\n  A: "x\\ny"\n', 5, "env.A", "not allowed"),
        (GOOD + "platform: linux/arm64\n", 4, "platform", "'linux/arm64': only linux/amd64 is supported"),
        (GOOD + "selftest: {timeout: 0}\n", 4, "selftest.timeout", ""),
        (GOOD + "selftest: {timeout: '900'}\n", 4, "selftest.timeout", "whole number"),
        (GOOD + "selftest: {timeout: 1.5}\n", 4, "selftest.timeout", "whole number"),
        (GOOD + "selftest: {allow_tf32: 'yes'}\n", 4, "selftest.allow_tf32", "true or false"),
        (GOOD + "selftest: {floor: {gemm: 1.5}}\n", 4, "selftest.floor.gemm", "must be 1.0 or less"),
        (GOOD + "selftest: {burn_seconds: 900}\n", 4, "selftest", "must be less than timeout (900)"),
        (GOOD + "selftest: {level: hard}\n", 4, "selftest.level", "quick"),
        (GOOD + "gpus: [h20]\nselftest: {transport: pcie}\n", 5, "selftest.transport", "p2p"),
        (GOOD + "selftest: {transport: p2p}\n", 4, "selftest", "transport needs GPUs"),
        (GOOD + "selftest: {memory_gb: -1}\n", 4, "selftest.memory_gb", ""),
        (GOOD + "selftest: {memory_gb: .nan}\n", 4, "selftest.memory_gb", ""),
        (GOOD + "selftest: {require: [Env.Libs]}\n", 4, "selftest.require[0]", "not allowed"),
        (GOOD + "selftest: quick\n", 4, "selftest", "mapping"),
        ("base: {}\n" + GOOD[28:], 1, "base", "give one of bootstrap or image"),
        ("base: bookworm\n" + GOOD[28:], 1, "base", "mapping"),
        ("base: {bootstrap: sid}\n" + GOOD[28:], 1, "base.bootstrap", "bookworm"),
        (
            "base: {image: debian}\n" + GOOD[28:],
            1,
            "base.image",
            "'debian' is not allowed here: name a tag or",
        ),
        (
            "base: {image: 'Team/a:1'}\n" + GOOD[28:],
            1,
            "base.image",
            "HOST/NAME:TAG or HOST/NAME@sha256:<64",
        ),
        ("base: {image: 'debian:12@sha256:00'}\n" + GOOD[28:], 1, "base.image", "not allowed"),
        (f"base: {{bootstrap: bookworm, image: 'debian@sha256:{DIGEST}'}}\n" + GOOD[28:], 1, "base", "give one of"),
    ],
)
def test_a_fault_names_file_line_and_field(project: Path, text: str, line: int, field: str, words: str) -> None:
    (fault,) = faults_of(project, text)
    assert (fault.file, fault.line, fault.field) == ("profiles/sample.yaml", line, field)
    assert words in fault.message


def test_a_torch_of_two_numbers_is_its_first_release(project: Path) -> None:
    assert profile_of(project, {**PROFILE, "torch": "2.13+cpu"}).profile.torch == "2.13.0+cpu"


def test_infinite_memory_is_refused(project: Path) -> None:
    assert faults_of(project, GOOD + "selftest: {memory_gb: .inf}\n")


WRONG_TWICE = """\
base: {bootstrap: bookworm}
python: 3.12
torch: 2.3.1
gpus: [h20]
packages: ["???"]
pins: {cudnnn: 8.9.2.26}
selftest:
  timeout: 0
  require: [gemm.exakt]
"""


def test_a_key_given_twice_and_a_tag_are_reported_with_the_rest(project: Path) -> None:
    text = WRONG_TWICE.replace("packages:", "env: !x {A: b}\npackages:").replace(
        "selftest:\n", "apt: []\napt: [x]\nselftest:\n"
    )
    faults = {fault.field: fault.message for fault in faults_of(project, text)}
    assert faults["apt"] == "given twice"
    assert faults["env"] == "tag !x is not supported"
    assert {"python", "torch", "packages[0]", "pins.cudnnn", "selftest.timeout"} <= set(faults)


def test_contradictions_are_reported_with_malformed_values(project: Path) -> None:
    faults = {fault.field: fault for fault in faults_of(project, WRONG_TWICE)}
    assert list(faults) == ["python", "torch", "packages[0]", "pins.cudnnn", "selftest.timeout", "selftest.require[0]"]
    assert "cublas-hopper-fpe" in faults["torch"].message
    assert faults["selftest.require[0]"].line == 9


@pytest.mark.parametrize(
    ("before", "after", "judged"),
    [
        ("gpus: [h20]", "gpu: [h20]", set()),  # the GPU is unknown
        ("gpus: [h20]", "cards: [h20]", set()),
        ("torch: 2.3.1", "torch: newest", set()),
        ("pins: {cudnnn: 8.9.2.26}", "pins: {cublas: new}", {"selftest.require[0]"}),  # it may be the fix
        ("pins: {cudnnn: 8.9.2.26}", "accept: [{advisory: cublas-hopper-fpe}]", {"selftest.require[0]"}),
        ("require: [gemm.exakt]", "require: [own.script]\n  script: nosuch.py", {"torch", "pins.cudnnn"}),
        ("base: {bootstrap: bookworm}", "base: {bootstrap: sid}", {"torch", "pins.cudnnn", "selftest.require[0]"}),
        ("bookworm}", "bookworm}\napt: [Less]", {"torch", "pins.cudnnn", "selftest.require[0]"}),
    ],
)
def test_values_that_depend_on_a_malformed_one_are_not_checked(
    project: Path, before: str, after: str, judged: set[str]
) -> None:
    found = {fault.field for fault in faults_of(project, WRONG_TWICE.replace(before, after))}
    assert (found & {"torch", "pins.cudnnn", "selftest.require[0]"}) - {before.partition(":")[0]} == judged


def test_all_faults_come_at_once_in_the_order_of_the_file(project: Path) -> None:
    text = "torhc: 1\nbase: {}\npython: 3.11\ntorch: new\napt: [Less]\nenv: {'1': x}\nselftest: {timeout: 0}\n"
    assert [fault.line for fault in faults_of(project, text)] == [1, 2, 3, 4, 5, 6, 7]


def test_the_shipped_profile_loads() -> None:
    loaded = profile_reader_and_overrides.load(str(package_data.PROFILES / "cpu.yaml"))
    assert loaded.name == "cpu"
    assert loaded.profile.base.bootstrap == "bookworm"


@pytest.mark.parametrize(
    ("name", "hint"),
    [("sampel", "did you mean sample?"), ("qqqqqqqq", "known profiles: "), ("../sample", None), ("Sample", "sample")],
)
def test_an_unknown_name_is_refused(project: Path, name: str, hint: str | None) -> None:
    write_profile(project, PROFILE)
    with pytest.raises(ProfileError, match=r"unknown profile|file not found") as caught:
        profile_reader_and_overrides.load(name)
    assert hint is None or hint in str(caught.value.hint)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "/",
        "a\n",
        "$(id)",
        "--help",
        "sample.lock",
        "sämple",
        "a" * 64,
        "a\0b",
        "a\0b.yaml",
        "no/such.yaml",
    ],
)
def test_an_odd_name_is_refused(project: Path, name: str) -> None:
    write_profile(project, PROFILE)
    with pytest.raises(ProfileError):
        profile_reader_and_overrides.load(name)


def test_a_path_too_long_for_the_file_system_is_refused(project: Path) -> None:
    with pytest.raises(ProfileError):
        profile_reader_and_overrides.load("a" * 300 + ".yaml")


@pytest.mark.parametrize("stem", ["Big", "a_b", "a b", "a.lock", "-a", "ä"])
def test_a_file_whose_name_cannot_name_an_image_is_refused(project: Path, stem: str) -> None:
    (project / f"{stem}.yaml").write_text(GOOD, encoding="utf-8")
    with pytest.raises(ProfileError, match="cannot be used in an image name"):
        profile_reader_and_overrides.load(f"{stem}.yaml")


def test_a_users_own_profile_comes_before_the_shipped_one(project: Path) -> None:
    write_profile(project, {**PROFILE, "description": "mine"}, "cpu")
    assert profile_reader_and_overrides.load("cpu").profile.description == "mine"
    assert profile_and_lock_name_lookup.profile_names().count("cpu") == 1


def test_results_are_next_to_the_profile(project: Path) -> None:
    loaded = profile_of(project, PROFILE)
    assert loaded.lock_file == project / "profiles" / "sample.lock.yaml"
    assert loaded.dockerfile == project / "dockerfiles" / "sample.Dockerfile"
    nested = write_profile(project, PROFILE)
    target = project / "profiles" / "projects" / "inner.yaml"
    target.parent.mkdir()
    nested.rename(target)
    inner = profile_reader_and_overrides.load("inner")
    assert inner.lock_file == target.with_name("inner.lock.yaml")
    assert inner.dockerfile == project / "dockerfiles" / "inner.Dockerfile"


@pytest.fixture
def installed(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of profiles of an envbuild that is installed elsewhere: one profile, with its lock."""
    root = project.parent / "site-packages" / "envbuild" / "shipped"
    monkeypatch.setattr(package_data, "ROOT", root)
    monkeypatch.setattr(package_data, "PROFILES", root / "profiles")
    write_profile(root, PROFILE, "ours")
    (root / "profiles" / "ours.lock.yaml").write_text("the lock\n", encoding="utf-8")
    return root / "profiles"


def test_a_shipped_profiles_results_lie_in_the_working_folder(project: Path, installed: Path) -> None:
    loaded = profile_reader_and_overrides.load("ours")
    assert loaded.file == installed / "ours.yaml"
    assert loaded.lock_file == project / "profiles" / "ours.lock.yaml"
    assert loaded.dockerfile == project / "dockerfiles" / "ours.Dockerfile"


def test_locks_are_found_without_a_profile_of_their_name(project: Path, installed: Path) -> None:
    for file in (installed / "ours-devel.lock.yaml", project / "profiles" / "ours.lock.yaml"):
        file.touch()
    assert profile_and_lock_name_lookup.locks() == {
        "ours": project / "profiles" / "ours.lock.yaml", "ours-devel": installed / "ours-devel.lock.yaml",
    }  # fmt: skip


def test_the_known_lock_is_the_projects_own_else_the_shipped_one(project: Path, installed: Path) -> None:
    loaded = profile_reader_and_overrides.load("ours")
    assert loaded.known_lock == installed / "ours.lock.yaml"
    loaded.lock_file.write_text("mine\n", encoding="utf-8")
    assert loaded.known_lock == loaded.lock_file


def test_the_shipped_lock_is_not_that_of_an_own_profile_of_the_same_name(project: Path, installed: Path) -> None:
    write_profile(project, PROFILE, "ours")
    assert profile_reader_and_overrides.load("ours").known_lock == project / "profiles" / "ours.lock.yaml"
    write_profile(project, {"extends": "ours"}, "mine")
    assert profile_reader_and_overrides.load("mine").known_lock == project / "profiles" / "mine.lock.yaml"


def test_a_name_with_devel_is_the_profiles_variant(project: Path) -> None:
    """The variant has its own lock and Dockerfile, and so its own tag and evidence, in every command."""
    file = write_profile(project, {**PROFILE, "torch": "2.11.0", "gpus": ["h200"]})
    runtime, devel = profile_reader_and_overrides.load("sample"), profile_reader_and_overrides.load("sample-devel")
    assert (runtime.profile.variant, devel.profile.variant) == ("runtime", "devel")
    assert (devel.name, devel.file) == ("sample-devel", file)
    assert devel.lock_file == devel.known_lock == project / "profiles" / "sample-devel.lock.yaml"
    assert devel.dockerfile == project / "dockerfiles" / "sample-devel.Dockerfile"
    assert devel.profile.model_copy(update={"variant": "runtime"}) == runtime.profile
    assert "sample-devel" not in profile_and_lock_name_lookup.profile_names()


def test_a_profile_of_that_name_comes_before_the_variant_of_another(project: Path) -> None:
    write_profile(project, PROFILE)
    write_profile(project, {**PROFILE, "description": "mine"}, "sample-devel")
    assert profile_reader_and_overrides.load("sample-devel").profile.description == "mine"
    assert profile_reader_and_overrides.load("sample-devel").profile.variant == "runtime"


@pytest.mark.parametrize(
    "name", ["nosuch-devel", "-devel", "devel", "sample-devel-devel", "sample-runtime", "../x-devel"]
)
def test_any_other_name_with_devel_is_unknown(project: Path, name: str) -> None:
    write_profile(project, PROFILE)
    with pytest.raises(ProfileError):
        profile_reader_and_overrides.load(name)


# extends


def test_the_other_kind_of_base_replaces_the_inherited_one(project: Path) -> None:
    image = f"registry.example/python@sha256:{DIGEST}"
    write_profile(project, {**PROFILE, "base": {"bootstrap": "bookworm"}}, "parent")
    write_profile(project, {"extends": "parent", "base": {"image": image}, "python": "3.12"}, "child")
    write_profile(project, {"extends": "child", "base": {"bootstrap": "trixie"}, "python": "3.13"}, "grandchild")
    assert profile_reader_and_overrides.load("child").profile.base == profile_model.Base(bootstrap=None, image=image)
    assert profile_reader_and_overrides.load("grandchild").profile.base.bootstrap == "trixie"


def test_a_child_changes_what_it_names_and_keeps_the_rest(project: Path) -> None:
    write_profile(project, PROFILE, "parent")
    write_profile(project, {"extends": "parent", "torch": "2.14.0", "env": {"MORE": "1"}}, "child")
    found = profile_reader_and_overrides.load("child").profile
    assert found.torch == "2.14.0"
    assert found.env == {"GREETING": "hello", "MORE": "1"}
    assert found.packages == ("numpy",)


def test_a_fault_in_a_parent_names_the_parents_file(project: Path) -> None:
    (project / "profiles" / "parent.yaml").write_text("# first\n" + GOOD.replace("'2.13.0'", "new"), encoding="utf-8")
    (project / "profiles" / "child.yaml").write_text("extends: parent\nenvv: {}\n", encoding="utf-8")
    with pytest.raises(ProfileError) as caught:
        profile_reader_and_overrides.load("child")
    places = {(fault.file, fault.line, fault.field) for fault in caught.value.faults}
    assert places == {("profiles/parent.yaml", 4, "torch"), ("profiles/child.yaml", 2, "envv")}


def test_a_child_may_name_its_parent_by_a_path_of_its_own_folder(project: Path) -> None:
    write_profile(project, PROFILE, "parent")
    write_profile(project, {"extends": "./parent.yaml"}, "child")
    assert profile_reader_and_overrides.load("child").profile.torch == "2.13.0+cpu"


@pytest.mark.parametrize("folder", ["", "profiles"])
def test_a_lock_is_next_to_its_profile_from_every_working_directory(project: Path, folder: str) -> None:
    other = project.parent / "other" / folder
    other.mkdir(parents=True)
    shutil.move(write_profile(project, PROFILE), other)
    for name in (f"../{other.relative_to(project.parent)}/sample.yaml", str(other / "sample.yaml")):
        assert profile_reader_and_overrides.load(name).lock_file == other / f"sample{profile_and_lock_name_lookup.LOCK}"


@pytest.mark.parametrize("links", [["a"], ["b", "a"], ["b", "c", "a"], ["b", "c", "b"]])
def test_a_circle_is_refused_at_its_place(project: Path, links: list[str]) -> None:
    for name, parent in zip("abc", links, strict=False):
        (project / "profiles" / f"{name}.yaml").write_text(f"# x\nextends: {parent}\n", encoding="utf-8")
    with pytest.raises(ProfileError, match="leads back to the same profile") as caught:
        profile_reader_and_overrides.load("a")
    assert caught.value.faults[0].line == 2


@pytest.mark.parametrize(
    "parent", ["nosuch", "nosuch.yaml", "", "sub/nosuch.yaml", "$(id)", "a\nb", "../../../etc/passwd"]
)
def test_a_missing_parent_is_refused_at_its_place(project: Path, parent: str) -> None:
    write_profile(project, {"description": "x", "extends": parent}, "child")
    with pytest.raises(ProfileError) as caught:
        profile_reader_and_overrides.load("child")
    (fault,) = caught.value.faults
    assert (fault.file, fault.line, fault.field) == ("profiles/child.yaml", 3, "extends")


@pytest.mark.parametrize("parent", [1, ["a"], {"a": 1}, True])
def test_a_parent_with_an_invalid_name_is_refused(project: Path, parent: object) -> None:
    write_profile(project, {"extends": parent}, "child")
    with pytest.raises(ProfileError, match="must name one profile"):
        profile_reader_and_overrides.load("child")


def test_a_long_chain_is_followed(project: Path) -> None:
    write_profile(project, PROFILE, "p0")
    for number in range(1, 50):
        write_profile(project, {"extends": f"p{number - 1}", "env": {f"V{number}": "x"}}, f"p{number}")
    assert len(profile_reader_and_overrides.load("p49").profile.env) == 50


# the schema


def shipped_documents() -> Iterator[dict[str, Any]]:
    for file in sorted(package_data.PROFILES.rglob("*.yaml")):
        if not file.stem.endswith(".lock"):
            yield yaml_and_project_paths.read(file).data


def conforms(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Check a value against the part of JSON Schema that the profile's schema uses; other keywords are an error of this
    test."""
    known = {
        "$ref", "$defs", "$schema", "title", "description", "default", "type", "properties", "required", "anyOf",
        "oneOf", "enum", "const", "pattern", "items", "additionalProperties", "propertyNames", "minimum", "maximum",
        "exclusiveMinimum", "maxLength", "minLength", "maxItems", "patternProperties",
    }  # fmt: skip
    assert set(schema) <= known, set(schema) - known
    kinds: dict[str, Any] = {
        "string": str,
        "object": dict,
        "array": list,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
    }
    if "$ref" in schema and not conforms(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root):
        return False
    if "anyOf" in schema and not any(conforms(value, option, root) for option in schema["anyOf"]):
        return False
    if "oneOf" in schema and sum(conforms(value, option, root) for option in schema["oneOf"]) != 1:
        return False
    kind = schema.get("type")
    if kind == "null":
        return value is None
    if kind and not isinstance(value, kinds[kind]):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, str):
        fits = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
        return fits and bool(re.search(schema.get("pattern", ""), value))
    if isinstance(value, list):
        return all(conforms(item, schema.get("items", {}), root) for item in value)
    if isinstance(value, dict):
        inner = schema.get("properties", {})
        rest = schema.get("additionalProperties", True)
        patterns = schema.get("patternProperties", {})
        others = [key for key in value if key not in inner and not any(re.search(p, key) for p in patterns)]
        if not set(schema.get("required", ())) <= set(value) or (rest is False and others):
            return False
        if not all(conforms(key, schema.get("propertyNames", {}), root) for key in value):
            return False
        for key, item in value.items():
            fitting = [option for pattern, option in patterns.items() if re.search(pattern, key)]
            options = fitting or [inner.get(key, rest if isinstance(rest, dict) else {})]
            if not all(conforms(item, option, root) for option in options):
                return False
        return True
    if isinstance(value, int | float) and not isinstance(value, bool):
        return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))
    return True


def test_the_schema_accepts_every_shipped_profile() -> None:
    schema = profile_model.schema()
    found = list(shipped_documents())
    assert found
    assert all(conforms(data, schema, schema) for data in found)


@pytest.mark.parametrize(
    "change",
    [
        {"torh": "1"},
        {"env": {"A B": "x"}},
        {"env": {"A": 1}},
        {"torch": 2.13},
        {"packages": "numpy"},
        {"apt": ["Less"]},
        {"base": {"bootstrap": "sid"}},
        {"base": {"bootstrap": "bookworm", "other": 1}},
        {"selftest": {"level": "hard"}},
        {"selftest": {"unknown": 1}},
        {"selftest": {"script": "/etc/passwd"}},
        {"selftest": {"script": {"text": "print()"}}},
        {"selftest": {"shapes": [{"m": 1, "k": 1, "n": 1}]}},
        {"selftest": {"shapes": [{"m": 1, "k": 1, "n": 1, "dtype": "int8"}]}},
        {"extends": 1},
        {"variant": "debug"},
        {"toolchain": "nvcc"},
        {"toolchain": {"url": "https://mirror.example/cuda.tar"}},
        {"toolchain": {"sha256": "a"}},
        {"driver": {"compat": {"sha256": "0" * 64, "url": "ftp://mirror.example/compat.tar"}}},
    ],
)
def test_the_schema_refuses_what_the_model_refuses(project: Path, change: dict[str, Any]) -> None:
    schema = profile_model.schema()
    data = {**copy.deepcopy(PROFILE), **change}
    assert conforms(PROFILE, schema, schema)
    assert not conforms(data, schema, schema)
    with pytest.raises(ProfileError):
        profile_of(project, data)


@pytest.mark.parametrize("toolchain", ["wheels", "base", {"sha256": "0" * 64}])
def test_the_schema_accepts_every_form_of_a_toolchain(project: Path, toolchain: object) -> None:
    schema = profile_model.schema()
    data = {**PROFILE, "toolchain": toolchain}
    assert conforms(data, schema, schema)
    assert profile_of(project, data).profile.toolchain is not None


def test_the_schema_wants_a_parent_or_all_that_is_required() -> None:
    schema = profile_model.schema()
    assert conforms({"extends": "cpu"}, schema, schema)
    assert not conforms({"torch": "1.0"}, schema, schema)


def test_the_schema_is_one_that_a_validator_takes() -> None:
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    validator.check_schema(profile_model.schema())
    for data in shipped_documents():
        validator(profile_model.schema()).validate(data)
    assert not validator(profile_model.schema()).is_valid({**PROFILE, "torh": "1"})
    for pin, valid in (("12.4.5.8", True), ({"version": "12.4.5.8"}, True), ({"reason": "faults"}, False)):
        assert validator(profile_model.schema()).is_valid({"extends": "h20", "pins": {"cublas": pin}}) == valid


def test_every_pattern_of_a_profile_has_words_for_who_wrote_something_else() -> None:
    def patterns(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from (found for key, found in value.items() if key == "pattern" and isinstance(found, str))
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from patterns(inner)

    script = project_test_shapes_and_script._PATH  # project_test_shapes_and_script.py checks paths itself
    assert {*patterns(profile_model.schema())} - {script} <= set(value_types.ALLOWED)


def test_the_schema_is_json() -> None:
    assert json.loads(json.dumps(profile_model.schema())) == profile_model.schema()


def test_the_committed_schema_is_the_models() -> None:
    """Editors read the file; `envbuild export schema -o profiles/profile.schema.json` writes it."""
    committed = json.loads((package_data.PROFILES / "profile.schema.json").read_text(encoding="utf-8"))
    assert committed == profile_model.schema()


@pytest.mark.parametrize(
    ("packages", "pins", "expected"),
    [
        (["numpy", "einops>=0.8"], {"numpy": "2.0"}, ["numpy==2.0", "einops>=0.8"]),
        (["Foo_Bar[x, y] >= 1; python_version > '3'"], {"foo-bar": "3"}, ["Foo_Bar[x,y]==3"]),
        (["numpy<2", "numpy>1"], {"NumPy": "1.5"}, ["numpy==1.5", "numpy==1.5"]),
    ],
)
def test_a_pin_may_be_of_a_package(
    project: Path, packages: list[str], pins: dict[str, str], expected: list[str]
) -> None:
    file = write_profile(project, {**PROFILE, "packages": packages})
    loaded = profile_reader_and_overrides.load(str(file), pins)
    assert list(loaded.profile.packages) == expected
    assert loaded.document.place(("packages", 0)).file == "--pin"
    assert not loaded.profile.pins


def test_a_pin_with_an_invalid_version_is_refused(project: Path) -> None:
    file = write_profile(project, PROFILE)
    with pytest.raises(ProfileError) as caught:
        profile_reader_and_overrides.load(str(file), {"numpy": "new"})
    assert [str(fault).partition(":")[0] for fault in caught.value.faults] == ["--pin"]


def requiring(folder: Path) -> Path:
    folder.mkdir(parents=True)
    file = folder / "requirements.txt"
    file.write_text("einops>=0.8\n", encoding="utf-8")
    return file


def test_the_lock_of_another_project_is_not_overwritten(project: Path) -> None:
    """Both folders would give the name sample-my-app."""
    write_profile(project, PROFILE)
    one, other = requiring(project.parent / "a" / "my_app"), requiring(project.parent / "b" / "my.app")
    loaded = profile_reader_and_overrides.load("sample", {}, one)
    lock_file.write(lock_for(plan_resolver.resolve(loaded)), loaded.lock_file, loaded.name, loaded.origin)
    assert profile_reader_and_overrides.load("sample", {}, one).name == loaded.name
    with pytest.raises(
        ProfileError, match=r"sample-my-app\.lock\.yaml is the lock of .*my_app/requirements\.txt, not of"
    ):
        profile_reader_and_overrides.load("sample", {}, other)
    loaded.lock_file.write_text("]", encoding="utf-8")
    assert profile_reader_and_overrides.load("sample", {}, other).name == loaded.name, "a damaged lock is locked again"


def test_long_names_of_folders_stay_apart(project: Path) -> None:
    write_profile(project, PROFILE)
    folders = [project.parent / ("x" * 80 + end) for end in "ab"]
    names = {profile_reader_and_overrides.load("sample", {}, requiring(folder)).name for folder in folders}
    assert len(names) == 2 and all(profile_and_lock_name_lookup.NAME.fullmatch(name) for name in names)


def test_a_missing_requirements_file_is_reported_as_such_though_a_lock_has_the_name(project: Path) -> None:
    write_profile(project, PROFILE)
    file = requiring(project.parent / "theirs")
    loaded = profile_reader_and_overrides.load("sample", {}, file)
    lock_file.write(lock_for(plan_resolver.resolve(loaded)), loaded.lock_file, loaded.name, loaded.origin)
    with pytest.raises(ProfileError, match=r"nosuch\.txt cannot be read: No such file"):
        profile_reader_and_overrides.load("sample", {}, file.with_name("nosuch.txt"))


@pytest.mark.parametrize("by_path", [True, False])
def test_with_requirements_a_profile_is_known_by_the_name_of_its_lock(
    project: Path, monkeypatch: pytest.MonkeyPatch, by_path: bool
) -> None:
    file = write_profile(project, PROFILE)
    theirs = project.parent / "Their_Code"
    theirs.mkdir()
    (theirs / "requirements.txt").write_text("einops>=0.8\n", encoding="utf-8")
    name = "profiles/sample.yaml" if by_path else "sample-devel"
    if not by_path:
        file.write_text(as_yaml({**PROFILE, "torch": "2.14.1", "gpus": ["b200"]}), encoding="utf-8")
    loaded = profile_reader_and_overrides.load(name, {}, theirs / "requirements.txt")
    assert loaded.name == ("sample-their-code" if by_path else "sample-devel-their-code")
    assert profile_and_lock_name_lookup.profile_names().count(loaded.name) == 0
    lock_file.write(lock_for(plan_resolver.resolve(loaded)), loaded.lock_file, loaded.name, loaded.origin)
    again = profile_reader_and_overrides.load(loaded.name)
    assert (again.name, again.profile, again.lock_file) == (loaded.name, loaded.profile, loaded.lock_file)
    assert (again.profile.packages[-1], again.origin) == ("einops>=0.8", loaded.origin)
    assert (
        loaded.name in profile_and_lock_name_lookup.profile_names()
        and loaded.name in profile_and_lock_name_lookup.own_names()
    )
    assert lock_file.current(lock_file.read(again.known_lock), plan_resolver.resolve(again), again.lock_file)


@pytest.mark.parametrize(
    ("of", "words"),
    [
        ({"profile": "other", "requirements": "../requirements.txt"}, "unknown profile 'other'"),
        ({"profile": "sample", "requirements": "../nosuch.txt"}, "nosuch.txt cannot be read"),
        ({"profile": "sample", "requirements": "/dev/zero"}, "zero leads out of the project's folder"),
        ({"profile": "sample"}, "unknown profile 'other'"),
        ("sample", "unknown profile 'other'"),
    ],
)
def test_a_lock_with_nonsense_about_itself_names_nothing(project: Path, of: object, words: str) -> None:
    write_profile(project, PROFILE)
    (project / "profiles" / "other.lock.yaml").write_text(as_yaml({"of": of}), encoding="utf-8")
    with pytest.raises(ProfileError, match=words):
        profile_reader_and_overrides.load("other")


def test_a_damaged_lock_hides_no_other_name(project: Path) -> None:
    write_profile(project, PROFILE)
    (project / "profiles" / "other.lock.yaml").write_text("a: [", encoding="utf-8")
    assert {"sample", "other"} <= set(profile_and_lock_name_lookup.profile_names())
    with pytest.raises(LockError):
        profile_reader_and_overrides.load("other")


def test_a_pin_of_a_requirement_of_the_command_line(project: Path) -> None:
    (project / "requirements.txt").write_text("einops>=0.8\n", encoding="utf-8")
    loaded = profile_reader_and_overrides.load(
        str(write_profile(project, PROFILE)), {"einops": "0.8.1"}, project / "requirements.txt"
    )
    assert loaded.profile.packages[-1] == "einops==0.8.1"
