"""Resolves and downloads Debian packages with the host's apt and the host's mirrors, proxies and keys, in a separate
state folder.

The host's package state is neither read nor changed. Downloads use apt's own helper, which checks the hash.

Most of apt's time goes into reading the package lists. The archives' signed Release files contain the hashes of these
lists, so the result depends only on the Release files, the host's configuration of apt, and the arguments. Therefore
apt fetches and checks the Release files first, and resolves only if there is no cached result for them.
"""

from __future__ import annotations

import atexit
import contextlib
import re
import urllib.parse
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from envbuild.fetch import apt_result_cache
from envbuild.fetch.sha256_file_store import Store, file_digest
from envbuild.util import disk_space, settings, temporary_files, url_redaction, user_folders
from envbuild.util.errors import NetworkError, ProfileError
from envbuild.util.host_processes import Completed, ProcessMissing, run
from envbuild.util.thread_safe_cache import thread_safe_cache

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_HELPER = "/usr/lib/apt/apt-helper"
# Docker's Debian images set this to true in the host's configuration, which only an option of the command line
# overrides. apt reads the lists several times, and would decompress them each time.
_UNCOMPRESSED = ("--option", "Acquire::GzipIndexes=false")
_RELEASES_ONLY = ("--option", "Acquire::IndexTargets::deb::Packages::DefaultEnabled=false")
# Holds the temporary folders with the package lists, which are used until the process ends.
_FOLDERS = contextlib.ExitStack()
atexit.register(_FOLDERS.close)
_APT_HINT = "a bootstrap base needs Debian's apt and mmdebstrap on this machine; without them, set a base image"


