"""Reads a profile by name or path, and applies `extends` and the pins and requirements of the command line."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import Specifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from envbuild.facts import database
from envbuild.facts.fact_field_types import is_version
from envbuild.fetch import uv_config
from envbuild.profile import inherited_value_reasons, profile_and_lock_name_lookup, starter_profile
from envbuild.profile.loaded_profile import PIN, LoadedProfile
from envbuild.profile.model import Profile, profile_error, tried
from envbuild.profile.profile_and_lock_name_lookup import Meant
from envbuild.profile.project_test_shapes_and_script import read_script
from envbuild.resolve import malformed_profile_contradictions, torch_companions
from envbuild.util import yaml_and_project_paths
from envbuild.util.errors import Fault, ProfileError
from envbuild.util.yaml_and_project_paths import Document, Place

_KEYS = ("torch", "python", "cuda")
_PACKAGE = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^]]*\])?")  # a requirement's name and its extras


def load(name: str, pins: Mapping[str, str] | None = None, wanted: Path | None = None) -> LoadedProfile:
    """Find and read a profile by name or path. `pins` replace its versions of libraries, torch, Python or packages.

    `<profile>-devel` is the devel variant of a profile, with its own lock and Dockerfile. `wanted` is a project's
    requirements file or lock (see requirements_reader): its packages are added to the profile's, under the name
    `<profile>-<folder of the file>`, and the lock and Dockerfile are written to the working folder. Once locked, that
    name alone is enough.
    Raises ProfileError with all faults, each with its file and line.
    """
    meant = profile_and_lock_name_lookup.meant(name, wanted)
    faults: list[Fault] = []
    return _source(
        meant, _extended(meant.file, yaml_and_project_paths.home(meant.file), (), faults), pins or {}, faults
    )


def unwritten(name: str, pins: Mapping[str, str] | None = None, wanted: Path | None = None) -> LoadedProfile:
    """The profile that `envbuild init` would write for a GPU without a profile. `name`: the GPU's id, or the name of
    one of its CUDA lines. `wanted`: as for `load`. Writes no file."""
    file = Path.cwd() / "profiles" / f"{name}.yaml"
    here = yaml_and_project_paths.parse(starter_profile.for_gpu(name), yaml_and_project_paths.display(file))
    meant = profile_and_lock_name_lookup.Meant(name, file, name, name)
    if wanted:
        meant = profile_and_lock_name_lookup.with_requirements(meant, wanted)
    faults: list[Fault] = []
    return _source(meant, _inherited(here, file, yaml_and_project_paths.home(file), (), faults), pins or {}, faults)


def _source(meant: Meant, merged: Document, pins: Mapping[str, str], faults: list[Fault]) -> LoadedProfile:
    """Build the profile from the merged files. `faults`: the errors already found in these files; ProfileError is
    raised with them and any further ones."""
    file, wanted = meant.file, meant.requirements
    parent = merged.data.pop("extends", None)
    if meant.profile == f"{file.stem}-{profile_and_lock_name_lookup.DEVEL}":
        variant = Document(
            merged.file,
            {"variant": profile_and_lock_name_lookup.DEVEL},
            {("variant",): yaml_and_project_paths.Place(merged.file, 1)},
        )
        merged = yaml_and_project_paths.merge(merged, variant)
    notes: list[str] = []
    constraints: list[str] = []
    faults += _require(merged, wanted, pins, notes, constraints) if wanted else []
    plain = (
        tried(yaml_and_project_paths.without(merged, [("selftest", "script")])) if pins else None
    )  # the script is read later
    if pins:
        own = yaml_and_project_paths.without(merged, [])
        merged = yaml_and_project_paths.merge(merged, _pinned(_repin(merged, pins)))
        merged = inherited_value_reasons.without_outdated(own, merged, ())
    _bound_companions(merged, notes)
    faults += read_script(merged)
    found = tried(merged)
    if faults or not isinstance(found, Profile):
        reported = {fault.field for fault in faults}
        malformed = [] if isinstance(found, Profile) else [item for item in found if item[1].field not in reported]
        more, hint = malformed_profile_contradictions.contradictions(meant, merged, malformed, faults)
        raise profile_error(meant.name, [*faults, *(fault for _, fault in malformed), *more], hint)
    file = Path.cwd() / "profiles" / file.name if wanted else file
    return LoadedProfile(
        meant.name, file, found, merged, meant, plain if isinstance(plain, Profile) else None, tuple(notes),
        tuple(constraints), parent,
    )  # fmt: skip


def ignored_uv_settings(found: Iterable[LoadedProfile]) -> list[str]:
    """Warnings about uv settings that a lock ignores: in the working folder, and next to these profiles' requirements
    files."""
    files = {loaded.meant.requirements for loaded in found if loaded.meant and loaded.meant.requirements}
    return list(
        uv_config.ignored_by_uv_config(dict.fromkeys([Path.cwd(), *sorted(file.resolve().parent for file in files)]))
    )


def _require(
    merged: Document, wanted: Path, pins: Mapping[str, str], notes: list[str], constraints: list[str]
) -> list[Fault]:
    """Append a project's requirements to the profile's packages, each with its file and line; return the faults.

    A line is left out, or reduced to the package's name and extras, if the profile compiles the package, or if the line
    contradicts an exact version from --pin or the profile, or a library or companion of the profile's torch. `notes`
    receives a text about each such line. `constraints` receives the bounds that the file names with -c, except those to
    which this applies."""
    from envbuild.profile import requirements_reader  # not needed without a requirements file

    packages = merged.data.setdefault("packages", [])
    python = str(pins.get("python", merged.data.get("python")))
    if not re.fullmatch(r"3\.[0-9]{1,2}", python):  # invalid or missing: a fault that is reported with the profile's
        python = "3.11"
    found = requirements_reader.read(wanted, python)
    notes += found.notes
    exact = _exact(merged, pins)
    torch = exact["torch"][0] if "torch" in exact else ""
    compiled = set(_compiled_extensions(merged))

    def kept(text: str, place: Place) -> str:
        overruled = (
            _compiled_here(text, compiled)
            or _overruled(text, exact, pins)
            or _made_for_another_torch(text, torch, exact)
        )
        if overruled is None:
            return text
        left, reason = overruled
        notes.append(f"{place.file}:{place.line}: {text if found.quotable else 'this line'} is left out: {reason}")
        return left

    for text, place in found.lines if isinstance(packages, list) else ():
        left = kept(text, place)
        if left:
            merged.places[("packages", len(packages))] = place
            packages.append(left)
    for text, place in found.constraints:
        if kept(text, place) == text:
            constraints.append(text)
    return found.faults


def _compiled_extensions(merged: Document) -> Iterator[str]:
    """The names of the extensions that the profile compiles, as far as the list is valid."""
    listed = merged.data.get("extensions")
    for one in listed if isinstance(listed, list) else ():
        if isinstance(one, dict) and isinstance(one.get("name"), str) and "none" not in one:
            yield str(canonicalize_name(one["name"]))


def _compiled_here(text: str, compiled: Collection[str]) -> tuple[str, str] | None:
    """An empty remainder and the reason for a requirement that the profile compiles from source; otherwise None."""
    requirement = _parsed(text)
    if requirement is None or canonicalize_name(requirement.name) not in compiled:
        return None
    return "", "the profile compiles it from source (extensions:)"


def _made_for_another_torch(text: str, torch: str, exact: Mapping[str, tuple[str, str]]) -> tuple[str, str] | None:
    """If a requirement belongs to another torch than the profile's, return what remains of it and the reason; otherwise
    None. `torch`: the profile's release. `pip freeze` and locks name torch's libraries and companions exactly: CUDA's
    libraries, triton, torchvision and torchaudio."""
    public, _, label = torch.partition("+")
    requirement, release = _parsed(text), database.torch_release(public if label == "cpu" else torch)
    if requirement is None or release is None or not requirement.specifier:
        return None
    name = str(canonicalize_name(requirement.name))
    if name in exact:
        return None
    if label == "cpu" and (database.is_cuda_library(name) or name == "triton"):
        return "", f"torch {torch} uses no GPU"
    if name != "torch" and name in database.torch_index().packages:
        pinned = any(one.operator in ("==", "===") for one in requirement.specifier)
        if not pinned or _fits_torch(requirement, release.version):
            return None
        own_series = torch_companions.companion_requirement(name, release.version)
        return own_series, f"the profile has torch {torch}, and the version that belongs to it is chosen"
    library = database.library_of(name)
    if name in release.requirements:
        versions = [one.version for one in requirement.specifier if one.operator == "=="]
        bound = SpecifierSet(release.requirements[name])
        if not versions or all(bound.contains(version.removesuffix(".*"), prereleases=True) for version in versions):
            return None
        return "", f"torch {torch} requires {name}{bound}"
    if library and database.is_cuda_library(name) and name != database.distribution_of(library, release.cuda):
        return "", f"torch {torch} is built for CUDA {release.cuda}, and has its own {library}"
    return None


def _bound_companions(merged: Document, notes: list[str]) -> None:
    """Restrict torchaudio without an exact version to the series that belongs to the profile's torch, because a
    resolver would choose a newer release. `notes` receives a text about each such package."""
    packages, torch = merged.data.get("packages"), str(merged.data.get("torch"))
    release = database.torch_release(torch.partition("+")[0])
    if not isinstance(packages, list) or release is None:
        return
    parsed = [_parsed(str(text)) for text in packages]
    exact = {canonicalize_name(one.name) for one in parsed if one and any(map(_is_exact, one.specifier))}
    for index, requirement in enumerate(parsed):
        if requirement is None or requirement.url or canonicalize_name(requirement.name) in exact:
            continue
        bound = torch_companions.missing_bound(canonicalize_name(requirement.name), release.version)
        if bound:
            requirement.specifier &= SpecifierSet(bound)
            packages[index] = str(requirement)
            place = merged.place(("packages", index))
            notes.append(f"{place.file}:{place.line}: {requirement} is used, because it belongs to torch {torch}")


def _is_exact(specifier: Specifier) -> bool:
    return specifier.operator in ("==", "===") and not specifier.version.endswith(".*")


def _fits_torch(requirement: Requirement, torch: str) -> bool:
    """Whether an exact version of torchvision or torchaudio belongs to a torch release."""
    series = torch_companions.companion_series(canonicalize_name(requirement.name), torch)
    for one in requirement.specifier:
        if one.operator not in ("==", "===") or not is_version(one.version.removesuffix(".*")):
            continue
        version = Version(one.version.removesuffix(".*"))
        if version.local or f"{version.major}.{version.minor}" != series:
            return False
    return True


ORDER = "--pin takes precedence over the profile, and the profile over the requirements file"


def _overruled(text: str, exact: Mapping[str, tuple[str, str]], pins: Mapping[str, str]) -> tuple[str, str] | None:
    """If a requirement contradicts an exact version, return what remains of the requirement (it may be empty) and the
    reason; otherwise None."""
    requirement = _parsed(text)
    if requirement is None:
        return None
    name = canonicalize_name(requirement.name)
    version, whose = exact.get(name, ("", ""))
    if not version or requirement.specifier.contains(Version(version), prereleases=True):
        return None
    bare = name != "torch" and name in map(canonicalize_name, pins)  # the name stays, and only --pin sets its version
    left = (
        f"{requirement.name}[{','.join(sorted(requirement.extras))}]"
        if requirement.extras
        else requirement.name
        if bare
        else ""
    )
    return left, f"{whose} has {requirement.name} {version} ({ORDER})"


def _parsed(text: str) -> Requirement | None:
    """The requirement; None if it is invalid, which is reported as a fault of the profile."""
    try:
        return Requirement(text)
    except (InvalidRequirement, RecursionError):
        return None


def _exact(merged: Document, pins: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Distribution -> its exact version from --pin, otherwise from the profile, and which of the two sets it."""
    data = merged.data
    torch = pins.get("torch", data.get("torch"))
    release = database.torch_release(str(torch))
    found: dict[str, tuple[object, str]] = {"torch": (torch, PIN if "torch" in pins else "the profile")}
    for text in data["packages"] if isinstance(data.get("packages"), list) else ():
        requirement = _parsed(str(text))
        if requirement and not requirement.marker:
            exact = next((one.version for one in requirement.specifier if one.operator == "=="), "")
            found[canonicalize_name(requirement.name)] = (exact, "the profile")
    libraries = data["pins"] if isinstance(data.get("pins"), dict) else {}
    named = {str(name): pin.get("version") if isinstance(pin, dict) else pin for name, pin in libraries.items()}
    for whose, given in (("the profile", named), (PIN, pins)):
        for library, pinned in given.items():
            distribution = database.distribution_of(library, release.cuda) if release else None
            found[canonicalize_name(distribution or library)] = (pinned, whose)
    return {name: (str(version), whose) for name, (version, whose) in found.items() if is_version(str(version))}


