"""Client of a registry repository over the HTTP API, without a Docker Engine. The size of responses is limited. All
digests are checked, except by `unchecked_blocks`."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import requests

from envbuild.registry import blob_uploads, oci_types, registry_http_and_auth
from envbuild.registry.blob_uploads import Uploads
from envbuild.registry.oci_types import Manifest, Reference
from envbuild.registry.registry_http_and_auth import Access, TemporaryFailure, TokenRefused
from envbuild.util import strict_and_canonical_json
from envbuild.util.errors import EnvbuildError, NetworkError
from envbuild.util.http_deadlines import TooSlow
from envbuild.util.untrusted_input_errors import Malformed, Refusal

_LOG = logging.getLogger(__name__)
_ACCEPT = ", ".join((*oci_types.MANIFESTS, *oci_types.INDEXES))
_BLOCK = 1 << 20
_PAUSES = blob_uploads.PAUSES  # seconds, before a download is resumed
_TAG_PAGES = 200  # maximum number of responses that are read for a list of tags
_TAGS = 200_000  # maximum number of tags that are read
_FIRST_TAG_PAGE = {"n": "1000"}  # the largest page that common registries accept
_NOT_LISTED = (400, 401, 403, 405, 501)  # from a registry that does not list tags, or not with these credentials


class _BrokenResponse(TemporaryFailure):
    """A response ended too early."""


class Repository:
    """One repository. Raises NetworkError if a request fails, Refusal if the registry serves wrong content."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        host = oci_types.server_of(reference.host)
        file = Path("/etc/docker/certs.d") / host / "ca.crt"
        authority = str(file) if file.is_file() else None
        base = _origin(host, authority)
        self._access = Access(reference.host, base, registry_http_and_auth.registry_session(authority))
        self._url = f"{base}/v2/{reference.name}"
        # `Uploads` retries, also where urllib3 must not, because a request has a stream or is a POST or PATCH.
        self._writer = Access(reference.host, base, registry_http_and_auth.registry_session(authority, tries=1))
        self._uploads = Uploads(self._send, self._url, self._writer.moved, self._require)

    def manifest(self, target: str) -> Manifest | None:
        """The manifest or index of a tag or digest; None if missing."""
        answer = self._get(f"manifests/{target}", headers={"Accept": _ACCEPT})
        if answer is None:
            return None
        raw = self._body(answer, oci_types.MAX_MANIFEST, "the manifest")
        media_type = answer.headers.get("Content-Type", "").partition(";")[0].strip()
        found = Manifest(raw, media_type)
        wanted = (
            target if oci_types.DIGEST.fullmatch(target) else answer.headers.get("Docker-Content-Digest", found.digest)
        )
        if found.digest != wanted:
            raise Refusal("digest", f"{self.reference.host} serves {found.digest} as the manifest {wanted}")
        stated = found.document.get("mediaType", media_type)
        if stated != media_type or not (found.is_index or media_type in oci_types.MANIFESTS):
            raise Refusal(
                "digest", f"{self.reference.host} serves a manifest as {media_type!r}, but its mediaType is {stated!r}"
            )
        return found

    def blob(self, digest: str, limit: int = strict_and_canonical_json.MAX_BYTES) -> bytes:
        """A small blob. Raises Refusal if it is larger than `limit` or does not match its digest."""
        found = bytearray()
        for block in self.blocks(digest):
            found += block
            if len(found) > limit:
                raise Refusal("too-large", f"the blob {digest} is larger than {limit} bytes")
        return bytes(found)

    def has_blob(self, digest: str) -> bool:
        """Whether the registry has a blob. Its content is not fetched."""
        answer = self._access.send("HEAD", f"{self._url}/blobs/{digest}", self._scope("pull"), headers={})
        self._require(answer, (200, 404), f"does not return blobs/{digest}")
        registry_http_and_auth.finish(answer)
        return answer.status_code == 200

    def blocks(self, digest: str) -> Generator[bytes, None, None]:
        """A blob of any size, in blocks. Raises Refusal after the last block if the blob does not match its digest."""
        seen = hashlib.sha256()
        for block in self._blocks_from(digest, 0):
            seen.update(block)
            yield block
        if f"sha256:{seen.hexdigest()}" != digest:
            raise self.wrong_content(digest)

    def unchecked_blocks(self, digest: str, start: int, size: int) -> Generator[bytes, None, None]:
        """The bytes of a blob of `size` bytes from `start` on, in blocks. The caller must compare the whole content
        with the digest. Raises Refusal if the blob has more bytes: a registry could fill the disk with a blob that does
        not end.

        A response that ends early is resumed. So is a download whose registry does not answer any more, or answers with
        408, 429 or 5xx (not 501). Before the first byte of this call has arrived, only a response that ends early is
        resumed; any other error is raised at once. After four failures in a row, the last error is raised; the count
        begins again whenever _BLOCK bytes have arrived since it began. The pauses between the failures are 0.5, 2 and 8
        seconds, or longer if the registry requests it (Retry-After); if it requests more than 60 seconds, the error is
        raised.
        """
        begin = counted_from = start
        pauses = iter(_PAUSES)
        while start < size:
            try:
                for block in self._blocks_from(digest, start):
                    start += len(block)
                    if start > size:
                        raise Refusal("digest", f"the blob {digest} has more bytes than the {size} in its manifest")
                    yield block
                if start < size:
                    sent = f"{self.reference.host} sends only {start} of the {size} bytes of the blob {digest}"
                    raise _BrokenResponse(sent, hint="run the same command again")
            except TemporaryFailure as error:
                if start - counted_from >= _BLOCK:
                    pauses, counted_from = iter(_PAUSES), start
                pause = next(pauses, None)
                failed_at_once = start == begin and not isinstance(error, _BrokenResponse)
                if pause is None or failed_at_once or error.retry_after > blob_uploads.LONGEST_PAUSE:
                    raise
                _LOG.info("%s: %s; resuming at byte %d", digest, error.message, start)
                yield b""  # so that the caller can stop
                time.sleep(max(pause, error.retry_after))
                yield b""

    def _blocks_from(self, digest: str, start: int) -> Generator[bytes, None, None]:
        """The bytes of a blob from `start` on. If the registry sends the whole blob, the bytes before `start` are
        dropped. If it sends a different part than requested, or none, the whole blob is requested."""
        path, ranges = f"blobs/{digest}", {"Range": f"bytes={start}-"} if start else {}
        answer = self._get(path, headers=ranges, codes=(200, 206, 416) if start else (200,))
        if answer is not None and answer.status_code != 200 and not _is_rest(answer, start):
            answer.close()
            answer = self._get(path)
        if answer is None:
            raise NetworkError(f"{self.reference.repository} has no blob {digest}")
        dropped = 0 if _is_rest(answer, start) else start
        try:
            encoding = answer.headers.get("Content-Encoding", "identity").lower()
            if encoding != "identity":  # requests would decompress the body, and its size and digest could differ
                raise NetworkError(
                    f"{self.reference.host} sends the blob {digest} with the Content-Encoding {encoding[:50]!r}",
                    hint="a proxy may compress what the registry sends: connect without it",
                )
            for block in answer.iter_content(_BLOCK):
                yield block[dropped:]  # yields b"" before `start` is reached, so that the caller can stop there too
                dropped = max(0, dropped - len(block))
        except requests.RequestException as error:
            broken = self._access.connection_error(answer.url, error)
            raise _BrokenResponse(broken.message, hint=broken.hint) from None
        finally:
            answer.close()

    def wrong_content(self, digest: str) -> Refusal:
        """The error for a blob that does not match its digest."""
        return Refusal("digest", f"{self.reference.host} serves wrong content for the blob {digest}")

    def referrers(self, digest: str) -> list[dict[str, Any]]:
        """Descriptors of the manifests that refer to a manifest: from the API, otherwise from the fallback tag."""
        answer = self._get(f"referrers/{digest}", also_missing=(400, 405))
        if answer is not None:
            raw = self._body(answer, oci_types.MAX_MANIFEST, "the list of referrers")
            return oci_types.descriptors(strict_and_canonical_json.parse(raw, "the list of referrers"), "manifests")
        index = self.manifest(oci_types.fallback_tag(digest))
        return oci_types.descriptors(index.document, "manifests") if index else []

    def tags(self) -> list[str]:
        """The tags of the repository. Reading stops after _TAGS tags or _TAG_PAGES responses. Empty if the repository
        does not exist, or if the registry does not list tags to this user."""
        found: list[str] = []
        page = _FIRST_TAG_PAGE
        for _ in range(_TAG_PAGES):
            answer = self._tag_page(page)
            if answer is None and page == _FIRST_TAG_PAGE:  # some registries refuse a number instead of reducing it
                answer = self._tag_page({})
            if answer is None:
                _LOG.info("%s does not list its tags, or only %d of them", self.reference.repository, len(found))
                return found
            listed = strict_and_canonical_json.parse(
                self._body(answer, oci_types.MAX_MANIFEST, "the list of tags"), "the list of tags"
            ).get("tags")
            if listed is None:  # some registries send null instead of an empty list
                return found
            if not isinstance(listed, list) or not all(isinstance(tag, str) for tag in listed):
                raise Malformed("the list of tags is not a list of texts")
            found += listed
            # only these two values are taken from the link: its host may be wrong behind a proxy, or hostile
            try:
                values = parse_qs(urlsplit(answer.links.get("next", {}).get("url", "")).query)
            except ValueError:
                raise Malformed("the link to the next part of the list of tags is not a URL") from None
            page = {key: values[key][0] for key in ("last", "n") if key in values}
            if "last" not in page or not listed:
                return found
            if len(found) >= _TAGS:
                break
        _LOG.info("%s has more tags than the %d that were read", self.reference.repository, len(found[:_TAGS]))
        return found[:_TAGS]

    def _tag_page(self, page: dict[str, str]) -> requests.Response | None:
        try:
            return self._get(f"tags/list{f'?{urlencode(page)}' if page else ''}", also_missing=_NOT_LISTED)
        except TokenRefused:  # a registry may require a separate permission for the list
            return None

    def put_blob(self, raw: bytes) -> None:
        """Upload a blob unless it exists."""
        self.put_blocks(oci_types.digest_of(raw), len(raw), lambda: (block for block in (raw,)))

    def put_file(self, digest: str, file: Path) -> None:
        """Upload a blob of any size from a file unless it exists."""
        self.put_blocks(digest, file.stat().st_size, functools.partial(_file_blocks, file))

    def put_blocks(
        self,
        digest: str,
        size: int,
        blocks: Callable[[], Generator[bytes, None, None]],
        mount_from: str | None = None,
        sleep: Callable[[float], object] | None = None,
    ) -> bool:
        """Upload a blob of any size from a stream unless it exists, as `Uploads.put_blob` does. Return whether it was
        sent."""
        return self._uploads.put_blob(digest, size, blocks, mount_from, sleep)

    def put_manifest(self, target: str, manifest: Manifest) -> bool:
        """Upload a manifest under a tag or its own digest. Return whether the registry adds it to the referrers of its
        subject; otherwise the caller must do so."""
        return "OCI-Subject" in self._uploads.put_manifest(target, manifest).headers

    def abort(self) -> None:
        """End all requests in other threads now; no more requests are possible."""
        self._access.abort()
        self._writer.abort()

    def _get(
        self,
        path: str,
        *,
        headers: dict[str, str] | None = None,
        codes: tuple[int, ...] = (200,),
        also_missing: tuple[int, ...] = (),
    ) -> requests.Response | None:
        answer = self._access.send("GET", f"{self._url}/{path}", self._scope("pull"), headers=headers or {})
        if answer.status_code in (404, *also_missing):
            registry_http_and_auth.finish(answer)
            return None
        self._require(answer, codes, f"does not return {path}")
        return answer

    def _send(self, method: str, url: str, **options: Any) -> requests.Response:
        try:
            return self._writer.send(method, url, self._scope("pull,push"), **options)
        except TooSlow as error:  # a connection that is dead, but not closed, is replaced
            raise TemporaryFailure(error.message, hint=error.hint) from None

    def _scope(self, actions: str) -> str:
        return f"repository:{self.reference.name}:{actions}"

    def _require(self, answer: requests.Response, codes: tuple[int, ...], what: str) -> None:
        if answer.status_code in codes:
            return
        message = _error_message(answer)
        answer.close()
        text = f"{self.reference.repository} {what}: {answer.status_code}"
        if registry_http_and_auth.is_temporary(answer.status_code):
            seconds = registry_http_and_auth.retry_after(answer)
            wait = f"the registry asks to wait {seconds:.0f} s" if seconds else ""
            raise TemporaryFailure(text, hint="\n".join(filter(None, (message, wait))) or None, retry_after=seconds)
        login = f"docker login {self.reference.host}" if answer.status_code in (401, 403) else ""
        raise NetworkError(text, hint="\n".join(filter(None, (message, login))) or None)

    def _body(self, answer: requests.Response, limit: int, what: str) -> bytes:
        try:
            return registry_http_and_auth.whole_body(answer, limit, what)
        except requests.RequestException as error:
            raise self._access.connection_error(answer.url, error) from None


