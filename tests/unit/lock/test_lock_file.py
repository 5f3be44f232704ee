from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from envbuild.fetch.locked_wheel_types import LockedWheel
from envbuild.lock import lock_file
from envbuild.lock.lock_entry_types import RecordedWheel
from envbuild.lock.lock_file import Lock
from envbuild.util import package_data, strict_and_canonical_json
from envbuild.util.errors import FileError, LockError, OutOfDate, ProfileError
from unit.support import PROFILE, deb, lock_for, plan_of, wheel

IMAGE = f"registry.example/debian@sha256:{'a' * 64}"


@pytest.fixture
def sample(project: Path) -> Lock:
    return lock_for(plan_of(project, PROFILE))


@pytest.fixture
def file(project: Path) -> Path:
    return project / "profiles" / "sample.lock.yaml"


def changed(sample: Lock, **changes: Any) -> Lock:
    return dataclasses.replace(sample, **changes)


def test_the_id_depends_on_content_alone(sample: Lock) -> None:
    assert changed(sample, made="20300101T000000Z").id == sample.id
    assert changed(sample, inputs={}).id == sample.id
    assert sample.id == f"sha256:{strict_and_canonical_json.canonical_digest(sample.content)}"
    assert sample.short == sample.id[7:19]


@pytest.mark.parametrize(
    "change",
    [
        {"python": "3.12"},
        {"platform": "linux/arm64"},
        {"suite": "trixie"},
        {"suite": None, "image": IMAGE},
        {"base": ()},
        {"apt": (deb("zip"),)},
        {"wheels": ()},
        {"environment": {"A": "1"}},
    ],
)
def test_every_part_of_the_content_changes_the_id(sample: Lock, change: dict[str, Any]) -> None:
    assert changed(sample, **change).id != sample.id


@pytest.mark.parametrize("field", ["name", "version", "file", "sha256", "bytes", "layer"])
def test_every_field_of_a_wheel_changes_the_id(sample: Lock, field: str) -> None:
    first, *rest = sample.wheels
    change: dict[str, Any] = {field: 5 if field == "bytes" else "x"}
    inner = field not in ("bytes", "layer")
    other = dataclasses.replace(first, **({"wheel": dataclasses.replace(first.wheel, **change)} if inner else change))
    assert changed(sample, wheels=(other, *rest)).id != sample.id


def test_the_canonical_digest_is_of_sorted_json() -> None:
    assert strict_and_canonical_json.canonical_digest({"b": 1, "a": "é"}) == strict_and_canonical_json.canonical_digest(
        {"a": "é", "b": 1}
    )
    assert strict_and_canonical_json.canonical_digest([1, 2]) != strict_and_canonical_json.canonical_digest([2, 1])


def test_a_written_lock_reads_back_the_same(sample: Lock, file: Path) -> None:
    lock_file.write(sample, file, "sample")
    assert lock_file.read(file) == sample


def test_a_lock_on_an_image_is_read_again(project: Path, file: Path) -> None:
    made = lock_for(plan_of(project, {**PROFILE, "base": {"image": IMAGE}, "apt": []}))
    lock_file.write(made, file, "sample")
    again = lock_file.read(file)
    assert again == made
    assert again is not None
    assert (again.image, again.suite) == (IMAGE, None)


VALUES = [
    "", " ", "  two  spaces  ", "a: b", "- a", "# no comment", "'single'", '"double"', "back\\slash", "end\\",
    "$H ${X}", "{a: 1}", "[1, 2]", "yes", "~", "1.0", "2024-01-01", "0x10", "<<EOF", "%", "@x", "`id`", "a, b",
    "é", "漢字", "&a *a !t",
    "x" * 1999, "word " * 399, "\u00a0", "\ufeff",
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES)
def test_any_one_line_value_survives_the_file(project: Path, file: Path, value: str) -> None:
    made = lock_for(plan_of(project, {**PROFILE, "env": {"A": value}}))
    lock_file.write(made, file, "sample")
    assert lock_file.read(file) == made


@pytest.mark.parametrize("value", ["\N{ROCKET}", "\u0080", "\u009b"])
def test_every_valid_profile_survives_a_round_trip_through_its_lock(project: Path, file: Path, value: str) -> None:
    try:
        made = lock_for(plan_of(project, {**PROFILE, "env": {"A": value}}))
    except ProfileError:
        return  # a refusal is also right
    lock_file.write(made, file, "sample")
    assert lock_file.read(file) == made


