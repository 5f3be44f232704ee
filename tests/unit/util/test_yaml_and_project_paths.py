from __future__ import annotations

from pathlib import Path

import pytest

from envbuild.util import yaml_and_project_paths
from envbuild.util.errors import FactsError, Fault, ProfileError
from envbuild.util.yaml_and_project_paths import Document, Place

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(8)
)


def refused(text: str) -> ProfileError:
    with pytest.raises(ProfileError) as caught:
        yaml_and_project_paths.parse(text, "p.yaml")
    return caught.value


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (BOMB, 2, "alias"),
        ("a: 1\nb: &x {c: 1}\nd: {<<: *x}\n", 3, "alias"),
        ("a: 1\nb: 2\na: 3\n", 3, "given twice"),
        ("a:\n  b: 1\n  b: 2\n", 3, "given twice"),
        ("a: !!python/object/apply:os.system ['touch /tmp/x']\n", 1, "python/object"),
        ("b: 1\na: !!python/name:os.system\n", 2, "python/name"),
        ("a: !!binary aGVsbG8=\n", 1, "binary"),
        ("a: !!set {x, y}\n", 1, "set"),
        ("a: !custom x\n", 1, "!custom"),
        ("a: " + "[" * 40 + "]" * 40, 1, "deeper than"),
        ("a: 1\n? [x, y]\n: 2\n", 2, "plain word"),
        ("a: 1\n<<: {b: 2}\n", 2, "plain word"),
        ("a: [1, 2\nb: 3\n", 2, "the list [...] that begins in line 1 is not closed"),
        ("b: 1\na: 'open\n\n", 2, "the quote that begins here is not closed"),
        ("a: {x: 1\nb: 2\n", 2, "the mapping {...} that begins in line 1 is not closed"),
        ("a: 1\nb: c: d\n", 2, "quotes"),
        ("a:\n  b: 1\n c: 2\n", 3, "wrong indentation"),
        ("  a: 1\nb: 2\n", 2, "wrong indentation"),
        ("a: 1\n\tb: 2\n", 2, "a tab in the indentation: use spaces"),
        ("a: 1\nb: @x\n", 2, "quotes"),
        ('a: "C:\\q"\n', 1, "single quotes"),
        ("a: 1\n---\nb: 2\n", 2, "a second document"),
        ("a: 1\nb\n\n", 2, "`key: value`"),
        ("- a\nb: 1\n", 2, "`- `"),
        ("a: !!int 5\n", 1, "int is not supported"),
        ("a: !!map x\n", 1, "map is not supported"),
        ("!custom {a: 1}\n", 1, "!custom is not supported"),
        ("a: " + "9" * 5000, 1, "too many digits"),
        ("a: !x [*y]\n", 1, "alias"),
        ("? {a: *y}\n", 1, "alias"),
        ("*y: 1\n", 1, "alias"),
        ("*y\n", 1, "alias"),
        ("a: !x " + "[" * 40 + "]" * 40, 1, "deeper than"),
        ("\t a: 1\n", 1, ""),
    ],
)
def test_a_fault_names_file_and_line(text: str, line: int, words: str) -> None:
    error = refused(text)
    assert [(f.file, f.line) for f in error.faults] == [("p.yaml", line)]
    assert words in str(error.faults[0])


def test_a_text_may_have_the_tag_of_texts() -> None:
    assert yaml_and_project_paths.parse("a: !!str 5\n", "p.yaml").data == {"a": "5"}


@pytest.mark.parametrize("opening", ["[", "{a: ", "[{a: "])
def test_as_many_levels_as_the_limit_are_read(opening: str) -> None:
    levels = opening.count("[") + opening.count("{")
    closing = "".join({"[": "]", "{": "}"}[sign] for sign in reversed(opening) if sign in "[{")
    count = (yaml_and_project_paths.MAX_DEPTH - 1) // levels
    text = "a:\n  " + "- " * (yaml_and_project_paths.MAX_DEPTH - 1 - count * levels)
    assert yaml_and_project_paths.parse(f"{text}{opening * count}x{closing * count}", "p.yaml").data
    assert "nested too deeply" in refused(f"{text}[{opening * count}x{closing * count}]").message


