"""The invariants that must hold after any fault, read from disk and engine each time; all campaigns use this checker.

Always: no image is called verified without evidence that counts for exactly that image, and every file is whole.
Once the next run has ended (`settled`): nothing is left of the one that died.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envbuild.image import container_definition_export
from envbuild.image.image_naming import LOCK_LABEL, PREFIX, VERIFIED
from envbuild.lock import lock_file
from envbuild.util.errors import EnvbuildError

WRONG, HALF, LEFT = "wrong verified tag", "half-written file", "left over"
_STORES = ("wheels", "debs", "archives")


@dataclass(frozen=True)
class Breach:
    """A violated invariant. `kind`: WRONG, HALF or LEFT."""

    kind: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


@dataclass(frozen=True)
class Ground:
    """The folders and the engine that are checked. `client`: the docker client of an engine used by this campaign only;
    None: the engine is not checked. `rendered`: lock id -> Dockerfile of all locks seen so far; the checker adds new
    ones."""

    project: Path
    state: Path
    cache: Path
    temporary: Path
    client: Any
    rendered: dict[str, str]


def check(ground: Ground, settled: bool = False) -> list[Breach]:
    found = [*half_written(ground)]
    if ground.client:
        found += wrong_tags(ground.client, ground.state)
    if settled:
        found += left_files(ground)
        found += left_in_engine(ground.client, ground.rendered) if ground.client else ()
    return found


# checks that only images with evidence are called verified


def wrong_tags(client: Any, state: Path) -> Iterator[Breach]:
    for image in client.api.images():
        for name in image.get("RepoTags") or ():
            named, _, tag = name.rpartition(":")
            if tag == VERIFIED and named.startswith(PREFIX):
                why = unproved(state, named.removeprefix(PREFIX), image["Id"], image.get("Labels") or {})
                if why:
                    yield Breach(WRONG, f"{name} {image['Id'][:19]}: {why}")


def unproved(state: Path, profile: str, image: str, labels: Mapping[str, str]) -> str | None:
    """Return why an image must not be called verified, from the evidence on disk alone; None if it may be called
    verified.

    The code with which envbuild decides this is not used here. The image may be called verified if a run record names
    this image, this profile and the lock in the image's label, if every probe that the record requires passed and none
    failed, and if no later record has a failure.
    """
    folder = state / "envbuild" / "evidence" / image.removeprefix("sha256:")
    runs = {
        path.name.partition(".")[0]: json.loads(path.read_bytes())
        for path in folder.glob("*.record.json")
        if _stated(path)
    }
    of_this = {digest: run for digest, run in runs.items() if run["image"]["id"] == image and run["profile"] == profile}
    good = {
        digest: run
        for digest, run in of_this.items()
        if _passed(run) and run["lock"] == labels.get(LOCK_LABEL) and _built(state, image, run["lock"])
    }
    if not good:
        return f"{len(runs)} run records, none of which proves it"
    bad = {digest for digest, run in of_this.items() if not _passed(run)}
    if not any(bad <= set(run["before"]) for run in good.values()):
        return "a self-test failed since it was proved"
    return None


def _stated(record: Path) -> bool:
    """Whether a record counts: its file is named by its digest, and a statement has the same digest in its name."""
    digest = hashlib.sha256(record.read_bytes()).hexdigest()
    return record.name == f"{digest}.record.json" and record.with_name(f"{digest}.statement.json").is_file()


def _passed(run: Mapping[str, Any]) -> bool:
    status = {result["probe"]: result["status"] for result in run["results"]}
    required = all(status.get(probe) == "passed" for probe in run["selftest"]["require"])
    return required and bool(status) and "failed" not in status.values() and not run["errors"]


def _built(state: Path, image: str, lock_id: str) -> bool:
    """Whether a build record says that this envbuild made the image from the lock."""
    made = map(_build, (state / "envbuild" / "builds").glob("*.json"))
    return any((record["image"], record["lock"]) == (image, lock_id) for record in made if record)


# checks that every file is complete


def half_written(ground: Ground) -> Iterator[Breach]:
    caches = (ground.cache / name for name in ("bases", "layers", "apt-results", *_STORES))
    files = _files(ground.project, ground.state, *caches)
    # locks first: Dockerfiles are compared with them
    for file in sorted(files, key=lambda file: not file.name.endswith(".lock.yaml")):
        why = _fault(file, ground)
        if why:
            yield Breach(HALF, f"{file.name}: {why}")


def _files(*folders: Path) -> Iterator[Path]:
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            on_its_way = any(part.startswith(".") for part in path.relative_to(folder).parts)
            if path.is_file() and not on_its_way:  # a file without its final name is not checked here: see left_files
                yield path


def _fault(file: Path, ground: Ground) -> str | None:
    if file.name.endswith(".lock.yaml"):
        return _lock(file, ground)
    if file.suffix == ".Dockerfile":
        return _dockerfile(file, ground)
    if file.parent == ground.cache / "layers" / "blobs":
        return None if _digest(file) == file.name else "not of the sha256 it is named by"
    if file.parent == ground.cache / "layers":
        return _layer_entry(file)
    if file.parent == ground.cache / "apt-results":
        digest, _, rows = file.read_bytes().partition(b"\n")
        return None if hashlib.sha256(rows).hexdigest().encode() == digest else "not of the sha256 in its first line"
    if file.parent.name == "builds":
        record = _build(file)
        named = record and f"{record['recipe']}-{record['image'].removeprefix('sha256:')[:12]}.json" == file.name
        return None if named else "no build record of its name"
    if file.suffix == ".json":
        return _evidence(file)
    if file.parent.parent.name in _STORES:
        return None if _digest(file) == file.parent.name else "not of the sha256 it is kept under"
    if file.suffix == ".tar":
        noted = file.with_suffix(".sha256")
        return (
            None if noted.is_file() and noted.read_text() == _digest(file) else "does not match the sha256 next to it"
        )
    return None


def _lock(file: Path, ground: Ground) -> str | None:
    try:
        found = lock_file.read(file)
        assert found
        if file.read_text(encoding="utf-8")[-1:] != "\n":
            return "ends within a line"
        ground.rendered.setdefault(
            found.id, container_definition_export.standalone_dockerfile(found, file.name.removesuffix(".lock.yaml"))
        )
    except (EnvbuildError, UnicodeDecodeError) as error:
        return str(error)
    return None


_FROM_LOCK = re.compile(r'io\.envbuild\.lock="(sha256:[0-9a-f]{64})"')


def _dockerfile(file: Path, ground: Ground) -> str | None:
    """Check that the Dockerfile equals, byte for byte, that of the lock next to it or of an earlier lock."""
    text = file.read_text(encoding="utf-8", errors="replace")
    made_of = _FROM_LOCK.search(text)
    if not made_of or made_of[1] not in ground.rendered:
        return "of no lock that was here"
    return None if text == ground.rendered[made_of[1]] else "not what its lock gives"


def _build(file: Path) -> dict[str, Any] | None:
    """Return a build record; None if the record is invalid."""
    try:
        found: dict[str, Any] = json.loads(file.read_bytes())
    except ValueError:
        return None
    return found if {"image", "handle", "lock", "recipe", "layers", "builder"} <= set(found) else None


def _evidence(file: Path) -> str | None:
    digest, _, kind = file.name.partition(".")
    try:
        document = json.loads(file.read_bytes())
    except ValueError:
        return "no JSON"
    if kind == "record.json":
        return None if _digest(file) == digest else "not of the sha256 it is named by"
    if kind == "statement.json":
        if not file.with_name(f"{digest}.record.json").is_file():
            return "the record that it points at is not there"
        if document["subject"][0]["digest"]["sha256"] != file.parent.name:
            return "of another image"
    return None


_ENTRY_FIELDS = ("key", "digest", "size", "diff_id", "diff_size")  # in the order in which `check` contains them


def _layer_entry(file: Path) -> str | None:
    """Check an entry of the cache of layers, and the blob that it names, if the cache has the blob. Most layers keep no
    blob; if a run needs a missing blob, the run writes it."""
    try:
        entry = json.loads(file.read_bytes())
        values = [entry[name] for name in _ENTRY_FIELDS]
    except (ValueError, KeyError, TypeError):
        return "no entry of a layer"
    if hashlib.sha256(json.dumps(values, separators=(",", ":")).encode()).hexdigest() != entry.get("check"):
        return "its check does not match its other fields"
    if f"{entry['key']}.json" != file.name:
        return "of another layer"
    blob = file.parent / "blobs" / entry["digest"].removeprefix("sha256:")
    if not blob.is_file() or _digest(blob) != blob.name:  # a damaged blob is a violation of its own
        return None
    found = (blob.stat().st_size, *_unpacked(blob))
    return None if found == (entry["size"], entry["diff_size"], entry["diff_id"]) else "its blob is of another layer"


_tars: dict[tuple[int, int, int], tuple[int, str]] = {}


def _unpacked(blob: Path) -> tuple[int, str]:
    """Return size and digest of the tar in a blob. The result is cached as that of `_digest` is."""
    key = _file_state(blob)
    if key not in _tars:
        seen, size = hashlib.sha256(), 0
        try:
            with gzip.open(blob) as stream:
                while block := stream.read(1 << 20):
                    seen.update(block)
                    size += len(block)
        except (OSError, EOFError, zlib.error):
            size = -1
        _tars[key] = (size, f"sha256:{seen.hexdigest()}")
    return _tars[key]


_digests: dict[tuple[int, int, int], str] = {}


def _digest(file: Path) -> str:
    """Return the digest of a file. If the file has not changed since the last call, the cached digest is used: torch
    alone has 190 MB."""
    key = _file_state(file)
    if key not in _digests:
        with file.open("rb") as stream:
            _digests[key] = hashlib.file_digest(stream, "sha256").hexdigest()
    return _digests[key]


def _file_state(file: Path) -> tuple[int, int, int]:
    found = file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


# checks that nothing is left of a killed process


def left_files(ground: Ground) -> Iterator[Breach]:
    for path in sorted(ground.temporary.iterdir()):
        if path.is_file() and path.read_bytes() in (b"", b"blat"):
            continue  # tempfile creates one for some microseconds, to test a folder
        yield Breach(LEFT, f"temporary {path.name}")
    for folder in (ground.project, ground.state, ground.cache):
        for path in sorted(folder.rglob(".*")):
            yield Breach(LEFT, f"{path.relative_to(folder.parent)}")


def left_in_engine(client: Any, locks: Iterable[str]) -> Iterator[Breach]:
    """Return every container, and every image except those of a lock and `verified`."""
    for container in client.api.containers(all=True):
        yield Breach(LEFT, f"container {container['Names'][0]} {container['State']}")
    known = {VERIFIED, *(lock_id.removeprefix("sha256:")[:12] for lock_id in locks)}
    for image in client.api.images():
        names = image.get("RepoTags") or ["<none>:<none>"]
        for name in names:
            if name.rpartition(":")[2] not in known:
                yield Breach(LEFT, f"image {name} {image['Id'][:19]}")
