"""Stores and reads signed statements about an image or an environment in a registry.

Statements about an image have the two forms that clients read: new clients read a sigstore bundle as an OCI referrer;
older ones read cosign's tag `sha256-<hex>.att`, whose manifest has one layer per statement. An environment has no
manifest that a referrer could name, so statements about it only have the older form, under a tag that the caller names.
Statements of other signers are kept. Existing blobs are not written again, so an interrupted push can be repeated.

A registry cannot detect that a tag was changed between a read and a write: of two lists that are written at the same
time, one is lost. Therefore each signed statement about an environment also has a tag of its own, and so does each
bundle in a registry that does not list referrers itself. Readers add what is missing in the list. The next push writes
it into the list; it also adds to cosign's list what only the bundles have.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from envbuild.attest import keys_and_signatures
from envbuild.attest.keys_and_signatures import Envelope, PublicKey, Signer
from envbuild.image.image_naming import LABEL
from envbuild.registry import oci_types
from envbuild.registry.oci_types import ImageSource, Manifest, TaggedSource, TaggedTarget, Target
from envbuild.registry.registry_client import Repository
from envbuild.util import strict_and_canonical_json
from envbuild.util.untrusted_input_errors import Malformed, Refusal

ENVELOPE = "application/vnd.dsse.envelope.v1+json"
BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_BUNDLED_KIND = "dev.sigstore.bundle.predicateType"
_MOST = 200  # maximum number of pieces of evidence that are read
_TOTAL = 128 << 20  # maximum size of all of them in bytes


@dataclass(frozen=True)
class Attestation:
    """An envelope. `kind`: the predicate type of its statement, by which clients search."""

    envelope: Envelope
    kind: str

    @property
    def annotations(self) -> dict[str, str]:
        return {"predicateType": self.kind, "dev.cosignproject.cosign/signature": ""}


def bundle(attestation: Attestation, key: PublicKey) -> dict[str, object]:
    """Return the envelope as a sigstore bundle, with the key's fingerprint as a hint and no transparency log entry."""
    envelope = attestation.envelope
    signatures = [
        {"sig": base64.b64encode(sig).decode(), "keyid": ""}
        for sig in keys_and_signatures.envelope_signatures(envelope)
    ]
    return {
        "mediaType": BUNDLE,
        "verificationMaterial": {"publicKey": {"hint": key.fingerprint}, "tlogEntries": []},
        "dsseEnvelope": {**envelope, "signatures": signatures},
    }


def publish(repository: Target, subject: Manifest, wanted: Sequence[tuple[str, bytes]], signer: Signer | None) -> int:
    """Store statements about the image `subject`, and return how many of them were missing. `wanted`: (kind,
    payload) of each.

    A statement is signed, unless the registry already has it with a signature by the same key. Without a signer, only
    the older form is written. With a signer, unsigned statements of the same kinds are removed: they have no value, and
    `verify` would report them.
    """
    reader, tag = _Reader(repository), att_tag(subject.digest)
    before = reader.layers(tag)
    layers = _kept(before, wanted, signer)
    in_layers = _envelopes(layers)
    unlisted = reader.unlisted_bundles(subject.digest) if signer else []
    bundles = [*reader.bundles(subject.digest), *unlisted] if signer else []
    in_bundles = _envelopes(bundles)
    _list_by_tag(repository, subject.digest, [item for item, found in unlisted if not isinstance(found, Refusal)])
    listed, new = [item for item, _ in layers], 0
    payloads = {payload for _, payload in wanted}
    for made in _missing_in_layers(in_layers, bundles, {kind for kind, _ in wanted}):
        listed.append(_put_layer(repository, made))
        in_layers.append(made.envelope)
        new += keys_and_signatures.envelope_payload(made.envelope) in payloads
    for kind, payload in wanted:
        layer, bundled = (_known(found, payload, signer) for found in (in_layers, in_bundles))
        made = Attestation(layer or bundled or keys_and_signatures.seal(payload, signer), kind)
        if layer is None:
            listed.append(_put_layer(repository, made))
        if signer and bundled is None:
            _put_bundle(repository, subject, made, signer.public)
        new += layer is None or (signer is not None and bundled is None)
    if listed != [item for item, _ in before]:
        _put_layers(repository, tag, listed)
    return new


def _missing_in_layers(in_layers: Sequence[Envelope], bundles: Layers, kinds: Collection[str]) -> list[Attestation]:
    """The statements of these kinds that the bundles have and cosign's list lacks: for example, two machines wrote the
    list at the same time and one list was lost, or a push was interrupted."""
    seen = {_identity(envelope) for envelope in in_layers}
    missing = []
    for item, found in bundles:
        noted = item.get("annotations")
        kind = noted.get(_BUNDLED_KIND) if isinstance(noted, dict) else None
        if isinstance(kind, str) and kind in kinds and not isinstance(found, Refusal) and _identity(found) not in seen:
            missing.append(Attestation(found, kind))
            seen.add(_identity(found))
    return missing


