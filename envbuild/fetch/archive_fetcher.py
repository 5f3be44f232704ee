"""Downloads archives that a profile names by sha256 into a store, and inspects them before they are locked.

The script dockerfiles/unpack extracts the archives in the build. Here the same script only inspects them, so that an
archive that it would refuse is refused before the build.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace

from packaging.specifiers import SpecifierSet

from envbuild.fetch import file_download_and_range_reads, index_config, sha256_file_store
from envbuild.fetch.archive_spec import UNPACKER, Archive, ArchiveRequest
from envbuild.fetch.file_download_and_range_reads import RemoteFile
from envbuild.fetch.sha256_file_store import Store
from envbuild.util import settings, url_redaction, user_folders
from envbuild.util.errors import HashMismatch, NetworkError, ProfileError
from envbuild.util.host_processes import ProcessTimeout, run

# The size of an archive is unknown before it is locked. The largest, a toolkit, has some GB; this limit only stops an
# endless download before it fills the disk.
_LARGEST = 16 << 30  # bytes
# Reading an archive of that size through xz takes minutes. A malicious endless archive must not block the profile's
# lock.
_LOOK_SECONDS = 1800.0


def inspect_archive(wanted: ArchiveRequest, progress: Callable[[str, int], None]) -> Archive:
    """Download an archive and inspect it.

    Raises what fetch_archives raises, and HashMismatch if the stored archive has changed. Raises ProfileError with the
    profile's line if the archive has unexpected content, an unsuitable version or a member outside the target folder,
    or if reading it takes too long.
    """
    held = sha256_file_store.archive_store()
    if held.holds(wanted.sha256, wanted.name):
        held.check(wanted.sha256, wanted.name)
    fetch_archives([wanted], progress)
    file = held.path(wanted.sha256, wanted.name)
    try:
        done = run([sys.executable, UNPACKER, wanted.name, file], timeout=_LOOK_SECONDS)
    except ProcessTimeout:
        raise _refused(wanted, f"reading the archive takes longer than {_LOOK_SECONDS:.0f} s") from None
    version = done.stdout.strip()
    if done.code:
        raise _refused(wanted, done.stderr.strip().removeprefix("error: ") or f"exit code {done.code}")
    if not SpecifierSet(wanted.fits).contains(version):
        raise _refused(wanted, f"{wanted.name} has version {version}, but must match {wanted.fits}")
    return Archive(wanted.name, version, wanted.sha256, file.stat().st_size)


def _refused(wanted: ArchiveRequest, message: str) -> ProfileError:
    return ProfileError(f"the archive {wanted.name} cannot be used", faults=[replace(wanted.at, message=message)])


def fetch_archives(archives: Iterable[ArchiveRequest], progress: Callable[[str, int], None]) -> None:
    """Download the archives missing in the store; `progress` gets the name and the number of new bytes.

    Raises HashMismatch for a file with a different sha256, NetworkError if no URL is known or the URL does not answer.
    """
    held = sha256_file_store.archive_store()
    for wanted in archives:
        if not held.holds(wanted.sha256, wanted.name):
            _bring(wanted, held, progress)


def _bring(wanted: ArchiveRequest, held: Store, progress: Callable[[str, int], None]) -> None:
    address = _address(wanted)
    shown = url_redaction.redact_url(address)
    with held.incoming() as folder:
        file = folder / wanted.sha256
        name = f"{wanted.name} ({shown})"
        report = functools.partial(progress, wanted.name)
        try:
            file_download_and_range_reads.fetch_file(
                index_config.index_session(), RemoteFile(address, name), file, report, limit=_LARGEST
            )
        except NetworkError as error:
            raise NetworkError(error.message, hint=error.hint, faults=[wanted.named]) from error
        try:
            held.put(file, wanted.sha256, wanted.name)
        except HashMismatch as error:
            hint = f"{shown} serves a different file than the one in {wanted.at.file}:{wanted.at.line}"
            # do not print the sha256 of a local file: it would allow guessing a short secret in it
            local = f"{wanted.name} is not the file with sha256 {wanted.sha256}"
            raise HashMismatch(local if address.startswith("file:") else error.message, hint=hint) from None


def _address(wanted: ArchiveRequest) -> str:
    site = settings.setting("archives")
    address = site.replace("{sha256}", wanted.sha256) if site else wanted.url
    if address is None:
        raise NetworkError(
            f"no URL is known for {wanted.name}",
            hint=f"add the key `url` next to its sha256 ({wanted.at.file}:{wanted.at.line}), or set `archives` in "
            f"{user_folders.config_file()}",
        )
    try:
        return url_redaction.validate_url(address)
    except ValueError as error:
        raise NetworkError(f"the URL of {wanted.name} is malformed: {error}") from None
