"""setup.py and shell scripts as requirements: literals count, and everything else is a fault with its line."""

from __future__ import annotations

import contextlib
import time
import warnings
from pathlib import Path

import pytest

from envbuild.profile import requirements_reader, setup_and_shell_script_readers
from envbuild.profile.requirements_reader import Requirements
from envbuild.util.errors import ProfileError

SETUP = """import os
from setuptools import find_packages, setup

setup(
    name="app",
    packages=find_packages(),
    install_requires=[
        "alpha==1.0",
        "beta[fast]>=2 ; python_version > '3'",  # a comment
        "",
    ],
    extras_require={"dev": ["gamma"]},
    version=os.environ["VERSION"],
)
"""
NAMED = """import setuptools
REQUIRED = ["alpha", "beta>=2"]
if __name__ == "__main__":
    setuptools.setup(install_requires=REQUIRED, tests_require=REQUIRED)
"""
SCRIPT = """#!/bin/bash
set -e
conda install -y -c conda-forge ffmpeg numpy=1.26
sudo apt-get install -y libsndfile1
pip install -U alpha "beta>=2; python_version > '3'" \\
    torch==2.1.0 --index-url https://index.example/cu121   # why
python3.10 -m pip install --no-cache-dir -q gamma==1.0 && cd app
uv pip install -r more.txt -e . > log.txt 2>&1
# pip install commented
cat > other.sh <<'END'
pip install inner
END
git clone https://git.example/x
make -C x
pip uninstall -y old
"""


def read(project: Path, name: str, text: str) -> Requirements:
    (project / name).write_text(text, encoding="utf-8")
    return requirements_reader.read(project / name, "3.11")


def texts(found: Requirements) -> list[tuple[str, int]]:
    return [(text, place.line) for text, place in found.lines]


def test_the_list_in_a_setup_py_counts_without_running_the_file(project: Path) -> None:
    found = read(project, "setup.py", SETUP)
    assert texts(found) == [("alpha==1.0", 8), ("beta[fast]>=2 ; python_version > '3'", 9)]
    assert (found.faults, found.notes) == ([], [])


@pytest.mark.parametrize(
    "text",
    [
        NAMED,
        NAMED.replace("REQUIRED =", "REQUIRED: list[str] ="),
        NAMED.replace('["alpha", "beta>=2"]', '("alpha", "beta>=2")'),
    ],
)
def test_a_name_stands_for_the_only_list_that_is_assigned_to_it(project: Path, text: str) -> None:
    assert texts(read(project, "setup.py", text)) == [("alpha", 2), ("beta>=2", 2)]


def test_a_text_gives_a_requirement_on_each_line(project: Path) -> None:
    found = read(project, "setup.py", 'setup(install_requires="""\nalpha\n# why\nbeta>=2 # why\n""")\n')
    assert [text for text, _ in texts(found)] == ["alpha", "beta>=2"]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("setup(\n  install_requires=read('requirements.txt'))\n", 2, "computed when the file runs"),
        ("setup(install_requires=['a'] + extra)\n", 1, "computed when the file runs"),
        ("setup(install_requires=[\n  'a',\n  name,\n])\n", 3, "this element is not a text"),
        ("setup(install_requires=[f'a=={v}'])\n", 1, "this element is not a text"),
        ("r = read()\nsetup(install_requires=r)\n", 1, "computed when the file runs"),
        ("setup(install_requires=r)\n", 1, "0 assignments give the list its value"),
        ("r = ['a']\nif x:\n  r = ['b']\nsetup(install_requires=r)\n", 4, "2 assignments give the list its value"),
        ("r = ['a']\nr.append('b')\nsetup(install_requires=r)\n", 3, "line 2 may change the list"),
        ("r = ['a']\nr += ['b']\nsetup(install_requires=r)\n", 3, "line 2 may change the list"),
        ("r = ['a']\nadd(r)\nsetup(install_requires=r)\n", 3, "line 2 may change the list"),
        ("r = ['a']\nfrom x import r\nsetup(install_requires=r)\n", 3, "line 2 may change the list"),
        ("r = ['a']\ndef f(r):\n  setup(install_requires=r)\n", 3, "line 2 may change the list"),
        ("r = ['a']\nsetup(x=r.pop(), install_requires=r)\n", 2, "line 2 may change the list"),
        ("if x:\n  setup(install_requires=['a'])\nelse:\n  setup(install_requires=['b'])\n", 4, "more than one list"),
        ("\nsetup(name='x')\n", 2, "setup() is not called with it: name the file that lists the dependencies"),
        ("\nsetup(**options)\n", 2, "setup() is not called with it"),
        ("x = 1\n", 1, "setup() is not called with it"),
    ],
)
def test_a_list_that_is_not_a_literal_is_a_fault_with_its_line(project: Path, text: str, line: int, words: str) -> None:
    found = read(project, "setup.py", text)
    (fault,) = found.faults
    assert fault.line == line and words in fault.message and fault.message.startswith("install_requires: ")
    assert not any(text == "b" for text, _ in found.lines)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("print 'x'\n", "setup.py is not valid Python 3 in line 1"),
        ("x = 'a\0b'\n", "setup.py is not valid Python 3"),
        ("x = " + "-" * 100_000 + "1\n", "setup.py is nested too deeply"),
        ("x = " + "(" * 100_000, "setup.py is not valid Python 3 in line 1"),
        ("#" * 300_000, "setup.py is larger than 200000 bytes"),
    ],
    ids=["Python 2", "NUL", "signs", "brackets", "size"],
)
def test_a_setup_py_that_cannot_be_read_is_refused(project: Path, text: str, words: str) -> None:
    with pytest.raises(ProfileError) as caught:
        read(project, "setup.py", text)
    assert words in caught.value.message


