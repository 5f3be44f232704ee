"""Where profiles come from: found by name or path, with `extends`, pins and requirements of a command line in."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from envbuild import document, shipped
from envbuild.document import Document
from envbuild.errors import Fault, LockError, ProfileError, near
from envbuild.plan import requirements
from envbuild.plan.own import Script, read_script
from envbuild.plan.profile import Accept, Profile, checked

_LONGEST = 63
NAME = re.compile(rf"[a-z0-9][a-z0-9-]{{0,{_LONGEST - 1}}}")
DEVEL = "devel"
_LOCK = ".lock.yaml"
PIN = "--pin"
"""Where what was asked for with that option stands, as a file is told of."""
_PACKAGE = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^]]*\])?")  # a requirement's name and its extras


@dataclass(frozen=True)
class Meant:
    """What a name stands for: the file of a profile, with a project's requirements, and what is made of them.

    `profile` is how the profile itself is asked for: its name or its variant's, or a path.
    """

    name: str
    file: Path
    profile: str
    requirements: Path | None = None


@dataclass(frozen=True)
class Source:
    """A profile's name, the file it was read from, and where each of its values stands."""

    name: str
    file: Path
    profile: Profile
    document: Document
    meant: Meant | None = None

    @property
    def project(self) -> Path:
        """The folder that holds profiles/ and dockerfiles/; a shipped profile's results go to the working folder."""
        if shipped.ROOT in self.file.parents and shipped.ROOT.name == "shipped":
            return Path.cwd()
        return document.home(self.file)

    @property
    def lock_file(self) -> Path:
        return self._beside("profiles", f"{self.name}{_LOCK}")

    @property
    def known_lock(self) -> Path:
        """The lock to read: the project's own, else the one that was shipped beside the profile."""
        return self.lock_file if self.lock_file.exists() else self.file.with_name(f"{self.name}{_LOCK}")

    @property
    def dockerfile(self) -> Path:
        return self.project / "dockerfiles" / f"{self.name}.Dockerfile"

    @property
    def origin(self) -> dict[str, str] | None:
        """What a lock says it was made for where no profile has its name; paths are relative to the lock's folder."""
        if self.meant is None or self.meant.requirements is None:
            return None
        folder = self.lock_file.parent
        by_path = _is_path(self.meant.profile)
        return {
            "profile": _relative(self.meant.file, folder) if by_path else self.meant.profile,
            "requirements": _relative(self.meant.requirements, folder),
        }

    def _beside(self, folder: str, name: str) -> Path:
        if self.project in self.file.parents:
            return self.file.parent / name
        return self.project / folder / name


def load(name: str, pins: Mapping[str, str] | None = None, wanted: Path | None = None) -> Source:
    """Find and read a profile by name or path; `pins` replace its own: of libraries, torch, python or its packages.

    `<profile>-devel` is a profile's variant devel, with a lock and a Dockerfile of that name. `wanted` is a project's
    requirements.txt or pyproject.toml: its packages join the profile's, under the name `<profile>-<folder of the
    file>`, whose lock and Dockerfile go to the working folder. Where that lock is, its name alone says all of it.

    Raises ProfileError with all faults, each with its file and line.
    """
    asked = meant(name, wanted)
    file, wanted = asked.file, asked.requirements
    merged = _extended(file, ())
    merged.data.pop("extends", None)
    if asked.profile == f"{file.stem}-{DEVEL}":
        variant = Document(merged.file, {"variant": DEVEL}, {("variant",): document.Place(merged.file, 1)})
        merged = document.merge(merged, variant)
    faults = _require(merged, wanted) if wanted else []
    if pins:
        merged = document.merge(merged, _pinned(_repin(merged, pins)))
    profile = checked(merged, asked.name, [*faults, *read_script(merged)])
    return Source(asked.name, Path.cwd() / "profiles" / file.name if wanted else file, profile, merged, asked)


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


def accepting(source: Source, ids: Iterable[str], reason: str) -> Source:
    """The same profile, with these advisories taken on beside those that it accepts itself."""
    own = {item.advisory for item in source.profile.accept}
    more = tuple(Accept(advisory=name, reason=reason) for name in ids if name not in own)
    return replace(source, profile=source.profile.model_copy(update={"accept": (*source.profile.accept, *more)}))


def bringing(source: Source, script: Script) -> Source:
    """The same profile with this script as its own."""
    selftest = source.profile.selftest.model_copy(update={"script": script})
    return replace(source, profile=source.profile.model_copy(update={"selftest": selftest}))


def _folders() -> Iterator[Path]:
    """A user's own profiles come first."""
    for root in dict.fromkeys((Path.cwd() / "profiles", shipped.PROFILES)):
        yield root
        yield root / "projects"


def names() -> list[str]:
    """Every profile that can be named, the shadowed ones once; with a project's requirements, once they are locked."""
    return _names(_folders())


def own_names() -> list[str]:
    """The profiles of the working folder, for commands that write; all where it has none."""
    return _names([Path.cwd() / "profiles", Path.cwd() / "profiles" / "projects"]) or names()


def _names(folders: Iterable[Path]) -> list[str]:
    folders = list(folders)
    profiles = _profiles(folders)
    return sorted({*profiles, *(name for name in locks(folders) if name not in profiles and _is_named(name))})


