"""Selects the trusted statements about one image from envelopes that anybody may have written, and reports why the
others are refused. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from envbuild.attest import in_toto_statements, keys_and_signatures
from envbuild.attest.keys_and_signatures import PublicKey
from envbuild.evidence import evidence_statements_and_store
from envbuild.lock import lock_file
from envbuild.lock.lock_file import Lock
from envbuild.profile import model as profile_model
from envbuild.profile import profile_name_lookup
from envbuild.profile.model import Profile
from envbuild.profile.project_shapes_and_script import Script
from envbuild.util.errors import EnvbuildError
from envbuild.util.rejected_input_errors import Malformed, Reason, Refusal
from envbuild.util.yaml_document import Document


@dataclass(frozen=True)
class SignedBuild:
    """A build statement: the profile, the lock, and what each locked distribution fills below site-packages.

    `subjects`: (name, hex digest) of everything it is about: the image, and its manifest where it was pushed to.
    """

    name: str
    document: Document
    profile: Profile
    lock: Lock
    lock_text: str
    roots: Mapping[str, tuple[str, ...]]
    subjects: frozenset[tuple[str, str]]

    def repositories(self, manifest: str) -> list[str]:
        """Return the repositories that it was pushed to with this manifest."""
        return sorted(name for name, digest in self.subjects if digest == manifest.removeprefix("sha256:"))


@dataclass(frozen=True)
class Trusted:
    """The trusted statements. `records`: run records with file names made of their digests, the newest first.
    `refused`: why other statements do not count."""

    builds: tuple[SignedBuild, ...]
    records: tuple[tuple[Path, dict[str, Any]], ...]
    refused: tuple[Reason, ...]


def believe(envelopes: Iterable[Mapping[str, Any]], keys: Sequence[PublicKey], image_id: str | None) -> Trusted:
    """Return what the owners of `keys` state about the image; `image_id` None: about any image."""
    builds: list[SignedBuild] = []
    records: dict[str, dict[str, Any]] = {}
    refused: list[Reason] = []
    for envelope in envelopes:
        try:
            statement = keys_and_signatures.signed_statement(envelope, keys)
            about = {digest for _, digest in _subjects(statement)}
            if image_id and image_id.removeprefix("sha256:") not in about:
                raise Refusal("subject", "a statement is about another image")
            if statement.get("predicateType") == evidence_statements_and_store.TEST_RESULT:
                digest, record = in_toto_statements.read_test_result(statement.get("predicate"))
                measured = record["image"]["id"]
                if measured.removeprefix("sha256:") not in about or image_id not in (None, measured):
                    raise Refusal("subject", "a run record is about another image than its statement")
                records[digest] = record
            elif statement.get("predicateType") == in_toto_statements.PROVENANCE:
                builds += _build(statement)
        except Refusal as refusal:
            refused.append(refusal.reason)
    found = evidence_statements_and_store.newest_first(
        (Path(f"{digest}.statement.json"), record) for digest, record in records.items()
    )
    return Trusted(tuple(builds), tuple(found), tuple(dict.fromkeys(refused)))


def _subjects(statement: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    """(name, sha256 in hex) of each subject. Raises Malformed."""
    if statement.get("_type") != evidence_statements_and_store.STATEMENT:
        raise Malformed("what is signed is no in-toto statement")
    try:
        return frozenset((str(item.get("name")), str(item["digest"]["sha256"])) for item in statement["subject"])
    except (KeyError, TypeError, AttributeError):
        raise Malformed("a statement names no subject") from None


def _build(statement: Mapping[str, Any]) -> list[SignedBuild]:
    """Return the build; empty if it is of another builder. Raises Malformed."""
    try:
        definition = statement["predicate"]["buildDefinition"]
        kind = str(definition["buildType"])
        if kind.startswith(in_toto_statements.BUILD_TYPES) and kind != in_toto_statements.BUILD_TYPE:
            said = f"a build statement is of type {kind[:100]}, this envbuild reads {in_toto_statements.BUILD_TYPE}"
            raise Refusal("newer", f"{said}: use a newer envbuild")
        if kind != in_toto_statements.BUILD_TYPE:
            return []
        given = definition["externalParameters"]
        name = str(given["profile"]["name"])
        text = in_toto_statements.descriptor_content(given["lock"], "the lock").decode()
        document = Document("the profile of the build statement", given["profile"]["document"])
        if "script" in given["profile"]:
            source = in_toto_statements.descriptor_content(given["profile"]["script"], "the script").decode()
            document.data["selftest"]["script"] = Script(document.data["selftest"]["script"], source)
        wishes = profile_model.validate_profile(document, name)
        locked = lock_file.parse(text, "the lock of the build statement")
        files = {item["name"]: item["annotations"]["roots"] for item in definition["resolvedDependencies"]
                 if "annotations" in item}  # fmt: skip
        roots: dict[str, tuple[str, ...]] = {
            canonicalize_name(one.wheel.name): tuple(str(root) for root in files.get(one.wheel.file, ()))
            for one in locked.wheels
        }
        byproducts = statement["predicate"]["runDetails"].get("byproducts", ())
        made = {item["annotations"]["extension"]: item["annotations"]["roots"] for item in byproducts}
        roots |= {one.name: tuple(str(root) for root in made[one.name]) for one in locked.extensions}
        if not profile_name_lookup.NAME.fullmatch(name):
            raise Malformed("the build statement names no profile")
        if definition["internalParameters"]["lock"] != locked.id:
            raise Malformed("the build statement names another lock than it holds")
    except Refusal:
        raise
    except (KeyError, TypeError, ValueError, AttributeError):
        raise Malformed("the build statement is not as it should be") from None
    except EnvbuildError as error:
        raise Malformed(f"the build statement is not as it should be: {error.message}") from None
    return [SignedBuild(name, document, wishes, locked, text, roots, _subjects(statement))]
