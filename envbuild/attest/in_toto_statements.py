"""Writes and reads in-toto statements about an image or a Python environment. Each contains all data that is needed to
check it. Pure.

An image has a test result per GPU model (with the complete run record), a statement about its build (SLSA provenance),
and an SBOM. An environment has only test results.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from envbuild.evidence import evidence_statements_and_store, run_record_schema
from envbuild.evidence.evidence_statements_and_store import STATEMENT, TEST_RESULT, Statement
from envbuild.evidence.run_record_schema import RunRecord
from envbuild.fetch.apt_resolution_and_download import Deb
from envbuild.fetch.archive_spec import Archive
from envbuild.fetch.locked_wheel_types import LockedWheel
from envbuild.image.build_records import CompiledRecord
from envbuild.lock.lock_entry_types import LockedExtension
from envbuild.lock.lock_file import Lock
from envbuild.profile.project_test_shapes_and_script import Script
from envbuild.util import strict_and_canonical_json
from envbuild.util.untrusted_input_errors import Malformed, Refusal

PROVENANCE = "https://slsa.dev/provenance/v1"
CYCLONEDX = "https://cyclonedx.org/bom"
BUILD_TYPES = "urn:envbuild:build:"
BUILD_TYPE = f"{BUILD_TYPES}1"
BUILDER = "urn:envbuild:builder"


@dataclass(frozen=True)
class Subject:
    """The image or environment that a statement is about. `image`: the id of the image, or the digest of the
    environment; `manifest`: the digest of the image's manifest; both "sha256:...".

    `name`: the image's name in the engine, or `environment/PROFILE`; `repository`: the image's name in the registry, or
    the name of the file that it is saved in. `repository` and `manifest` are None for an environment, and for an image
    that is neither pushed nor saved.
    """

    name: str
    image: str
    repository: str | None = None
    manifest: str | None = None

    @property
    def digests(self) -> tuple[tuple[str, str], ...]:
        """The image and the manifest, by name and sha256 (hex)."""
        found = [(self.name, self.image), (self.repository, self.manifest)]
        return tuple((name, digest.removeprefix("sha256:")) for name, digest in found if name and digest)


@dataclass(frozen=True)
class BuildDetails:
    """The data about a build for its statement. `document`: the content of the profile. `facts`, `recipe`: sha256 (hex)
    of the facts database and of the recipe. `versions`: of the tools that built the image."""

    profile: str
    document: Mapping[str, object]
    lock: Lock
    lock_text: str
    facts: str
    recipe: str
    versions: Mapping[str, str]
    roots: Mapping[str, Sequence[str]]
    """Name of a wheel file -> the files and folders directly below site-packages that it installs."""
    compiled: Sequence[CompiledRecord] = ()


def digest_set(digest: str) -> dict[str, str]:
    return {"sha256": digest.removeprefix("sha256:")}


class Part(BaseModel):
    """Part of a statement from an untrusted author: only the fields that are read."""

    model_config = ConfigDict(extra="ignore", strict=True, alias_generator=to_camel, defer_build=True)


class Descriptor(Part):
    """A resource descriptor, possibly with its content in base64."""

    name: str | None = None
    digest: dict[str, str] = {}
    content: str | None = None


class _StatementHead(Part):
    subject: list[Descriptor]
    predicate_type: str | None = None
    predicate: object = None


class _TestResult(Part):
    configuration: list[Descriptor]


def canonical(statement: Statement) -> bytes:
    """Return the bytes to sign; the same statement always gives the same bytes."""
    return strict_and_canonical_json.encode(statement.document())


def parse_statement(document: Mapping[str, object]) -> Statement:
    """Return the statement in a parsed JSON document. A predicate that is missing or is not a JSON object is replaced
    by an empty one; its fields are not checked here. Raises Malformed if another part is invalid."""
    if document.get("_type") != STATEMENT:
        raise Malformed("the signed content is not an in-toto statement")
    try:
        found = _StatementHead.model_validate(document)
        subjects = tuple((item.name or "", item.digest["sha256"]) for item in found.subject)
    except (ValueError, KeyError):
        raise Malformed("a statement names no subject") from None
    return Statement(subjects, found.predicate_type or "", found.predicate if isinstance(found.predicate, dict) else {})


def _enclosed(name: str, raw: bytes, media_type: str) -> dict[str, object]:
    """Return a resource descriptor that contains the described data."""
    content = base64.b64encode(raw).decode()
    digest = {"sha256": hashlib.sha256(raw).hexdigest()}
    return {"name": name, "digest": digest, "content": content, "mediaType": media_type}


def descriptor_content(descriptor: Descriptor | None, what: str) -> bytes:
    """Return the content of a descriptor. Raises Malformed if it is missing or does not match its digest. `what`: the
    name of the content in messages."""
    try:
        raw = base64.b64decode(descriptor.content, validate=True) if descriptor and descriptor.content else None
    except ValueError:
        raw = None
    if descriptor is None or raw is None:
        raise Malformed(f"{what} is not in its statement")
    if hashlib.sha256(raw).hexdigest() != descriptor.digest.get("sha256"):
        raise Malformed(f"{what} does not match the digest in its statement")
    return raw


def test_result(record: RunRecord, raw: bytes, subject: Subject) -> Statement:
    """Return the test result to store. It encloses `raw`, the bytes of the run record."""
    return Statement(subject.digests, TEST_RESULT, _test_predicate(record, raw))


def _test_predicate(record: RunRecord, raw: bytes) -> dict[str, object]:
    enclosed = _enclosed("run-record", raw, "application/json")
    return evidence_statements_and_store.test_predicate(record, enclosed)


def read_test_result(predicate: Mapping[str, object]) -> tuple[str, RunRecord]:
    """Return the enclosed run record, with its sha256 (hex) first. Raises Refusal if the record is invalid, or if the
    other fields of the predicate do not match the record."""
    try:
        found = _TestResult.model_validate(predicate).configuration
    except ValueError:
        raise Malformed("the test result names no run record") from None
    raw = descriptor_content(next((one for one in found if one.name == "run-record"), None), "the run record")
    try:
        record = run_record_schema.validate_record(strict_and_canonical_json.parse(raw, "the run record"))
    except run_record_schema.Newer as newer:
        raise Refusal("newer", str(newer)) from None
    except ValueError:
        raise Malformed("invalid run record") from None
    if _test_predicate(record, raw) != predicate:
        raise Refusal("predicate", "the test result does not match its run record")
    return hashlib.sha256(raw).hexdigest(), record


def slsa_provenance(made: BuildDetails, subject: Subject) -> Statement:
    """Return SLSA provenance: the profile and the lock of the build, and the hash of every file, or the commit of every
    git source, used in it."""
    dependencies = [
        *(_deb(deb) for deb in (*made.lock.base, *made.lock.apt)),
        *(_archive(archive) for archive in made.lock.archives),
        *(_wheel(wheel, made.roots.get(wheel.wheel.file, ())) for wheel in made.lock.wheels),
        *(_source(extension) for extension in made.lock.extensions),
        *(_tool(item) for item in _tools(made.lock)),
    ]
    if made.lock.image:
        name, _, digest = made.lock.image.partition("@")
        dependencies.insert(0, {"name": name, "uri": f"docker://{name}", "digest": digest_set(digest)})
    definition = {
        "buildType": BUILD_TYPE,
        "externalParameters": {
            "profile": _profile(made),
            "lock": _enclosed(f"{made.profile}.lock.yaml", made.lock_text.encode(), "application/yaml"),
        },
        "internalParameters": {
            "lock": made.lock.id,
            "facts": digest_set(made.facts),
            "recipe": digest_set(made.recipe),
        },
        "resolvedDependencies": dependencies,
    }
    run: dict[str, object] = {"builder": {"id": BUILDER, "version": dict(made.versions)}}
    if made.compiled:
        run["byproducts"] = [_compiled(one) for one in made.compiled]
    return Statement(subject.digests, PROVENANCE, {"buildDefinition": definition, "runDetails": run})


def _profile(made: BuildDetails) -> dict[str, object]:
    """Return the profile as the user wrote it, with the source of the project's own test script, if it names one."""
    selftest = made.document.get("selftest")
    script = selftest.get("script") if isinstance(selftest, Mapping) else None
    if not isinstance(script, Script) or not isinstance(selftest, Mapping):
        return {"name": made.profile, "document": dict(made.document)}
    document = {**made.document, "selftest": {**selftest, "script": script.path}}
    enclosed = _enclosed(script.path, script.text.encode(), "text/x-python")
    return {"name": made.profile, "document": document, "script": enclosed}


