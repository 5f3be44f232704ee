"""Plans the repair of an environment: the commands of its manager (pip, uv, conda, ...), the edits that keep a later
installation from undoing them, and which library files are loaded before and after. Reads ELF headers and the manager's
files; changes nothing.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import uv
from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from envbuild.audit import library_and_distribution_findings
from envbuild.audit.collected_environment import Copy, Holdings
from envbuild.audit.environment_audit import Audit
from envbuild.explain.cause_ranking import Explanation
from envbuild.facts import database
from envbuild.repair import (
    dynamic_loader_search,
    environment_manager_detection,
    project_requirement_check,
    required_changes,
)
from envbuild.repair.dynamic_loader_search import LoadedFile, LoaderInput
from envbuild.repair.environment_manager_detection import CondaPackage, EnvironmentManager
from envbuild.repair.required_changes import Changes, Diagnosis, LibraryPin
from envbuild.selftest.inventory import elf_reader
from envbuild.selftest.inventory.elf_reader import Elf


@dataclass(frozen=True)
class Command:
    """A command as a list of arguments. `shell`: the command changes the shell's own variables, so only the user of the
    shell can run it."""

    does: str
    argv: tuple[str, ...]
    shell: bool = False

    @property
    def text(self) -> str:
        return shlex.join(self.argv)


@dataclass(frozen=True)
class DiagnosisInput:
    """What a diagnosis was made from: the environment's interpreter, the logs, and the ids of the GPUs that the user
    named. Its methods return commands that make the same diagnosis."""

    target: str
    logs: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()

    def fix(self, *options: str) -> tuple[str, ...]:
        return ("envbuild", "fix", *self._repeatable_logs, *self._models, "--python", self.target, *options)

    def run_with_fix(self) -> tuple[str, ...]:
        """The command that starts PROGRAM with fixed libraries and changes nothing."""
        logs = [word for log in self._repeatable_logs for word in ("--with-fix", log)] or ["--with-fix"]
        return ("envbuild", "run", *logs, *self._models, "--python", self.target, "--", "PROGRAM")

    @property
    def _repeatable_logs(self) -> tuple[str, ...]:
        """The paths of the logs. LOG stands for standard input and for the file of a shell's <(...), because these
        cannot be read again."""
        return tuple("LOG" if log == "-" or log.startswith(("/dev/", "/proc/")) else log for log in self.logs)

    @property
    def _models(self) -> tuple[str, ...]:
        return tuple(word for gpu in self.gpus for word in ("--gpu", gpu))


@dataclass(frozen=True)
class MetadataPin:
    """A requirement of the installed distribution `owner` that would bring the old version of `name` back at the next
    installation. `before`: the requirement; `version`: the version that must be required instead."""

    file: Path
    owner: str
    name: str
    version: str
    before: str

    @property
    def files(self) -> tuple[Path, ...]:
        """METADATA, and RECORD if there is one."""
        record = self.file.with_name("RECORD")
        return (self.file, record) if record.is_file() else (self.file,)

    @property
    def command(self) -> Command:
        """The sed command that changes the requirement, and removes the checksum of METADATA from RECORD. sed writes a
        new file and renames it, so hard links to the old file do not change."""
        name = re.sub("-", "[-_.]", self.name)
        scripts = ["-e", rf"s/^(Requires-Dist: *{name})[^A-Za-z0-9._;-][^;]*/\1==%s /I" % self.version]
        scripts += ["-e", r"s#^([^/,]*\.dist-info/METADATA),.*#\1,,#"]
        does = (
            f"keep the new version: {self.owner} requires {self.before}, and the next pip install would bring that back"
        )
        return Command(does, ("sed", "-i", "-E", *scripts, *map(str, self.files)))


@dataclass(frozen=True)
class ProjectOverrides:
    """Requirements that [tool.uv] override-dependencies of a pyproject.toml must contain."""

    file: Path
    requirements: tuple[str, ...]


@dataclass(frozen=True)
class LibraryOutcome:
    """Which file of a library torch loads, now and after the repair. `before_way`, `after_way`: the loader's rule that
    finds it. `measured`: true if `before` was seen in a process that imported torch, false if it is predicted."""

    library: str
    before: str | None
    before_version: str | None
    before_way: str | None
    measured: bool
    after: str | None
    after_version: str | None
    after_way: str | None


@dataclass(frozen=True)
class RepairPlan:
    """The repair of an environment. `commands`: in the order to run them; `metadata` and `overrides`: edits that keep a
    later installation from undoing the repair; `touched`: the distributions that the commands replace; `refused`: why
    envbuild does not run the commands itself, and what to do."""

    source: DiagnosisInput
    manager: EnvironmentManager
    diagnosis: Diagnosis
    commands: tuple[Command, ...] = ()
    metadata: tuple[MetadataPin, ...] = ()
    overrides: ProjectOverrides | None = None
    libraries: tuple[LibraryOutcome, ...] = ()
    touched: frozenset[str] = frozenset()
    warnings: tuple[str, ...] = ()
    refused: tuple[str, str] | None = None

    @property
    def target(self) -> str:
        return self.source.target

    @property
    def or_unchanged(self) -> str:
        """The end of a remedy: the alternative to a change of the environment, if other library files are enough."""
        return _or_unchanged(self.diagnosis.changes, self.source)

    @property
    def printed(self) -> tuple[Command, ...]:
        """All commands, including the edits that can be written as commands."""
        return (*self.commands, *(pin.command for pin in self.metadata))

    @property
    def by_user(self) -> tuple[Command, ...]:
        """The commands that change variables of the shell, which only the user can run."""
        return tuple(command for command in self.commands if command.shell)

    @property
    def state(self) -> Literal["healthy", "fixable", "by-hand"]:
        if self.diagnosis.healthy:
            return "healthy"
        return "fixable" if self.printed or self.overrides else "by-hand"


def plan_repair(
    audited: Audit,
    found: Explanation | None,
    *,
    logs: Sequence[str] = (),
    gpus: Sequence[str] = (),
    files_only: bool = False,
) -> RepairPlan:
    """Plan the repair of an audited environment. `found`: the explanation of logs from the environment; `logs`: their
    paths; `gpus`: the ids of the GPUs that the user named; `files_only`: as in required_changes.diagnose."""
    held = audited.held
    manager = environment_manager_detection.detect(held)
    files = environment_manager_detection.metadata_files(
        list(dict.fromkeys(item.folder for item in held.distributions))
    )
    # conda does not read the METADATA of its own packages; pip, which may share its environment, reads that of torch
    pip_owns_torch = manager.kind == "conda" and "torch" in files and not manager.conda_owner(str(files["torch"]))
    by_metadata = manager.kind in ("pip", "uv", "system") or pip_owns_torch
    diagnosis = required_changes.diagnose(audited, found, files_only=files_only, metadata_counts=by_metadata)
    source = DiagnosisInput(audited.target, tuple(logs), tuple(gpus))
    plan = RepairPlan(source, manager, diagnosis)
    if diagnosis.healthy:
        return plan
    steps = _Steps(held, manager, diagnosis.changes, files, source)
    outcomes, shells, warnings = _outcomes(held, diagnosis.changes)
    steps.warnings += warnings
    plan = replace(plan, libraries=tuple(outcomes))
    prevented = steps.prevented()
    if prevented:
        commands = [*shells, *steps.instead(prevented)]
        refused = (prevented, f"install torch in a virtual environment{plan.or_unchanged}")
        if manager.kind == "system":
            refused = steps.refusal(commands) or refused
        return replace(plan, commands=tuple(commands), warnings=tuple(steps.warnings), refused=refused)
    commands = [*shells, *steps.commands()]
    if any("uv" in command.argv for command in commands) and not shutil.which("uv"):
        steps.warnings.append(f"uv is not on PATH: write {shlex.quote(uv.find_uv_bin())} instead of uv")
    return replace(
        plan,
        commands=tuple(commands),
        metadata=tuple(steps.metadata()),
        overrides=steps.overrides(),
        touched=steps.touched(),
        warnings=tuple(steps.warnings),
        refused=steps.refusal(commands),
    )


def _or_unchanged(changes: Changes, source: DiagnosisInput) -> str:
    return "" if changes.needs_changed_packages else f", or change nothing: {shlex.join(source.run_with_fix())}"


def package_folders(prefix: Path, held: Holdings) -> list[str]:
    """The package folders (site-packages) inside the environment's own folder `prefix`."""
    real = Path(os.path.realpath(prefix))
    folders = dict.fromkeys(os.path.realpath(item.folder) for item in held.distributions)
    return [folder for folder in folders if Path(folder).is_relative_to(real)]