def publish_without_image(
    repository: TaggedTarget, tag: str, wanted: Sequence[tuple[str, bytes]], signer: Signer | None
) -> tuple[Manifest, int]:
    """Store statements that are not about an image, under a tag. Return the manifest that lists all statements of the
    tag, and how many statements were new. `wanted` and `signer`: as for `publish`."""
    reader = _Reader(repository)
    manifest = repository.manifest(tag)
    listed_before = reader.layers_of(manifest)
    missing = [
        (item, found)
        for item, found in _missing_in_list(reader, repository, tag, manifest)
        if not isinstance(found, Refusal)
    ]
    layers = _kept([*listed_before, *missing], wanted, signer)
    known = _envelopes(layers)
    listed, new = [item for item, _ in layers], 0
    for kind, payload in wanted:
        if _known(known, payload, signer) is None:
            item = _put_layer(repository, Attestation(keys_and_signatures.seal(payload, signer), kind))
            if signer:
                _put_layers(repository, _own_tag(tag, item), [item])
            listed.append(item)
            new += 1
    if manifest is None or listed != [item for item, _ in listed_before]:
        manifest = _put_layers(repository, tag, listed, {_LISTED_AT: tag})
    return manifest, new


_LISTED_AT = f"{LABEL}tag"
"""The annotation of a list of statements that names its tag. Other tags may point to the list too."""


def _own_tag(tag: str, item: Mapping[str, object]) -> str:
    """The tag of a single statement of the list at `tag`."""
    return f"{tag}-{oci_types.digest_in(item).removeprefix('sha256:')[:16]}"


def _missing_in_list(reader: _Reader, repository: TaggedSource, target: str, manifest: Manifest | None) -> Layers:
    """The statements that have a tag of their own and are missing in the list at `target`, which has this manifest."""
    annotations = manifest.document.get("annotations") if manifest else None
    tag = annotations.get(_LISTED_AT) if isinstance(annotations, dict) else None
    listed = manifest.layers if manifest else ()
    found: list[tuple[dict[str, object], Envelope | Refusal]] = []
    for name in _own_tags(repository, tag if isinstance(tag, str) else target, listed):
        try:
            found += [({}, name)] if isinstance(name, Refusal) else reader.layers(name)
        except Refusal as refusal:  # what anybody wrote to one tag must not hide the others
            found.append(({}, refusal))
    return found


def _own_tags(repository: TaggedSource, tag: str, listed: Sequence[Mapping[str, object]]) -> list[str | Refusal]:
    """The tags of single statements of the list at `tag` that are missing in the list, and refusals. `listed`: the
    descriptors in the list."""
    own = re.compile(rf"{re.escape(tag)}-([0-9a-f]{{16}})")
    known = {str(item.get("digest"))[7:23] for item in listed}
    try:
        matches = filter(None, map(own.fullmatch, repository.tags()))
    except Refusal as refusal:
        return [refusal]
    names = sorted({match[0] for match in matches if match[1] not in known})
    if len(names) > _MOST:
        return [*names[:_MOST], Refusal("too-large", f"more than {_MOST} statements have a tag of their own")]
    return [*names]


Layers = Sequence[tuple[dict[str, object], Envelope | Refusal]]


def _kept(before: Layers, wanted: Sequence[tuple[str, bytes]], signer: Signer | None) -> Layers:
    """The layers without unsigned statements of the kinds in `wanted`, if there is a signer, and without layers that
    name no digest."""
    kinds = {kind for kind, _ in wanted} if signer else set()
    named = [(item, found) for item, found in before if isinstance(item.get("digest"), str)]
    return [(item, found) for item, found in named if not _unsigned(item, found, kinds)]


def _envelopes(layers: Layers) -> list[Envelope]:
    """The envelopes that were not refused."""
    return [found for _, found in layers if not isinstance(found, Refusal)]


def _put_layer(repository: Target, made: Attestation) -> dict[str, object]:
    raw = oci_types.encoded(made.envelope)
    repository.put_blob(raw)
    return oci_types.descriptor(ENVELOPE, raw, annotations=made.annotations)


def _unsigned(item: Mapping[str, object], found: Envelope | Refusal, kinds: Collection[str]) -> bool:
    noted = item.get("annotations")
    kind = noted.get("predicateType") if isinstance(noted, dict) else None
    return kind in kinds and not isinstance(found, Refusal) and not keys_and_signatures.envelope_signatures(found)