def test_a_long_value_that_looks_like_an_entry_survives_the_file(project: Path, file: Path) -> None:
    made = lock_for(plan_of(project, {**PROFILE, "env": {"A": "x" * 200 + " - name: evil"}}))
    lock_file.write(made, file, "sample")
    assert lock_file.read(file) == made


def test_an_entry_is_one_line(sample: Lock, file: Path) -> None:
    lock_file.write(sample, file, "sample")
    lines = file.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "# Made by `envbuild lock sample`; not to be edited."
    entries = [line for line in lines if line.lstrip().startswith("- ")]
    assert len(entries) == len(sample.base) + len(sample.apt) + len(sample.wheels)
    assert all(re.fullmatch(r" +- \{name: .*\}", entry) for entry in entries)


def test_a_moved_pin_is_a_one_line_difference_of_content(sample: Lock, file: Path, project: Path) -> None:
    last = sample.wheels[-1]
    moved = changed(sample, wheels=(*sample.wheels[:-1], LockedWheel(wheel("numpy", "9.9"), last.bytes, last.layer)))
    lock_file.write(sample, file, "sample")
    before = file.read_text(encoding="utf-8").splitlines()
    lock_file.write(moved, file, "sample")
    after = file.read_text(encoding="utf-8").splitlines()
    differing = [a for a, b in zip(after, before, strict=True) if a != b]
    assert [line.partition(":")[0].strip() for line in differing] == ["id", "- {name"]


def test_no_address_is_in_a_lock(sample: Lock, file: Path) -> None:
    lock_file.write(sample, file, "sample")
    assert "://" not in file.read_text(encoding="utf-8")


def test_a_missing_lock_is_none(file: Path) -> None:
    assert lock_file.read(file) is None


def test_comments_and_spacing_change_nothing(sample: Lock, file: Path) -> None:
    lock_file.write(sample, file, "sample")
    data = yaml.safe_load(file.read_text(encoding="utf-8"))
    file.write_text("# another comment\n" + yaml.safe_dump(data, sort_keys=True), encoding="utf-8")
    assert lock_file.read(file) == sample


def edited(sample: Lock, file: Path, old: str, new: str) -> LockError:
    lock_file.write(sample, file, "sample")
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(LockError) as caught:
        lock_file.read(file)
    return caught.value


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("name: numpy, version: '1.0'", "name: numpy, version: '1.1'"),
        ("layer: torch", "layer: packages"),
        ("bytes: 1000", "bytes: 1001"),
        ("GREETING: hello", "GREETING: bye"),
        ("python: '3.11'", "python: '3.13'"),
        ("bootstrap: bookworm", "bootstrap: trixie"),
        ("name: less", "name: more"),
    ],
)
def test_an_edited_lock_is_refused_at_its_id(sample: Lock, file: Path, old: str, new: str) -> None:
    error = edited(sample, file, old, new)
    assert [(f.file, f.line) for f in error.faults] == [("profiles/sample.lock.yaml", 4)]
    assert "edited by hand" in error.faults[0].message
    assert error.hint is not None
    assert "envbuild lock" in error.hint


def test_another_platform_is_refused_at_its_line(sample: Lock, file: Path) -> None:
    error = edited(sample, file, "platform: linux/amd64", "platform: linux/arm64")
    (line,) = [n for n, text in enumerate(file.read_text(encoding="utf-8").splitlines(), 1) if "platform:" in text]
    ((fault),) = error.faults
    assert (fault.file, fault.line, fault.field) == ("profiles/sample.lock.yaml", line, "content.platform")
    assert "linux/amd64" in fault.message


def test_a_base_is_packages_of_a_suite_or_an_image(sample: Lock, file: Path, project: Path) -> None:
    other = lock_for(plan_of(project, {**PROFILE, "base": {"image": IMAGE}, "apt": []}))
    for made, keys in ((sample, {"bootstrap", "packages"}), (other, {"image"})):
        lock_file.write(made, file, "sample")
        content: Any = made.content
        assert set(yaml.safe_load(file.read_text(encoding="utf-8"))["content"]["base"]) == keys == {*content["base"]}


@pytest.mark.parametrize("addition", [f"    image: {IMAGE}\n", "    image: ''\n"])
def test_a_lock_with_a_second_base_is_refused(sample: Lock, file: Path, addition: str) -> None:
    edited(sample, file, "    bootstrap: bookworm\n", "    bootstrap: bookworm\n" + addition)


