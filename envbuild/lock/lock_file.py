"""The lock file: every file of an image by name, version and sha256, without URLs, so that any mirror works.

The lock id is the sha256 of the canonical `content` alone. `inputs`: for each part of the lock (base, apt, wheels ...),
the digest of what the profile requests; a part is stale if that has changed. `compiled`: the wheels that were compiled
from the lock's extensions. They are not part of the id, because the id is needed before anything is compiled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

import yaml
from pydantic import ValidationError

from envbuild.fetch.apt_resolution_and_download import Deb
from envbuild.fetch.archive_spec import Archive
from envbuild.fetch.locked_wheel_types import LockedWheel, Wheel
from envbuild.lock import lock_schema
from envbuild.lock.lock_entry_types import AcceptedOld, Builder, LockedExtension, Nvcc, Overridden, RecordedWheel
from envbuild.profile import profile_and_lock_name_lookup
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.profile.value_types import StartupFile
from envbuild.resolve.plan_resolver import Plan, as_locked
from envbuild.util import yaml_and_project_paths
from envbuild.util.atomic_files import write_within
from envbuild.util.errors import Fault, LockError, OutOfDate
from envbuild.util.strict_and_canonical_json import canonical_digest

FORMAT = 1
# Names of layers that several wheels share: small dependencies of torch, nvcc, and the profile's own packages.
SMALL, TOOLCHAIN, PACKAGES = "python", "toolchain", "packages"
# The layer of wheels needed only for compiling extensions, in a separate build stage.
BUILDER = "builder"
EVERYTHING = "*"
"""In a set of package names: all packages, and all other parts of the lock."""
PARTS = ("base", "apt", "wheels", "startup", "environment", "archives", "extensions")


@dataclass(frozen=True)
class Lock:
    """A lock. `made` (UTC, 20261121T000000Z) only selects a date in a snapshot archive; it is not part of the id.
    `image`: the base image by digest; `image_tag`: the tag in the profile that pointed to it, None if the profile names
    the digest. `compiled`: the wheels of its extensions as far as they were compiled; not part of the id either."""

    made: str
    inputs: Mapping[str, str]
    platform: str
    python: str
    suite: str | None
    image: str | None
    base: tuple[Deb, ...]
    apt: tuple[Deb, ...]
    wheels: tuple[LockedWheel, ...]
    environment: Mapping[str, str]
    overrides: tuple[Overridden, ...] = ()
    startup: tuple[StartupFile, ...] = ()
    archives: tuple[Archive, ...] = ()
    nvcc: Nvcc | None = None
    extensions: tuple[LockedExtension, ...] = ()
    builder: Builder | None = None
    accepted_old: tuple[AcceptedOld, ...] = ()
    image_tag: str | None = None
    compiled: tuple[RecordedWheel, ...] = ()

    @property
    def content(self) -> dict[str, object]:
        base: dict[str, object] = {"image": self.image, **({"tag": self.image_tag} if self.image_tag else {})}
        if self.suite:
            base = {"bootstrap": self.suite, "packages": [dict(vars(deb)) for deb in self.base]}
        return {
            "platform": self.platform,
            "python": self.python,
            "base": base,
            "apt": [dict(vars(deb)) for deb in self.apt],
            "wheels": [wheel.content for wheel in self.wheels],
            **({"overrides": [dict(vars(o)) for o in self.overrides]} if self.overrides else {}),
            **({"startup": [dict(vars(s)) for s in self.startup]} if self.startup else {}),
            **({"accepted_old": [dict(vars(o)) for o in self.accepted_old]} if self.accepted_old else {}),
            **({"archives": [dict(vars(a)) for a in self.archives]} if self.archives else {}),
            **({"nvcc": dict(vars(self.nvcc))} if self.nvcc else {}),
            **({"extensions": [one.content for one in self.extensions]} if self.extensions else {}),
            **({"builder": self.builder.content} if self.builder else {}),
            "environment": dict(self.environment),
        }

    @cached_property
    def id(self) -> str:
        return f"sha256:{canonical_digest(self.content)}"

    @property
    def short(self) -> str:
        """12 hex digits of the id, as in the image's tag."""
        return self.id.removeprefix("sha256:")[:12]

    @property
    def compiled_with(self) -> tuple[LockedWheel, ...]:
        """The wheels in the stage that compiles extensions. The profile's own packages are not among them, because they
        are installed later."""
        shared = tuple(item for item in self.wheels if item.layer != PACKAGES)
        return (*shared, *(self.builder.wheels if self.builder else ()))

    @property
    def debs(self) -> tuple[Deb, ...]:
        """Every Debian package, including those of the builder."""
        return (*self.base, *self.apt, *(self.builder.debs if self.builder else ()))

    @property
    def versions(self) -> dict[str, str]:
        return {locked.wheel.name: locked.wheel.version for locked in self.wheels}

    def recorded_wheel(self, name: str, key: str) -> RecordedWheel | None:
        """The recorded wheel of an extension. None if none was compiled with these inputs; `key`: their sha256."""
        return next((one for one in self.compiled if (one.name, one.key) == (name, key)), None)

    def stale(self, plan: Plan) -> list[str]:
        """The parts whose inputs have changed since locking."""
        now = inputs(plan)
        return [part for part in PARTS if self.inputs.get(part) != now.get(part)]


