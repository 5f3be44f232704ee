"""Finds faults in an environment's files: changed files, foreign files, and files that run when Python starts. Pure."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from envbuild.audit import library_and_distribution_findings
from envbuild.audit.collected_environment import Altered, Holdings
from envbuild.audit.finding_types import Finding, Severity
from envbuild.facts import database
from envbuild.profile.value_types import StartupFile

_MOST = 5


def file_findings(
    held: Holdings, accepted: Mapping[StartupFile, str], *, built: bool, strict: bool
) -> Iterator[Finding]:
    """Yield all findings about files. `accepted`: startup files that the profile accepts, with the reason. `built`:
    whether the files are those of an image built from a lock, which must contain no other files. `strict`: False for a
    developer's own environment, in which files may have been edited."""
    yield from _startup(held, accepted, "refuse" if strict else "warn")
    yield from _altered(held, built, "defect" if strict else "warn")
    if built and held.unrecorded:
        text = f"no installed distribution contains {_some(held.unrecorded)}"
        yield Finding("foreign-file", "defect", text, "find the build step that wrote it")
    if held.preferred:
        text = f"the loader prefers these to the libraries of other packages: {_some(held.preferred)}"
        yield Finding("loader-folder", "defect", text, "remove them, and the package that installed them")
    if held.unchecked:
        text = f"Python runs this bytecode without comparing it with its source: {_some(held.unchecked)}"
        yield Finding("unchecked-bytecode", "defect", text, "remove these files: Python compiles the source again")


def _startup(held: Holdings, accepted: Mapping[StartupFile, str], severity: Severity) -> Iterator[Finding]:
    known = {(row.distribution, row.sha256) for row in database.startup_files()}
    for item in held.startup:
        if (item.owner, item.sha256) in known:
            continue
        reason = accepted.get(StartupFile(item.file, item.sha256))
        when = "torch is imported" if item.path.endswith("/entry_points.txt") else "Python starts"
        text = f"{item.path} ({item.owner or 'no distribution'}) runs code whenever {when}"
        if reason is not None:
            yield Finding("startup-code", "note", f"accepted by the profile ({reason}): {text}", "")
        else:
            remedy = f"remove it, or accept it in the profile, under startup: {item.file}, sha256 {item.sha256}"
            yield Finding("startup-code", severity, text, remedy)
    if held.variables.get("PYTHONSTARTUP"):
        text = f"PYTHONSTARTUP runs {held.variables['PYTHONSTARTUP']} in every interactive Python"
        yield Finding("startup-variable", "warn", text, "unset PYTHONSTARTUP, in the image or the shell")


def _altered(held: Holdings, built: bool, severity: Severity) -> Iterator[Finding]:
    reported = {
        copy.path for copy in held.libraries if copy.record is False and copy.sha256
    }  # these are reported by library_and_distribution_findings.cuda_library_findings, and so are the overwritten ones
    overwritten = {(one.path, one.wanted) for one in library_and_distribution_findings.overwritten_libraries(held)}
    namespaces = {hashlib.sha256(text).hexdigest() for text in database.namespace_texts()}
    by_owner: dict[tuple[str, str], list[Altered]] = defaultdict(list)
    for item in held.altered:
        shared = item.path.endswith("/__init__.py") and item.sha256 in namespaces
        # a missing file counts only in an image built from a lock: elsewhere it may have been removed to save space
        other = (item.path, item.owner.partition("==")[0]) not in overwritten
        if item.path not in reported and other and not shared and (item.sha256 or built):
            by_owner[item.owner, item.by].append(item)
    for (owner, by), items in by_owner.items():
        source = "its wheel" if by == "wheel" else "its RECORD"
        text = f"files of {owner} differ from {source}: {_some([item.path for item in items])}"
        yield Finding("modified-file", severity, text, f"reinstall {owner.partition('==')[0]}")


def _some(paths: Sequence[str]) -> str:
    more = f" (and {len(paths) - _MOST} more)" if len(paths) > _MOST else ""
    return f"{', '.join(paths[:_MOST])}{more}"
