"""Finds requirements that the index lacks, or has only as source, and reports what to do: for example, compile them, or
make wheels of them."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from envbuild.facts import extension_compilers, torch_cuda_arch_list_parser
from envbuild.facts.extension_compilers import CompiledPackage
from envbuild.fetch import index_config, index_pages, newest_release_lag, wheel_resolution_and_download
from envbuild.fetch.index_pages import Listed
from envbuild.profile.environment_and_lock_file_readers import marker_applies
from envbuild.profile.extension_spec import Extension
from envbuild.resolve import nvcc_source
from envbuild.resolve.plan_resolver import ARCH_LIST, Plan
from envbuild.util.errors import NetworkError

# uv's message for a package without a usable wheel
_NO_WHEEL = re.compile(
    r"(?:all versions of )?\b([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?:[<>=!~]\S*)? (?:have|has) no usable wheels"
)
# uv's message for a package that no index has
_NOT_FOUND = re.compile(r"\b([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?) was not found in")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST = 20
"""The most packages that a message names."""


@dataclass(frozen=True)
class SourceOnly:
    """A package for which the index has no usable wheel in the required range: the newest release in that range for
    the profile's Python, and its sdist, None if the index has none."""

    name: str
    version: str
    sdist: Listed | None


def remedies(plan: Plan, message: str, without_wheel: Iterable[str] = ()) -> str | None:
    """What to do about the packages that the index lacks, or has without a wheel: those that the error `message` of the
    resolver names, and those in `without_wheel`. None if there are none. Names every such package of the profile and
    its requirements file, and not only the one in the message."""
    unknown = {str(canonicalize_name(name)) for name in _NOT_FOUND.findall(message)}
    named = {str(canonicalize_name(name)) for name in (*_NO_WHEEL.findall(message), *without_wheel)} | unknown
    if not named:
        return None
    requirements = [Requirement(text) for text in plan.packages]
    direct = {str(canonicalize_name(one.name)) for one in requirements if marker_applies(one.marker, plan.python)}
    names = sorted(named | direct)
    with ThreadPoolExecutor(index_config.PARALLEL) as pool:
        listed = dict(zip(names, pool.map(_listed_files, names), strict=True))
    missing = [name for name, files in listed.items() if files == () and name in direct | unknown]
    found = filter(None, (_source_only(plan, name, files or ()) for name, files in listed.items()))
    core = {str(canonicalize_name(Requirement(text).name)) for text in plan.core}
    stated = [name for name in missing if name in direct | core]
    others = [name for name in missing if name not in stated]
    texts = [*_texts_for_missing(stated), *_texts_for_missing_dependencies(others), *_texts(plan, list(found)[:_MOST])]
    return "\n".join(texts) or None


def _listed_files(name: str) -> Sequence[Listed] | None:
    """The files of a package on the index, None if it did not answer."""
    with contextlib.suppress(NetworkError):
        return index_pages.listed_files(name)
    return None


def _texts_for_missing(names: Sequence[str]) -> Iterator[str]:
    if names:
        yield f"not on the index: {_listing(names)}"
        yield (
            "correct the names; for a conda package or a system library, remove the line, and name its Debian package "
            "under apt or install it in a child image"
        )


def _texts_for_missing_dependencies(names: Sequence[str]) -> Iterator[str]:
    if names:
        yield f"not on the index, required by another package: {_listing(names)}"
        yield ("add an index or find-links that has it, or use a version of the other package that does not require it")


