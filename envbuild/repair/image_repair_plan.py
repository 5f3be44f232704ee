"""Plans the repair of an image: the lines of a Dockerfile that builds a fixed child image, or the change of the profile
that the image was built from. Pure.

The contents of an image may be hostile. The lines contain versions from the facts, names of NVIDIA's packages, and
paths that are quoted for the shell.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from packaging.utils import canonicalize_name

from envbuild.audit import library_and_distribution_findings
from envbuild.audit.collected_environment import Holdings
from envbuild.audit.environment_audit import Audit, Expected
from envbuild.explain.cause_ranking import Explanation
from envbuild.facts import database
from envbuild.facts.gpu_fact_types import Gpu
from envbuild.image import container_definition_export
from envbuild.lock import requirements_export
from envbuild.repair import environment_manager_detection, required_changes
from envbuild.repair.repair_plan import LibraryOutcome
from envbuild.repair.required_changes import Changes, Diagnosis
from envbuild.resolve import advisory_remedy

_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(?::[A-Za-z0-9_][A-Za-z0-9_.-]*)?")
_BUILT_AGAIN = frozenset({"not-as-locked", "modified-file", "foreign-file", "unchecked-bytecode"})
"""Ids of audit findings that a new image from the same lock does not have."""
_PACKAGE = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")


@dataclass(frozen=True)
class ImageRepairPlan:
    """The repair of an image. `profile`: the known profile whose lock the image was built from, if any. Then the fix is
    to build the image again (`rebuild`), after the lines of `profile_change` are written into the profile; otherwise
    the fix is `dockerfile`. `libraries`: the files that torch loads now."""

    image: str
    diagnosis: Diagnosis
    profile: str | None
    dockerfile: tuple[str, ...] = ()
    profile_change: tuple[str, ...] = ()
    rebuild: bool = False
    libraries: tuple[LibraryOutcome, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def state(self) -> Literal["healthy", "fixable", "by-hand"]:
        if self.diagnosis.healthy:
            return "healthy"
        return "fixable" if self.dockerfile or self.rebuild else "by-hand"


def expected_in_image(labelled: Expected | None, found: Explanation | None, gpus: Sequence[Gpu]) -> Expected:
    """Return what an image is compared with. GPUs: `gpus`; if empty, those in the log; otherwise those of the profile
    that the image was built from. Driver: the one in the log, otherwise the profile's minimum unless `gpus` are given.
    `labelled`: the contents by that profile, if it is known."""
    base = labelled or Expected()
    situation = found.read.situation if found else None
    if gpus:
        base = replace(base, gpus=tuple(gpus), gpu_count=len(gpus), driver=None)
    elif situation and situation.gpus:
        base = replace(base, gpus=situation.gpus, gpu_count=situation.gpu_count or len(situation.gpus))
    return replace(base, driver=situation.driver or base.driver) if situation else base


def fixed_image_name(reference: str) -> str:
    """Return the name of the fixed image: NAME:TAG-fixed, or NAME:fixed for an image without a tag."""
    name = reference.partition("@")[0]
    head, _, tag = name.rpartition(":")
    return f"{head}:{tag}-fixed" if head and "/" not in tag else f"{name}:fixed"


def plan_image_repair(audited: Audit, found: Explanation | None, user: str) -> ImageRepairPlan:
    """Plan the repair of an audited image. `found`: the explanation of a log of its container; `user`: the user that
    the image's configuration names."""
    profile = audited.wanted.cli_words if audited.wanted.claimed else None
    diagnosis = required_changes.diagnose(audited, found, metadata_counts=profile is None)
    plan = ImageRepairPlan(audited.target, diagnosis, profile)
    if diagnosis.healthy:
        return plan
    held, changes = audited.held, diagnosis.changes
    plan = replace(plan, libraries=tuple(_loaded_libraries(held, changes)))
    if profile:
        lines = tuple(advisory_remedy.yaml_lines(_profile_keys(changes)))
        return replace(plan, profile_change=lines, rebuild=bool(lines) or _differs_from_lock(audited, changes))
    instructions = list(_instructions(held, changes))
    if not instructions:
        return plan
    runs = any(line.startswith("RUN ") for line in instructions)
    as_root = ["USER root"] if runs and user not in ("", "root", "0") else []
    back = [f"USER {user}"] if as_root and _USER.fullmatch(user) else []
    lines_of_file = (f"FROM {audited.target}", *as_root, *instructions, *back)
    warnings = list(_warnings(held, changes))
    if as_root and not back:
        warnings.append(
            f"the fixed image runs as root: add a line USER at the end for the image's user, {user[:100]!r}, which is "
            "not a plain name or number"
        )
    return replace(plan, dockerfile=lines_of_file, warnings=tuple(warnings))