def test_a_lock_on_an_image_with_packages_is_refused(project: Path, file: Path) -> None:
    made = lock_for(plan_of(project, {**PROFILE, "base": {"image": IMAGE}, "apt": []}))
    entry = f"{{name: x, version: '1', sha256: {'b' * 64}, bytes: 1, path: pool/x.deb}}"
    edited(made, file, f"    image: {IMAGE}\n", f"    image: {IMAGE}\n    packages: [{entry}]\n")


def test_a_lock_without_a_base_is_refused(sample: Lock, file: Path) -> None:
    lock_file.write(changed(sample, suite=None, image=None), file, "sample")
    with pytest.raises(LockError):
        lock_file.read(file)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("format: 1", "format: 2", "format 2, this envbuild reads 1"),
        ("format: 1", "format: '1'", "format 1"),
        ("format: 1", "format: [1]", "format"),
        ("format: 1\n", "", "damaged"),
        ("  apt:\n", "  ap:\n", "damaged"),
        ("bytes: 1000", "bytes: many", "damaged"),
        ("bytes: 1000", "bytes: 1e3", "damaged"),
        ("made: 2026", "made: x2026", "damaged"),
        ("id: sha256:", "id: md5:", "damaged"),
        ("content:", "content: 1\nother:", "damaged"),
        ("wheels:\n", "wheels: x\n  y:\n", "damaged"),
        ("inputs:", "inputs: []\nother:", "damaged"),
        ("  base: sha256:", "  base: sha512:", "damaged"),
        (
            "  base: sha256:",
            '  base: "\\N"\n  old: sha256:',
            "damaged",
        ),  # a line break to some readers: the written text differs
        ("format: 1", "format: 1\nextra: 1", "damaged"),
        ("format: 1", "format: [1", "not valid YAML"),
        ("format: 1", "format: &a 1\nb: *a", "alias"),
        ("format: 1", "format: !!python/object:os.system 1", "not a usable document"),
    ],
)
def test_a_damaged_lock_is_refused(sample: Lock, file: Path, old: str, new: str, words: str) -> None:
    error = edited(sample, file, old, new)
    assert words in error.message
    assert "sample.lock.yaml" in error.message


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"\0", b"{", b"a", b"format: 1\n", b"a: " + b"[" * 100])
def test_any_file_that_is_not_a_lock_is_refused(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(LockError):
        lock_file.read(file)


def test_a_lock_cut_anywhere_is_refused(sample: Lock, file: Path) -> None:
    lock_file.write(sample, file, "sample")
    whole = file.read_bytes()
    for length in range(0, len(whole) - 1, 97):
        file.write_bytes(whole[:length])
        with pytest.raises(LockError):
            lock_file.read(file)


def test_a_folder_in_its_place_is_refused(file: Path) -> None:
    file.mkdir()
    with pytest.raises(LockError):
        lock_file.read(file)


def test_the_shipped_lock_fits_the_shipped_profile() -> None:
    from envbuild.resolve import plan_resolver, profile_reader_and_overrides

    loaded = profile_reader_and_overrides.load(str(package_data.PROFILES / "cpu.yaml"))
    found = lock_file.read(package_data.PROFILES / "cpu.lock.yaml")
    assert found is not None
    assert found.stale(plan_resolver.resolve(loaded)) == []


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({}, []),
        ({"description": "other"}, []),
        ({"selftest": {"level": "full", "require": ["train.step"], "timeout": 5}}, []),
        ({"env": {"GREETING": "bye"}}, ["environment"]),
        ({"torch": "2.14.0"}, ["wheels"]),
        ({"packages": []}, ["wheels"]),
        ({"apt": []}, ["apt"]),
        ({"base": {"bootstrap": "trixie"}, "python": "3.13"}, ["base", "wheels"]),
        ({"base": {"image": IMAGE}, "apt": [], "env": {}}, ["base", "apt", "wheels", "environment"]),
    ],
)
def test_the_parts_whose_inputs_changed_are_stale(
    sample: Lock, project: Path, change: dict[str, Any], parts: list[str]
) -> None:
    assert sample.stale(plan_of(project, {**PROFILE, **change})) == parts


def test_a_lock_without_its_inputs_is_stale(sample: Lock, project: Path) -> None:
    assert changed(sample, inputs={}).stale(plan_of(project, PROFILE)) == ["base", "apt", "wheels", "environment"]


