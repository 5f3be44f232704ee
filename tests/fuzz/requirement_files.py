"""Targets: requirement files as they are read, the lock files of uv and pip, conda's environments, and index pages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from hypothesis import strategies as st
from unit.profile.test_environment_and_lock_file_readers import CONDA, PYLOCK, UV

from envbuild.fetch import index_pages
from envbuild.profile import requirements_reader
from envbuild.util.errors import EnvbuildError, printable
from fuzz.strategies import BYTES, ENCODED, YAML, files, json_files, yaml_files
from fuzz.target import Target

_SECRET = b"Sesame42"
"""Part of every name in the seeds, and not of any message of envbuild."""
_TOML = (
    b"[[package]]\n",
    b"[[packages]]\n",
    b"[package]\n",
    b"[package.optional-dependencies]\nfast = [1]\n",
    b"[" * 5000,
    b"{a=" * 500,
    b"a." * 2000 + b"b = 1\n",
    b"'''",
    b'"""',
    b"= 1\n",
    b"= []\n",
    b"= {}\n",
    b'= "."\n',
    b"1979-05-27",
    b"1e999",
    b"\\ud800",
    b"dependencies = [1, {}, {name = 1}]\n",
    b'source = { virtual = "." }\n',
    b"source = { editable = 1 }\n",
    b'requires-python = ">=9"\n',
    b"requires-python = 1\n",
    b"marker = \"extras == 'x'\"\n",
    b"marker = \"'x' in dependency_groups\"\n",
    b'marker = "' + b"(" * 300 + b'"\n',
    b"marker = \"python_version < '3' and " * 9,
    b"marker = 1\n",
    b"vcs = {}\n",
)
_CONDA = (
    b"\n  - pip:\n      - -r other.txt\n",
    b"\n  - pip: null\n",
    b"\n  - pip: x\n",
    b"\n  - pip: [1, null, {}]\n",
    b"\n  - [a]\n",
    b"\n  - {pip: [x], b: c}\n",
    b"\n  - 1.5\n",
    b"\n  - null\n",
    b"\n  - a::b::c\n",
    b"\n  - numpy[version='>=1,<2', build=x]\n",
    b"\n  - numpy[" + b"version=" * 200,
    b"\n  - numpy =1.2\n",
    b"\n  - numpy 1.2.* py_0\n",
    b"\n  - numpy==1=2=3\n",
    b"\n  - numpy " + b" " * 3000 + b"x\n",
    b"\n  - " + b"a-" * 3000 + b"\n",
    b"dependencies: []\n",
)
_LINES = (
    b"-r other.txt\n",
    b"-c other.txt\n",
    b"-r self.txt\n",
    b"-r ../out.txt\n",
    b"-r \0\n",
    b"-r " + b"x/" * 2000,
    b"-c " + b"x" * 300,
    b"-e .\n",
    b"-e ./a[b] ; python_version < '3'\n",
    b"./a.whl ; sys_platform == 'win32'\n",
    b"../a.tar.gz\n",
    b"-\n",
    b"--\n",
    b"-i\n",
    b"--index-url http://[x\n",
    b" --extra-index-url x\n",
    b"numpy>=2 \\\n  --hash=sha256:00\n",
    b"torch @ https://x/torch-2.6.0-cp311-cp311-linux_x86_64.whl#sha256=0\n",
    b"torch @ https://x/torch-x-y.whl\n",
    b"https://x/torch-" + b"9" * 5000 + b"-py3-none-any.whl\n",
    b"https://x/torch-2.6.0%2Bcu124-cp311-cp311-linux_x86_64.whl ; os_name == 'nt'\n",
    b"http://[x/torch.whl\n",
    b"git+https://x/y@z#egg=w\n",
    b"a;" + b"(" * 250,
    b"a; " + b"'x' in '" * 20,
    b"===x",
    b"#",
    b"\\\n" * 500,
    b"-r other.txt\n" * 150,
    b"\x0c",
    b"\x1c",
    b"\xff\xfea\0\n\0",
    b"\xef\xbb\xbf",
)
_TXT = [
    b"Sesame42-a>=2\nSesame42-b==0.8.0 --hash=sha256:00\n# why\n-r other.txt\n-c other.txt\n"
    b"Sesame42 ; python_version > '3.8'\n"
]
_PYPROJECT = [b'[project]\nname = "Sesame42"\ndependencies = ["Sesame42-a>=2", "Sesame42-b; python_version>\'3\'"]\n']


