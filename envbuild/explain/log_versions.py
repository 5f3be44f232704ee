"""Reads the versions in a log: loaded, installed, or only stated. Pure.

A version does not count if the text around it recommends, requires or downloads it. The table `mentions` of
signatures.yaml has the patterns of such texts.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from packaging.utils import canonicalize_name

from envbuild.explain.log_reader_and_search import Line, Log, log_pattern
from envbuild.facts import database, log_signatures

Found = Mapping[str, tuple[str, ...]]
"""Name -> the distinct versions in the log, in its order."""
Options = Mapping[str, tuple[str | None, ...]]

# The patterns of one of the following tables are tried in order. The first pattern is used that matches outside of the
# texts described above.
_TORCH_LOADED = (
    r"\b(?:py)?torch version(?: \(gpu\?\))?(?::| \.{2,60}) {0,4}v?(\d{1,2}\.\d{1,3}\.\d{1,3}[a-z0-9.+]{0,40})"
)
_TORCH_STATED = (
    r"\b(?:py)?torch(?:[ _.-]{0,2}(?:_?_?version_?_?|版本|バージョン|버전|versi[oó]ne?))?"
    r"[ =:'\",(]{0,24}v?([12]\.\d{1,2}\.\d{1,2}[a-z0-9.+]{0,40})"
)
_CUDA = (
    r"cuda used to build pytorch: {0,4}(\d{1,2}\.\d{1,2})",
    r"torch\.version\.cuda[ =:'\"]{0,4}(\d{1,2}\.\d{1,2})",
    r"torch cuda version \.{2,60} {0,4}(\d{1,2}\.\d{1,2})",
    r"\btorch[ =v]{1,3}[12]\.\d{1,2}(?:\.\d{1,2})?"
    r" {0,2}(?:with|and|[,/+(&]){0,1} {0,2}cuda[ =-]{0,2}((?:9|1[0-3])\.\d)\b",
    r"nccl version 2[0-9.]{1,8}\+cuda(\d{1,2}\.\d{1,2})",
)
_DRIVER = (
    r"nvidia driver version: {0,4}(\d{3}\.\d{1,3}(?:\.\d{1,3})?)",
    r"driver version: {0,4}(\d{3}\.\d{1,3}(?:\.\d{1,3})?)",
    r"nvrm version: .{0,80} (\d{3}\.\d{1,3}(?:\.\d{1,3})?) ",
    r"\b(?:nvidia[ -])?driver(?: version)?[ :=v]{1,4}(\d{3}\.\d{1,3}(?:\.\d{1,3})?)\b",
    # in other languages: at most a few words between the driver and its version, and no comparison among them
    r"(?:驱动|驅動|ドライバ|드라이버|[Дд]райвер|treiber|controlador|pilote)[^0-9<>≥≤=。,;]{0,24}[ :=v]{0,4}"
    r"(\d{3}\.\d{1,3}(?:\.\d{1,3})?)\b",
    r"driver version[ :|]{1,8}(\d{3}\.\d{1,3}(?:\.\d{1,3})?)\b",
)
_FULL = r"(1[1-3]\.\d{1,2}\.\d{1,2}\.\d{1,4})"
# NCCL prints its version. For cuBLAS: a mapped file, a file in a stack trace, or a line of `envbuild audit`.
_LOADED = {
    "nccl": (r"nccl version:? {0,2}(2\.\d{1,2}\.\d{1,2})",),
    "cublas": (
        rf"libcublas(?:lt)?\.so\.{_FULL}(?:\[[0-9a-f]{{4,16}}\+|\(\w{{0,200}}\+0x|\+0x)",
        rf"^[0-9a-f]{{6,16}}-[0-9a-f]{{6,16}} [rwxsp-]{{4}} .{{0,200}}/libcublas(?:lt)?\.so\.{_FULL}\s{{0,4}}$",
        rf"^#\d{{1,3}} .{{0,300}} from \S{{0,200}}libcublas(?:lt)?\.so\.{_FULL}\b",
        rf"^\s{{0,8}}cublas(?:lt)? {{1,40}}{_FULL} {{1,40}}loaded\b",
    ),
}
_CUBLAS_STATED = rf"\b(?:lib)?cublas(?:lt)?(?:\.so\.| version| |=)[ :=]{{0,3}}{_FULL}\b"
_VERSION = r"(\d{1,4}\.\d{1,3}[a-z0-9.+]{0,40})"
_DISTRIBUTION = rf"\b(?:%s)(?:==| {{1,60}}|[ :=]{{1,3}}(?:version[ :=]{{1,3}})?)v?{_VERSION}"
# A line of pip list, pip freeze, uv pip install or collect_env; a line of conda list has a build and a channel as well.
_BUILD = r" {1,60}(?=\S{0,60}\d)\S{1,60}(?: {1,60}\S{1,80})?"
_BY_PIP = rf"^\s{{0,8}}(?:\[pip3?\] {{1,8}}|[+~] )?(?:%s)(?:==| {{1,60}}){_VERSION}(?:{_BUILD})?\s{{0,8}}$"
_BY_CONDA = rf"^\s{{0,8}}(?:\[conda\] {{1,8}})?(?:%s) {{1,60}}{_VERSION}{_BUILD}\s{{0,8}}$"
_CONDA = {"libcublas": "cublas", "cudnn": "cudnn", "nccl": "nccl"}
"""conda's packages of CUDA libraries."""
# Lines of pip about a distribution that it found or installed: how the line begins, then name and version.
_NAME = r"([a-z0-9][\w.-]{0,60}?)"
_REPORTED = (
    ("successfully installed ", rf"(?<= ){_NAME}-(\d[\w.+!]{{0,40}})(?= |$)"),
    (r"\byou(?:'ll)? have ", rf"\bhave {_NAME}(?:==| )v?{_VERSION}"),
    ("requirement already satisfied: ", rf"satisfied: {_NAME}(?:\[|[<>=!~]| ).{{0,400}} \({_VERSION}\)\s{{0,4}}$"),
)
# A requirements file printed in a log: the line before names it, or a line has a form that pip freeze never prints.
_REQUIREMENTS_HEAD = r"\b(?:requirements|constraints)[\w-]{0,30}\.(?:txt|in)\b[`'\"*:) ]{0,6}$"
_REQUIREMENT_ONLY = (
    r"^\s{0,8}[a-z0-9][\w.-]{0,60}(?:\[[\w,-]{0,60}\])?\s{0,4}(?:[<>~!]=|<|>)\s{0,4}\d\S{0,60}\s{0,8}$",
    r"^\s{0,8}(?:-r |-c |--hash|--extra-index-url|--index-url)",
)
_REQUIREMENTS = r"^\s{0,8}(?:[#-].{0,2000}|[a-z0-9][\w.-]{0,60}(?:\[[\w,-]{0,60}\])?\s{0,4}(?:[<>=~!@;].{0,300})?)$"
_READ, _SEVERAL, _EACH = 50, 4, 3
"""Limits: lines that are read for one name; names whose versions are varied; versions of each of these names."""


