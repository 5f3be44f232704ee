"""The cache of compiled extensions that several machines share: a folder, or a repository in a registry.

An entry is a wheel and its description, which names the inputs that the wheel was compiled from. In a folder the entry
is the two files KEY/SHA256.json and KEY/SHA256.whl; in a repository it is a manifest whose config is the description
and whose only layer is the wheel. KEY is the hash of the inputs, SHA256 that of the wheel. Two machines that compile
with the same inputs may get different wheels; the cache keeps both, so that each lock finds the wheel that it records.

Whoever can write to the cache can put anything into it. An entry is therefore limited in size, its names and its inputs
are checked, and its wheel must pass the checks of a wheel that was just compiled. These checks find mistakes. Only the
sha256 in the lock protects against a hostile wheel.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Protocol

from pydantic import Field, StringConstraints, ValidationError

from envbuild.image import extension_wheel_build, registry_push
from envbuild.image.extension_wheel_build import BuiltWheel
from envbuild.lock.lock_entry_types import LockedExtension, RecordedWheel
from envbuild.lock.lock_file import Lock
from envbuild.lock.lock_schema import WheelFile
from envbuild.profile.value_types import Model, Sha256
from envbuild.registry import oci_types
from envbuild.registry.registry_client import Repository
from envbuild.util import disk_space, settings, strict_and_canonical_json
from envbuild.util.errors import Fault, FileError, NetworkError, UsageError, printable, unknown
from envbuild.util.untrusted_input_errors import Malformed, Refusal

_MOST_DESCRIPTION = 1 << 20  # bytes of a description; that of apex has 3 kB
_MOST_WHEEL = 4 << 30  # bytes; the largest wheel of torch has 0.9 GB
_MOST_ENTRIES = 10  # read for one key
_BLOCK = 1 << 20
_CONFIG = "application/vnd.envbuild.extension.v1+json"
_WHEEL = "application/vnd.envbuild.wheel.v1"
_TITLE = "org.opencontainers.image.title"  # the name under which oras and others store a layer
_DESCRIPTION = re.compile(r"[0-9a-f]{64}\.json")  # the name of a file
_KEY = "cache"  # the only key of the settings section


class WheelDescription(Model):
    """The description of a wheel in the cache. `inputs`: what it was compiled from; `made`: UTC."""

    file: WheelFile
    sha256: Sha256
    bytes: int = Field(ge=1, le=_MOST_WHEEL)
    seconds: float = Field(ge=0)
    jobs: int = Field(ge=1)
    made: Annotated[str, StringConstraints(pattern=r"^[0-9]{8}T[0-9]{6}Z$")]
    inputs: dict[str, Any] = Field(alias="from")


class SharedCache(Protocol):
    """A shared cache. Its methods raise FileError, NetworkError or Refusal."""

    @property
    def location(self) -> str:
        """The cache's name in messages, as it is set."""
        ...

    def descriptions(self, key: str, sha256: str | None) -> Iterator[bytes]:
        """Yield the descriptions of the wheels of a key, or of the only one with this sha256. They are not checked."""
        ...

    def wheel_blocks(self, key: str, description: WheelDescription) -> Iterator[bytes]:
        """Yield the content of a wheel, which is not checked. It may have more bytes than its description states."""
        ...

    def has_wheel(self, key: str, description: WheelDescription) -> bool:
        """Whether the cache has the wheel of a description. False if it is damaged and `store` can replace it."""
        ...

    def store(self, key: str, description: bytes, wheel: BuiltWheel) -> None:
        """Store a wheel and its description. Readers see the whole entry or nothing."""
        ...