def test_what_follows_a_value_that_is_left_out_keeps_its_line() -> None:
    found: list[Fault] = []
    text = "a: 1\na: {b: [1, 2]}\n? [c, {d: 1}]\n: [2]\ne: !x {f: [1]}\ng: 3\n"
    document = yaml_and_project_paths.parse(text, "p.yaml", faults=found)
    assert document.data == {"a": 1, "e": None, "g": 3}
    assert document.place(("g",)).line == 6
    assert [fault.line for fault in found] == [2, 3, 5]


@pytest.mark.parametrize("text", ["- a\n- b\n", "plain\n", "42\n", "null\n", "[{a: 1}]\n"])
def test_a_value_that_is_not_a_mapping_is_refused(text: str) -> None:
    assert "not a mapping" in refused(text).message


@pytest.mark.parametrize("text", ["", "\n", "# only a comment\n", "---\n"])
def test_an_empty_file_is_reported_as_empty(text: str) -> None:
    assert refused(text).message == "p.yaml is empty"
    assert yaml_and_project_paths.parse(text, "p.yaml", empty=True).data == {}


def test_fractions_are_decimal() -> None:
    found = yaml_and_project_paths.parse(f"a: 1.5\nb: -.5\nc: 1:30.5\nd: {'1:' * 300}1.0\n", "p.yaml").data
    assert (found["a"], found["b"], found["c"], type(found["d"])) == (1.5, -0.5, "1:30.5", str)


def test_whole_numbers_are_decimal() -> None:
    found = yaml_and_project_paths.parse("a: 12\nb: 0012\nc: 1:30:00\nd: -3\ne: 0x10\nf: 1_000\n", "p.yaml").data
    assert found == {"a": 12, "b": "0012", "c": "1:30:00", "d": -3, "e": "0x10", "f": "1_000"}


@pytest.mark.parametrize(
    "text", ["a: 1\n--- \nb: 2\n", "a: \x00\n", "a: \x07\n", "a: \ufffe\n", 'a: "\\ud800"\n', "\0"]
)
def test_anything_but_one_text_document_is_refused(text: str) -> None:
    assert "not valid YAML" in refused(text).message


def test_all_faults_of_a_document_come_at_once() -> None:
    error = refused("a: 1\na: 2\nb: !x 1\nc: !y 2\n")
    assert [fault.line for fault in error.faults] == [2, 3, 4]


