"""Makes the metadata of installed wheels require an overridden version, by changed files in a layer above the wheels.

torch pins its CUDA libraries exactly. If a profile overrides a pin, a later `pip install` of a package that needs torch
would install torch's version again, and `pip check` would fail (docs/decisions/0005-overrides-in-metadata.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from packaging.utils import NormalizedName, canonicalize_name

from envbuild.image.layers.layer_writer import LayerEntry, LayerFile, WheelContent
from envbuild.image.layers.wheel_installed_files import RecordRow, hash_in_record, parse_record, write_record

_REQUIREMENT = re.compile(
    r"(?m)^(Requires-Dist: *)([A-Za-z0-9._-]+) *(\[[^]\n]*\])? *\(?([<>=!~][^;)\r\n]*)\)?( *;[^\r\n]*)?(?=\r?$)"
)
_METADATA = re.compile(r".*/site-packages/[^/]+\.dist-info/METADATA")  # not of a vendored package


def overriding_files(entries: Iterable[LayerEntry], pins: Mapping[str, str]) -> Iterator[LayerFile]:
    """Yield the changed METADATA and RECORD of the wheels whose files are `entries`. `pins`: version by name.

    In each requirement of a pinned name, the version specifier becomes exactly the pinned version; extras and markers
    stay. Requirements without a version do not change. Raises WheelRefused.
    """
    files = {entry.path: entry for entry in entries if isinstance(entry, LayerFile)}
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    for path, entry in files.items():
        if not _METADATA.fullmatch(path):
            continue
        metadata = _content(entry)
        changed = override_requirements(metadata, versions)
        if changed == metadata:
            continue
        yield LayerFile(path, changed, entry.executable)
        folder = path.removesuffix("/METADATA")
        record = files[f"{folder}/RECORD"]
        name = f"{folder.rpartition('/')[2]}/METADATA"
        rows = [row for row in parse_record(_content(record).decode()) if row.path != name]
        rows.append(RecordRow(name, hash_in_record(changed), str(len(changed))))
        yield LayerFile(record.path, write_record(rows), record.executable)


def _content(entry: LayerFile) -> bytes:
    return entry.content.text() if isinstance(entry.content, WheelContent) else entry.content


def override_requirements(metadata: bytes, versions: Mapping[NormalizedName, str]) -> bytes:
    """Return the METADATA with the version specifiers of these distributions changed to exactly these versions."""

    def replace(match: re.Match[str]) -> str:
        version = versions.get(canonicalize_name(match[2]))
        return match[0] if version is None else f"{match[1]}{match[2]}{match[3] or ''}=={version}{match[5] or ''}"

    # bytes that are not UTF-8 stay as they are
    head, separator, body = re.split(r"(\r?\n\r?\n|\Z)", metadata.decode(errors="surrogateescape"), maxsplit=1)
    return (_REQUIREMENT.sub(replace, head) + separator + body).encode(errors="surrogateescape")