@dataclass(frozen=True)
class SharedFolder:
    """A folder, usually on a network file system. Files get the access mode that the umask of each writer gives."""

    folder: Path

    @property
    def location(self) -> str:
        return str(self.folder)

    def fault(self) -> str | None:
        """Why the path cannot be used as a folder; None if it can."""
        try:
            if self.folder.is_dir():
                return None
            exists = self.folder.exists()
        except OSError as error:
            return f"{self.folder}: {error.strerror}"
        return f"{self.folder} is not a folder" if exists else f"the folder {self.folder} does not exist"

    def descriptions(self, key: str, sha256: str | None) -> Iterator[bytes]:
        """Yield descriptions as the protocol says. Raises Refusal after the last one if a file was not usable."""
        with _file_errors(self.folder):
            if fault := self.fault():
                raise FileError(fault)
            refused: Refusal | None = None
            entries = self._entries(key)
            for name in [f"{sha256}.json"] if sha256 else sorted(_names(entries)):
                try:
                    with _opened(entries / name) as stream:
                        raw = stream.read(_MOST_DESCRIPTION + 1)
                except FileNotFoundError:
                    continue
                except PermissionError as error:
                    refused = refused or Refusal("file", f"{error.filename}: {error.strerror}")
                    continue
                except Refusal as error:
                    refused = refused or error
                    continue
                yield raw
            if refused:
                raise refused

    def wheel_blocks(self, key: str, description: WheelDescription) -> Iterator[bytes]:
        with _file_errors(self.folder), _opened(self._entries(key) / f"{description.sha256}.whl") as stream:
            while block := stream.read(_BLOCK):
                yield block

    def has_wheel(self, key: str, description: WheelDescription) -> bool:
        with _file_errors(self.folder):
            try:
                with _opened(self._entries(key) / f"{description.sha256}.whl") as stream:
                    same_size = os.fstat(stream.fileno()).st_size == description.bytes
                    return same_size and hashlib.file_digest(stream, "sha256").hexdigest() == description.sha256
            except (FileNotFoundError, Refusal):
                return False

    def store(self, key: str, description: bytes, wheel: BuiltWheel) -> None:
        with _file_errors(self.folder):
            if fault := self.fault():
                raise FileError(fault)
            target = self._entries(key)
            target.mkdir(exist_ok=True)
            with wheel.path.open("rb") as stream:
                _replace(target / f"{wheel.sha256}.whl", iter(lambda: stream.read(_BLOCK), b""))
            _replace(target / f"{wheel.sha256}.json", [description])

    def _entries(self, key: str) -> Path:
        """The folder of a key's wheels. Raises Refusal for a link, which could lead to any folder of this machine."""
        if (self.folder / key).is_symlink():
            raise Refusal("file", f"{self.folder / key} is a link")
        return self.folder / key


@dataclass(frozen=True)
class SharedRepository:
    """A repository in a registry. The tag of a wheel contains the key and a part of its sha256. The tag with only the
    key names the wheel that was stored last."""

    location: str

    @cached_property
    def _place(self) -> Repository:
        return Repository(registry_push.parse_repository(self.location))

    def descriptions(self, key: str, sha256: str | None) -> Iterator[bytes]:
        manifest = self._place.manifest(_tag(key, sha256))
        if manifest is None:
            return
        if manifest.is_index or len(manifest.layers) != 1:
            raise Malformed(f"{self.location}:{_tag(key, sha256)} is not a manifest with one wheel")
        yield self._place.blob(manifest.config, _MOST_DESCRIPTION)

    def wheel_blocks(self, key: str, description: WheelDescription) -> Iterator[bytes]:
        return self._place.unchecked_blocks(f"sha256:{description.sha256}", 0, description.bytes)

    def has_wheel(self, key: str, description: WheelDescription) -> bool:
        return self._place.has_blob(f"sha256:{description.sha256}")  # the registry compared it with its digest

    def store(self, key: str, description: bytes, wheel: BuiltWheel) -> None:
        digest, size = f"sha256:{wheel.sha256}", wheel.path.stat().st_size
        layer = {"mediaType": _WHEEL, "digest": digest, "size": size, "annotations": {_TITLE: wheel.path.name}}
        manifest = oci_types.image_manifest(oci_types.descriptor(_CONFIG, description), [layer])
        self._place.put_file(digest, wheel.path)
        self._place.put_blob(description)
        self._place.put_manifest(_tag(key, wheel.sha256), manifest)
        with contextlib.suppress(NetworkError):  # a registry may refuse to change a tag
            self._place.put_manifest(_tag(key, None), manifest)


