"""Requirement files that include missing files or themselves: each is a fault with its line, and reading ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from envbuild.profile import requirements_reader
from envbuild.util.errors import ProfileError


def faults_of(file: Path, text: str) -> list[str]:
    file.write_text(text, encoding="utf-8")
    return list(map(str, requirements_reader.read(file, "3.11").faults))


@pytest.mark.parametrize(
    ("name", "words"),
    [("a\0b.txt", "embedded null byte"), ("circle.txt", "circle.txt cannot be read"), ("x" * 300, "cannot be read"),
     ("requirements.txt", "includes itself")],
)  # fmt: skip
def test_an_include_that_cannot_be_read_is_a_fault_of_its_line(project: Path, name: str, words: str) -> None:
    (project / "circle.txt").symlink_to("circle.txt")
    (fault,) = faults_of(project / "requirements.txt", f"numpy\n-r {name}\n")
    assert fault.startswith("requirements.txt:2: ")
    assert words in fault


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_byte_order_mark_says_how_a_file_is_encoded(project: Path, encoding: str) -> None:
    """`pip freeze > requirements.txt` in PowerShell writes UTF-16."""
    file = project / "requirements.txt"
    file.write_text("# für alle\r\nnumpy==2.4.6\r\n", encoding=encoding)
    ((line, place),) = requirements_reader.read(file, "3.11").lines
    assert (line, place.line) == ("numpy==2.4.6", 2)


@pytest.mark.parametrize("raw", [b"caf\xe9\n", b"\xff\xfea"])
def test_a_file_in_no_known_encoding_is_refused(project: Path, raw: bytes) -> None:
    (project / "requirements.txt").write_bytes(raw)
    with pytest.raises(ProfileError, match="cannot be read: invalid UTF-"):
        requirements_reader.read(project / "requirements.txt", "3.11")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nosuch.txt", "cannot be read: No such file"),
        ("poetry.lock", "poetry export"),
        ("Pipfile", "pipenv requirements > requirements.txt"),
        ("setup.cfg", "pip freeze > requirements.txt"),
    ],
)
def test_a_missing_file_or_one_of_another_tool_is_refused_with_what_is_accepted(
    project: Path, name: str, words: str
) -> None:
    if name != "nosuch.txt":
        (project / name).write_text("numpy\n", encoding="utf-8")
    with pytest.raises(ProfileError) as caught:
        requirements_reader.read(project / name, "3.11")
    assert words in f"{caught.value.message} {caught.value.hint}"
    assert "accepted: a requirements.txt (pip's format), pyproject.toml, uv.lock" in str(caught.value.hint)


def test_files_that_include_each_other_without_end_are_counted(project: Path) -> None:
    """Thirty small files, each of which includes the next file twice, would be read a billion times."""
    for number in range(30):
        (project / f"{number}.txt").write_text(f"-r {number + 1}.txt\n" * 2, encoding="utf-8")
    faults = faults_of(project / "30.txt", "numpy\n") + list(
        map(str, requirements_reader.read(project / "0.txt", "3.11").faults)
    )
    assert faults and all("more than 100 files are included" in fault for fault in faults)


@pytest.mark.parametrize("depth", [50, 100_000])
def test_a_deeply_nested_pyproject_is_refused(project: Path, depth: int) -> None:
    file = project / "pyproject.toml"
    file.write_text(f"a = {'[' * depth}", encoding="utf-8")
    with pytest.raises(ProfileError, match=r"not a usable pyproject\.toml"):
        requirements_reader.read(file, "3.11")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[project]\nname = "x"\ndynamic = ["dependencies"]\n', "pyproject.toml:3: dependencies are dynamic"),
        ('[tool.poetry.dependencies]\nnumpy = "*"\n', "write them to a requirements file (poetry export)"),
        ('[build-system]\nrequires = ["setuptools"]\n', "no table [project] with dependencies"),
        ('[project]\ndependencies = "numpy"\n', "pyproject.toml:2: project.dependencies is not a list of texts"),
        ("[project]\ndependencies = [1]\n", "project.dependencies is not a list of texts"),
    ],
    ids=["dynamic", "Poetry", "no project", "text", "number"],
)
def test_dependencies_that_are_named_in_another_way_are_a_fault(project: Path, text: str, words: str) -> None:
    (fault,) = faults_of(project / "pyproject.toml", text)
    assert words in fault


def test_a_project_without_dependencies_is_accepted(project: Path) -> None:
    assert faults_of(project / "pyproject.toml", '[project]\nname = "x"\n') == []


@pytest.mark.parametrize(
    ("name", "text"),
    [("pyproject.toml", "[project]\ndependencies = [" + '"numpy",' * 3000 + "]\n"), ("r.txt", "numpy\n" * 3000)],
)
def test_thousands_of_requirements_are_refused(project: Path, name: str, text: str) -> None:
    with pytest.raises(ProfileError, match="more than 2000 requirements"):
        faults_of(project / name, text)


def test_hashes_that_are_not_compared_are_reported(project: Path) -> None:
    file = project / "requirements.txt"
    file.write_text(f"numpy==2.4.6 --hash=sha256:{'0' * 64}\nidna\n", encoding="utf-8")
    found = requirements_reader.read(file, "3.11")
    assert [text for text, _ in found.lines] == ["numpy==2.4.6", "idna"]
    assert [note.partition(":")[0] for note in found.notes] == ["requirements.txt"]


def test_a_file_in_a_folder_includes_one_of_the_project(project: Path) -> None:
    (project / "reqs").mkdir()
    (project / "base.txt").write_text("numpy\n", encoding="utf-8")
    (project / "reqs" / "dev.txt").write_text("-r ../base.txt\n", encoding="utf-8")
    found = requirements_reader.read(Path("reqs/dev.txt"), "3.11")
    assert [text for text, _ in found.lines] == ["numpy"] and found.faults == []


def test_options_without_effect_on_a_lock_are_reported_and_ignored(project: Path) -> None:
    """Index URLs of a file are never used: otherwise the author of the file would choose where packages come from."""
    file = project / "requirements.txt"
    file.write_text(
        "--extra-index-url https://index.example/cu121\n-f https://index.example/links\n--pre\n"
        "torch==2.1.0 --index-url https://index.example/cu121\n--no-binary :all:\n"
        "alpha[fast]>=1 ; python_version >= '3.8'\n",
        encoding="utf-8",
    )
    found = requirements_reader.read(file, "3.11")
    assert [text for text, _ in found.lines] == ["torch==2.1.0", "alpha[fast]>=1 ; python_version >= '3.8'"]
    assert [note.split(":")[1] for note in found.notes] == ["1", "2", "3", "4", "5"] and found.faults == []
    assert not any("index.example" in note for note in found.notes)


def test_a_file_of_constraints_bounds_packages_and_requires_none(project: Path) -> None:
    (project / "constraints.txt").write_text("alpha<2\nbeta==1.0\n", encoding="utf-8")
    file = project / "requirements.txt"
    file.write_text("alpha\n-c constraints.txt\n", encoding="utf-8")
    found = requirements_reader.read(file, "3.11")
    assert [text for text, _ in found.lines] == ["alpha"]
    assert [(text, place.file, place.line) for text, place in found.constraints] == [
        ("alpha<2", "constraints.txt", 1),
        ("beta==1.0", "constraints.txt", 2),
    ]
    (project / "constraints.txt").write_text("beta @ https://a.example/b.whl\n", encoding="utf-8")
    assert "constraints.txt:1: a URL cannot be locked" in str(requirements_reader.read(file, "3.11").faults[0])


@pytest.mark.parametrize("line", ["-e .", ".", "-e ./tools[dev]", "--editable=../app"])
def test_folders_of_the_project_are_left_out_with_a_note(project: Path, line: str) -> None:
    (project / "requirements.txt").write_text(f"alpha\n{line}\n", encoding="utf-8")
    found = requirements_reader.read(project / "requirements.txt", "3.11")
    assert [text for text, _ in found.lines] == ["alpha"] and found.faults == []
    assert "requirements.txt:2: " in found.notes[0] and "child image" in found.notes[0]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("./wheels/x-1.0-py3-none-any.whl", "./wheels/x-1.0-py3-none-any.whl is a local file"),
        ("../x-1.0.tar.gz[fast]", "../x-1.0.tar.gz is a local file: put it into a folder of find-links"),
        ("-e ./apex", "NVIDIA's is built from source"),
        ("./apex-0.1-py3-none-any.whl", "NVIDIA's is built from source"),
    ],
)
def test_local_files_and_a_folder_of_apex_are_faults(project: Path, line: str, words: str) -> None:
    (fault,) = faults_of(project / "requirements.txt", f"alpha\n{line}\n")
    assert fault.startswith("requirements.txt:2: ") and words in fault


def test_a_local_file_for_another_platform_is_ignored(project: Path) -> None:
    assert faults_of(project / "requirements.txt", "./x-1.0-py3-none-any.whl ; sys_platform == 'win32'\n") == []


def test_addresses_for_another_platform_are_ignored_and_wheels_of_torch_count_as_their_version(project: Path) -> None:
    (project / "requirements.txt").write_text(
        "https://a.example/x-1.0-py3-none-any.whl; sys_platform == 'win32'\n"
        "https://a.example/cu124/torch-2.6.0%2Bcu124-cp311-cp311-linux_x86_64.whl\n"
        "https://a.example/y-1.0-py3-none-any.whl\n"
        f"https://a.example/{'9' * 5000}-{'9' * 5000}-py3-none-any.whl\n",
        encoding="utf-8",
    )
    found = requirements_reader.read(project / "requirements.txt", "3.11")
    assert [(text[:19], place.line) for text, place in found.lines] == [
        ("torch==2.6.0+cu124", 2),
        ("https://a.example/y", 3),
        ("https://a.example/9", 4),
    ]


@pytest.mark.parametrize(
    ("requires", "notes"),
    [
        (">=3.12", ["pyproject.toml:2: requires-python is ignored: the profile has Python 3.11"]),
        (">=3.11.4,<3.13", []),
        ("no version", []),
    ],
)
def test_a_project_for_another_python_is_noted(project: Path, requires: str, notes: list[str]) -> None:
    file = project / "pyproject.toml"
    file.write_text(f'[project]\nrequires-python = "{requires}"\ndependencies = ["numpy"]\n', encoding="utf-8")
    assert requirements_reader.read(Path(file.name), "3.11").notes == notes