def test_under_locked_a_missing_or_stale_lock_is_out_of_date(sample: Lock, project: Path, file: Path) -> None:
    plan = plan_of(project, PROFILE)
    assert lock_file.current(sample, plan, file) is sample
    with pytest.raises(OutOfDate, match=r"profiles/sample\.lock\.yaml is missing"):
        lock_file.current(None, plan, file)
    other = plan_of(project, {**PROFILE, "torch": "9.0", "apt": []})
    with pytest.raises(OutOfDate, match="apt, wheels changed"):
        lock_file.current(sample, other, file)


# records of compiled wheels

RECORD = RecordedWheel("kernels", "a" * 64, "kernels-0.1-cp311-cp311-linux_x86_64.whl", "b" * 64, 38)


def test_records_of_wheels_are_not_part_of_the_id(sample: Lock, file: Path) -> None:
    lock_file.write(sample, file, "sample")
    before = file.read_text(encoding="utf-8")
    recorded = changed(sample, compiled=(RECORD,))
    assert recorded.id == sample.id
    lock_file.write(recorded, file, "sample")
    assert file.read_text(encoding="utf-8").startswith(before)
    assert lock_file.read(file) == recorded
    assert recorded.recorded_wheel("kernels", "a" * 64) == RECORD
    assert recorded.recorded_wheel("kernels", "c" * 64) is recorded.recorded_wheel("other", "a" * 64) is None


@pytest.mark.parametrize("where", ["at the end", "before the content", "missing", "empty", "without a newline"])
def test_only_the_records_of_a_lock_file_are_replaced(sample: Lock, file: Path, where: str) -> None:
    lock_file.write(sample, file, "sample")
    before = file.read_text(encoding="utf-8")
    old = "compiled:\n- {name: old, key: KEY, file: o.whl, sha256: KEY, bytes: 1}\n".replace("KEY", "d" * 64)
    text = {
        "at the end": f"{before}{old}",
        "before the content": before.replace("content:\n", f"{old.replace('- ', '  - ')}content:\n"),
        "missing": before,
        "empty": before.replace("content:\n", "compiled: []\ncontent:\n"),
        "without a newline": f"{before}{old}".rstrip("\n"),
    }[where]
    file.write_text(text, encoding="utf-8")
    file.chmod(0o640)
    lock_file.record_compiled(file, sample, [RECORD])
    after = file.read_text(encoding="utf-8")
    assert after.startswith(before) and after.count("compiled:") == 1
    assert lock_file.read(file) == changed(sample, compiled=(RECORD,))
    assert file.stat().st_mode & 0o777 == 0o640
    lock_file.record_compiled(file, sample, [])
    assert file.read_text(encoding="utf-8") == before


def test_a_lock_that_was_changed_meanwhile_gets_no_record(sample: Lock, file: Path) -> None:
    lock_file.write(changed(sample, python="3.12"), file, "sample")
    before = file.read_bytes()
    with pytest.raises(LockError, match="it was changed meanwhile"):
        lock_file.record_compiled(file, sample, [RECORD])
    assert file.read_bytes() == before


def test_a_lock_file_that_is_a_link_out_of_the_project_gets_no_record(sample: Lock, file: Path, tmp_path: Path) -> None:
    lock_file.write(sample, file, "sample")
    file.rename(tmp_path / "outside")
    file.symlink_to(tmp_path / "outside")
    before = (tmp_path / "outside").read_bytes()
    with pytest.raises(FileError):
        lock_file.record_compiled(file, sample, [RECORD])
    assert (tmp_path / "outside").read_bytes() == before


@pytest.mark.parametrize(
    "change",
    [{"file": "../k.whl"}, {"file": "k.zip"}, {"sha256": "b"}, {"key": "a"}, {"bytes": -1}, {"bytes": "1"},
     {"name": "a/b"}, {"more": 1}],
)  # fmt: skip
def test_an_invalid_record_is_refused(sample: Lock, file: Path, change: dict[str, Any]) -> None:
    lock_file.write(sample, file, "sample")
    row = {**vars(RECORD), **change}
    text = file.read_text(encoding="utf-8")
    file.write_text(text + yaml.safe_dump({"compiled": [row]}), encoding="utf-8")
    with pytest.raises(LockError):
        lock_file.read(file)


def test_two_records_of_one_extension_are_refused(sample: Lock, file: Path) -> None:
    lock_file.write(changed(sample, compiled=(RECORD, RECORD)), file, "sample")
    with pytest.raises(LockError, match="damaged") as caught:
        lock_file.read(file)
    assert "two wheels of one extension" in str(caught.value.faults[0])
