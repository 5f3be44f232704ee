"""Reads uv.lock, pylock.toml (PEP 751) and conda's environment.yml as requirements for pip. Pure.

Only what installs on linux/amd64 with the profile's Python counts. Optional dependencies and dependency groups of the
project are left out, as for a pyproject.toml. Packages that an index cannot have are faults, each with its line.
"""

from __future__ import annotations

import re
import tomllib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from packaging.markers import InvalidMarker, Marker, UndefinedEnvironmentName
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from envbuild.util import yaml_and_project_paths
from envbuild.util.errors import ProfileError


@dataclass(frozen=True)
class Entry:
    """One entry of a file. Exactly one of the texts is set: `requirement`: as pip writes it; `option`: a line of the
    pip section of an environment.yml; `note`: why the entry is left out; `fault`: why it cannot be locked. `name`: the
    package, for messages."""

    line: int
    name: str = ""
    requirement: str = ""
    option: str = ""
    note: str = ""
    fault: str = ""


_ELSEWHERE = (
    "the index does not have this source: name a release, compile it (extensions:), or install it in a child image"
)


def _environment(python: str) -> dict[str, str]:
    """The values of markers for linux/amd64. The patch release of Python is taken to be the newest."""
    return {
        "implementation_name": "cpython",
        "implementation_version": f"{python}.99",
        "os_name": "posix",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": f"{python}.99",
        "python_version": python,
        "sys_platform": "linux",
        "extra": "",
    }


def marker_applies(marker: object, python: str) -> bool:
    """Whether a marker holds for linux/amd64 and no extra. Raises ProfileError for an invalid marker."""
    if marker is None:
        return True
    try:
        values: dict[str, Any] = {**_environment(python), "extras": set(), "dependency_groups": set()}
        return Marker(str(marker)).evaluate(values, context="lock_file" if "extras" in str(marker) else "metadata")
    except (InvalidMarker, UndefinedEnvironmentName, RecursionError, ValueError, AssertionError, TypeError):
        # AssertionError, TypeError: packaging 25 raises them for a comparison such as extras == "x"
        raise ProfileError("invalid marker") from None


def _tables(text: str, key: str, name: str) -> tuple[dict[str, Any], list[dict[str, Any]], list[int]]:
    """The document, its tables [[key]] and their lines. Raises ProfileError if the file does not have this form."""
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        where = re.search(r"at line [0-9]+, column [0-9]+", str(error))
        raise ProfileError(f"{name} is not valid TOML {where[0] if where else ''}".rstrip()) from None
    found = document.get(key)
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise ProfileError(f"{name} has no tables [[{key}]]", hint="give the file as the tool wrote it")
    lines = [number for number, line in enumerate(text.split("\n"), 1) if line.startswith(f"[[{key}]]")]
    return document, found, lines if len(lines) == len(found) else [1] * len(found)


def is_for_python(requires: object, python: str) -> bool:
    """Whether the value of a key requires-python allows some release of Python `python`, such as 3.11. True if the key
    is missing or invalid."""
    try:
        return SpecifierSet(str(requires or "")).contains(f"{python}.99")
    except InvalidSpecifier:
        return True


def _for_another_python(document: Mapping[str, Any], text: str, python: str) -> Iterator[Entry]:
    """A fault if the lock was made for other releases of Python than the profile's: the locked versions need not have
    wheels for the profile's release."""
    if not is_for_python(document.get("requires-python"), python):
        line = text.count("\n", 0, max(0, text.find("requires-python"))) + 1
        reason = f"this lock is for another Python than the profile's {python}: use a profile with that Python"
        yield Entry(line, "requires-python", fault=reason)


def pylock_entries(text: str, name: str, python: str) -> Iterator[Entry]:
    """The packages of a pylock.toml. Raises ProfileError if the file is not a pylock.toml."""
    document, packages, lines = _tables(text, "packages", name)
    yield from _for_another_python(document, text, python)
    for package, line in zip(packages, lines, strict=True):
        known, version = package.get("name"), package.get("version")
        if not isinstance(known, str):
            continue
        try:
            if not marker_applies(package.get("marker"), python):
                continue
        except ProfileError as error:
            yield Entry(line, known, fault=error.message)
            continue
        if {"vcs", "directory", "archive"} & package.keys() or not isinstance(version, str):
            yield Entry(line, known, fault=_ELSEWHERE)
        else:
            yield Entry(line, known, requirement=f"{known}=={version}")