@dataclass
class _Steps:
    """Translates the changes into commands of the environment's manager."""

    held: Holdings
    manager: EnvironmentManager
    changes: Changes
    files: Mapping[str, Path]
    source: DiagnosisInput
    warnings: list[str] = field(default_factory=list)

    def prevented(self) -> str | None:
        """Why no command can change torch in this environment; None if one can."""
        if self.manager.locked_down:
            return "the system forbids pip here"
        folder = next((item.folder for item in self.held.distributions if item.name == "torch"), None)
        if self.manager.kind == "system" or folder is None or self._is_inside(folder):
            return None
        return f"torch is installed in {folder}, outside this environment"

    def instead(self, reason: str) -> Iterator[Command]:
        """The commands that leave the environment as it is. `reason`: why the environment cannot be changed."""
        if not self.changes.needs_changed_packages:
            yield Command(f"{reason}: start the program with fixed libraries instead", self.source.run_with_fix())
        elif self.changes.torch:
            requirements = (f"torch=={self.changes.torch}", *self.changes.companions, *self.changes.packages)
            argv = ("NEW_FOLDER/bin/python", "-m", "pip", "install", *requirements)
            new = (self.manager.python, "-m", "venv", "NEW_FOLDER")
            yield Command(f"{reason}: make a virtual environment", new)
            yield Command("install torch and what belongs to it there", argv)

    def _is_inside(self, path: str | Path) -> bool:
        return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(self.manager.prefix))

    def commands(self) -> Iterator[Command]:
        """The commands, in the order to run them: files and packages that are in the way are removed first."""
        changes, manager = self.changes, self.manager
        for path in changes.leftovers:
            yield Command("remove a file that no installed distribution owns", ("rm", "--", path))
        if changes.uninstall:
            yield Command("remove an unrelated package", (*manager.pip("uninstall"), *changes.uninstall))
        if changes.overwriting:
            argv = (*manager.pip("uninstall"), *changes.overwriting)
            yield Command("remove a package that overwrote libraries of torch's own requirements", argv)
        if changes.old_cuda:
            argv = (*manager.pip("uninstall"), *changes.old_cuda)
            yield Command("remove the libraries of the CUDA version that the old torch used", argv)
        yield from self._torch()
        yield from self._pins()
        if changes.packages:
            yield Command("install versions without the fault", (*self._add(), *changes.packages))
        if changes.reinstall:
            argv = (*manager.pip("install"), "--no-deps", self._reinstall, *changes.reinstall)
            yield Command("install overwritten files again", argv)
        for name, value in changes.variables.items():
            yield Command(_IN_SHELL, ("export", f"{name}={value}"), True)

    def _torch(self) -> Iterator[Command]:
        torch, owner = self.changes.torch, self._conda_owner("torch")
        companions = self._companions(owner)
        if torch is None:
            yield from self._rebuilt(companions)
            return
        if owner:
            cpu = self.held.torch is not None and not self.held.torch.cuda
            # without *cuda*, conda keeps the build for the CPU if its version fits
            argv = (*self._conda(), f"{owner.name}={torch}{'=*cuda*' if cpu else ''}")
            yield Command(f"conda owns torch ({owner.name} {owner.version})", argv)
            return
        if self.changes.bundled:
            self.warnings.append(
                f"torch bundles {', '.join(self.changes.bundled)}, so separately installed versions have no effect; "
                f"to keep this torch: {shlex.join(self.source.run_with_fix())}"
            )
        names = [Requirement(text).name for text in companions]
        left = {Requirement(text).name for text in self.changes.companions} - set(names)
        again = [name for name in self.changes.reinstall_with_torch if name not in left]
        force: tuple[str, ...] = ()
        if "uv" in self._add():
            force = tuple(word for name in again for word in ("--reinstall-package", name))
        elif again:
            # Uninstall them first. pip's --force-reinstall would also replace numpy and all other requirements by their
            # newest versions, and `poetry add` has no option that reinstalls.
            tool = "Poetry" if "poetry" in self._add() else "pip"
            does = f"remove {', '.join(again)}, which {tool} would keep"
            yield Command(does, (*self.manager.pip("uninstall"), *again))
        does = " and ".join([f"install torch {torch} with its own CUDA libraries", *_builds(companions)])
        yield Command(does, (*self._add(), *force, f"torch=={torch}", *companions))

    def _companions(self, owner: CondaPackage | None) -> tuple[str, ...]:
        """The requirements for torchvision and torchaudio, except those that conda installed; none if conda installed
        torch. Adds a warning for each that was not installed by the same tool as torch. `owner`: the conda package of
        torch."""
        kept = []
        for text in (*self.changes.companions, *self.changes.rebuilt):
            name = Requirement(text).name
            own = self._conda_owner(name)
            if owner is None and own is None:
                kept.append(text)
            elif owner is None or own is None:
                others = "conda installed torch, and pip" if owner else "pip installed torch, and conda"
                self.warnings.append(f"{others} installed {name}: install both with the same tool")
        return tuple(kept)

    def _rebuilt(self, requirements: Sequence[str]) -> Iterator[Command]:
        """The command that installs builds for the CUDA version of the installed torch."""
        if not requirements:
            return
        commands = {"uv-project": "`uv sync` and `uv run`", "poetry": "`poetry install` and `poetry sync`"}
        if again := commands.get(self.manager.kind):
            self.warnings.append(
                f"the project's lock may contain the old build, which {again} then install again: after each of them, "
                "repeat the command that installs the new build"
            )
        options = ("--no-deps", self._reinstall, *required_changes.index_options(self.held.installed.get("torch", "")))
        yield Command(" and ".join(_builds(requirements)), (*self.manager.pip("install"), *options, *requirements))

    @property
    def _reinstall(self) -> str:
        return "--reinstall" if self.manager.pip("install")[0] == "uv" else "--force-reinstall"

    def _pins(self) -> Iterator[Command]:
        missing = [pin for pin in self.changes.pins if not pin.installed]
        owned = {pin: owner for pin in missing for owner in [self._conda_library(pin)] if owner}
        for pin, owner in owned.items():
            yield Command(f"conda owns {pin.library} ({owner.name} {owner.version})", self._conda_pin(pin, owner))
            self.warnings += self._conda_conflicts(pin, owner)
        rest = [pin for pin in missing if pin not in owned]
        if not rest:
            return
        does = "install " + ", ".join(f"{pin.library} {pin.version}" for pin in rest)
        if self.manager.kind == "uv-project":
            assert self.manager.project
            words = (*self._uv, "sync", "--project", str(self.manager.project), "--inexact")
            yield Command(does, words)
            if not environment_manager_detection.always_installs_torch(self.manager.project):
                # without --extra or --group, uv sync does not install what only an extra or a group requires
                own = (*self.manager.pip("install"), "--no-deps", *(pin.requirement for pin in rest))
                yield Command(f"{does}, if the project requires torch in an extra or a group", own)
            return
        # --no-deps: torch's own metadata may require the old version
        yield Command(does, (*self.manager.pip("install"), "--no-deps", *(pin.requirement for pin in rest)))
        if self.manager.kind == "poetry":
            self.warnings.append(
                "Poetry cannot override what torch requires: `poetry install` and `poetry sync` install the old "
                "version again; after each of them, repeat the command that installs the new version"
            )

    def _add(self) -> tuple[str, ...]:
        """The first words of a command that installs a package with its dependencies."""
        if self.manager.kind == "uv-project":
            return (*self._uv, "add", "--project", str(self.manager.project))
        if self.manager.kind == "poetry" and self.manager.project:
            # Poetry changes the active environment, which may be a different one. It ignores VIRTUAL_ENV in the
            # environment base of conda.
            environment = ("env", "-u", "CONDA_DEFAULT_ENV", f"VIRTUAL_ENV={self.manager.prefix}")
            return (*environment, "poetry", "--directory", str(self.manager.project), "add")
        return self.manager.pip("install")

    @property
    def _uv(self) -> tuple[str, ...]:
        """The first words of a command of uv that changes this environment of a project: the shell may have a different
        value of the variable, and without the variable uv changes the folder .venv."""
        return ("env", f"UV_PROJECT_ENVIRONMENT={self.manager.prefix}", "uv")

    def metadata(self) -> Iterator[MetadataPin]:
        """The requirements that contradict the pins, in METADATA files that pip or uv installed."""
        if self.manager.kind == "poetry" or self.changes.torch:
            return
        pins = {pin.distribution: pin for pin in self.changes.pins if not self._conda_library(pin)}
        seen = set()
        for owner, requirement in library_and_distribution_findings.held_requirements(self.held):
            pin = pins.get(canonicalize_name(requirement.name))
            file = self.files.get(owner)
            if pin is None or file is None:
                continue
            # the system's Python also has the packages in ~/.local, which is outside its folder
            if self.manager.kind != "system" and not self._is_inside(file):
                continue
            if requirement.specifier.contains(pin.version, prereleases=True):
                continue
            if (owner, pin.distribution) not in seen and not self.manager.conda_owner(str(file)):
                seen.add((owner, pin.distribution))
                before = f"{pin.distribution}{requirement.specifier}"
                yield MetadataPin(file, owner, pin.distribution, pin.version, before)

    def overrides(self) -> ProjectOverrides | None:
        pins = [pin for pin in self.changes.pins if not self._conda_library(pin)]
        if self.manager.kind != "uv-project" or not pins:
            return None
        assert self.manager.project
        return ProjectOverrides(self.manager.project / "pyproject.toml", tuple(map(self._override, pins)))

    def _override(self, pin: LibraryPin) -> str:
        """The pin with the marker of the requirements that it overrides: without it, uv would require the library on
        platforms for which it does not exist, such as macOS."""
        found = library_and_distribution_findings.held_requirements(self.held)
        markers = {str(one.marker or "") for _, one in found if canonicalize_name(one.name) == pin.distribution}
        marker = markers.pop() if len(markers) == 1 else ""
        return f"{pin.requirement} ; {marker}" if marker and "extra" not in marker else pin.requirement

    def touched(self) -> frozenset[str]:
        """The distributions that the commands replace. If torch is replaced, the result includes all installed
        distributions that torch requires, directly or indirectly."""
        changes = self.changes
        texts = [*changes.packages, *changes.reinstall, *changes.uninstall, *changes.overwriting, *changes.old_cuda]
        texts += [*changes.companions, *changes.rebuilt]
        named: set[str] = {canonicalize_name(Requirement(text).name) for text in texts}
        named |= {pin.distribution for pin in changes.pins if not pin.installed}
        if changes.torch:
            named |= library_and_distribution_findings.torch_requirements(self.held)
        return frozenset(named)

    def refusal(self, commands: Sequence[Command]) -> tuple[str, str] | None:
        """Why envbuild does not run the commands itself, and what to do."""
        manager = self.manager
        if manager.kind == "system":
            text = f"{manager.python} is the system's Python, or not in a virtual environment ({manager.reason})"
            return text, f"install torch in a virtual environment{_or_unchanged(self.changes, self.source)}"
        if manager.kind == "poetry":
            return "Poetry manages this environment", "run the commands above; envbuild does not change Poetry projects"
        if manager.kind == "conda":
            owned = manager.conda_distributions(self.files) & self.touched()
            owned |= {pin.distribution for pin in self.changes.pins if self._conda_library(pin)}
            if owned:
                text = f"conda owns {', '.join(sorted(owned))}, and pip must not replace files of conda"
                return text, f"run the conda commands above{_or_unchanged(self.changes, self.source)}"
        if manager.kind == "uv-project" and manager.project and (refused := self._uv_add_refusal(manager.project)):
            return refused
        if all(command.shell for command in commands) and not any(self.metadata()) and not self.overrides():
            lines = "; ".join(command.text for command in commands)
            if not lines:
                return "the fix must be done by hand", "see above"
            hint = f"envbuild cannot set variables of your shell; {_IN_SHELL}: {lines}"
            return "the fix only changes shell variables", hint
        locked = [folder for folder in package_folders(manager.prefix, self.held) if not os.access(folder, os.W_OK)]
        if locked:
            return (
                f"no permission to write to {', '.join(locked)}",
                f"repeat it as the owner{_or_unchanged(self.changes, self.source)}",
            )
        return None

    def _uv_add_refusal(self, project: Path) -> tuple[str, str] | None:
        """Why `uv add` cannot install the planned torch in this project, and what to do."""
        changes, file = self.changes, project / "pyproject.toml"
        release = database.torch_release(changes.torch) if changes.torch else None
        if release is None:
            return None
        names = {"torch", *(Requirement(text).name for text in changes.companions)}
        if chosen := sorted(names & environment_manager_detection.uv_sources_without_cuda(project, release.cuda)):
            return (
                f"{file} sets a source for {', '.join(chosen)}, under [tool.uv.sources]",
                f"set one that has builds for CUDA {release.cuda}, or remove the entry, then run the commands above",
            )
        before = self.held.installed
        planned = project_requirement_check.planned_versions(before, changes)
        if lines := project_requirement_check.requirements_kept_by_uv_add(project, before, planned):
            return (
                f"`uv add` does not change these requirements: {'; '.join(lines)}",
                "change them, then run `uv sync` with the options that the project needs, such as --extra and --group",
            )
        return None

    def _conda_library(self, pin: LibraryPin) -> CondaPackage | None:
        """The conda package that owns the loaded copy of a library, if a new version must be installed."""
        loaded = None if pin.installed else self.held.loaded(pin.library)
        return self.manager.conda_owner(loaded.path) if loaded else None

    def _conda_owner(self, distribution: str) -> CondaPackage | None:
        file = self.files.get(distribution)
        return self.manager.conda_owner(str(file)) if file else None

    def _conda(self) -> tuple[str, ...]:
        return (environment_manager_detection.conda_program(), "install", "--prefix", str(self.manager.prefix))

    def _conda_pin(self, pin: LibraryPin, owner: CondaPackage) -> tuple[str, ...]:
        return (*self._conda(), f"{owner.name}={pin.version}")

    def _conda_conflicts(self, pin: LibraryPin, owner: CondaPackage) -> Iterator[str]:
        for package in self.manager.conda:
            for text in package.depends:
                name, _, bounds = text.partition(" ")
                if name == owner.name and bounds and not _conda_allows(bounds, pin.version):
                    yield (
                        f"{package.name} {package.version} requires {name} {bounds}: conda will replace or remove "
                        f"{package.name} too, or refuse"
                    )