def _repin(merged: Document, pins: Mapping[str, str]) -> dict[str, str]:
    """Change the profile's packages to the versions in `pins`; return the pins that do not name one of its packages.

    Pins of torch, Python and CUDA are always returned, because these are keys of a profile, even if a requirements file
    names torch.
    """
    packages, pinned = merged.data.get("packages"), set()
    wanted = {str(canonicalize_name(name)): version for name, version in pins.items() if name not in _KEYS}
    for index, text in enumerate(packages if isinstance(packages, list) else ()):
        match = _PACKAGE.match(str(text))
        name = canonicalize_name(match[1]) if match else ""
        if match and name in wanted:
            merged.data["packages"][index] = f"{match[0]}=={wanted[name]}"
            merged.places[("packages", index)] = yaml_and_project_paths.Place(PIN, 1)
            pinned.add(name)
    return {name: version for name, version in pins.items() if canonicalize_name(name) not in pinned}


def _pinned(pins: Mapping[str, str]) -> Document:
    """The pins from --pin that do not name packages, as a document to merge onto the profile."""
    own = {name: version for name, version in pins.items() if name in _KEYS}
    libraries = {name: {"version": v, "reason": "given with --pin"} for name, v in pins.items() if name not in own}
    data: dict[str, Any] = {**own, **({"pins": libraries} if libraries else {})}
    places: dict[yaml_and_project_paths.Path, yaml_and_project_paths.Place] = {
        (name,): yaml_and_project_paths.Place(PIN, 1) for name in data
    }
    places |= {("pins", name): yaml_and_project_paths.Place(PIN, 1) for name in libraries}
    return Document(PIN, data, places)