def _tag(key: str, sha256: str | None) -> str:
    """The tag of a key's wheel: 74 or 107 of at most 128 characters."""
    return f"extension-{key}{f'-{sha256[:32]}' if sha256 else ''}"


# settings


def parse(found: Mapping[str, Any], given: Mapping[str, str]) -> SharedCache | None:
    """Validate the settings section `extensions`. Raises UsageError with every fault. `given` is always empty: no
    command-line option changes this section."""
    faults = [Fault(unknown(str(key), [_KEY]), field=printable(str(key)[:100])) for key in found if key != _KEY]
    value = found.get(_KEY)
    cache = _cache(value) if isinstance(value, str) else None
    if _KEY in found and cache is None:
        text = "must be the absolute path of a folder, or HOST/REPOSITORY without http:// and without a tag"
        faults.append(Fault(text, field=_KEY))
    if faults:
        raise UsageError("invalid extensions settings", faults=faults, hint=f"known: {_KEY}")
    return cache


def _cache(value: str) -> SharedCache | None:
    """Return the cache that a setting names; None if the setting is invalid. A repository needs a host: a relative path
    would otherwise name a repository of docker.io."""
    if value.startswith(("/", "~/")):
        return SharedFolder(Path(value).expanduser()) if "\0" not in value else None
    host, slash, _ = value.partition("/")
    if not slash or not (host == "localhost" or set(host) & set(".:[")):
        return None
    try:
        registry_push.parse_repository(value)
    except UsageError:
        return None
    return SharedRepository(value)


def configured_cache() -> SharedCache | None:
    """Return the shared cache of the site; None if none is set. Raises SettingsError if config.yaml is invalid."""
    return settings.read("extensions", parse, {})


# entries


def find_description(
    cache: SharedCache, lock: Lock, one: LockedExtension, lock_record: RecordedWheel | None
) -> WheelDescription | None:
    """Return the description of the recorded wheel of an extension, or without a record, of any wheel with the same
    inputs. Its wheel is not read. Return None if the cache has none.

    Raises FileError or NetworkError if the cache cannot be read, and Refusal if each entry is damaged or not as
    requested.
    """
    key = extension_wheel_build.key(lock, one)
    refused: Refusal | None = None
    for raw in islice(cache.descriptions(key, lock_record.sha256 if lock_record else None), _MOST_ENTRIES):
        try:
            return _checked_description(raw, lock_record, extension_wheel_build.wheel_inputs(lock, one))
        except Refusal as error:
            refused = refused or error
    if refused:
        raise refused
    return None


def _checked_description(raw: bytes, lock_record: RecordedWheel | None, inputs: Mapping[str, Any]) -> WheelDescription:
    """Parse a description. Raises Refusal if it is invalid, or describes a wheel other than the recorded one, or one
    that was compiled from other inputs. Pure."""
    found = strict_and_canonical_json.parse(raw, "the description of the wheel", _MOST_DESCRIPTION)
    try:
        description = WheelDescription.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))[:100]
        raise Malformed(f"the description of the wheel has an invalid {field!r}") from None
    if lock_record and description.sha256 != lock_record.sha256:
        message = (
            f"the description names the wheel {description.sha256[:12]}, but the lock records {lock_record.sha256[:12]}"
        )
        raise Refusal("digest", message)
    if lock_record and (description.file, description.bytes) != (lock_record.file, lock_record.bytes):
        raise Refusal(
            "name", f"the description names {description.file}, {description.bytes} bytes, and the lock does not"
        )
    ours = json.loads(json.dumps(inputs))
    if description.inputs != ours:
        differ = sorted(name for name in {*description.inputs, *ours} if description.inputs.get(name) != ours.get(name))
        raise Refusal("inputs", f"the wheel was compiled from different inputs: {', '.join(map(repr, differ))[:200]}")
    return description