def _builds(requirements: Sequence[str]) -> list[str]:
    """What a command does with these requirements, if there are any."""
    names = " and ".join(Requirement(text).name for text in requirements)
    return [f"install the build of {names} for the CUDA version of torch"] if names else []


def _conda_allows(bounds: str, version: str) -> bool:
    """Whether a version fits conda's bounds. Bounds in a syntax that pip does not share count as fitting."""
    text = bounds.partition(" ")[0]
    if re.fullmatch(r"[0-9.]+(\.\*)?", text):
        begin = text.removesuffix("*").removesuffix(".")
        return version == begin or version.startswith(f"{begin}.")
    try:
        return SpecifierSet(text).contains(version)
    except InvalidSpecifier:
        return True


def _outcomes(held: Holdings, changes: Changes) -> tuple[list[LibraryOutcome], list[Command], list[str]]:
    """Return which files are loaded now and after the repair, the commands that change shell variables for this, and
    warnings."""
    torch = held.torch
    given = loader_input(held)
    if torch is None or given is None:
        return [], [unset_elsewhere(held)] if changes.library_path else [], []
    before = dynamic_loader_search.loaded_files(given)
    libraries = [copy for pin in changes.pins for copy in group_sonames(held, pin.library, before)]
    foreign_paths = {copy.path for copy in required_changes.foreign_on_library_path(held)}
    moved = [name for name, file in before.items() if file.path in foreign_paths and name not in libraries]
    # The new files come last, because a new file may have the path of a leftover.
    planned = {**dict.fromkeys(changes.leftovers), **_planned(held, changes)}
    after_input, shells = replace(given, planned=planned), list[Command]()
    if changes.library_path:
        after_input = replace(after_input, library_path=own_library_path(held, given.library_path))
    after = dynamic_loader_search.loaded_files(after_input)
    own = {path for path in planned if planned[path]} | {
        copy.path for pin in changes.pins for copy in held.libraries if copy.distribution == pin.distribution
    }
    for _ in range(8):  # each round removes the folders, or the preloaded file, that lead to one library's wrong file
        foreign = next((after[name] for name in libraries if name in after and after[name].path not in own), None)
        left = _without(after_input, foreign) if foreign else None
        if left is None:
            break
        after_input = left
        after = dynamic_loader_search.loaded_files(after_input)
    for name, was, now in (
        ("LD_LIBRARY_PATH", given.library_path, after_input.library_path),
        ("LD_PRELOAD", given.preload, after_input.preload),
    ):
        if was != now:
            argv = ("export", f"{name}={now}") if now else ("unset", name)
            left_out = [part for part in _entries(was) if part not in _entries(now)]
            does = f"{name} leads to a different copy, by {', '.join(left_out)}; {_IN_SHELL}"
            shells.append(Command(does, argv, True))
    if changes.library_path and given.library_path == after_input.library_path:
        shells.append(unset_elsewhere(held))
    versions = {pin.library: pin.version for pin in changes.pins}
    rows, warnings = [], []
    if changes.library_path:
        rows += [_outcome(held, name, before.get(name), after.get(name), set(), {}) for name in moved]
    for name in libraries:
        row = _outcome(held, name, before.get(name), after.get(name), own, versions)
        rows.append(replace(row, after=None, after_version=None, after_way=None) if changes.torch else row)
        if row.after and row.after not in own and not changes.torch:
            warnings.append(f"{row.after} is still loaded, by {row.after_way}: the new version would have no effect")
        simulated = before.get(name)
        if row.measured and simulated and simulated.path != row.before:
            warnings.append(
                f"torch loads {row.before}, but the loader's rules lead to {simulated.path}: check the result with "
                "envbuild audit"
            )
    return rows, shells, warnings