def inputs(plan: Plan) -> dict[str, str]:
    values = plan.inputs
    return {part: f"sha256:{canonical_digest(values[part])}" for part in PARTS if part in values}


def read(file: Path) -> Lock | None:
    """The lock in `file`, None if the file is missing.

    Raises LockError if it is damaged, was edited by hand, has a different format, or is a link to a file outside its
    project.
    """
    if not file.exists():
        return None
    profile_and_lock_name_lookup.refuse_link(file.parent.resolve() / file.name, LockError)
    return parse(yaml_and_project_paths.yaml_text(file, LockError), yaml_and_project_paths.display(file))


@lru_cache(maxsize=32)  # several steps of a command read the same lock
def parse(text: str, name: str) -> Lock:
    """The lock in a text. `name`: the name of the text in errors. Raises LockError as `read` does."""
    return _checked(yaml_and_project_paths.parse(text, name, LockError))


def _checked(doc: yaml_and_project_paths.Document) -> Lock:
    if doc.data.get("format") not in (None, FORMAT):
        raise LockError(
            f"{doc.file} has format {doc.data['format']}, this envbuild reads {FORMAT}", hint="use a newer envbuild"
        )
    try:
        parsed = lock_schema.LockDocument.model_validate(doc.data)
    except ValidationError as error:
        faults = [doc.fault(tuple(item["loc"]), item["msg"]) for item in error.errors()]
        raise LockError(f"{doc.file} is damaged", hint=_AGAIN, faults=faults) from None
    lock = _lock(parsed)
    if not lock.id == parsed.id == f"sha256:{canonical_digest(doc.data['content'])}":
        fault = Fault("the id does not fit the content: edited by hand, or merged", doc.file, doc.place(("id",)).line)
        raise LockError(f"{doc.file} is damaged", hint=_AGAIN, faults=[fault])
    return lock


_AGAIN = "restore the committed file (git checkout), or delete it and run envbuild lock NAME to lock all versions again"


def _lock(parsed: lock_schema.LockDocument) -> Lock:
    content, base = parsed.content, parsed.content.base
    return Lock(
        made=parsed.made,
        inputs=parsed.inputs,
        platform=content.platform,
        python=content.python,
        suite=base.bootstrap if isinstance(base, lock_schema.Bootstrap) else None,
        image=base.image if isinstance(base, lock_schema.ImageEntry) else None,
        image_tag=base.tag if isinstance(base, lock_schema.ImageEntry) else None,
        base=tuple(Deb(**deb.model_dump()) for deb in base.packages) if isinstance(base, lock_schema.Bootstrap) else (),
        apt=tuple(Deb(**deb.model_dump()) for deb in content.apt),
        wheels=_wheels(content.wheels),
        overrides=tuple(Overridden(**o.model_dump()) for o in content.overrides),
        startup=tuple(StartupFile(**s.model_dump()) for s in content.startup),
        accepted_old=tuple(AcceptedOld(**o.model_dump()) for o in content.accepted_old),
        archives=tuple(Archive(**a.model_dump()) for a in content.archives),
        nvcc=Nvcc(**content.nvcc.model_dump()) if content.nvcc else None,
        environment=content.environment,
        extensions=tuple(map(_extension, content.extensions)),
        builder=_builder(content.builder) if content.builder else None,
        compiled=tuple(RecordedWheel(**one.model_dump()) for one in parsed.compiled),
    )


def _wheels(parsed: Iterable[lock_schema.WheelEntry]) -> tuple[LockedWheel, ...]:
    dumped = [one.model_dump() for one in parsed]
    return tuple(LockedWheel(bytes=w.pop("bytes"), layer=w.pop("layer"), wheel=Wheel(**w)) for w in dumped)


def _extension(parsed: lock_schema.ExtensionEntry) -> LockedExtension:
    kind = "git" if parsed.git else "sdist"
    return LockedExtension(
        parsed.name, kind, str(parsed.git or parsed.sdist), parsed.modules, parsed.tree, parsed.env, parsed.settings
    )


def _builder(parsed: lock_schema.BuilderEntry) -> Builder:
    archives = tuple(Archive(**a.model_dump()) for a in parsed.archives)
    debs = tuple(Deb(**deb.model_dump()) for deb in parsed.debs)
    nvcc = Nvcc(**parsed.nvcc.model_dump())
    return Builder(parsed.arch, nvcc, _wheels(parsed.wheels), archives, debs, parsed.environment)