def _known(found: Sequence[Envelope], payload: bytes, signer: Signer | None) -> Envelope | None:
    return next((envelope for envelope in found if _same(envelope, payload, signer)), None)


def _same(envelope: Envelope, payload: bytes, signer: Signer | None) -> bool:
    try:
        if keys_and_signatures.envelope_payload(envelope) != payload:
            return False
        if signer is not None:
            keys_and_signatures.signed_statement(envelope, [signer.public])
        return True
    except Refusal:
        return False


def _put_layers(
    repository: Target,
    tag: str,
    layers: Sequence[Mapping[str, object]],
    annotations: Mapping[str, str] | None = None,
) -> Manifest:
    files = {"type": "layers", "diff_ids": [item["digest"] for item in layers]}
    config = oci_types.encoded({"architecture": "", "os": "", "config": {}, "rootfs": files})
    repository.put_blob(config)
    manifest = oci_types.image_manifest(oci_types.descriptor(oci_types.CONFIG, config), layers, annotations)
    repository.put_manifest(tag, manifest)
    return manifest


def _put_bundle(repository: Target, subject: Manifest, made: Attestation, key: PublicKey) -> None:
    raw, nothing = oci_types.encoded(bundle(made, key)), b"{}"
    for blob in (raw, nothing):
        repository.put_blob(blob)
    annotations = {
        "dev.sigstore.bundle.content": "dsse-envelope",
        _BUNDLED_KIND: made.kind,
    }
    document = {
        "schemaVersion": 2,
        "mediaType": oci_types.MANIFEST,
        "artifactType": BUNDLE,
        "config": oci_types.descriptor(oci_types.EMPTY, nothing),
        "layers": [oci_types.descriptor(BUNDLE, raw)],
        "subject": subject.descriptor,
        "annotations": annotations,
    }
    manifest = Manifest(oci_types.encoded(document), oci_types.MANIFEST)
    if not repository.put_manifest(manifest.digest, manifest):
        if isinstance(repository, Repository):
            repository.put_manifest(_own_tag(oci_types.fallback_tag(subject.digest), manifest.descriptor), manifest)
        _list_by_tag(repository, subject.digest, [_referrer(manifest)])


def _referrer(manifest: Manifest) -> dict[str, object]:
    """The descriptor of a manifest in a list of referrers."""
    keys = ("artifactType", "annotations")
    return {**manifest.descriptor, **{key: manifest.document[key] for key in keys if key in manifest.document}}


def _list_by_tag(repository: Target, digest: str, items: Sequence[Mapping[str, object]]) -> None:
    """Add referrers to the list under a tag that clients maintain in a registry without the referrers API."""
    if not items:
        return
    before = repository.manifest(oci_types.fallback_tag(digest))
    listed = oci_types.descriptors(before.document, "manifests") if before else []
    document = {"schemaVersion": 2, "mediaType": oci_types.INDEX, "manifests": [*listed, *map(dict, items)]}
    repository.put_manifest(oci_types.fallback_tag(digest), Manifest(oci_types.encoded(document), oci_types.INDEX))


def att_tag(digest: str) -> str:
    return f"{digest.replace(':', '-')}.att"


def fetch_envelopes(repository: ImageSource, digest: str) -> tuple[list[Envelope], list[Refusal]]:
    """Return every envelope stored with an image, without duplicates, and the refusals of invalid ones. Signatures are
    not checked.

    Raises NetworkError, and Refusal if a list of envelopes is itself invalid.
    """
    reader = _Reader(repository)
    layers = [*reader.layers(att_tag(digest)), *reader.bundles(digest), *reader.unlisted_bundles(digest)]
    return _without_duplicates([found for _, found in layers])


def fetch_envelopes_without_image(repository: TaggedSource, target: str) -> tuple[list[Envelope], list[Refusal]]:
    """Return every envelope that publish_without_image stored under this tag, as fetch_envelopes does. `target` may be
    the digest of a list instead: then exactly the envelopes in that list."""
    reader, manifest = _Reader(repository), None
    try:
        manifest = repository.manifest(target)
        layers: Layers = reader.layers_of(manifest)
    except Refusal as refusal:  # an invalid list must not hide the statements that have a tag of their own
        manifest, layers = None, [({}, refusal)]
    if not oci_types.DIGEST.fullmatch(target):
        layers = [*layers, *_missing_in_list(reader, repository, target, manifest)]
    return _without_duplicates([found for _, found in layers])


def _without_duplicates(everything: Sequence[Envelope | Refusal]) -> tuple[list[Envelope], list[Refusal]]:
    envelopes: dict[tuple[bytes, ...], Envelope] = {}
    for found in everything:
        if not isinstance(found, Refusal):
            envelopes.setdefault(_identity(found), found)
    return list(envelopes.values()), [found for found in everything if isinstance(found, Refusal)]