_MARKERS = (
    "sys_platform == 'win32'",
    "extras == 'x'",
    "'x' in extras",
    "'dev' in dependency_groups",
    "extra == 'x'",
    "python_full_version < '3.x'",
    "platform_version > '1.a.b'",
    "python_version in '3.9 3.11'",
    "implementation_version === '1'",
    "(" * 300,
    "nosuch == '1'",
    "",
)
_ENVIRONMENT = {
    "name": "app",
    "dependencies": [
        "python=3.10",
        "conda-forge::Sesame42numpy=1.26.4=py310_0",
        "Sesame42scipy[version='>=1,<2', build=py_0]",
        "pandas>=2,<3",
        "ffmpeg",
        {"pip": ["Sesame42alpha==3.1", "-r other.txt", "-e git+https://git.example/taming#egg=taming"]},
    ],
}


_SETUP = [
    b"from setuptools import setup\n"
    b"REQ = ['Sesame42-a>=2', \"Sesame42-b; python_version>'3'\"]\nsetup(install_requires=REQ)\n",
    b"import setuptools\nsetuptools.setup(\n    install_requires=[\n        'Sesame42-a',  # why\n    ],\n)\n",
]
_PYTHON = (
    b"(" * 300,
    b"not " * 2000,
    b"a" + b".a" * 3000,
    b"-" * 5000,
    b"lambda: " * 100,
    b"f'{" * 20,
    b"'" * 3,
    b"setup(install_requires=[1])\n",
    b"setup(install_requires=" + b"'" * 3 + b"a\nb # c\n" + b"'" * 3 + b")\n",
    b"setup(**{})\n",
    b"REQ.append('x')\n",
    b"REQ: list = []\n",
    b"for REQ in []: pass\n",
    b"import x as REQ\n",
    b"print 'x'\n",
    b"'\\d'\n",
    b"# coding: utf-7\n",
)
_SHELL_SEED = [
    b"set -e\nconda install -c conda-forge ffmpeg Sesame42numpy=1.2\nsudo apt-get install -y git\n"
    b"python3 -m pip install -U 'Sesame42-a>=2' \\\n  Sesame42-b --index-url https://x.example # why\n"
    b"if true; then pip install Sesame42c; fi\npip install -r other.txt -e . && git clone x\n"
]
_SHELL = (
    b"'",
    b'"',
    b"`",
    b"$(",
    b"${x}",
    b"\\\n",
    b"cat > x <<'EOF'\npip install y\nEOF\n",
    b"<<" * 300,
    b"{ " * 300,
    b"if " * 300,
    b"2>&1 >",
    b"&&",
    b"||",
    b";;",
    b"pip install -r",
    b"pip install --",
    b"pip install -e git+https://x.example/y#egg=z\n",
    b"uv pip install -c other.txt\n",
    b"conda env create -f x.yml\n",
    b"mamba create -n x --file y python=3.1 pytorch::pytorch\n",
)


def _with_markers(text: str) -> list[bytes]:
    """The text with each of the markers instead of its own."""
    return [raw.replace(b"sys_platform == 'win32'", one.encode()) for one in _MARKERS for raw in _with_secret(text)]


def _with_secret(text: str) -> list[bytes]:
    """Return the text as it is, and the text with the secret in the names of its packages."""
    named = text.encode()
    for name in (b"alpha", b"beta", b"gamma", b"numpy", b"scipy", b"winonly", b"tool"):
        named = named.replace(name, _SECRET + name)
    return [text.encode(), named]