def test_a_bomb_costs_nothing(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(BOMB, encoding="utf-8")
    with pytest.raises(ProfileError):
        yaml_and_project_paths.read(file)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a: \xff\xfe\n", "not UTF-8"),
        (b"a: caf\xe9\n", "not UTF-8"),
        (b"a: " + b"x" * yaml_and_project_paths.MAX_BYTES, "larger than"),
    ],
)
def test_a_file_that_cannot_be_text(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "p.yaml"
    file.write_bytes(content)
    with pytest.raises(ProfileError, match=words) as caught:
        yaml_and_project_paths.read(file)
    assert str(file) in caught.value.message


def test_the_largest_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_bytes(b"a: " + b"x" * (yaml_and_project_paths.MAX_BYTES - 3))
    assert len(yaml_and_project_paths.read(file).data["a"]) == yaml_and_project_paths.MAX_BYTES - 3


@pytest.mark.parametrize("make", ["nothing", "folder"])
def test_a_file_that_cannot_be_opened_raises_the_requested_error(tmp_path: Path, make: str) -> None:
    file = tmp_path / "p.yaml"
    if make == "folder":
        file.mkdir()
    with pytest.raises(FactsError, match="cannot be read"):
        yaml_and_project_paths.read(file, FactsError)


def test_values_are_plain_and_places_are_kept() -> None:
    doc = yaml_and_project_paths.parse("a: 1\nb:\n  c: [x, 'y']\n  d: 2024-01-02\ne: ~\nf: 1.5\ng: yes\n", "p.yaml")
    assert doc.data == {"a": 1, "b": {"c": ["x", "y"], "d": "2024-01-02"}, "e": None, "f": 1.5, "g": True}
    assert doc.place(("b", "c", 1)).line == 3
    assert doc.place(("b", "d")).line == 4
    assert doc.place(("b", "missing", "deeper")).line == 2
    assert doc.place(("missing",)).line == 1


def test_every_key_is_text() -> None:
    assert set(yaml_and_project_paths.parse("1: a\nyes: b\n~: c\n", "p.yaml").data) == {"1", "yes", "~"}


@pytest.mark.parametrize(
    ("path", "name"), [((), None), (("a",), "a"), (("a", "b"), "a.b"), (("a", 0, "b"), "a[0].b"), (("a", 1), "a[1]")]
)
def test_field_names(path: yaml_and_project_paths.Path, name: str | None) -> None:
    assert yaml_and_project_paths.field_name(path) == name


def parsed(text: str, name: str) -> Document:
    return yaml_and_project_paths.parse(text, name)


def test_merge_goes_key_by_key_and_places_follow_the_file_a_value_comes_from() -> None:
    parent = parsed("env:\n  A: '1'\n  B: '2'\npackages: [x, y]\ntorch: 1.0\n", "parent.yaml")
    child = parsed("# child\npackages:\n- z\nenv:\n  B: '3'\nnew: {k: v}\n", "child.yaml")
    merged = yaml_and_project_paths.merge(parent, child)
    assert merged.data == {
        "env": {"A": "1", "B": "3"}, "packages": ["z"], "torch": 1.0, "new": {"k": "v"}
    }  # fmt: skip
    assert merged.place(("env", "A")) == Place("parent.yaml", 2)
    assert merged.place(("env", "B")) == Place("child.yaml", 5)
    assert merged.place(("env",)) == Place("child.yaml", 4)
    assert merged.place(("packages", 0)) == Place("child.yaml", 3)
    assert merged.place(("torch",)) == Place("parent.yaml", 5)
    assert merged.place(("new", "k")) == Place("child.yaml", 6)


def test_merge_replaces_where_kinds_differ() -> None:
    merged = yaml_and_project_paths.merge(parsed("a: {b: 1}\nc: 1\n", "p"), parsed("a: 5\nc: {d: 1}\n", "c"))
    assert merged.data == {"a": 5, "c": {"d": 1}}


def test_a_path_is_shown_relative_to_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert yaml_and_project_paths.display(tmp_path / "profiles" / "a.yaml") == "profiles/a.yaml"
    assert yaml_and_project_paths.display(tmp_path.parent / "a.yaml") == str(tmp_path.parent / "a.yaml")


def test_removing_a_value_also_removes_its_list_or_mapping() -> None:
    doc = yaml_and_project_paths.parse("a: {b: 1, c: {d: 2}}\ne: [1, 2]\nf: 3\n", "p.yaml")
    assert yaml_and_project_paths.without(doc, [("a", "b"), ("e", 1), ("nosuch",)]).data == {
        "a": {"c": {"d": 2}},
        "f": 3,
    }
    assert yaml_and_project_paths.without(doc, [("a", "c", "missing"), ("e", 0, "x")]).data == {"a": {"b": 1}, "f": 3}
    assert doc.data["e"] == [1, 2]


@pytest.mark.parametrize(
    ("file", "home"),
    [
        ("/w/p/profiles/a.yaml", "/w/p"),
        ("/w/p/profiles/projects/a.yaml", "/w/p"),
        ("/w/p/a.yaml", "/w/p"),
        ("/w/projects/a.yaml", "/w/projects"),
        ("/w/projects/profiles/a.yaml", "/w/projects"),
        ("/w/projects/profiles/projects/a.yaml", "/w/projects"),
    ],
)
def test_a_folder_above_the_project_is_not_part_of_it(file: str, home: str) -> None:
    assert yaml_and_project_paths.home(Path(file)) == Path(home)