def _identity(envelope: Envelope) -> tuple[bytes, ...]:
    """Equal for two envelopes with the same payload and signatures."""
    return keys_and_signatures.envelope_payload(envelope), *keys_and_signatures.envelope_signatures(envelope)


class _Reader:
    """Reads evidence that anybody may have written, with limits on its number and size. An invalid piece does not
    prevent the others from being read, but NetworkError is raised if the registry lacks a blob that it lists."""

    def __init__(self, repository: ImageSource) -> None:
        self._repository = repository
        self._pieces, self._left = _MOST, _TOTAL

    def layers(self, tag: str) -> list[tuple[dict[str, object], Envelope | Refusal]]:
        """Return the envelopes stored in the older form under a tag, each after its descriptor."""
        return self.layers_of(self._manifest(tag))

    def layers_of(self, manifest: Manifest | None) -> list[tuple[dict[str, object], Envelope | Refusal]]:
        """Return the envelopes in a list in the older form, each after its descriptor."""
        return [(item, self._envelope(partial(self._json, item))) for item in (manifest.layers if manifest else ())]

    def bundles(self, digest: str) -> Layers:
        """Return the envelopes in the bundles that refer to an image, each after the descriptor of its bundle."""
        found = [item for item in self._repository.referrers(digest) if item.get("artifactType") == BUNDLE]
        return [(item, self._envelope(partial(self._bundle, item, digest))) for item in found]

    def unlisted_bundles(self, digest: str) -> Layers:
        """Return the envelopes in bundles that have a tag of their own and are missing in the list under the fallback
        tag, as `bundles` does. Empty if that list does not exist: then the registry lists referrers itself, or the
        manifest has no referrers."""
        repository, tag = self._repository, oci_types.fallback_tag(digest)
        if not isinstance(repository, Repository):
            return []  # a file, which only one process writes
        index = repository.manifest(tag)
        if index is None:
            return []
        found: list[tuple[dict[str, object], Envelope | Refusal]] = []
        for name in _own_tags(repository, tag, oci_types.descriptors(index.document, "manifests")):
            if isinstance(name, Refusal):
                found.append(({}, name))
                continue
            try:
                manifest = self._manifest(name)
                item = _referrer(manifest) if manifest else {}
            except Refusal as refusal:  # what anybody wrote to one tag must not hide the others
                found.append(({}, refusal))
                continue
            if item.get("artifactType") == BUNDLE:
                found.append((item, self._envelope(partial(self._bundle, item, digest))))
        return found

    def _envelope(self, read: Callable[[], object]) -> Envelope | Refusal:
        try:
            self._pieces -= 1
            if self._pieces < 0:
                raise Refusal("too-large", f"there are more than {_MOST} pieces of evidence")
            found = read()
            if not isinstance(found, dict):
                raise Malformed("the envelope is not DSSE")
            keys_and_signatures.envelope_payload(found), keys_and_signatures.envelope_signatures(found)
            return found
        except Refusal as refusal:
            return refusal

    def _bundle(self, item: Mapping[str, object], digest: str) -> object:
        wanted = oci_types.digest_in(item)
        manifest = self._manifest(wanted)
        if manifest is None:
            raise Malformed(f"referrer not found: {wanted}")
        if oci_types.digest_in(manifest.document.get("subject")) != digest:
            raise Refusal("subject", f"the bundle {wanted} refers to a different image")
        if len(manifest.layers) != 1:
            raise Malformed(f"the bundle {wanted} does not have exactly one layer")
        return self._json(manifest.layers[0]).get("dsseEnvelope")

    def _json(self, item: Mapping[str, object]) -> dict[str, object]:
        digest, raw = oci_types.digest_in(item), bytearray()
        self._require_rest()
        for block in self._repository.blocks(digest):
            raw += block
            self._left -= len(block)
            self._require_rest()
            if len(raw) > strict_and_canonical_json.MAX_BYTES:
                limit = strict_and_canonical_json.MAX_BYTES
                raise Refusal("too-large", f"the blob {digest} is larger than {limit} bytes")
        return strict_and_canonical_json.parse(bytes(raw), "the envelope")

    def _manifest(self, target: str) -> Manifest | None:
        """Return a manifest. One that is refused counts as the largest that may have been downloaded."""
        self._require_rest()
        self._left -= oci_types.MAX_MANIFEST
        found = self._repository.manifest(target)
        self._left += oci_types.MAX_MANIFEST - (len(found.raw) if found else 0)
        return found

    def _require_rest(self) -> None:
        if self._left < 0:
            raise Refusal("too-large", f"all evidence together is larger than {_TOTAL} bytes")