def _files() -> Iterator[st.SearchStrategy[tuple[str, bytes]]]:
    own: dict[str, tuple[list[bytes], tuple[bytes, ...]]] = {
        "requirements.txt": (_TXT, _LINES),
        "pyproject.toml": (_PYPROJECT, _TOML),
        "uv.lock": (_with_markers(UV), _TOML),
        "pylock.toml": (_with_markers(PYLOCK), _TOML),
        "environment.yml": (_with_secret(CONDA), (*_CONDA, *_LINES, *YAML)),
        "setup.py": (_SETUP, _PYTHON),
        "env.sh": (_SHELL_SEED, (*_SHELL, *_LINES)),
    }
    for name, (seeds, pieces) in own.items():
        yield st.tuples(st.just(name), files(seeds, (*pieces, *ENCODED)))
    yield st.tuples(st.just("environment.yml"), yaml_files([_ENVIRONMENT]))


def _read(value: tuple[tuple[str, bytes], bytes, bool, str]) -> None:
    """Every requirement and fault has a line of a file that was given. No message quotes a file outside the project."""
    (name, raw), other, outside, python = value
    here, shown = Path.cwd(), list[str]()
    project, folder = here / "project", here / ("outside" if outside else "project")
    for path in (project / "profiles", folder):
        path.mkdir(parents=True, exist_ok=True)
    (folder / "other.txt").write_bytes(other)
    (folder / name).write_bytes(raw)
    os.chdir(project)
    try:
        found = requirements_reader.read(folder / name, python)
        shown = [*found.notes, *map(str, found.faults)]
        for _, place in (*found.lines, *found.constraints):
            assert place.line >= 1 and Path(place.file).name in (name, "other.txt")
        assert found.quotable != outside
    except EnvbuildError as error:
        shown = [error.message, str(error.hint), *map(str, error.faults)]
        raise
    finally:
        os.chdir(here)
        (folder / "other.txt").unlink()
        (folder / name).unlink()
        if outside:
            assert _SECRET.decode() not in "".join(shown)
        assert "\x1b" not in printable("\n".join(shown))


_PAGE = [
    b'<a href="https://x.example/a/numpy-2.0-py3-none-any.whl#sha256=00" data-requires-python="&gt;=3.9">n</a>'
    b'<a href="../numpy-1.0.tar.gz" data-yanked>n</a><a>x</a>'
]
_HREFS = (
    b'<a href="http://[x">',
    b'<a href="//[/numpy-1.0.whl">',
    b'<a href="http://a\xe2\x84\x80b/x.whl">',
    b'<a href="#sha256=1&sha256=2">',
    b'<a href="' + b"%" * 300 + b'">',
    b"<!--",
    b"<![CDATA[",
    b"<!" * 500,
    b"<a " * 3000,
    b"&#x110000;",
    b"&#" + b"9" * 5000 + b";",
    b"<![x[",
    b"<script>",
)
_LISTING = [
    {
        "files": [
            {
                "filename": "numpy-2.0-cp311-cp311-linux_x86_64.whl",
                "hashes": {"sha256": "00"},
                "requires-python": ">=3.9",
                "upload-time": "2026-01-01T00:00:00Z",
                "yanked": False,
                "url": "https://x.example/a",
            }
        ]
    }
]


def _html_page(raw: bytes) -> None:
    file = Path("index.html")
    file.write_bytes(raw)
    for listed in index_pages.listed_at(str(file), "numpy"):
        assert listed.parsed and listed.parsed[0] == "numpy"
        assert not listed.address or listed.address.startswith(("http://", "https://"))


def _json_page(raw: bytes) -> None:
    for listed in index_pages._files_of_json(raw.decode("utf-8", "replace"), "numpy", "x.example"):
        assert listed.parsed is None or str(listed.parsed[1])


TARGETS = (
    Target(
        "requirement file",
        st.tuples(
            st.one_of(*_files()),
            files(_TXT, (*_LINES, *ENCODED)),
            st.booleans(),
            st.sampled_from(("3.9", "3.11", "3.14")),
        ),
        _read,
        20,
    ),
    Target("index page", files(_PAGE, (*_HREFS, *BYTES)), _html_page, 40),
    Target("index listing", json_files(_LISTING), _json_page, 68),
)