def _extended(file: Path, root: Path, seen: tuple[Path, ...], faults: list[Fault]) -> Document:
    """The profile merged with its parents. A parent given by path must be within `root`. `faults` receives the faults
    of single keys."""
    return _inherited(yaml_and_project_paths.read(file, faults=faults), file, root, seen, faults)


def _without_other_base(inherited: Document, here: Document) -> Document:
    """The inherited values without the kind of base (Debian suite or image) that this profile replaces by the other."""
    own, before = here.data.get("base"), inherited.data.get("base")
    if not isinstance(own, dict) or not isinstance(before, dict):
        return inherited
    kinds = {"bootstrap", "image"}
    replaced = kinds - own.keys() if kinds & own.keys() else set()
    return yaml_and_project_paths.without(inherited, [("base", kind) for kind in replaced & before.keys()])


def _inherited(here: Document, file: Path, root: Path, seen: tuple[Path, ...], faults: list[Fault]) -> Document:
    parent = here.data.get("extends")
    if parent is None:
        return here
    if not isinstance(parent, str):
        raise ProfileError(
            "extends: must name one profile", faults=[here.fault(("extends",), "not the name or path of a profile")]
        )
    try:
        if profile_and_lock_name_lookup.is_path(parent):
            yaml_and_project_paths.inside(parent, file.parent, root)
        found = profile_and_lock_name_lookup.find_parent(parent, file.parent)
    except (ProfileError, ValueError) as error:
        fault = here.fault(("extends",), str(error))
        raise ProfileError(str(error), hint=getattr(error, "hint", None), faults=[fault]) from None
    target = found.resolve()
    if target in (*seen, file.resolve()):
        raise ProfileError(
            "extends: leads back to the same profile", faults=[here.fault(("extends",), f"{parent} leads back here")]
        )
    root = root if profile_and_lock_name_lookup.is_path(parent) else yaml_and_project_paths.home(found)
    inherited = _without_other_base(_extended(target, root, (*seen, file.resolve()), faults), here)
    reasons = here.data.get("why")
    own = reasons if isinstance(reasons, dict) else ()
    return inherited_value_reasons.without_outdated(inherited, yaml_and_project_paths.merge(inherited, here), own)