MAX_STEPS = 1_000_000
"""The most pairs of a dependency and a package of its name in one uv.lock. 1000 packages with 20 dependencies each have
20,000. Without a limit, a file that lists one name thousands of times would be read for hours."""


def uv_lock_entries(text: str, name: str, python: str) -> Iterator[Entry]:
    """The packages of a uv.lock that the project needs, each with its locked version. Raises ProfileError if the
    file is not a uv.lock, or if none of its packages is a project in the folder of the uv.lock."""
    document, packages, lines = _tables(text, "package", name)
    yield from _for_another_python(document, text, python)
    places = {id(package): line for package, line in zip(packages, lines, strict=True)}
    named: dict[str, list[dict[str, Any]]] = {}
    for package in packages:
        named.setdefault(str(canonicalize_name(str(package.get("name", "")))), []).append(package)
    roots = [package for package in packages if _folder(package) == "."]
    if not roots:
        raise ProfileError(
            f"{name} has no project of its own",
            hint="write a requirements.txt: uv export --no-hashes --no-emit-project",
        )
    waiting: deque[tuple[dict[str, Any], str]] = deque((root, "") for root in roots)
    seen = {(id(root), "") for root in roots}
    given: set[int] = set()
    steps = 0
    while waiting:
        package, extra = waiting.popleft()
        if id(package) not in given:
            given.add(id(package))
            yield from _uv_entry(package, places[id(package)])
        optional = package.get("optional-dependencies")
        of_extra = optional.get(extra, []) if extra and isinstance(optional, dict) else []
        required = of_extra if extra else package.get("dependencies", [])
        for dependency in required if isinstance(required, list) else ():
            if not isinstance(dependency, dict):
                continue
            try:
                if not marker_applies(dependency.get("marker"), python):
                    continue
            except ProfileError as error:
                required_by = f"{dependency.get('name')}, required by {package.get('name')}"
                yield Entry(places[id(package)], required_by, fault=error.message)
                continue
            wanted, extras = dependency.get("version"), dependency.get("extra")
            chosen = ("", *(map(str, extras) if isinstance(extras, list) else ()))
            for found, one in product(named.get(str(canonicalize_name(str(dependency.get("name", "")))), []), chosen):
                steps += 1
                if steps > MAX_STEPS:
                    raise ProfileError(f"{name} has more than {MAX_STEPS} dependencies between its packages")
                if (wanted is None or found.get("version") == wanted) and (id(found), one) not in seen:
                    seen.add((id(found), one))
                    waiting.append((found, one))


def _folder(package: Mapping[str, Any]) -> str | None:
    """The folder of a package that is a project of the workspace, None for any other package."""
    source = package.get("source")
    found = (source.get(kind) for kind in ("virtual", "editable")) if isinstance(source, dict) else ()
    return next((folder for folder in found if isinstance(folder, str)), None)


def _uv_entry(package: Mapping[str, Any], line: int) -> Iterator[Entry]:
    known, version, source = package.get("name"), package.get("version"), package.get("source")
    folder = _folder(package)
    if folder == ".":
        return
    if folder is not None:
        yield Entry(line, f"{known} ({folder})", note="it is a folder of the project; install it in a child image")
    elif not isinstance(source, dict) or "registry" not in source or not isinstance(version, str):
        yield Entry(line, str(known), fault=_ELSEWHERE)
    else:
        yield Entry(line, str(known), requirement=f"{known}=={version}")