def test_warnings_of_python_about_a_setup_py_are_not_shown(project: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert texts(read(project, "setup.py", "x = '\\d'\nsetup(install_requires=['alpha'])\n")) == [("alpha", 2)]


def test_the_packages_that_a_shell_script_installs_count_with_their_lines(project: Path) -> None:
    (project / "more.txt").write_text("delta\n", encoding="utf-8")
    found = read(project, "env.sh", SCRIPT)
    assert found.faults == []
    assert [(text, place.file, place.line) for text, place in found.lines] == [
        ("numpy==1.26.*", "env.sh", 3),
        ("alpha", "env.sh", 5),
        ("beta>=2; python_version > '3'", "env.sh", 5),
        ("torch==2.1.0", "env.sh", 5),
        ("gamma==1.0", "env.sh", 7),
        ("delta", "more.txt", 1),
    ]
    assert not any("index.example" in note for note in found.notes)
    notes = "\n".join(found.notes)
    for words in (
        "env.sh:3: ffmpeg is left out: not a package for pip; if you need it, name its Debian package under apt",
        "env.sh:4: libsndfile1 is left out: not a package for pip; if you need it, name its Debian package under apt",
        "env.sh:5: option -U is left out: it changes no version",
        "env.sh:5: option --index-url is ignored: indexes are those that pip or uv is configured with",
        "env.sh:7: option --no-cache-dir is ignored: it changes no version",
        "env.sh:8: . is left out: it is a folder of the project",
        "env.sh:10: this command (and lines 13, 14) is left out: only pip, conda and apt commands are read",
        "env.sh:15: pip uninstall is left out",
    ):
        assert words in notes


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("pip install git+https://git.example/x", None),
        ("pip install alpha $EXTRA", "$EXTRA: it contains a variable or command of the shell"),
        ('pip install "alpha==${VERSION}"', "alpha==${VERSION}: it contains a variable"),
        ("pip install -r $(cat files)", "it contains a variable"),
        ("$PIP install alpha", "this command: it contains a variable"),
        ("if true; then pip install alpha; fi", "this command: it depends on a condition"),
        ("for x in a b; do pip install alpha; done", "this command: it depends on a condition"),
        ("[ -f x ] && pip install alpha", "this command: it depends on a condition"),
        ("pip install alpha || pip install beta", "this command: it depends on a condition"),
        ("setup() { pip install alpha; }", "this command: it depends on a condition"),
        ("function setup { pip install alpha; }", "this command: it depends on a condition"),
        ("pip install alpha --target /opt/x", "option --target is not supported in this file"),
        ("pip install 'alpha", "this line: a quote or backslash without its end"),
        ("conda env create -f environment.yml", "conda env: name the environment.yml instead"),
        ("conda install --file packages.txt", "option --file: not read from this file"),
        ("pip install apex", None),
    ],
)
def test_what_a_script_computes_is_a_fault_with_its_line(project: Path, line: str, words: str | None) -> None:
    found = read(project, "env.sh", f"set -e\npip install alpha\n{line}\n")
    if words is None:  # judged with the packages of the profile
        assert [place.line for _, place in found.lines] == [2, 3]
        return
    (fault,) = found.faults
    assert fault.line == 3 and words in fault.message


def test_conditions_end_and_notes_need_no_condition(project: Path) -> None:
    text = "if true; then\n  apt-get install git\nfi\nfoo() {\n  echo x\n}\nwhich pip || exit 1\npip install alpha\n"
    found = read(project, "env.sh", text)
    assert (found.faults, texts(found)) == ([], [("alpha", 8)])


@pytest.mark.parametrize("text", ["", "echo pip install x\n", "# pip install x\n", "pip --version\n"])
def test_a_script_that_installs_nothing_is_refused(project: Path, text: str) -> None:
    with pytest.raises(ProfileError, match=r"env\.sh has no line with pip install or conda install"):
        read(project, "env.sh", text)


@pytest.mark.parametrize(
    "text",
    ["<<A " * 20_000 + "\n" * 100, "'\"\n" * 40_000, '"\\"\n' * 40_000, "pip install " + "$a " * 60_000, "if " * 60_000,
     "a|" * 90_000, ">" * 190_000, "\\\n" * 90_000],
    ids=["here", "quotes", "escapes", "variables", "conditions", "pipes", "redirections", "continued"],
)  # fmt: skip
def test_a_hostile_script_is_read_in_bounded_time(text: str) -> None:
    start = time.process_time()
    with contextlib.suppress(ProfileError):
        list(setup_and_shell_script_readers.shell_entries(text, "env.sh"))
    assert time.process_time() - start < 20


def test_a_script_is_refused_by_its_size(project: Path) -> None:
    with pytest.raises(ProfileError, match="larger than 200000 bytes"):
        read(project, "env.sh", "pip install a\n" * 20_000)