def _deb(deb: Deb) -> dict[str, object]:
    return {"name": deb.file, "uri": deb_url(deb), "digest": digest_set(deb.sha256)}


def _wheel(locked: LockedWheel, roots: Sequence[str]) -> dict[str, object]:
    found = {"name": locked.wheel.file, "uri": wheel_url(locked), "digest": digest_set(locked.wheel.sha256)}
    return {**found, "annotations": {"layer": locked.layer, "roots": list(roots)}}


def _source(extension: LockedExtension) -> dict[str, object]:
    """Describe an extension's source by its commit, or by the sha256 of its sdist. The URL or path is left out, since
    it differs between sites."""
    digest = {"gitCommit": extension.digest} if extension.kind == "git" else digest_set(extension.digest)
    return {"name": extension.name, "uri": extension_url(extension), "digest": digest}


def _tools(lock: Lock) -> Sequence[LockedWheel | Archive | Deb]:
    return (*lock.builder.debs, *lock.builder.wheels, *lock.builder.archives) if lock.builder else ()


def _tool(item: LockedWheel | Archive | Deb) -> dict[str, object]:
    """Describe a package that was used to compile extensions. It is not in the image, so it has no roots."""
    if isinstance(item, Deb):
        return _deb(item)
    if isinstance(item, Archive):
        return _archive(item)
    return {"name": item.wheel.file, "uri": wheel_url(item), "digest": digest_set(item.wheel.sha256)}