_IN_SHELL = "in the shell or job script that starts the program"


def unset_elsewhere(held: Holdings) -> Command:
    """The command for a job whose LD_LIBRARY_PATH differs from that of this shell, and how to check the job."""
    check = shlex.join(["envbuild", "audit", "--python", held.python.executable])
    does = (
        f"in this shell, LD_LIBRARY_PATH leads to no other CUDA library: run `{check}` inside the job script to check "
        f"the job; {_IN_SHELL}, remove the CUDA folder from the variable, or unset it if it has nothing else"
    )
    return Command(does, ("unset", "LD_LIBRARY_PATH"), True)


def _entries(variable: str) -> list[str]:
    return [part for part in re.split("[:; ]", variable) if part]


def own_library_path(held: Holdings, variable: str) -> str:
    """The value of LD_LIBRARY_PATH without the folders that have CUDA libraries outside of Python's packages."""
    names = {name for copy in required_changes.foreign_on_library_path(held) for name in (copy.soname, copy.name)}
    folders = [folder for folder in re.split("[:;]", variable) if folder]
    kept = [folder for folder in folders if not any(os.path.lexists(f"{folder}/{name}") for name in names if name)]
    return ":".join(kept) if kept != folders else variable


def loader_input(held: Holdings) -> LoaderInput | None:
    """Return what the loader's choice of files depends on in this environment; None if torch's files were not found."""
    folder = _torch_folder(held)
    roots = dynamic_loader_search.torch_roots(folder) if folder else ()
    if not roots:
        return None
    variables = held.variables
    program = os.path.realpath(held.python.executable)
    return LoaderInput(program, roots, variables.get("LD_LIBRARY_PATH", ""), variables.get("LD_PRELOAD", ""))