def _differs_from_lock(audited: Audit, changes: Changes) -> bool:
    """Whether the image has faults that a new image from the same lock does not have."""
    files = (changes.reinstall, changes.rebuilt, changes.uninstall, changes.overwriting, changes.leftovers)
    return any(files) or any(one.id in _BUILT_AGAIN and one.severity == "defect" for one in audited.findings)


def _profile_keys(changes: Changes) -> dict[str, Any]:
    """The keys and values of a profile that make the changes. Files that a lock does not describe are not part of it:
    an image that is built again does not have them."""
    release = database.torch_release(changes.torch) if changes.torch else None
    keys: dict[str, Any] = {"torch": release.version, "cuda": release.cuda} if release else {}
    pins = {pin.library: pin.version for pin in changes.pins if not pin.installed}
    keys |= {"pins": pins} if pins else {}
    keys |= {"packages": list(changes.packages)} if changes.packages else {}
    return keys | ({"env": dict(changes.variables)} if changes.variables else {})


def _instructions(held: Holdings, changes: Changes) -> Iterator[str]:
    """The instructions of the Dockerfile after FROM."""
    install = environment_manager_detection.pip_words(held, "install")
    uninstall = environment_manager_detection.pip_words(held, "uninstall")
    with_uv = install[0] == "uv"
    force = "--reinstall" if with_uv else "--force-reinstall"

    def run(*words: str) -> str:
        return f"RUN {shlex.join(words)}"

    if changes.leftovers:
        yield run("rm", "--", *changes.leftovers)
    # not --force-reinstall: it would also replace numpy and all other requirements by their newest versions
    again = changes.reinstall_with_torch
    if removed := (*changes.uninstall, *changes.overwriting, *changes.old_cuda, *(() if with_uv else again)):
        yield run(*uninstall, *removed)
    if changes.torch:
        words = (word for name in again for word in ("--reinstall-package", name)) if with_uv else ()
        yield run(*install, *words, f"torch=={changes.torch}", *changes.companions)
    if changes.rebuilt:
        options = ("--no-deps", force, *required_changes.index_options(held.installed.get("torch", "")))
        yield run(*install, *options, *changes.rebuilt)
    pins = {pin.distribution: pin.version for pin in changes.pins}
    if missing := [pin.requirement for pin in changes.pins if not pin.installed]:
        # --no-deps: torch's own metadata may require the old version
        yield run(*install, "--no-deps", *missing)
    if changes.packages:
        yield run(*install, *changes.packages)
    if changes.reinstall:
        yield run(*install, "--no-deps", force, *changes.reinstall)
    if not changes.torch:
        yield from _metadata_edits(held, pins)
    for name, value in changes.variables.items():
        yield f"ENV {container_definition_export.environment_pair(name, value)}"


def _metadata_edits(held: Holdings, pins: dict[str, str]) -> Iterator[str]:
    """An instruction for each folder with packages that require other versions than the pinned ones. The instruction
    makes these packages require the pinned versions, and removes the checksum of the changed METADATA from RECORD."""
    folders = {item.name: item.folder for item in reversed(held.distributions)}
    owners: dict[str, dict[str, dict[str, str]]] = {}
    for owner, requirement in library_and_distribution_findings.held_requirements(held):
        version = pins.get(canonicalize_name(requirement.name))
        if version and not requirement.specifier.contains(version, prereleases=True) and _PACKAGE.fullmatch(owner):
            name = canonicalize_name(requirement.name)
            owners.setdefault(folders[owner], {}).setdefault(owner, {})[name] = version
    for folder, changed in owners.items():
        site = shlex.quote(folder)
        edits = [requirements_export.metadata_edit(versions, site, owner) for owner, versions in changed.items()]
        listed = r"\|".join(map(requirements_export.any_spelling, changed))
        record = rf"sed -i -e 's#^\(\({listed}\)-[^/,]*\.dist-info/METADATA\),.*#\1,,#I' {site}/*.dist-info/RECORD"
        yield f"RUN {' && '.join([*edits, record])}"


def _loaded_libraries(held: Holdings, changes: Changes) -> Iterator[LibraryOutcome]:
    groups = {pin.library for pin in changes.pins}
    for copy in held.libraries:
        if copy.loaded and copy.group in groups:
            yield LibraryOutcome(copy.soname or copy.name, copy.path, copy.version, None, True, None, None, None)


def _warnings(held: Holdings, changes: Changes) -> Iterator[str]:
    if "pip" not in held.installed:
        yield "the image's Python has no pip: install pip or uv in a line before these"
    for pin in changes.pins:
        loaded = held.loaded(pin.library)
        if loaded and not loaded.in_packages and not changes.torch:
            yield (
                f"torch loads {loaded.path}, which no Python package contains: if conda or a system package installed "
                f"it, install {pin.version} with that tool instead"
            )