def _profiles(folders: Iterable[Path]) -> set[str]:
    files = {file.stem for folder in folders for file in folder.glob("*.yaml")}
    return {name for name in files if not name.endswith(".lock")}


def locks(folders: Iterable[Path] | None = None) -> dict[str, Path]:
    """Every lock that stands beside profiles, by name, also one of a variant or of a project's requirements, which has
    no profile file of its name; a user's own shadows a shipped one."""
    found: dict[str, Path] = {}
    for folder in _folders() if folders is None else folders:
        for file in sorted(folder.glob(f"*{_LOCK}")):
            found.setdefault(file.name.removesuffix(_LOCK), file)
    return found


def find(name: str, beside: Path | None = None) -> Path:
    """The file of a profile given by name or by path (anything that ends in .yaml or holds a slash)."""
    if _is_path(name):
        file = (beside or Path.cwd()) / name
        try:
            there = file.is_file()
        except OSError as error:  # longer than any name can be
            raise ProfileError(f"{name[:60]}... names no file: {error.strerror}") from error
        if not there:
            raise ProfileError(f"there is no file {name}")
        if not NAME.fullmatch(file.stem):
            raise ProfileError(f"{file.stem!r} cannot name images: use lower case letters, digits and dashes")
        return file
    for folder in _folders():
        if NAME.fullmatch(name) and (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    known = names()
    hint = near(name, known) or f"known profiles: {', '.join(known) or 'none'}"
    raise ProfileError(f"there is no profile {name!r}", hint=hint)


def _is_path(name: str) -> bool:
    return "/" in name or name.endswith((".yaml", ".yml"))


def meant(name: str, wanted: Path | None = None) -> Meant:
    """What `name` stands for, with the requirements `wanted`.

    A profile of that name comes before the variant of another, and that before what a lock of that name was made for.
    Raises ProfileError where there is none of them, and where the name that is made is that of another project's lock.
    """
    try:
        asked = _profile(name)
    except ProfileError:
        origin = _origin(name) if wanted is None else None
        if origin is None:
            raise
        made_for, wanted, folder = origin
        return replace(_profile(made_for, folder), name=name, requirements=wanted)
    if wanted is None:
        return asked
    folder_name = re.sub(r"[^a-z0-9]+", "-", wanted.resolve().parent.name.lower()).strip("-")
    made = replace(asked, name=_shortened(f"{asked.name}-{folder_name or 'project'}"), requirements=wanted)
    _refuse_another(made, wanted)
    return made


def _shortened(name: str) -> str:
    """At most 63 characters; what is cut off goes into a hash, so that long names stay apart."""
    if len(name) <= _LONGEST:
        return name
    mark = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: _LONGEST - 9].rstrip('-')}-{mark}"


def _refuse_another(made: Meant, wanted: Path) -> None:
    """Folders of different names, or of the same in different places, can make the same name."""
    try:
        origin = _origin(made.name)
    except LockError:  # it is damaged: whoever locks mends it
        return
    if origin and origin[1].resolve() != wanted.resolve():
        raise ProfileError(
            f"{locks()[made.name]} is the lock of {origin[1]}, not of {wanted}",
            hint="rename the folder of one of the two, or delete that lock",
        )


def _profile(name: str, beside: Path | None = None) -> Meant:
    """A profile or its variant."""
    try:
        file = find(name, beside)
        return Meant(file.stem, file, name)
    except ProfileError:
        plain = name.removesuffix(f"-{DEVEL}")
        if plain == name or plain not in _profiles(_folders()):
            raise
        return Meant(name, find(plain), name)


def _origin(name: str) -> tuple[str, Path, Path] | None:
    """The profile and the requirements that the lock of a name says it was made for, and its folder; None where it says
    nothing, or there is no such lock."""
    file = locks().get(name)
    if file is None or not NAME.fullmatch(name):
        return None
    found = document.read(file, LockError).data.get("of")
    profile, wanted = (found.get("profile"), found.get("requirements")) if isinstance(found, dict) else (None, None)
    if not isinstance(profile, str) or not isinstance(wanted, str):
        return None
    return profile, Path(_relative(file.parent / wanted, Path.cwd())), file.parent


def _is_named(name: str) -> bool:
    """Whether a lock's name can be asked for; that it is damaged is told then."""
    try:
        return _origin(name) is not None
    except LockError:
        return True


def _relative(file: Path, folder: Path) -> str:
    """The path of a file as seen from a folder; links are left as they are."""
    return os.path.relpath(file, folder)


def _extended(file: Path, seen: tuple[Path, ...]) -> Document:
    here = document.read(file)
    parent = here.data.get("extends")
    if parent is None:
        return here
    if not isinstance(parent, str):
        raise ProfileError("extends: must name one profile", faults=[here.fault(("extends",), "not a name")])
    try:
        target = find(parent, file.parent).resolve()
    except ProfileError as error:
        fault = here.fault(("extends",), error.message)
        raise ProfileError(error.message, hint=error.hint, faults=[fault]) from None
    if target in (*seen, file.resolve()):
        raise ProfileError("extends: goes in a circle", faults=[here.fault(("extends",), f"{parent} leads back here")])
    return document.merge(_extended(target, (*seen, file.resolve())), here)