def _file_blocks(file: Path) -> Generator[bytes, None, None]:
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            yield block


def _is_rest(answer: requests.Response, start: int) -> bool:
    """Whether a response contains a blob from `start` on, as requested."""
    return answer.status_code == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {start}-")


def _error_message(answer: requests.Response) -> str:
    """The error message in the registry's response; empty if the response has none."""
    try:
        errors = json.loads(registry_http_and_auth.whole_body(answer, 1 << 16, "the error"))["errors"]
        words = "; ".join(f"{item.get('code')}: {item.get('message')}" for item in errors[:3])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, EnvbuildError, requests.RequestException):
        return ""
    return words[:500]


def _origin(host: str, authority: str | None) -> str:
    """The base URL of a registry: https, or http for a registry without TLS on this machine, as in docker."""
    if registry_http_and_auth.is_local(urlsplit(f"//{host}").hostname or ""):
        try:
            once = registry_http_and_auth.registry_session(authority, tries=1)
            once.get(
                f"https://{host}/v2/", timeout=registry_http_and_auth.TIMEOUT, allow_redirects=False, stream=True
            ).close()
        except requests.exceptions.SSLError as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise registry_http_and_auth.unreachable(host, error) from None
            return f"http://{host}"
        except requests.RequestException:
            return f"http://{host}"
    return f"https://{host}"