def fetch_wheel(
    cache: SharedCache,
    lock: Lock,
    one: LockedExtension,
    description: WheelDescription,
    say: Callable[[str], None],
    show: Callable[[str, int], None],
) -> BuiltWheel:
    """Fetch the wheel that `find_description` found into this machine's cache. `show` gets the file's name and the
    number of bytes of each block.

    Raises FileError or NetworkError if the cache cannot be read, Refusal if the wheel is damaged or not as requested,
    and DiskError if the disk has no space for it.
    """
    key = extension_wheel_build.key(lock, one)
    with (
        extension_wheel_build.exclusive_wheel(lock, one, "fetches or compiles", say),
        extension_wheel_build.incoming_folder() as folder,
    ):
        there = extension_wheel_build.find_wheel(lock, one)
        if there and (there.sha256 == description.sha256 or lock.recorded_wheel(one.name, key) is None):
            return there  # another process has fetched or compiled it meanwhile
        disk_space.require_free(folder, description.bytes, f"the wheel of {one.name}")
        wheel = folder / description.file
        with wheel.open("wb") as stream:
            _write_checked(
                cache.wheel_blocks(key, description), description, stream, functools.partial(show, description.file)
            )
        if wrong := extension_wheel_build.faults_of_wheel(wheel, lock, one):
            raise Refusal("wheel", f"{description.file} is not as requested: {'; '.join(wrong)[:1000]}")
        return extension_wheel_build.keep_wheel(lock, one, wheel, description.model_dump(by_alias=True))


def _write_checked(
    blocks: Iterable[bytes], description: WheelDescription, stream: BinaryIO, on_bytes: Callable[[int], None]
) -> None:
    """Write a wheel. Raises Refusal as soon as it has more bytes than described, and if its sha256 differs."""
    seen, size = hashlib.sha256(), 0
    for block in blocks:
        size += len(block)
        if size > description.bytes:
            raise Refusal(
                "too-large", f"{description.file} has more than the {description.bytes} bytes of its description"
            )
        seen.update(block)
        stream.write(block)
        on_bytes(len(block))
    if seen.hexdigest() != description.sha256:
        raise Refusal(
            "digest", f"{description.file} has the sha256 {seen.hexdigest()[:12]}, not {description.sha256[:12]}"
        )


def store_wheel(cache: SharedCache, wheel: BuiltWheel) -> None:
    """Store a wheel of this machine's cache, with its description. Raises FileError, NetworkError or Refusal."""
    description = json.loads((wheel.path.parent / extension_wheel_build.DESCRIPTION_FILE).read_text(encoding="utf-8"))
    cache.store(wheel.key, strict_and_canonical_json.encode(description, ascii_only=True), wheel)


# files of a shared folder


@contextlib.contextmanager
def _file_errors(folder: Path) -> Iterator[None]:
    """Convert an OSError, such as a missing permission, to a FileError that names the file."""
    try:
        yield
    except OSError as error:
        raise FileError(f"{error.filename or folder}: {error.strerror or error}") from None


def _names(folder: Path) -> list[str]:
    """The names of the first descriptions in a folder; empty if it does not exist."""
    try:
        with os.scandir(folder) as listed:
            described = (entry.name for entry in listed if _DESCRIPTION.fullmatch(entry.name))
            return list(islice(described, _MOST_ENTRIES))
    except FileNotFoundError:
        return []


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[BufferedReader]:
    """Open a regular file. Raises Refusal for anything else: a link could lead to any file of this machine, and a read
    of a pipe could wait forever."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, or a socket
            raise Refusal("file", f"{file} is not a regular file") from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise Refusal("file", f"{file} is not a regular file")
    with os.fdopen(handle, "rb") as stream:
        yield stream


def _replace(file: Path, blocks: Iterable[bytes]) -> None:
    """Write a file under a hidden name, flush it to disk, and rename it. `temporary_files` is not used: other machines
    may write to the folder, and the locks by which it recognises the files of running processes may be local."""
    made = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    try:
        with made.open("xb") as stream:
            for block in blocks:
                stream.write(block)
            stream.flush()
            os.fsync(stream.fileno())
        made.replace(file)
    finally:
        made.unlink(missing_ok=True)
