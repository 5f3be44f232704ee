"""A loaded profile: its name, its file, its values and their positions in the file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from envbuild.profile.model import Accept, Profile
from envbuild.profile.profile_and_lock_name_lookup import LOCK, Meant, is_path, relative_path
from envbuild.profile.project_test_shapes_and_script import Script
from envbuild.util import package_data, yaml_and_project_paths
from envbuild.util.yaml_and_project_paths import Document

PIN = "--pin"
"""Messages name this instead of a file for a value that the option --pin set."""


@dataclass(frozen=True)
class LoadedProfile:
    """A profile with its name and file. `document`: its values, each with file and line. `plain`: the profile without
    the versions from --pin; None if that option is not used. `notes`: lines of a requirements file that are left out,
    each with the reason. `constraints`: bounds from the files that the requirements file names with -c. `parent`: the
    name or path of the profile that this one extends."""

    name: str
    file: Path
    profile: Profile
    document: Document
    meant: Meant | None = None
    plain: Profile | None = None
    notes: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    parent: str | None = None

    @property
    def cli_words(self) -> str:
        """The words that name the profile on the command line of lock, build and make."""
        return self.meant.cli_words if self.meant else self.name

    @property
    def known(self) -> str:
        """The words by which commands find the profile once it is locked. With a requirements file, this is the name of
        the lock; otherwise `cli_words`."""
        return self.name if self.meant and self.meant.requirements else self.cli_words

    @property
    def unpinned(self) -> LoadedProfile:
        """A copy of the profile without the versions from --pin; if --pin is not used, without its own `pins`."""
        return replace(self, profile=self.plain or self.profile.model_copy(update={"pins": {}}))

    @property
    def project(self) -> Path:
        """The folder that contains profiles/ and dockerfiles/; for a shipped profile, the working folder."""
        if package_data.ROOT in self.file.parents and package_data.ROOT.name == "shipped":
            return Path.cwd()
        return yaml_and_project_paths.home(self.file)

    @property
    def lock_file(self) -> Path:
        return self._generated_file("profiles", f"{self.name}{LOCK}")

    @property
    def known_lock(self) -> Path:
        """The lock to read: the project's own; if that is missing, the lock next to the profile's file."""
        return self.lock_file if self.lock_file.exists() else self.file.with_name(f"{self.name}{LOCK}")

    @property
    def dockerfile(self) -> Path:
        return self.project / "dockerfiles" / f"{self.name}.Dockerfile"

    @property
    def origin(self) -> dict[str, str] | None:
        """The value of `of` in the lock file if a profile is combined with a requirements file: the profile (its path,
        or its name if the user gave a name) and the path of the requirements. Paths are relative to the lock's folder.
        None without a requirements file."""
        if self.meant is None or self.meant.requirements is None:
            return None
        folder = self.lock_file.parent
        by_path = is_path(self.meant.profile)
        return {
            "profile": relative_path(self.meant.file, folder) if by_path else self.meant.profile,
            "requirements": relative_path(self.meant.requirements, folder),
        }

    def accepting(self, ids: Iterable[str], reason: str) -> LoadedProfile:
        """A copy of the profile that also accepts these advisories."""
        own = {item.advisory for item in self.profile.accept}
        more = tuple(Accept(advisory=name, reason=reason) for name in ids if name not in own)
        return replace(self, profile=self.profile.model_copy(update={"accept": (*self.profile.accept, *more)}))

    def bringing(self, script: Script) -> LoadedProfile:
        """A copy of the profile with this self-test script."""
        selftest = self.profile.selftest.model_copy(update={"script": script})
        return replace(self, profile=self.profile.model_copy(update={"selftest": selftest}))

    def _generated_file(self, folder: str, name: str) -> Path:
        if self.project in self.file.parents:
            return self.file.parent / name
        return self.project / folder / name