def _torch_folder(held: Holdings) -> Path | None:
    if held.torch and held.torch.path:
        return Path(held.torch.path).parent
    folders = (Path(item.folder) / "torch" for item in held.distributions if item.name == "torch")
    return next((folder for folder in folders if folder.is_dir()), None)


def group_sonames(held: Holdings, library: str, found: Mapping[str, LoadedFile]) -> list[str]:
    """The sonames of a library and of its parts (such as cublasLt of cublas), as far as they are loaded or needed."""
    loaded = [copy.soname or copy.name for copy in held.libraries if copy.group == library and copy.loaded]
    needed = [name for name in found if re.match(rf"lib{re.escape(library)}(Lt|_[a-z_]+)?\.so", name)]
    return sorted(dict.fromkeys([*loaded, *needed]))


def _planned(held: Holdings, changes: Changes) -> dict[str, Elf | None]:
    """The files that the wheels of pinned, not yet installed distributions will add. Only distributions whose
    names end in -cu12 are considered."""
    found: dict[str, Elf | None] = {}
    folder = _torch_folder(held)
    for pin in changes.pins:
        if pin.distribution in held.installed or folder is None or not pin.distribution.endswith("-cu12"):
            continue
        for soname in group_sonames(
            held, pin.library, dynamic_loader_search.loaded_files(loader_input(held) or LoaderInput("", ()))
        ):
            path = folder.parent / "nvidia" / pin.library / "lib" / soname
            found[os.path.realpath(path)] = Elf(soname=soname, machine=elf_reader.X86_64)
    return found