def _listing(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more


def _source_only(plan: Plan, name: str, files: Sequence[Listed]) -> SourceOnly | None:
    wanted = newest_release_lag.specifier(name, (*plan.core, *plan.packages, *plan.constraints), plan.python)
    tags = wheel_resolution_and_download.tags(plan.python, plan.glibc)
    known = newest_release_lag.matching_releases(files, plan.python, tags)
    early = bool(wanted.prereleases)  # without it, some releases of packaging accept each pre-release
    fitting = [one for one in known if one.fits and wanted.contains(one.version, prereleases=early)]
    if not fitting or any(one.usable for one in fitting):
        return None
    newest = fitting[-1].version
    sdists = [one for one in files if one.parsed and one.parsed[1] == newest and not one.file.endswith(".whl")]
    return SourceOnly(name, str(newest), sdists[0] if sdists else None)


def _texts(plan: Plan, found: Sequence[SourceOnly]) -> Iterator[str]:
    compiled = extension_compilers.compiled_packages()
    listed = plan.choice.environment.get(ARCH_LIST, "")
    capabilities = torch_cuda_arch_list_parser.capabilities(listed)
    torch = plan.choice.situation.torch
    known = [one for one in found if one.name in compiled]
    obstacles = {one: compiled[one.name].obstacle(one.version, torch, capabilities) for one in known}
    compilable = [one for one in known if not obstacles[one]]
    kernels = [one for one in compilable if one.sdist and _SHA256.fullmatch(str(one.sdist.sha256))]
    others = [one for one in found if one not in kernels and not obstacles.get(one)]
    for one, obstacle in obstacles.items():
        if obstacle:
            yield f"{one.name} {one.version} {obstacle}"
    if others:
        yield f"without a wheel for {wheel_resolution_and_download.target(plan.python, plan.glibc)}: {_named(others)}"
        pins = " ".join(f"{one.name}=={one.version}" for one in others)
        yield f"if they have no compiled code, make their wheels once: pip wheel --no-deps -w wheels {pins}"
        yield "then lock with UV_FIND_LINKS=wheels, and give this folder to every machine that builds the image"
    if kernels:
        yield f"only source on the index: {_named(kernels)}"
        rows = [compiled[one.name] for one in kernels]
        needed = sorted({name for row in rows for name in row.packages})
        yield f"{'it needs' if len(rows) == 1 else 'they need'} these packages too: {', '.join(needed)}"
        cuda = plan.choice.situation.cuda
        without_nvcc = nvcc_source.reason_without_wheels(cuda) if cuda and not plan.extension_toolchain else None
        if without_nvcc:
            yield f"their compiler is missing too: {without_nvcc}"
        yield (
            f"to compile {'it' if len(rows) == 1 else 'them'} for torch {torch} and compute "
            f"capability {listed or '-'}, add to a profile that extends {plan.cli_words.split()[0]}:"
        )
        yield "extensions:"
        for item in plan.extension_toolchain.wanted if plan.extension_toolchain else ():
            yield from _inherited(item.extension)
        for one, row in zip(kernels, rows, strict=True):
            yield from _stanza(one, row, capabilities)


def _inherited(extension: Extension) -> Iterator[str]:
    """The entry of an extension that the profile compiles already, because a list replaces that of the parent."""
    entry = extension.model_dump(mode="json", exclude_unset=True)
    for line in yaml.safe_dump([entry], default_flow_style=None, sort_keys=False, width=110).splitlines():
        yield f"  {line}"


def _named(found: Sequence[SourceOnly]) -> str:
    return ", ".join(f"{one.name} {one.version}" for one in found)


def _stanza(one: SourceOnly, row: CompiledPackage, capabilities: Sequence[str]) -> Iterator[str]:
    """The entry for `extensions:` as lines of YAML."""
    assert one.sdist is not None
    address = one.sdist.address
    url = f", url: {json.dumps(address)}" if address and address.isprintable() else ""
    yield f"  - name: {one.name}  # {one.version}"
    yield f"    sdist: {{sha256: {one.sdist.sha256}{url}}}"
    build = []
    if variables := row.variables(capabilities):
        build.append(f"env: {{{', '.join(f'{name}: {json.dumps(value)}' for name, value in variables.items())}}}")
    if row.requires:
        build.append(f"requires: [{', '.join(row.requires)}]")
    if build:
        yield f"    build: {{{', '.join(build)}}}"
    yield f"    modules: [{', '.join(row.modules)}]"
