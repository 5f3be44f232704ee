"""Finds the profile that a name on the command line stands for. The name may be that of a profile file, of its devel
variant, of a lock with a project's requirements, or of a GPU."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from envbuild.profile.profile_folders import is_path as is_path
from envbuild.profile.profile_folders import profile_folders, split_line
from envbuild.util import package_data, yaml_and_project_paths
from envbuild.util.errors import EnvbuildError, LockError, ProfileError

_LONGEST = 63
NAME = re.compile(rf"[a-z0-9][a-z0-9-]{{0,{_LONGEST - 1}}}")
DEVEL = "devel"
LOCK = ".lock.yaml"


class UnwrittenProfile(ProfileError):
    """A GPU has no profile, or no profile for one of its CUDA lines. `name`: the name of the profile that `envbuild
    init` would write: the GPU's id, or for a line GPU-cu12. `note`: the beginning of the line that commands print if
    they use that profile although its file does not exist."""

    def __init__(self, name: str) -> None:
        writes = f"envbuild init {name}"
        super().__init__(
            f"no profile is shipped for {name}, and profiles/{name}.yaml does not exist", hint=f"create it: {writes}"
        )
        self.name = name
        self.note = f"no profile is shipped for {name}: using the profile that `{writes}` would write"


@dataclass(frozen=True)
class Meant:
    """The profile file, and perhaps the requirements file, that a name on the command line stands for.

    `name`: the name of their lock and Dockerfile. `profile`: the profile's name, the name of its devel variant, or its
    path, as the user gave it. `cli_words`: the words on the command line of lock, build and make that name the profile
    and the requirements.
    """

    name: str
    file: Path
    profile: str
    cli_words: str
    requirements: Path | None = None


def profile_names() -> list[str]:
    """The names of all profiles, and of all locks with a project's requirements, each once."""
    return _names(profile_folders())


def own_names() -> list[str]:
    """The names of the profiles in the working folder; all names if it has no profiles. For commands that write
    files."""
    return _names([Path.cwd() / "profiles", Path.cwd() / "profiles" / "projects"]) or profile_names()


def _names(folders: Iterable[Path]) -> list[str]:
    folders = list(folders)
    profiles = _profiles(folders)
    return sorted({*profiles, *(name for name in locks(folders) if name not in profiles and _is_named(name))})


def _profiles(folders: Iterable[Path]) -> set[str]:
    return {file.stem for folder in folders for file in _files(folder)}


def _files(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.glob("*.yaml")) if not file.name.endswith(LOCK)]


def named_line(name: str) -> tuple[str, str] | None:
    """Split the name of a CUDA line into profile and label: h20-cu12 into h20 and cu12. None if the name does not have
    this form, or if the first part is neither the name of a profile nor a GPU for which `envbuild init` would write
    this line."""
    found = split_line(name)
    if found is None:
        return None
    if found[0] in _profiles(profile_folders()):
        return found
    from envbuild.profile import nearest_gpu_profile  # imported only for such names: it imports the facts

    return found if found[1] in nearest_gpu_profile.lines_for_gpu(found[0]) else None


def lines_of(name: str) -> dict[str, str]:
    """The profiles of the other CUDA lines of the profile `name`, by label: cu12 -> h20-cu12."""
    found = {other: named_line(other) for other in _profiles(profile_folders())}
    return {line[1]: other for other, line in sorted(found.items()) if line and line[0] == name}


def locks(folders: Iterable[Path] | None = None) -> dict[str, Path]:
    """All locks in the profile folders, by name. These include locks of devel variants and of a project's requirements,
    for which no profile file of the same name exists. A user's own lock takes precedence over a shipped one."""
    found: dict[str, Path] = {}
    for folder in profile_folders() if folders is None else folders:
        for file in sorted(folder.glob(f"*{LOCK}")):
            found.setdefault(file.name.removesuffix(LOCK), file)
    return found


def find_profile(name: str, folder: Path | None = None) -> Path:
    """Find the file of a profile. `name` is a path if it contains a slash or ends in .yaml or .yml. `folder`: where
    relative paths start, by default the working folder. Raises ProfileError."""
    if is_path(name):
        # remove `..`, because the parent folders are compared; a link to a profile is not resolved
        file = Path(os.path.abspath((folder or Path.cwd()) / name))  # noqa: PTH100
        try:
            there, is_folder = file.is_file(), file.is_dir()
        except OSError as error:  # the name is too long
            raise ProfileError(f"{name[:60]}... is not a usable path: {error.strerror}") from error
        if is_folder:
            raise _folder(name, file)
        if not there:
            raise ProfileError(f"file not found: {name}")
        if not NAME.fullmatch(file.stem):
            raise ProfileError(
                f"{file.stem!r} cannot be used in an image name: use lower case letters, digits and dashes"
            )
        return file
    for folder in profile_folders():
        if NAME.fullmatch(name) and (folder / f"{name}.yaml").is_file():
            refuse_link(folder / f"{name}.yaml", ProfileError)
            return folder / f"{name}.yaml"
    if name in (".", "..") or (NAME.fullmatch(name) and (Path.cwd() / name).is_dir()):
        raise _folder(name, Path.cwd() / name)
    from envbuild.facts import database, gpu_name_lookup  # imported only here: every command imports this module
    from envbuild.profile import value_types  # imported only here: every command imports this module

    text = database.unsupported(name, value_types.PLATFORM)
    if text:
        raise ProfileError(text)
    known = profile_names()
    hint = gpu_name_lookup.suggestion(name, known) or f"known profiles: {', '.join(known) or 'none'}"
    raise ProfileError(f"unknown profile {name!r}", hint=hint)