def _compiled(one: CompiledRecord) -> dict[str, object]:
    """Describe a wheel that was compiled during the build. Its `key` is the hash of everything it was compiled from."""
    annotations = {"extension": one.name, "key": one.key, "roots": list(one.roots)}
    return {"name": one.file, "digest": digest_set(one.sha256), "annotations": annotations}


def _archive(archive: Archive) -> dict[str, object]:
    return {"name": archive.name, "uri": archive_url(archive), "digest": digest_set(archive.sha256)}


def archive_url(archive: Archive) -> str:
    return _package_url("generic", None, archive.name, archive.version)


def deb_url(deb: Deb) -> str:
    return _package_url("deb", "debian", deb.name, deb.version, deb.file.removesuffix(".deb").rpartition("_")[2])


def extension_url(extension: LockedExtension) -> str:
    return _package_url("generic", None, extension.name, extension.digest)


def wheel_url(locked: LockedWheel) -> str:
    return _package_url("pypi", None, locked.wheel.name, locked.wheel.version)


def _package_url(kind: str, namespace: str | None, name: str, version: str, arch: str | None = None) -> str:
    # imported here: only publishing needs it, and the command line starts faster without it
    from packageurl import PackageURL

    return PackageURL(kind, namespace, name, version, {"arch": arch} if arch else None).to_string()


def sbom(bom: Mapping[str, object], subject: Subject) -> Statement:
    return Statement(subject.digests, CYCLONEDX, bom)
