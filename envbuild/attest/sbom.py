"""Writes the software bill of materials (SBOM) of a lock as CycloneDX 1.6. Pure.

Every component has its locked hash, except extensions, which are compiled during the build.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL

from envbuild.attest import in_toto_statements
from envbuild.lock.lock_file import Lock

# arbitrary, but constant: the same image and lock always have the same serial number
_SPACE = uuid.UUID("5d1c5e9e-2f2e-5e0e-9a51-6f0a6f2f9d0b")


def make_sbom(profile: str, lock: Lock, image_id: str) -> dict[str, object]:
    """Return the SBOM. It is the same byte for byte each time: its time is that of the lock, and its serial number is
    derived from image and lock."""
    image = Component(
        name=profile,
        version=lock.short,
        type=ComponentType.CONTAINER,
        bom_ref=f"image:{image_id}",
        hashes=[_sha256(image_id.removeprefix("sha256:"))],
    )
    bom = Bom(
        components=_components(lock),
        serial_number=uuid.uuid5(_SPACE, f"{image_id} {lock.id}"),
        metadata=BomMetaData(
            component=image,
            timestamp=datetime.strptime(lock.made, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC),
            properties=[Property(name="envbuild:lock", value=lock.id)],
        ),
    )
    bom.register_dependency(image, bom.components)
    text = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string()
    found: dict[str, object] = json.loads(text)
    return found


def _components(lock: Lock) -> Iterator[Component]:
    if lock.image:
        name, _, digest = lock.image.partition("@")
        hashes = [_sha256(digest.removeprefix("sha256:"))]
        yield Component(name=name, type=ComponentType.CONTAINER, bom_ref=lock.image, hashes=hashes)
    for deb in (*lock.base, *lock.apt):
        yield _library(deb.name, deb.version, deb.sha256, deb.file, in_toto_statements.deb_url(deb))
    for archive in lock.archives:
        yield _library(
            archive.name, archive.version, archive.sha256, archive.name, in_toto_statements.archive_url(archive)
        )
    for locked in lock.wheels:
        wheel = locked.wheel
        yield _library(wheel.name, wheel.version, wheel.sha256, wheel.file, in_toto_statements.wheel_url(locked))
    for one in lock.extensions:  # the SBOM has no hash of it: the lock need not record the wheel
        url = PackageURL.from_string(in_toto_statements.extension_url(one))
        yield Component(
            name=one.name, version=one.digest, type=ComponentType.LIBRARY, bom_ref=f"extension:{one.name}", purl=url
        )


def _library(name: str, version: str, sha256: str, file: str, url: str) -> Component:
    return Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        bom_ref=file,
        purl=PackageURL.from_string(url),
        hashes=[_sha256(sha256)],
    )


def _sha256(content: str) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=content)
