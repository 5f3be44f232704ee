"""Selects the trusted statements about an image from envelopes that anybody may have written, and reports why it
refuses the others. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name
from pydantic import Field

from envbuild.attest import in_toto_statements, keys_and_signatures
from envbuild.attest.in_toto_statements import Descriptor, Part
from envbuild.attest.keys_and_signatures import Envelope, PublicKey
from envbuild.evidence import evidence_statements_and_store
from envbuild.evidence.evidence_statements_and_store import Statement
from envbuild.evidence.run_record_schema import RunRecord
from envbuild.lock import lock_file
from envbuild.lock.lock_file import Lock
from envbuild.profile import model as profile_model
from envbuild.profile import profile_and_lock_name_lookup
from envbuild.profile.model import Profile
from envbuild.profile.project_test_shapes_and_script import Script
from envbuild.util.errors import EnvbuildError
from envbuild.util.untrusted_input_errors import Malformed, Reason, Refusal
from envbuild.util.yaml_and_project_paths import Document


@dataclass(frozen=True)
class SignedBuild:
    """A build statement. `document` and `profile`: the profile as written, and as validated. `roots`: distribution ->
    the files and folders directly below site-packages that it installs.

    `subjects`: name and sha256 (hex) of the image, and of its manifest if it was pushed.
    """

    name: str
    document: Document
    profile: Profile
    lock: Lock
    lock_text: str
    roots: Mapping[str, tuple[str, ...]]
    subjects: frozenset[tuple[str, str]]

    def repositories(self, manifest: str) -> list[str]:
        """Return the repositories that the image was pushed to with the manifest of this digest."""
        return sorted(name for name, digest in self.subjects if digest == manifest.removeprefix("sha256:"))


@dataclass(frozen=True)
class Trusted:
    """The trusted statements. `records`: pairs of a file name, made from the digest of a run record, and the run
    record; the newest first. `refused`: why the other statements do not count."""

    builds: tuple[SignedBuild, ...]
    records: tuple[tuple[Path, RunRecord], ...]
    refused: tuple[Reason, ...]


def believe(envelopes: Iterable[Envelope], keys: Sequence[PublicKey], image_id: str | None) -> Trusted:
    """Return the build statements and test results about the image that were signed with one of `keys`, and why others
    are refused. If `image_id` is None, return those about any image or environment."""
    builds: list[SignedBuild] = []
    records: dict[str, RunRecord] = {}
    refused: list[Reason] = []
    for envelope in envelopes:
        try:
            statement = in_toto_statements.parse_statement(keys_and_signatures.signed_statement(envelope, keys))
            about = {digest for _, digest in statement.subjects}
            if image_id and image_id.removeprefix("sha256:") not in about:
                raise Refusal("subject", "a statement is about a different image")
            if statement.predicate_type == evidence_statements_and_store.TEST_RESULT:
                digest, record = in_toto_statements.read_test_result(statement.predicate)
                measured = record.subject
                if measured.removeprefix("sha256:") not in about or image_id not in (None, measured):
                    raise Refusal("subject", "a run record and its statement are about different subjects")
                records[digest] = record
            elif statement.predicate_type == in_toto_statements.PROVENANCE:
                builds += _build(statement)
        except Refusal as refusal:
            refused.append(refusal.reason)
    found = evidence_statements_and_store.newest_first(
        (Path(f"{digest}.statement.json"), record) for digest, record in records.items()
    )
    return Trusted(tuple(builds), tuple(found), tuple(dict.fromkeys(refused)))


class _BuildType(Part):
    build_type: str


class _AnyProvenance(Part):
    """Provenance of any format."""

    build_definition: _BuildType


class _Filled(Part):
    """The files and folders directly below site-packages that a wheel installs. `extension`: the name of a compiled
    extension."""

    roots: list[str]
    extension: str = ""


class _Dependency(Part):
    name: str
    annotations: _Filled | None = None


class _Byproduct(Part):
    annotations: _Filled


class _Profile(Part):
    name: str
    document: dict[str, object]
    script: Descriptor | None = None


class _External(Part):
    profile: _Profile
    lock: Descriptor


class _Internal(Part):
    lock: str


class _Definition(Part):
    external_parameters: _External
    internal_parameters: _Internal
    resolved_dependencies: list[_Dependency]


class _RunDetails(Part):
    byproducts: list[_Byproduct] = Field(default_factory=list)


class _Provenance(Part):
    """Provenance as in_toto_statements.slsa_provenance writes it."""

    build_definition: _Definition
    run_details: _RunDetails


def _build(statement: Statement) -> list[SignedBuild]:
    """Return a list with the build statement. The list is empty if a builder other than envbuild wrote it. Raises
    Refusal."""
    try:
        kind = _AnyProvenance.model_validate(statement.predicate).build_definition.build_type
        if kind.startswith(in_toto_statements.BUILD_TYPES) and kind != in_toto_statements.BUILD_TYPE:
            message = f"a build statement is of type {kind[:100]}, this envbuild reads {in_toto_statements.BUILD_TYPE}"
            raise Refusal("newer", f"{message}: use a newer envbuild")
        if kind != in_toto_statements.BUILD_TYPE:
            return []
        made = _Provenance.model_validate(statement.predicate)
        definition, given = made.build_definition, made.build_definition.external_parameters
        name = given.profile.name
        text = in_toto_statements.descriptor_content(given.lock, "the lock").decode()
        document = Document("the profile of the build statement", given.profile.document)
        if given.profile.script:
            source = in_toto_statements.descriptor_content(given.profile.script, "the script").decode()
            document.data["selftest"]["script"] = Script(document.data["selftest"]["script"], source)
        profile = profile_model.validate_profile(document, name)
        locked = lock_file.parse(text, "the lock of the build statement")
        files = {item.name: tuple(item.annotations.roots) for item in definition.resolved_dependencies
                 if item.annotations}  # fmt: skip
        roots: dict[str, tuple[str, ...]] = {
            canonicalize_name(one.wheel.name): files.get(one.wheel.file, ()) for one in locked.wheels
        }
        compiled = {item.annotations.extension: item.annotations.roots for item in made.run_details.byproducts}
        roots |= {one.name: tuple(compiled[one.name]) for one in locked.extensions}
        if not profile_and_lock_name_lookup.NAME.fullmatch(name):
            raise Malformed("the build statement names no profile")
        if definition.internal_parameters.lock != locked.id:
            raise Malformed("the build statement contains a different lock than it names")
    except Refusal:
        raise
    except (KeyError, TypeError, ValueError):
        raise Malformed("invalid build statement") from None
    except EnvbuildError as error:
        raise Malformed(f"invalid build statement: {error.message}") from None
    return [SignedBuild(name, document, profile, locked, text, roots, frozenset(statement.subjects))]
