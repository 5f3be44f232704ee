"""Additions of a profile to the self-test: checked when read, and not part of a lock."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from envbuild.profile import project_test_shapes_and_script
from envbuild.profile.model import SelfTest
from envbuild.profile.project_test_shapes_and_script import Attention, Script, Shape
from envbuild.resolve import profile_reader_and_overrides
from envbuild.util.errors import Fault, ProfileError
from unit.support import PROFILE, lock_for, plan_of, profile_of, write_profile

SHAPE = {"m": 2, "k": 1024, "n": 18432, "dtype": "bf16"}


def asking(**selftest: Any) -> dict[str, Any]:
    return {**PROFILE, "selftest": {"level": "quick", **selftest}}


def loaded(project: Path, **selftest: Any) -> SelfTest:
    return profile_of(project, asking(**selftest)).profile.selftest


def refused(project: Path, **selftest: Any) -> Fault:
    with pytest.raises(ProfileError) as caught:
        loaded(project, **selftest)
    (fault,) = caught.value.faults
    return fault


# shapes


def test_shapes_are_read(project: Path) -> None:
    found = loaded(project, shapes=[SHAPE, {**SHAPE, "bias": True}, {**SHAPE, "layout": "tn"}]).shapes
    assert found == (
        Shape(m=2, k=1024, n=18432, dtype="bf16"),
        Shape(m=2, k=1024, n=18432, dtype="bf16", bias=True),
        Shape(m=2, k=1024, n=18432, dtype="bf16", layout="tn"),
    )


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"m": 0}, ".m", "must be 1 or more"),
        ({"m": -1}, ".m", "must be 1 or more"),
        ({"m": 1 << 25}, ".m", "must be 16777216 or less"),
        ({"m": "2"}, ".m", "whole number"),
        ({"m": True}, ".m", "whole number"),
        ({"dtype": "fp8"}, ".dtype", "must be one of fp64, fp32, fp16, bf16, not 'fp8'"),
        ({"dtype": "bfloat16"}, ".dtype", "not 'bfloat16' (did you mean bf16?)"),
        ({"dtype": "torch.float16"}, ".dtype", "(did you mean fp16?)"),
        ({"dtype": "BF16"}, ".dtype", "(did you mean bf16?)"),
        ({"dtype": 16}, ".dtype", "must be one of fp64, fp32, fp16, bf16, not 16"),
        ({"dtype": "x" * 10**5}, ".dtype", "bf16, not 'xxx"),
        ({"layout": "xx"}, ".layout", "must be one of nn, nt, tn, tt, not 'xx'"),
        ({"bias": 1}, ".bias", "true or false"),
        ({"q": 1}, ".q", "unknown key (known: bias, dtype, k, layout, m, n)"),
        ({"bias": True, "layout": "nt"}, "", "remove layout or bias"),
        ({"m": 1 << 14, "n": 1 << 14}, "", "the product may have 67108864 elements"),
        ({"k": 1 << 20}, "", "a factor may have 1073741824 elements at most in bf16"),
        ({"k": 1 << 19, "dtype": "fp64"}, "", "a factor may have 536870912 elements at most in fp64"),
    ],
)
def test_a_shape_is_bounded(project: Path, change: dict[str, Any], field: str, words: str) -> None:
    fault = refused(project, shapes=[SHAPE, {**SHAPE, **change}])
    assert fault.field == f"selftest.shapes[1]{field}"
    assert words in fault.message
    assert len(fault.message) < 300


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (5, "must be a list"),
        ([5], "must be a mapping of keys to values"),
        ([[]], "must be a mapping of keys to values"),
        ([None], "must be a mapping of keys to values"),
        (["2x1024x18432"], "must be a mapping of keys to values"),
    ],
)
def test_an_invalid_shape_is_reported_in_plain_words(project: Path, shapes: Any, words: str) -> None:
    assert refused(project, shapes=shapes).message == words


@pytest.mark.parametrize("change", [{"m": 1 << 12, "n": 1 << 14}, {"m": 8, "k": 4096, "n": 128256}, {"k": 1}])
def test_values_of_real_models_are_within_the_bounds(project: Path, change: dict[str, Any]) -> None:
    assert loaded(project, shapes=[{**SHAPE, **change}])


ATTENTION = {"heads": 16, "length": 4096, "depth": 128, "dtype": "bf16"}


def test_attention_shapes_are_read_in_addition_to_products(project: Path) -> None:
    found = loaded(project, shapes=[SHAPE, ATTENTION, {**ATTENTION, "causal": True}]).shapes
    plain = Attention(heads=16, length=4096, depth=128, dtype="bf16")
    assert found == (Shape.model_validate(SHAPE), plain, plain.model_copy(update={"causal": True}))


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"heads": 0}, ".heads", "must be 1 or more"),
        ({"heads": "2"}, ".heads", "whole number"),
        ({"depth": 513}, ".depth", "must be 512 or less"),
        ({"dtype": "fp64"}, ".dtype", "must be one of fp32, fp16, bf16, not 'fp64'"),
        ({"causal": 1}, ".causal", "true or false"),
        ({"bias": True}, ".bias", "unknown key (known: causal, depth, dtype, heads, length)"),
        ({"heads": 17}, "", "heads x length x length may be 268435456 at most"),
        ({"depth": 129}, "", "heads x length x depth may be 8388608 at most"),
    ],
)
def test_an_attention_shape_is_bounded(project: Path, change: dict[str, Any], field: str, words: str) -> None:
    fault = refused(project, shapes=[SHAPE, {**ATTENTION, **change}])
    assert fault.field == f"selftest.shapes[1]{field}"
    assert words in fault.message


def test_a_missing_size_of_an_attention_shape_is_named(project: Path) -> None:
    lacking = {key: value for key, value in ATTENTION.items() if key != "heads"}
    assert refused(project, shapes=[lacking]).field == "selftest.shapes[0].heads"


def test_there_may_be_many_shapes_but_not_any_number(project: Path) -> None:
    assert (
        len(loaded(project, shapes=[SHAPE] * project_test_shapes_and_script.MOST_SHAPES).shapes)
        == project_test_shapes_and_script.MOST_SHAPES
    )
    fault = refused(project, shapes=[SHAPE] * (project_test_shapes_and_script.MOST_SHAPES + 1))
    assert (fault.field, fault.message) == ("selftest.shapes", "must have 200 entries at most")


# the script


def script(project: Path, path: str = "profiles/smoke.py", text: str = "print('hello')\n") -> Path:
    file = project / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("file", "path"),
    [
        ("profiles/smoke.py", "smoke.py"),
        ("profiles/tests/smoke.py", "tests/smoke.py"),
        ("scripts/smoke.py", "../scripts/smoke.py"),
        ("smoke-2.x.py", "../smoke-2.x.py"),
    ],
)
def test_a_script_is_read_from_the_folder_of_its_profile(project: Path, file: str, path: str) -> None:
    text = "# grüße\nstep('one')\n"
    script(project, file, text)
    found = loaded(project, script=path).script
    assert found == Script(path, text)
    assert found.name == file.rpartition("/")[2]
    assert found.sha256 == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("folder", ["profiles", "profiles/projects"])
def test_it_does_not_matter_where_envbuild_is_started(
    project: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    script(project, "scripts/smoke.py")
    write_profile(project, asking(script="../scripts/smoke.py"))
    (project / folder).mkdir(exist_ok=True)
    monkeypatch.chdir(project / folder)
    assert profile_reader_and_overrides.load(
        os.path.relpath(project / "profiles" / "sample.yaml")
    ).profile.selftest.script


def test_a_profile_without_a_script_has_no_script(project: Path) -> None:
    assert loaded(project).script is None
    assert loaded(project, script=None).script is None


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/etc/passwd", "not a path of a .py file"),
        ("/etc/passwd.py", "not a path of a .py file"),
        ("smoke.sh", "not a path of a .py file"),
        ("", "not a path of a .py file"),
        ("~/smoke.py", "not a path of a .py file"),
        ("a/../smoke.py", "not a path of a .py file"),
        (".hidden.py", "not a path of a .py file"),
        ("a b.py", "not a path of a .py file"),
        ("$(id).py", "not a path of a .py file"),
        ("smoke.py\n", "not a path of a .py file"),
        ("a" * 300 + ".py", "not a path of a .py file"),
        ("../../outside.py", "leads out of the project's folder"),
        ("link.py", "leads out of the project's folder"),
        ("../../../../../../../etc/x.py", "leads out of the project's folder"),
        ("absent.py", "file not found: profiles/absent.py"),
        ("folder.py", "file not found: profiles/folder.py"),
        ("large.py", "larger than 262144 bytes"),
        ("latin.py", "is not UTF-8"),
        ("loop.py", ""),
    ],
)
def test_a_script_that_cannot_be_taken_is_a_fault_at_its_place(project: Path, path: str, words: str) -> None:
    script(project, "../outside.py")
    script(project, text="print()")
    folder = project / "profiles"
    (folder / "link.py").symlink_to(project / ".." / "outside.py")
    (folder / "loop.py").symlink_to(folder / "loop.py")
    (folder / "folder.py").mkdir()
    (folder / "large.py").write_bytes(b"#" * (project_test_shapes_and_script.MOST_BYTES + 1))
    (folder / "latin.py").write_bytes(b"\xe9")
    fault = refused(project, script=path)
    assert (fault.file, fault.field) == ("profiles/sample.yaml", "selftest.script")
    assert words in fault.message


@pytest.mark.parametrize("value", [5, True, ["smoke.py"], {"path": "smoke.py", "text": "print()"}])
def test_a_profile_cannot_give_the_source_itself(project: Path, value: object) -> None:
    script(project)
    assert refused(project, script=value).message == "must be a path"


def _wrong(project: Path, text: str, **profile: Any) -> list[str]:
    (project / "smoke.py").write_bytes(text.encode())
    try:
        profile_of(project, {**asking(script="../smoke.py"), **profile})
    except ProfileError as error:
        return [str(fault) for fault in error.faults]
    return []


def test_a_script_with_a_syntax_error_is_found_before_anything_is_built(project: Path) -> None:
    assert _wrong(project, "one = 1\nreturn one\n") == ["smoke.py:2: invalid Python: 'return' outside function"]
    assert _wrong(project, "def f(:\n")[0].startswith("smoke.py:1: invalid Python: ")
    assert len(_wrong(project, "a = 1\0")) == 1
    for deep in ("-" * 100_000 + "1", "x" + "+x" * 60_000, "(" * 1000):
        assert len(_wrong(project, deep)) == 1


def test_a_script_is_judged_by_the_python_of_its_profile(project: Path) -> None:
    newer = "match 1:\n    case 1: pass\n"
    assert _wrong(project, newer, python="3.11") == []
    assert "only supported in Python 3.10" in _wrong(project, newer, python="3.9", base={"bootstrap": "bullseye"})[0]
    future = f"3.{sys.version_info.minor + 1}"
    assert list(project_test_shapes_and_script.syntax("not ours to judge (", "smoke.py", future)) == []


def test_the_largest_script_is_taken(project: Path) -> None:
    script(project, text="#" * project_test_shapes_and_script.MOST_BYTES)
    assert loaded(project, script="smoke.py").script


def test_the_scripts_fault_comes_with_all_others(project: Path) -> None:
    write_profile(project, {**asking(script="absent.py", levle="quick"), "torch": 2.13})
    with pytest.raises(ProfileError) as caught:
        profile_reader_and_overrides.load("sample")
    assert [fault.field for fault in caught.value.faults] == ["torch", "selftest.script", "selftest.levle"]


def test_an_inherited_script_is_in_the_folder_of_the_profile_that_names_it(project: Path) -> None:
    script(project, "base/profiles/smoke.py", "parent")
    write_profile(project / "base", asking(script="smoke.py"), "parent")
    write_profile(project, {"extends": "../base/profiles/parent.yaml"}, "child")
    found = profile_reader_and_overrides.load("child").profile.selftest.script
    assert found
    assert found.text == "parent"


def test_added_shapes_and_scripts_are_not_part_of_the_lock(project: Path) -> None:
    plain = plan_of(project, asking())
    script(project)
    added = plan_of(project, asking(script="smoke.py", shapes=[SHAPE]))
    assert plain.inputs == added.inputs
    assert lock_for(plain).id == lock_for(added).id
    assert lock_for(plain).stale(added) == []


def test_requiring_the_script_needs_one(project: Path) -> None:
    script(project)
    assert plan_of(project, asking(script="smoke.py", require=["own.script"]))
    with pytest.raises(ProfileError) as caught:
        plan_of(project, asking(require=["own.script"]))
    (fault,) = caught.value.faults
    assert fault.field == "selftest.require[0]"
    assert "needs selftest.script" in fault.message