def find_parent(name: str, folder: Path) -> Path:
    """Find the file of a profile that another one extends. Like `find_profile`, but for a GPU's name the error says
    which profile can be extended, or how to create one."""
    try:
        return find_profile(name, folder)
    except ProfileError as unknown:
        plain = name.removesuffix(f"-{DEVEL}")
        if plain != name and plain in _profiles(profile_folders()):
            raise ProfileError(unknown.message, hint=f"write extends: {plain}, and variant: {DEVEL}") from None
        known = _of_gpu(name, unknown)
        raise ProfileError(unknown.message, hint=f"did you mean {known}?") from None


def refuse_link(file: Path, error: type[EnvbuildError]) -> None:
    """Raise `error` if a file found by name (a profile or a lock) is a link to a file outside its project, because
    later messages could quote that file.

    Files of an installed envbuild are not checked: uv may install them as links.
    """
    if package_data.ROOT.name == "shipped" and package_data.ROOT in file.parents:
        return
    try:
        yaml_and_project_paths.inside(file.name, file.parent, yaml_and_project_paths.home(file))
    except ValueError as problem:
        raise error(str(problem), hint="use a copy of the file, or give a profile's path instead of its name") from None


_MOST = 10  # how many profiles of a folder, or GPUs with one name, an error lists


def _folder(name: str, folder: Path) -> ProfileError:
    """The error for a folder given instead of a profile, with the paths of its profiles."""
    below = [folder, folder / "profiles", folder / "profiles" / "projects"]
    found = [str(Path(name) / file.relative_to(folder)) for there in below for file in _files(there)]
    paths = [quote(one if is_path(one) else f"./{one}") for one in found]
    more = f", and {len(paths) - _MOST} more" if len(paths) > _MOST else ""
    hint = f"name one of its profiles: {', '.join(paths[:_MOST])}{more}" if paths else "it contains no profile"
    return ProfileError(f"{name} is a folder, and a profile is a file", hint=hint)


def meant(name: str, wanted: Path | None = None) -> Meant:
    """Find the profile for `name`, combined with the requirements file `wanted` if it is given.

    Tries in this order: a profile of that name, the devel variant of a profile, a lock of that name that records a
    requirements file (not with `wanted`), and the profile of a GPU that people call by that name.

    Raises ProfileError if the profile is missing, or if the combined name belongs to another project's lock;
    UnwrittenProfile for a GPU without a profile.
    """
    try:
        found = _profile(name)
    except ProfileError as unknown:
        origin = _origin(name) if wanted is None else None
        if origin is None:
            found = _profile(_of_gpu(name, unknown))
        else:
            made_for, wanted, folder = origin
            _refuse_foreign(locks()[name], made_for, wanted)
            return replace(_profile(made_for, folder), name=name, cli_words=quote(name), requirements=wanted)
    return found if wanted is None else with_requirements(found, wanted)


def with_requirements(found: Meant, wanted: Path) -> Meant:
    """Combine a profile with a requirements file, under a name that contains the name of the file's folder. Raises
    ProfileError if this name belongs to another project's lock."""
    folder_name = re.sub(r"[^a-z0-9]+", "-", wanted.resolve().parent.name.lower()).strip("-")
    words = f"{found.cli_words} --requirements {quote(str(wanted))}"
    name = _shortened(f"{found.name}-{folder_name or 'project'}")
    made = replace(found, name=name, cli_words=words, requirements=wanted)
    _refuse_another(made, wanted)
    return made


def _of_gpu(name: str, unknown: ProfileError) -> str:
    """The name of the profile for a GPU, which people may call by several names, or for one of its CUDA lines
    (GPU-cu12). If the GPU has no profile, the name of the profile for a GPU that shares its evidence. Raises `unknown`
    if `name` is not a GPU's, or is a path or a folder; ProfileError if several GPUs have this name; UnwrittenProfile if
    there is no such profile."""
    if not _may_be_gpu(name):
        raise unknown
    from envbuild.facts import database, gpu_name_lookup  # imported only if no profile has the name
    from envbuild.profile import nearest_gpu_profile, value_types

    found, label = gpu_name_lookup.candidates(name), None
    if not found and (line := split_line(name)):
        name, label = line
        found = gpu_name_lookup.candidates(name)
    if not found:
        raise unknown
    if len(found) > 1:
        listed = ", ".join(f"{gpu.id} ({gpu.names[0]})" for gpu in found[:_MOST])
        more = f", and {len(found) - _MOST} more" if len(found) > _MOST else ""
        raise ProfileError(f"{name!r} is the name of several GPUs: {listed}{more}", hint="use one of these names")
    text = database.unsupported(found[0].id, value_types.PLATFORM)
    if text:
        raise ProfileError(text)
    known = _profiles(profile_folders())
    served = [gpu.id for gpu in (*found, *database.family(found[0])) if gpu.id in known]
    base = served[0] if served else found[0].id
    profile = f"{base}-{label}" if label else base
    if profile in known:
        return profile
    if label and label not in nearest_gpu_profile.lines_for_gpu(base):
        raise unknown
    raise UnwrittenProfile(profile)


