"""The root file system of an image: a tar that mmdebstrap makes from the locked packages only, reproducible byte for
byte.

mmdebstrap reads a local archive with exactly those packages, so the result does not depend on what a mirror serves
today.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from envbuild.fetch.apt_resolution_and_download import Deb
from envbuild.fetch.sha256_file_store import Store, file_digest
from envbuild.lock.lock_file import Lock
from envbuild.util import disk_space, temporary_files, user_folders
from envbuild.util.atomic_files import write_atomically
from envbuild.util.errors import BuildError, HashMismatch
from envbuild.util.host_processes import LineListeners, ProcessMissing, run
from envbuild.util.strict_and_canonical_json import canonical_digest

# No file of an image has a later time than this: 2024-01-01T00:00:00Z. Any fixed time that zip files can store works.
SOURCE_DATE_EPOCH = 1704067200

# Run in the finished root ($1): removes the host's name and resolver, the local archive, logs and caches. apt's own
# cleanup is skipped: it recreates directories whose owner depends on whether the host's user _apt may enter TMPDIR.
_CLEAN = (
    'rm -rf "$1"/etc/apt/sources.list "$1"/etc/resolv.conf "$1"/etc/hostname "$1"/var/log/* "$1"/var/lib/apt/lists/* '
    '"$1"/var/cache/apt/archives/* "$1"/var/cache/apt/*.bin "$1"/var/cache/ldconfig/aux-cache '
    '"$1"/var/cache/debconf/*-old "$1"/var/lib/dpkg/*-old'
)
# The builder mounts these files. If they were missing, it would create and remove them, which changes /etc in every
# layer.
_MOUNT_POINTS = ': >"$1"/etc/resolv.conf; : >"$1"/etc/hosts'
# Bytecode contains the source's time, which is changed afterwards, so the bytecode would never be used.
_NO_BYTECODE = 'find "$1"/usr -name __pycache__ -type d -prune -exec rm -rf {} +'


_OPTIONS = (
    "--variant=essential",
    "--architectures=amd64",
    "--format=tar",
    "--aptopt=APT::Install-Recommends false",
    "--skip=cleanup/apt",
    f"--customize-hook={_CLEAN}",
    f"--customize-hook={_MOUNT_POINTS}",
    f"--customize-hook={_NO_BYTECODE}",
)


# Run too if the profile lists packages in `apt:`. Removes keys, certificates and ids that their installation generates
# at random, because all containers of the image would share them. systemd fills an empty machine-id when it starts.
_NO_RANDOM = (
    'rm -f "$1"/etc/ssh/ssh_host_*_key "$1"/etc/ssh/ssh_host_*_key.pub "$1"/etc/ssl/private/ssl-cert-snakeoil.key '
    '"$1"/etc/ssl/certs/ssl-cert-snakeoil.pem "$1"/var/lib/dbus/machine-id; '
    '[ ! -e "$1"/etc/machine-id ] || : >"$1"/etc/machine-id; '
    '[ ! -d "$1"/etc/ssl/certs ] || chroot "$1" find /etc/ssl/certs -xtype l -delete'
)


def tar_file(lock: Lock, make: bool = True, *, apt: bool = False) -> Path:
    """Return the path of this lock's base tar, whether it exists or not. `make`: create the directory if missing;
    `apt`: the base with the packages of `apt:`."""
    return user_folders.cache_folder("bases", make) / f"{_key(lock, apt)}.tar"


def _key(lock: Lock, apt: bool) -> str:
    if not apt:
        return canonical_digest([base_recipe(), lock.content["base"]])
    return canonical_digest([base_recipe(), _NO_RANDOM, lock.content["base"], lock.content["apt"]])


def base_recipe() -> str:
    """Return the sha256 of everything that determines a base without the packages of `apt:`, except its packages."""
    return canonical_digest([_OPTIONS, SOURCE_DATE_EPOCH])


def intact_base(lock: Lock) -> Path:
    """Return the path of the base tar, after checking its sha256. If the sha256 differs, the file is removed.

    Raises HashMismatch.
    """
    target = tar_file(lock)
    require_intact(target, file_digest(target))
    return target


def require_intact(target: Path, found: str) -> None:
    """If a base has changed, or the file with its sha256 is missing, remove the base and raise HashMismatch. `found`:
    the sha256 of its content, hex."""
    noted = target.with_suffix(".sha256")
    if not noted.is_file() or noted.read_text(encoding="utf-8") != found:
        target.unlink()
        raise HashMismatch(
            f"the cached base {target.name} was damaged on this disk",
            hint="the damaged file was removed: run the same command again to make it",
        )


def make_base(lock: Lock, store: Store, on_line: Callable[[str], None], *, apt: bool = False) -> Path:
    """Make the base of `lock` from packages in `store`, unless it exists already, and return its path. `apt`: with the
    packages of `apt:`.

    Raises ProcessMissing if mmdebstrap is missing, BuildError if it fails, HashMismatch for a stored package that
    changed, and DiskError.
    """
    target = tar_file(lock, apt=apt)
    if target.is_file():
        temporary_files.sweep()  # of a run that was killed after it had completed the base
        return target
    assert lock.suite is not None
    debs = (*lock.base, *lock.apt) if apt else lock.base
    hooks = (f"--customize-hook={_NO_RANDOM}",) if apt else ()
    with temporary_files.folder("base") as folder:
        folder.chmod(0o755)  # mmdebstrap's download step may run as another user
        _archive(folder, lock.suite, debs, store)
        with temporary_files.folder("base", target.parent) as near:  # same file system: the move is atomic
            made = near / target.name
            _bootstrap(lock.suite, debs, hooks, folder, made, on_line)
            write_atomically(target.with_suffix(".sha256"), file_digest(made))
            made.replace(target)
    return target


def _archive(folder: Path, suite: str, debs: Sequence[Deb], store: Store) -> None:
    """Write a flat Debian archive: the packages, their index, and a Release file that names the suite."""
    stanzas = []
    for deb in debs:
        store.check(deb.sha256, deb.file)
        source = store.path(deb.sha256, deb.file)
        shutil.copyfile(source, folder / deb.file)
        # TMPDIR: if dpkg-deb is killed, its unpacked files stay in there
        control = run(["dpkg-deb", "--field", source], env={"TMPDIR": str(folder)}).stdout.strip()
        stanzas.append(f"{control}\nFilename: ./{deb.file}\nSize: {deb.bytes}\nSHA256: {deb.sha256}\n")
    index = "\n".join(stanzas).encode()
    (folder / "Packages").write_bytes(index)
    (folder / "Release").write_text(
        f"Suite: {suite}\nCodename: {suite}\nSHA256:\n {hashlib.sha256(index).hexdigest()} {len(index)} Packages\n",
        encoding="utf-8",
    )


def _contained() -> list[str]:
    """Return the command prefix that runs mmdebstrap in separate namespaces. If root runs it, mmdebstrap mounts /proc,
    /sys and devices into its target. If mmdebstrap is killed, these mounts would stay in a directory that is later
    deleted as temporary; in separate namespaces they end with mmdebstrap.

    The prefix is empty for other users, for whom mmdebstrap itself creates namespaces, and for a root user that may not
    create namespaces, who may not mount either.
    """
    own = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if os.geteuid():
        return []
    try:
        return [] if run([*own, "true"]).code else own
    except ProcessMissing:
        return []


def _bootstrap(
    suite: str,
    debs: Sequence[Deb],
    hooks: Sequence[str],
    folder: Path,
    target: Path,
    on_line: Callable[[str], None],
) -> None:
    if shutil.which("mmdebstrap") is None:  # check it here: otherwise unshare would report it missing
        raise ProcessMissing(
            "mmdebstrap is not installed; a bootstrap base is made with it",
            hint="install it (Debian: apt-get install mmdebstrap), or set a base image in the profile, under base",
        )
    done = run(
        [
            *_contained(),
            "mmdebstrap",
            *_OPTIONS,
            *hooks,
            f"--include={','.join(deb.name for deb in debs)}",
            suite,
            target,
            f"deb [trusted=yes] copy://{folder} ./",
        ],
        # Packages' scripts run in the new root: without the user's variables, it does not depend on them.
        env=dict.fromkeys(os.environ.keys() - {"PATH"})
        | {
            "SOURCE_DATE_EPOCH": str(SOURCE_DATE_EPOCH),
            "LC_ALL": "C.UTF-8",
            "TZ": "UTC",
            "TMPDIR": str(folder),
        },
        listeners=LineListeners(stderr=on_line),
        timeout=1800,
    )
    if done.code and disk_space.lacked(done.stderr):
        raise disk_space.full([folder, target.parent], "the disk is full in the middle of making the base")
    if done.code:
        tail = "\n".join(done.stderr.strip().splitlines()[-12:])
        if "unable to pick chroot mode" in tail:
            tail += (
                "\nwithout root it needs the package uidmap, and a range of ids for you in /etc/subuid and /etc/subgid"
            )
        raise BuildError("mmdebstrap could not make the base", hint=tail)
