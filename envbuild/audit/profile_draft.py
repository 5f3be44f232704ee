"""Drafts a commented profile from the contents of an image or an environment. Pure. Entries that the contents do not
determine are written as comments.

The contents are not trusted: names and versions are validated against their grammar, and text is quoted as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from envbuild.audit import library_and_distribution_findings
from envbuild.audit.collected_environment import Holdings
from envbuild.facts import database, misleading_packages
from envbuild.facts.database import TorchRelease
from envbuild.facts.fact_field_types import is_version
from envbuild.util.errors import CheckFailed, printable

# Distributions that every environment contains.
_TOOLS = {"pip", "setuptools", "wheel"}


def draft_profile(name: str, source: str, held: Holdings, kind: str = "image") -> str:
    """Return the text of a profile for the contents of `source`, an image's reference or an environment's path. `kind`:
    "image" or "environment". Raises CheckFailed if torch is not installed there."""
    source = printable(source).replace("\n", "?")  # a path may contain any character; this text goes into a comment
    version = held.installed.get("torch") or (held.torch.version if held.torch else None)
    if version is None or not is_version(version):
        raise CheckFailed(
            f"{source} has no torch: cannot write a profile for it",
            hint="lock its packages under a profile that has torch: envbuild lock PROFILE --requirements FILE",
        )
    release = database.torch_release(version)
    named, left = _packages(held, version)
    lines = [
        f"# The contents of {source}.",
        f"# `envbuild show {name}` explains every pin, `envbuild make {name}` builds and proves the image.",
        f"# Not determined from the {kind}: GPUs, Debian packages, environment variables, where packages came from.",
        "# The public package index has no version with a local label (+...).",
        f"description: {json.dumps(f'{name}, as {source} has it')}",
        *_python(held, release, kind),
        f"torch: {json.dumps(version)}",
        *_cuda(held),
        "# gpus: [h20]  # the GPU models it is for; without this line: the CPU",
        *_pins(held, release, version, kind),
        "packages:" if named else "packages: []",
        *(f"  - {json.dumps(text)}" for text in named),
        *(f"# {text}" for text in left),
        "# apt: [git]  # Debian packages, in one of the last layers",
        '# env: {OMP_NUM_THREADS: "4"}',
    ]
    return "\n".join([*lines, ""])


def _python(held: Holdings, release: TorchRelease | None, kind: str) -> Iterator[str]:
    """Choose the Debian suite with the environment's Python version. If this torch has no wheel for that Python
    version, or no suite has that version, choose the suite with the closest Python version for which this torch has a
    wheel."""
    python = ".".join(held.python.version.split(".")[:2])
    fits = [suite for suite in database.suites().values() if release is None or suite.python in release.pythons]
    suite = min(fits or database.suites().values(), key=lambda suite: _distance(suite.python, python))
    if suite.python != python:
        yield f"# The {kind} has Python {python}, which no Debian suite has together with this torch."
        yield "# To keep it, use a base image by digest."
    yield f"base: {{bootstrap: {suite.name}}}  # Debian; the base's other contents were not read"
    yield f'python: "{suite.python}"'


def _distance(one: str, other: str) -> int:
    return abs(int(one.split(".")[1]) - int(other.split(".")[1]))


def _cuda(held: Holdings) -> Iterator[str]:
    torch = held.torch
    if torch and torch.cuda:
        yield f"cuda: {json.dumps(torch.cuda)}  # a check: the CUDA version of this torch build"
    elif torch and not torch.imported:
        yield "# cuda: unknown, because torch could not be imported"


def _pins(held: Holdings, release: TorchRelease | None, version: str, kind: str) -> Iterator[str]:
    """Pin the CUDA libraries whose version differs from what torch requires."""
    found = database.libraries_among(held.installed, held.torch.cuda if held.torch else None)
    if release is None:
        unknown = ", ".join(f"{name} {found[name]}" for name in found if name != "torch")
        if unknown:
            yield f"# envbuild's facts do not contain torch {version}, so these are not pinned: {unknown}"
        return
    required = release.requirements
    other: dict[str, tuple[str, str]] = {}
    for name, installed in found.items():
        wanted = required.get(database.distribution_of(name, release.cuda) or "")
        if wanted and is_version(installed) and not SpecifierSet(wanted).contains(installed, prereleases=True):
            other[name] = (installed, wanted)
    if other:
        yield f"pins:  # versions in the {kind} that differ from torch's requirements"
    for name, (installed, wanted) in other.items():
        reason = json.dumps(f"as in the {kind}; torch {version} requires {wanted}")
        yield f"  {name}: {{version: {json.dumps(installed)}, reason: {reason}}}"
    for copy in held.libraries:
        if copy.loaded and copy.distribution is None:
            yield f"# Loaded, but not part of a distribution, so not pinned: {copy}"


def _packages(held: Holdings, torch: str) -> tuple[list[str], list[str]]:
    """Return the packages to list with their versions, and those that a profile cannot list, with the reason. Packages
    that torch or another package requires are left out: the lock adds them."""
    installed = {canonicalize_name(name): version for name, version in held.installed.items()}
    needs: dict[str, set[str]] = {name: set() for name in installed}
    for who, wanted in library_and_distribution_findings.held_requirements(held):
        needs[canonicalize_name(who)].add(canonicalize_name(wanted.name))
    needed = {name for who, names in needs.items() for name in names - {who}}
    covered = _closure(needs, {"torch", *_TOOLS})
    named, left = [], []
    for name in sorted(
        installed, key=lambda name: (name in needed, name)
    ):  # of packages that require each other in a cycle, only the first is listed
        if name not in covered:
            covered |= _closure(needs, {name})
            text = f"{name}=={installed[name]}"
            why = _unnamable(name, installed[name], torch)
            if why is None:
                named.append(text)
            else:
                left.append(f"{text}: {why}")
    return named, left


def _closure(needs: Mapping[str, set[str]], roots: set[str]) -> set[str]:
    reached, todo = set(roots), list(roots)
    while todo:
        more = needs.get(todo.pop(), set()) - reached
        reached |= more
        todo += more
    return reached


def _unnamable(name: str, version: str, torch: str) -> str | None:
    """Return why an installed distribution cannot be listed in a profile; None if it can."""
    meant = misleading_packages.refusal_reason(name)
    if meant:
        return meant
    if database.library_of(name):
        return "a CUDA library that this torch does not require"
    try:
        Requirement(f"{name}=={version}")
        local = Version(version).local
    except (InvalidRequirement, InvalidVersion):
        return "the name or version is not valid in an index"
    if local and local != Version(torch).local:
        return f"a local build (+{local}): add its folder or page to find-links, then list it"
    return None