@dataclass(frozen=True)
class LogVersions:
    """The versions in a log. `loaded`, `installed`, `stated`: distribution -> versions. The key is the short name of a
    library (cudnn) instead, if conda installed it, if it is loaded, or if prose uses the short name. `torch`: the
    possible versions of torch, by the best evidence in the log."""

    torch: tuple[str, ...]
    cuda: str | None
    driver: str | None
    loaded: Found
    installed: Found
    stated: Found

    def libraries(self, cuda: str | None) -> Options:
        """Returns short name -> the versions of a library that may be loaded. None stands for the version that torch
        requires. A version that is only stated does not exclude the version that torch requires, and a version from
        conda does not exclude a version from pip."""
        found: dict[str, tuple[str | None, ...]] = {}
        for row in database.libraries().values():
            names = [name for major, name in row.distributions.items() if cuda is None or major == cuda.split(".")[0]]
            by_pip = [version for name in names for version in self.installed.get(name, ())]
            by_conda = self.installed.get(row.name, ())
            stated = [version for name in (*names, row.name) for version in self.stated.get(name, ())]
            if row.name in self.loaded:
                found[row.name] = self.loaded[row.name]
            elif by_pip:
                found[row.name] = tuple(dict.fromkeys((*by_pip, *by_conda)))
            elif by_conda or stated:
                found[row.name] = (*dict.fromkeys((*by_conda, *stated)), None)
        return found

    @property
    def others(self) -> Options:
        """The versions of each distribution that is not a CUDA library. None stands for an unknown version."""
        names = [name for name in {**self.stated, **self.installed} if database.library_of(name) is None]
        return {
            name: self.installed.get(name) or (*self.stated[name], None)
            for name in names
            if name not in database.libraries()
        }


