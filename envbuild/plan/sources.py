"""Reading a profile: found by name or path, with `extends`, pins and requirements of a command line in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from envbuild import document
from envbuild.document import Document
from envbuild.errors import Fault, ProfileError
from envbuild.plan import naming, remainder, requirements
from envbuild.plan.own import read_script
from envbuild.plan.profile import Profile, refused, tried
from envbuild.plan.source import PIN, Source

_PACKAGE = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^]]*\])?")  # a requirement's name and its extras


def load(name: str, pins: Mapping[str, str] | None = None, wanted: Path | None = None) -> Source:
    """Find and read a profile by name or path; `pins` replace its own: of libraries, torch, python or its packages.

    `<profile>-devel` is a profile's variant devel, with a lock and a Dockerfile of that name. `wanted` is a project's
    requirements.txt or pyproject.toml: its packages join the profile's, under the name `<profile>-<folder of the
    file>`, whose lock and Dockerfile go to the working folder. Where that lock is, its name alone says all of it.

    Raises ProfileError with all faults, each with its file and line.
    """
    asked = naming.meant(name, wanted)
    file, wanted = asked.file, asked.requirements
    faults: list[Fault] = []
    merged = _extended(file, (), faults)
    merged.data.pop("extends", None)
    if asked.profile == f"{file.stem}-{naming.DEVEL}":
        variant = Document(merged.file, {"variant": naming.DEVEL}, {("variant",): document.Place(merged.file, 1)})
        merged = document.merge(merged, variant)
    faults += _require(merged, wanted) if wanted else []
    plain = tried(document.without(merged, [("selftest", "script")])) if pins else None  # which is not read yet
    if pins:
        merged = document.merge(merged, _pinned(_repin(merged, pins)))
    faults += read_script(merged)
    found = tried(merged)
    if faults or not isinstance(found, Profile):
        told = {fault.field for fault in faults}
        malformed = [] if isinstance(found, Profile) else [item for item in found if item[1].field not in told]
        more, hint = remainder.contradictions(asked, merged, malformed, faults)
        raise refused(asked.name, [*faults, *(fault for _, fault in malformed), *more], hint)
    file = Path.cwd() / "profiles" / file.name if wanted else file
    return Source(asked.name, file, found, merged, asked, plain if isinstance(plain, Profile) else None)


def _require(merged: Document, wanted: Path) -> list[Fault]:
    """Put a project's requirements behind the profile's packages, each with its own place; returns what is wrong with
    them."""
    packages = merged.data.setdefault("packages", [])
    found, faults = requirements.read(wanted)
    for text, place in found if isinstance(packages, list) else ():
        merged.places[("packages", len(packages))] = place
        packages.append(text)
    return faults


def _repin(merged: Document, pins: Mapping[str, str]) -> dict[str, str]:
    """Pin those of the profile's own packages that are named; returns the pins of what is none."""
    packages, pinned = merged.data.get("packages"), set()
    wanted = {str(canonicalize_name(name)): version for name, version in pins.items()}
    for index, text in enumerate(packages if isinstance(packages, list) else ()):
        match = _PACKAGE.match(str(text))
        name = canonicalize_name(match[1]) if match else ""
        if match and name in wanted:
            merged.data["packages"][index] = f"{match[0]}=={wanted[name]}"
            merged.places[("packages", index)] = document.Place(PIN, 1)
            pinned.add(name)
    return {name: version for name, version in pins.items() if canonicalize_name(name) not in pinned}


def _pinned(pins: Mapping[str, str]) -> Document:
    """What `--pin` asks for beside packages, as a document on top of the profile."""
    own = {name: version for name, version in pins.items() if name in ("torch", "python", "cuda")}
    libraries = {name: {"version": v, "reason": "given with --pin"} for name, v in pins.items() if name not in own}
    data: dict[str, Any] = {**own, **({"pins": libraries} if libraries else {})}
    places: dict[document.Path, document.Place] = {(name,): document.Place(PIN, 1) for name in data}
    places |= {("pins", name): document.Place(PIN, 1) for name in libraries}
    return Document(PIN, data, places)


def _extended(file: Path, seen: tuple[Path, ...], faults: list[Fault]) -> Document:
    """With its parents; `faults` takes what is wrong with single keys of them."""
    here = document.read(file, faults=faults)
    parent = here.data.get("extends")
    if parent is None:
        return here
    if not isinstance(parent, str):
        raise ProfileError("extends: must name one profile", faults=[here.fault(("extends",), "not a name")])
    try:
        target = naming.find(parent, file.parent).resolve()
    except ProfileError as error:
        fault = here.fault(("extends",), error.message)
        raise ProfileError(error.message, hint=error.hint, faults=[fault]) from None
    if target in (*seen, file.resolve()):
        raise ProfileError("extends: goes in a circle", faults=[here.fault(("extends",), f"{parent} leads back here")])
    return document.merge(_extended(target, (*seen, file.resolve()), faults), here)