# Name in conda-forge or a conda channel -> name on the package index, where they differ.
_INDEX_NAMES = {
    "faiss": "faiss-cpu", "matplotlib-base": "matplotlib", "msgpack-python": "msgpack", "opencv": "opencv-python",
    "py-opencv": "opencv-python", "pytables": "tables", "pytorch": "torch", "pytorch-gpu": "torch",
    "seaborn-base": "seaborn", "tensorboardx": "tensorboardX", "tensorflow-gpu": "tensorflow",
}  # fmt: skip
# Parts of conda that pip does not install: the profile has Python and CUDA, Debian has the libraries.
_PROFILE_HAS = re.compile(r"(python|python_abi|pip|cuda|cuda-.*|cudatoolkit.*|cudnn|nccl|pytorch-(cuda|mutex))")
_SYSTEM = re.compile(
    r"_.*|(?!librosa|libcst|liblinear)lib.*|blas|bzip2|c-ares|ca-certificates|cmake|compilers|cxx-compiler|ffmpeg|fontconfig"
    r"|freetype|gcc.*|gcc_.*|gettext|giflib|git|git-lfs|glib|gmp|gnutls|gperftools|gxx.*|gxx_.*|icu|intel-openmp|jpeg|krb5"
    r"|lame|lcms2|ld_impl_.*|lerc|llvm-openmp|lz4-c|make|mkl|mkl-service|mkl_fft|mkl_random|ncurses|nettle|nodejs|openh264"
    r"|openjpeg|openssl|patchelf|pthread-stubs|readline|sqlite|sysroot_.*|tk|unzip|wget|x264|xorg-.*|xz|yaml|zip|zlib|zstd"
)
_CONDA = re.compile(r"(?:[A-Za-z0-9_./-]+::)?([A-Za-z0-9_][A-Za-z0-9_.-]*)\s*(\[.*\])?\s*(.*)")
_VERSION = re.compile(r"\bversion\s*=\s*('[^']*'|\"[^\"]*\"|[^],]*)")
"""The version in the brackets of a specification: numpy[version='>=1.2,<2', build=py310_0]."""
_NO_SPECIFICATION = "not a package specification of conda, as in numpy=1.26 or numpy>=1.26"


def conda_entries(text: str, name: str) -> Iterator[Entry]:
    """The dependencies of an environment.yml: conda's packages under their names on the index, then those of its
    section `pip`. Raises ProfileError if the file has no list of dependencies."""
    document = yaml_and_project_paths.parse(text, name)
    listed = document.data.get("dependencies")
    if not isinstance(listed, list):
        raise ProfileError(f"{name} has no list `dependencies`", hint="give an environment.yml of conda")
    for index, item in enumerate(listed):
        path = ("dependencies", index)
        line = document.place(path).line
        if isinstance(item, dict) and set(item) == {"pip"} and isinstance(item["pip"], list | None):
            for number, option in enumerate(item["pip"] or ()):
                yield Entry(document.place((*path, "pip", number)).line, option=str(option))
        elif isinstance(item, str):
            yield conda_entry(item, line)
        else:
            yield Entry(line, str(item), fault=_NO_SPECIFICATION)


def conda_entry(text: str, line: int) -> Entry:
    match = _CONDA.fullmatch(text.strip())
    if match is None:
        return Entry(line, text, fault=_NO_SPECIFICATION)
    known = match[1].lower()
    if _PROFILE_HAS.fullmatch(known):
        return Entry(line, known, note="the profile has its own Python and CUDA")
    if _SYSTEM.fullmatch(known):
        return Entry(line, known, note="not a package for pip; if you need it, name its Debian package under apt")
    version = _VERSION.search(match[2] or "")
    bound = _bound(version[1].strip("'\"") if version else match[3])
    return Entry(line, known, requirement=f"{_INDEX_NAMES.get(known, known)}{bound}")


def _bound(text: str) -> str:
    """conda's version specification in pip's form: =1.2 and 1.2.* are ==1.2.*; a build string is dropped."""
    text = text.strip()
    if not text or text == "*":
        return ""
    if re.match(r"[<>!~]|==", text):
        return text.split(" ")[0] if re.fullmatch(r"[^ ]+ [A-Za-z0-9_*]+", text) else text.replace(" ", "")
    version, _, build = text.lstrip("=").strip().replace(" ", "=").partition("=")
    if re.match(r"[0-9.]+\*?[,|]", version):
        return f"=={version}"
    exact = bool(build) or version.endswith("*")
    return f"=={version}" if exact else f"=={version}.*"


def reader_of(file_name: str) -> Callable[[str, str, str], Iterator[Entry]] | None:
    """The function that reads a file of this name: of its text, its name in messages, and the release of Python. None
    for a file that is not one of these kinds."""
    if file_name == "uv.lock":
        return uv_lock_entries
    if re.fullmatch(r"pylock(\.[^.]+)?\.toml", file_name):
        return pylock_entries
    if file_name.endswith((".yml", ".yaml")):
        return lambda text, name, python: conda_entries(text, name)
    return None