@dataclass(frozen=True)
class Deb:
    """One package file. `path` is its path below an archive's root, the same on every mirror."""

    name: str
    version: str
    sha256: str
    bytes: int
    path: str

    @property
    def file(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass(frozen=True)
class AptArchive:
    root: str
    suite: str


class AptUnavailable(NetworkError):
    """The mirrors answer, but no longer have some packages."""

    kind = "mirror"

    def __init__(self, missing: Sequence[Deb]) -> None:
        names = ", ".join(f"{deb.name} {deb.version}" for deb in missing[:5])
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        super().__init__(
            f"no configured mirror has {names}{more}",
            hint="set debian_snapshot in config.yaml to a snapshot archive, or lock again without --locked",
        )
        self.missing = tuple(missing)


def apt_archives(suite: str) -> list[AptArchive]:
    """The archives for `suite`: from the site's settings, otherwise apt's own sources with the suite's name
    substituted.

    Raises NetworkError if neither contains a Debian archive.
    """
    mirror, security = (
        settings.setting("debian_mirror"),
        settings.setting("debian_security_mirror"),
    )
    if mirror:
        main = [AptArchive(mirror.rstrip("/"), suite), AptArchive(mirror.rstrip("/"), f"{suite}-updates")]
        return main + ([AptArchive(security.rstrip("/"), f"{suite}-security")] if security else [])
    listed = _checked(_apt("--print-uris", "update").stdout.splitlines())
    found = [AptArchive(root, f"{suite}{pocket}") for root, pocket in listed]
    if not any(archive.suite == suite for archive in found):
        raise NetworkError(
            f"no Debian archive for a {suite} base is configured in apt",
            hint=f"set debian_mirror in {user_folders.config_file()}",
        )
    return found


def _checked(lines: Iterable[str]) -> list[tuple[str, str]]:
    """The entries of apt's sources for the host's own release, as (root, pocket), such as (".../debian-security",
    "-security")."""
    codename = _host_codename()
    pattern = re.compile(rf"^'(\S+)/dists/{re.escape(codename)}(-updates|-security)?/InRelease'")
    found = [(match[1], match[2] or "") for line in lines if (match := pattern.match(line))]
    return list(dict.fromkeys(found))


def _host_codename() -> str:
    for line in Path("/etc/os-release").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition("=")
        if key == "VERSION_CODENAME":
            return value.strip('"')
    return ""


def resolve_debs(
    suite: str, packages: Sequence[str], keep: Sequence[Deb] = (), components: Sequence[str] = ("main",)
) -> list[Deb]:
    """Debian's essential packages, `packages`, `keep`, and all their dependencies, sorted by name. Packages in `keep`
    get exactly these versions. `components`: the components of the archive to use, such as main and non-free.

    Raises ProfileError if the suite lacks a package, or if apt cannot resolve them together. Raises NetworkError if the
    mirrors do not answer, or if they lack a package and several components are requested.
    """
    return list(_resolve(suite, tuple(packages), tuple(keep), tuple(components)))


@thread_safe_cache
def _resolve(
    suite: str, packages: tuple[str, ...], keep: tuple[Deb, ...], components: tuple[str, ...]
) -> tuple[Deb, ...]:
    """Resolve once for all profiles that are locked together: most have the same base image."""
    archives = tuple(apt_archives(suite))
    # `?essential` matches only the essential packages; apt adds their dependencies.
    wanted = ["?essential", *packages, *(f"{deb.name}={deb.version}" for deb in keep)]
    arguments = ["install", "--yes", "--no-install-recommends", "--print-uris", *wanted]
    inputs = _inputs_by_releases(archives, components)
    rows = apt_result_cache.load_rows([inputs, arguments]) if inputs else None
    if rows is not None:
        return tuple(Deb(*row) for row in rows)
    config, inputs = _package_lists(archives, components)
    # Docker's Debian images switch this cache off too. With it, apt reads the package lists only once in a process.
    done = _apt("--option", f"Dir::Cache::pkgcache={config.parent}/pkgcache.bin", *arguments, config=config)
    if done.code and disk_space.is_none(config.parent):
        raise disk_space.full([config.parent], "the disk is full while apt runs")
    if done.code:
        raise _not_resolved(suite, done.stderr, components)
    found = sorted((_deb(line) for line in done.stdout.splitlines() if line.startswith("'")), key=lambda deb: deb.name)
    if inputs:
        apt_result_cache.save_rows([inputs, arguments], [astuple(deb) for deb in found])
    return tuple(found)


@thread_safe_cache
def _inputs_by_releases(archives: Sequence[AptArchive], components: Sequence[str]) -> list[str]:
    """Fetch only the archives' Release files, and return the inputs of the cached result (see `_result_inputs`)."""
    with temporary_files.folder("apt") as state:
        config = _configure(state, archives, components)
        _update(config, *_RELEASES_ONLY)
        return _result_inputs(config, archives, components)


@thread_safe_cache
def _package_lists(archives: Sequence[AptArchive], components: Sequence[str]) -> tuple[Path, list[str]]:
    """Fetch the package lists into a folder that exists until the process ends. Return apt's configuration for this
    folder, and what `_result_inputs` returns; empty if a package list is missing, so that no result is cached."""
    with contextlib.ExitStack() as stack:
        state = stack.enter_context(temporary_files.folder("apt"))
        config = _configure(state, archives, components)
        _update(config)
        found = _result_inputs(config, archives, components) if _all_written(state / "lists", components) else []
        _FOLDERS.push(stack.pop_all())
        return config, found


def _all_written(lists: Path, components: Sequence[str]) -> bool:
    """Whether each package list has the hash in its Release file. On a full disk, apt may exit with 0 without some.
    False also for an archive that states only the hashes of compressed lists."""
    for release in lists.glob("*Release"):
        text, prefix = release.read_text(encoding="utf-8", errors="replace"), re.sub("(In)?Release$", "", release.name)
        for component in components:
            path = rf"{re.escape(component)}/binary-amd64/Packages"
            listed = re.search(rf"^ [0-9a-f]{{64}} +[1-9]\d* +{path}", text, re.M)
            named = re.search(rf"^ ([0-9a-f]{{64}}) +[1-9]\d* +{path}$", text, re.M)
            file = lists / f"{prefix}{component.replace('/', '_')}_binary-amd64_Packages"
            if listed and not (named and file.is_file() and file_digest(file) == named[1]):
                return False
    return True


# These settings accept package lists whose hashes are in no signed Release file.
_INSECURE = re.compile(r'Acquire::Allow\w*Repositories "(?!0|no|false|without|off|disable)')


def _result_inputs(config: Path, archives: Sequence[AptArchive], components: Sequence[str]) -> list[str]:
    """All that apt's result depends on, apart from the arguments: the Release files, which contain the hashes of the
    package lists, the archives, and apt's version and settings. Empty if the settings accept unsigned archives."""
    dump = run(["apt-config", "dump"], env={"APT_CONFIG": str(config), "LC_ALL": "C"}, timeout=60)
    if dump.code or _INSECURE.search(dump.stdout):
        return []
    lines = dump.stdout.replace(str(config.parent), "").splitlines()
    releases = sorted((config.parent / "lists").glob("*Release"))
    return [
        *(f"{file.name} {file_digest(file)}" for file in releases),
        # without a password, which could be guessed from a hash
        *(f"{url_redaction.redact_url(archive.root)} {archive.suite}" for archive in archives),
        *components,
        _apt("--version").stdout,
        # how files are downloaded does not matter, and the address of a proxy may contain a password
        *(line for line in lines if not line.startswith("Acquire::")),
    ]


def beyond(found: Iterable[Deb], present: Iterable[Deb]) -> tuple[Deb, ...]:
    """The packages in `found` whose names do not occur in `present`."""
    names = {deb.name for deb in present}
    return tuple(deb for deb in found if deb.name not in names)


def _configure(state: Path, sources: Sequence[AptArchive], components: Sequence[str]) -> Path:
    for folder in ("lists/partial", "archives/partial"):
        (state / folder).mkdir(parents=True)
    (state / "status").touch()
    listed = " ".join(components)
    lines = [f"deb [signed-by={KEYRING}] {archive.root} {archive.suite} {listed}\n" for archive in sources]
    (state / "sources.list").write_text("".join(lines), encoding="utf-8")
    config = state / "apt.conf"
    config.write_text(
        f"""
Dir::Etc::sourcelist "{state}/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
Dir::State "{state}";
Dir::State::lists "{state}/lists";
Dir::State::status "{state}/status";
Dir::Cache "{state}";
Dir::Cache::archives "{state}/archives";
APT::Architecture "amd64";
APT::Architectures "amd64";
APT::Sandbox::User "root";
APT::Update::Error-Mode "any";
Acquire::ForceHash "SHA256";
Acquire::Retries "3";
Acquire::Languages "none";
""",
        encoding="utf-8",
    )
    return config


def _apt(*arguments: str, config: Path | None = None) -> Completed:
    # TMPDIR: apt's signature check leaves files there if it is killed
    given = {"APT_CONFIG": str(config), "TMPDIR": str(config.parent)} if config else {}
    options = _UNCOMPRESSED if config else ()
    try:
        done = run(["apt-get", *options, *arguments], env={**given, "LC_ALL": "C"}, timeout=600)
    except ProcessMissing as error:
        raise ProcessMissing(error.message, hint=_APT_HINT) from None
    if done.code and disk_space.lacked(done.stderr):
        raise disk_space.full([config.parent] if config else [], "the disk is full while apt runs")
    return done


def _update(config: Path, *options: str) -> None:
    # `update` would compute apt's index of all packages and not keep it; the next command computes it anyway
    done = _apt("--quiet", "--option", "pkgCacheFile::Generate=false", *options, "update", config=config)
    # A third-party repository for the same suite is not signed by Debian: ignore its error and use the others.
    errors = [line for line in done.stderr.splitlines() if line.startswith("E:")]
    if done.code and not (errors and all("is not signed" in line for line in errors)):
        raise NetworkError("the Debian mirrors did not answer", hint=" ".join(errors[:3]) or done.stderr.strip()[-300:])


def _not_resolved(suite: str, stderr: str, components: Sequence[str]) -> ProfileError | NetworkError:
    missing = re.findall(r"E: Unable to locate package (\S+)|E: Package '(\S+)' has no installation candidate", stderr)
    names = ", ".join(a or b for a, b in missing)
    if names and len(components) > 1:
        return NetworkError(
            f"no configured mirror has {names} for Debian {suite}",
            hint=f"set debian_mirror in {user_folders.config_file()} to a mirror with {', '.join(components)}",
        )
    if names:
        return ProfileError(f"Debian {suite} has no package {names}", hint="correct apt: in the profile")
    return ProfileError(f"apt cannot resolve the packages for {suite}", hint=stderr.strip()[-600:])


_LINE = re.compile(r"^'(?P<uri>[^']+)' (?P<file>\S+) (?P<bytes>\d+) SHA256:(?P<sha256>[0-9a-f]{64})$")


def _deb(line: str) -> Deb:
    match = _LINE.match(line.strip())
    if not match:
        raise NetworkError(f"apt reports no sha256 for a package: {line.strip()[:200]}")
    path = urllib.parse.unquote("pool/" + match["uri"].partition("/pool/")[2])
    # apt writes the epoch's colon as %3a in the file name; the file name in the pool has no epoch.
    name, version, _ = urllib.parse.unquote(match["file"]).rsplit("_", 2)
    return Deb(name, version, match["sha256"], int(match["bytes"]), path)


def fetch_debs(debs: Sequence[Deb], suite: str, store: Store, timestamp: str | None) -> int:
    """Download the packages missing in the store; return how many. `timestamp`: the time of the lock, which selects a
    snapshot in the snapshot archive.

    Raises AptUnavailable with the packages that neither the mirrors nor the site's snapshot archive have.
    """
    missing = [deb for deb in debs if not store.holds(deb.sha256, deb.file)]
    wanted = len(missing)
    if not missing:
        return 0
    roots = list(dict.fromkeys(archive.root for archive in apt_archives(suite)))
    snapshot = settings.setting("debian_snapshot")
    if snapshot and timestamp:
        roots.append(snapshot.replace("{timestamp}", timestamp).rstrip("/"))
    for root in roots:
        if missing:
            missing = _from_root(root, missing, store)
    if missing:
        raise AptUnavailable(missing)
    return wanted


# apt's messages for a file that an archive no longer has, or that was replaced.
_GONE = re.compile(r"(404  Not Found.*|File not found.*|Hash Sum mismatch)$")
_SUMMARY = "E: Download Failed"


def _without_credentials(root: str, netrc: Path) -> str:
    """Return the root's URL without user and password. Write both to the file `netrc` for apt, because every user of
    the machine can read a command line."""
    parts = urllib.parse.urlsplit(root)
    if not parts.username:
        return root
    host = url_redaction.host(parts.netloc)
    netrc.touch(mode=0o600)
    netrc.write_text(f"machine {parts.scheme}://{host}\nlogin {parts.username}\npassword {parts.password or ''}\n")
    return urllib.parse.urlunsplit(parts._replace(netloc=host))


def _from_root(root: str, debs: Sequence[Deb], store: Store) -> list[Deb]:
    """Download packages from the root URL of one archive; return those that it does not have."""
    with store.incoming() as folder:
        arguments: list[str] = []
        netrc = folder / "auth.conf"
        open_root = _without_credentials(root, netrc)
        for deb in debs:
            address = f"{open_root}/{urllib.parse.quote(deb.path)}"
            arguments += [address, str(folder / deb.sha256), f"SHA256:{deb.sha256}"]
        own = ["-o", f"Dir::Etc::netrc={netrc}"] if netrc.is_file() else []  # otherwise apt's own netrc file is used
        done = run(
            [_HELPER, "-o", "Acquire::Retries=3", *own, "download-file", *arguments], env={"LC_ALL": "C"}, timeout=3600
        )
        if done.code and disk_space.lacked(done.stderr):
            raise disk_space.full([folder], "the disk is full in the middle of fetching Debian packages")
        failures = [line for line in done.stderr.splitlines() if line.startswith("E: ") and line != _SUMMARY]
        other = [line for line in failures if not _GONE.search(line)]
        if done.code and (other or not failures):
            error = other[0] if other else done.stderr.strip()[-300:]
            raise NetworkError(f"packages cannot be downloaded from {open_root}", hint=error.removeprefix("E: "))
        for deb in debs:
            if (folder / deb.sha256).is_file():
                store.put(folder / deb.sha256, deb.sha256, deb.file)
    return [deb for deb in debs if not store.holds(deb.sha256, deb.file)]