class _OneLine(dict[str, object]):
    """A mapping written on one line, so that a changed pin is a one-line diff."""


class _Dumper(yaml.CSafeDumper):
    pass


_Dumper.add_representer(
    _OneLine, lambda dumper, data: dumper.represent_mapping("tag:yaml.org,2002:map", data, flow_style=True)
)


_LISTED = {"apt", "wheels", "startup", "archives", "debs", "packages"}


def write(lock: Lock, file: Path, name: str, origin: Mapping[str, str] | None = None) -> None:
    """Write the lock file. `origin`: the profile and the requirements file that the lock was made from, if no profile
    is called `name`."""
    data: dict[str, object] = {"format": FORMAT, "made": lock.made, "id": lock.id, "inputs": dict(lock.inputs)}
    data |= {"of": dict(origin)} if origin else {}
    data["content"] = _with_lines(lock.content)
    text = f"# Made by `envbuild lock {name}`; not to be edited.\n{_dumped(data)}{_compiled_text(lock.compiled)}"
    write_within(yaml_and_project_paths.home(file), file, text)


def _dumped(data: Mapping[str, object]) -> str:
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100_000, default_flow_style=False)


def _compiled_text(wheels: Sequence[RecordedWheel]) -> str:
    return _dumped({"compiled": [_OneLine(vars(one)) for one in wheels]}) if wheels else ""


# The key `compiled` of a lock file with its list.
_COMPILED = re.compile(r"^compiled:.*\n?(?:[ -].*\n?)*", re.MULTILINE)


def record_compiled(file: Path, lock: Lock, wheels: Sequence[RecordedWheel]) -> None:
    """Replace the recorded wheels in the file of a lock; nothing else in the file changes.

    Raises LockError if the file is not the lock any more, or was edited so that it cannot be changed safely.
    """
    before = file.read_text(encoding="utf-8")
    rest = _COMPILED.sub("", before)
    after = f"{rest}{'' if rest.endswith(chr(10)) else chr(10)}{_compiled_text(wheels)}"
    name = yaml_and_project_paths.display(file)
    found = parse(before, name)
    if found.id != lock.id or parse(after, name) != replace(found, compiled=tuple(wheels)):
        raise LockError(
            f"the compiled wheels cannot be recorded in {name}: it was changed meanwhile, or was edited",
            hint="restore the committed file, then run the same command again",
        )
    write_within(yaml_and_project_paths.home(file), file, after)


def _with_lines(content: Mapping[str, object]) -> dict[str, object]:
    """Return a lock's content with each entry of the lists in _LISTED on one line."""
    found: dict[str, object] = {}
    for key, value in content.items():
        if key in _LISTED and isinstance(value, list):
            found[key] = [_OneLine(item) for item in value]
        else:
            found[key] = _with_lines(value) if isinstance(value, dict) else value
    return found


def required_lock(loaded: LoadedProfile) -> Lock:
    """The lock of a profile, even if it is out of date. Raises OutOfDate if it is missing, and the errors of `read`."""
    lock = read(loaded.known_lock)
    if lock is None:
        raise _missing(loaded.lock_file, loaded.cli_words)
    return lock


def similar_lock(loaded: LoadedProfile) -> tuple[str, Lock] | None:
    """For a profile without a lock: the name and the lock of a similar profile with the same torch. This is the profile
    without its requirements file or devel variant, or the profile that it extends."""
    names = [loaded.meant.file.stem if loaded.meant else None, loaded.parent]
    files = profile_and_lock_name_lookup.locks()
    for name in filter(None, names):
        try:
            lock = read(files[name]) if name in files else None
        except LockError:  # reported by the commands that use this profile
            continue
        if lock and lock.versions.get("torch") == loaded.profile.torch:
            return name, lock
    return None


def current_lock(loaded: LoadedProfile, plan: Plan) -> Lock:
    """The lock of a profile, after checking that it matches the plan. Raises what `current` and `read` raise."""
    return current(read(loaded.known_lock), plan, loaded.lock_file)


def _missing(file: Path, cli_words: str) -> OutOfDate:
    return OutOfDate(f"{yaml_and_project_paths.display(file)} is missing", hint=f"run: envbuild lock {cli_words}")


def current(lock: Lock | None, plan: Plan, file: Path) -> Lock:
    """Return the lock if it matches the plan.

    Raises OutOfDate if it is missing or does not match, ProfileError if an advisory refuses a locked version.
    """
    if lock is None:
        raise _missing(file, plan.cli_words)
    stale = lock.stale(plan)
    if stale:
        message = f"{yaml_and_project_paths.display(file)} is out of date: {', '.join(stale)} changed in the profile"
        raise OutOfDate(message, hint=f"run: envbuild lock {plan.cli_words}")
    as_locked(plan, lock.versions)
    return lock