_WRITTEN_AS_PATH = re.compile(r"[./~].*|.*(/|\.ya?ml)")  # ./l40, /srv/l40, ~/l40, l40/, l40.yaml


def _may_be_gpu(name: str) -> bool:
    """Whether a name that is not a profile's may be a GPU's. Names of GPUs on the PCI bus contain slashes: "GB206M
    [GeForce RTX 5060 Max-Q / Mobile]". A path is not a GPU's name if it is written like one, or if it exists."""
    if is_path(name):
        return not _WRITTEN_AS_PATH.fullmatch(name) and not os.path.lexists(name)
    return not (NAME.fullmatch(name) and (Path.cwd() / name).is_dir())


def _shortened(name: str) -> str:
    """Limit a name to 63 characters; a hash of the full name replaces the rest, so that long names stay distinct."""
    if len(name) <= _LONGEST:
        return name
    mark = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: _LONGEST - 9].rstrip('-')}-{mark}"


def _refuse_another(made: Meant, wanted: Path) -> None:
    """Refuse a name that the lock of another requirements file has already: several folders can lead to the same name.
    A missing requirements file is not an error here; it is reported where it is read."""
    if not os.path.exists(wanted):  # noqa: PTH110 - False also for a name that is too long
        return
    try:
        origin = _origin(made.name)
    except LockError:  # a damaged lock will be replaced by the new one
        return
    if origin and origin[1].resolve() != wanted.resolve():
        raise ProfileError(
            f"{locks()[made.name]} is the lock of {origin[1]}, not of {wanted}",
            hint="rename the folder of one of the two, or delete that lock",
        )


def _profile(name: str, folder: Path | None = None) -> Meant:
    """A profile or its devel variant."""
    try:
        file = find_profile(name, folder)
        return Meant(file.stem, file, name, quote(name))
    except ProfileError:
        plain = name.removesuffix(f"-{DEVEL}")
        if plain == name or plain not in _profiles(profile_folders()):
            raise
        return Meant(name, find_profile(plain), name, quote(name))


def _origin(name: str) -> tuple[str, Path, Path] | None:
    """The profile and the requirements file recorded in the lock of that name, and the lock's folder. None if the lock
    is missing, or does not record both."""
    file = locks().get(name)
    if file is None or not NAME.fullmatch(name):
        return None
    refuse_link(file, LockError)
    found = yaml_and_project_paths.read(file, LockError).data.get("of")
    profile, wanted = (found.get("profile"), found.get("requirements")) if isinstance(found, dict) else (None, None)
    if not isinstance(profile, str) or not isinstance(wanted, str):
        return None
    return profile, Path(relative_path(file.parent / wanted, Path.cwd())), file.parent


_REQUIREMENTS = re.compile(
    r"[A-Za-z0-9._-]*requirements[A-Za-z0-9._-]*\.(txt|in)|pyproject\.toml|uv\.lock"
    r"|pylock(\.[A-Za-z0-9_-]+)?\.toml|environment[A-Za-z0-9._-]*\.ya?ml|setup\.py"
    r"|(env|install|requirements|setup)[A-Za-z0-9_-]*\.sh"
)


def _refuse_foreign(lock: Path, made_for: str, wanted: Path) -> None:
    """Refuse a lock that names a file outside its project: the lock's author may be untrusted.

    A requirements file may be outside the project, because --requirements allows it. But then it must have one of the
    usual names (requirements.txt, pyproject.toml, uv.lock, environment.yml, setup.py, env.sh), and no message quotes
    its text (see requirements_reader).
    """
    root = yaml_and_project_paths.home(lock)
    try:
        if is_path(made_for):
            yaml_and_project_paths.inside(made_for, lock.parent, root)
        if not _REQUIREMENTS.fullmatch(wanted.resolve().name):
            yaml_and_project_paths.inside(str(wanted), Path.cwd(), root)
    except (OSError, RuntimeError, ValueError) as error:
        hint = "give the files instead: envbuild lock PROFILE --requirements FILE"
        raise ProfileError(
            f"the lock {yaml_and_project_paths.display(lock)} cannot be used by name: {error}", hint=hint
        ) from None


def _is_named(name: str) -> bool:
    """Whether a lock's name can be used like that of a profile, because the lock records a requirements file. True for
    a damaged lock too, so that its damage is reported when the name is used."""
    try:
        return _origin(name) is not None
    except LockError:
        return True


def relative_path(file: Path, folder: Path) -> str:
    """The path of a file relative to a folder; links are not resolved."""
    return os.path.relpath(file, folder)