def _without(given: LoaderInput, foreign: LoadedFile) -> LoaderInput | None:
    """Return the input without the entries of LD_LIBRARY_PATH or LD_PRELOAD that lead to this file; None if no entry
    leads to it."""
    if foreign.way == "LD_LIBRARY_PATH":
        folders = dynamic_loader_search.search_folders(given.library_path)
        left = [folder for folder in folders if not os.path.lexists(f"{folder}/{foreign.name}")]
        return replace(given, library_path=":".join(left)) if left != folders else None
    if foreign.way == "LD_PRELOAD":
        names = [name for name in re.split(r"[ :]", given.preload) if name]
        kept = [name for name in names if os.path.realpath(name) != foreign.path]
        return replace(given, preload=":".join(kept)) if kept != names else None
    return None


def _outcome(
    held: Holdings,
    name: str,
    before: LoadedFile | None,
    after: LoadedFile | None,
    own: set[str],
    versions: Mapping[str, str],
) -> LibraryOutcome:
    copy = next((copy for copy in held.libraries if copy.loaded and (copy.soname or copy.name) == name), None)
    path = copy.path if copy else before.path if before else None
    way = before.way if before and before.path == path else None
    version = _version_of(held, path)
    new = None
    if after:
        group = next((library for library in versions if re.match(rf"lib{library}", name)), "")
        new = versions.get(group) if after.path in own else _version_of(held, after.path)
    return LibraryOutcome(
        name, path, version, way, copy is not None, after.path if after else None, new, after.way if after else None
    )


def _version_of(held: Holdings, path: str | None) -> str | None:
    copy: Copy | None = next((copy for copy in held.libraries if copy.path == path), None)
    return copy.version if copy else None