def combinations(options: Options) -> Iterator[dict[str, str]]:
    """Yields the combinations of one version per name. A name is left out of a combination if its version is None. Only
    the first few names with several versions are varied; for the other names, the last version is used."""
    several = [name for name, found in options.items() if len(found) > 1][:_SEVERAL]
    choices = [found[:_EACH] if name in several else found[-1:] for name, found in options.items()]
    for chosen in product(*choices):
        yield {name: version for name, version in zip(options, chosen, strict=True) if version is not None}


def read(log: Log) -> LogVersions:
    required = _requirements(log)

    def matches(*patterns: str) -> tuple[str, ...]:
        found = (_stated(_lines(log, pattern, required), pattern) for pattern in patterns)
        return next(filter(None, found), ())

    installed, stated = _distributions(log, required)
    torch = installed.pop("torch", ())
    return LogVersions(
        torch=matches(_TORCH_LOADED) or torch or matches(_TORCH_STATED),
        cuda=next(iter(matches(*_CUDA)), None),
        driver=next(iter(matches(*_DRIVER)), None),
        loaded={name: found for name, patterns in _LOADED.items() if (found := matches(*patterns))},
        installed=installed,
        stated=stated | {name: found for name, found in [("cublas", matches(_CUBLAS_STATED))] if found},
    )


Places = Container[tuple[str, int]]
"""A set of lines, each as (file, line number)."""


def _lines(log: Log, pattern: str, required: Places) -> list[Line]:
    found = log.find(log_pattern(pattern), _READ)
    return [line for line, _ in found if (line.file, line.number) not in required]


def _stated(lines: Iterable[Line], pattern: str) -> tuple[str, ...]:
    """Returns the versions in these lines, except versions that are only recommended, required or downloaded."""
    matches = ((line.text, match) for line in lines for match in log_pattern(pattern).finditer(line.text))
    kept = (
        m[1].rstrip(".+") for text, m in matches if not log_signatures.mentioned(text[: m.start()], text[m.end() :])
    )
    return tuple(dict.fromkeys(kept))


def _distributions(log: Log, required: Places) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """Returns the installed and the stated versions of CUDA libraries, of torch, and of the distributions that
    advisories name."""
    advised = {name for advisory in database.advisories() for match in advisory.match for name in match.distributions}
    carried = {name for row in database.libraries().values() for name in row.distributions.values()}
    reported = _reported(log)
    installed: dict[str, list[str]] = {}
    stated: dict[str, tuple[str, ...]] = {}
    for name in sorted({*advised, *carried, *_CONDA, "torch", "pytorch"}):
        written = re.escape(name).replace(r"\-", "[-_.]")
        lines = _lines(log, _DISTRIBUTION % written, required)
        ours = _CONDA.get(name, "torch" if name == "pytorch" else name)
        forms = [_BY_CONDA] if name in (*_CONDA, "pytorch") else [_BY_PIP, _BY_CONDA]
        listed = {
            line: match[1]
            for line in lines
            for form in forms
            if (match := log_pattern(form % written).search(line.text))
        }
        installed.setdefault(ours, []).extend((*listed.values(), *reported.get(name, ())))
        prose = _stated((line for line in lines if line not in listed), _DISTRIBUTION % written)
        if prose and ours == name and name != "torch":
            stated[name] = prose
    return {name: tuple(dict.fromkeys(found)) for name, found in installed.items() if found}, stated


def _reported(log: Log) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for begin, pattern in _REPORTED:
        for line, match in log.find(log_pattern(begin), _READ):
            for named in log_pattern(pattern).finditer(line.text, max(0, match.start() - 1)):
                found.setdefault(canonicalize_name(named[1]), []).append(named[2].rstrip("."))
    return found


def _requirements(log: Log) -> set[tuple[str, int]]:
    """Returns the lines of the log that belong to a printed requirements file."""
    marks = [
        (line.file, line.number) for pattern in _REQUIREMENT_ONLY for line, _ in log.find(log_pattern(pattern), _READ)
    ]
    marks += [(line.file, line.number + 1) for line, _ in log.find(log_pattern(_REQUIREMENTS_HEAD), _READ)]
    places = {(line.file, line.number): line.text for line in log.lines} if marks else {}
    found: set[tuple[str, int]] = set()
    for file, number in marks:
        for step in (1, -1):
            at = number
            while (file, at) in places and (at == number or (file, at) not in found):
                if not log_pattern(_REQUIREMENTS).search(places[file, at]):
                    break
                found.add((file, at))
                at += step
    return found
