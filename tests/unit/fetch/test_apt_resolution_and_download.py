"""Resolution and download with apt, with handwritten output of apt and its helper."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from envbuild.fetch import apt_resolution_and_download, apt_result_cache, sha256_file_store
from envbuild.fetch.apt_resolution_and_download import AptArchive, AptUnavailable, Deb
from envbuild.util import user_folders
from envbuild.util.errors import DiskError, EnvbuildError, NetworkError, ProfileError
from envbuild.util.host_processes import Completed, ProcessMissing
from unit.conftest import forget

HASH = "a" * 64
M, S = "http://m.example/debian/pool/main", "http://s.example/debian-security/pool/updates/main"
URIS = f"""Reading package lists...
'{M}/u/util-linux/bsdutils_2.38.1-5%2bdeb12u3_amd64.deb' bsdutils_1%3a2.38.1-5+deb12u3_amd64.deb 95000 SHA256:{HASH}
'{M}/g/gcc-12/libstdc%2b%2b6_12.2.0-14_amd64.deb' libstdc++6_12.2.0-14_amd64.deb 613000 SHA256:{HASH}
'{S}/a/apt/apt_2.6.2_amd64.deb' apt_2.6.2_amd64.deb 1373116 SHA256:{HASH}
'{M}/t/tzdata/tzdata_2025b-0%2bdeb12u2_all.deb' tzdata_2025b-0+deb12u2_all.deb 296000 SHA256:{HASH}
"""
UPDATE = """'http://m.example/debian/dists/bookworm/InRelease' m.example_debian_dists_bookworm_InRelease 0
'http://m.example/debian/dists/bookworm-updates/InRelease' m.example_debian_dists_bookworm-updates_InRelease 0
'http://m.example/debian/dists/bookworm-backports/InRelease' x 0
'http://s.example/debian-security/dists/bookworm-security/InRelease' x 0
'http://m.example/debian/dists/bookworm/InRelease' again 0
'http://m.example/other/dists/stable/InRelease' x 0
"""


class Apt:
    """Stands in for programs: answers by program and verb. `files`: the files on the mirrors, by URL."""

    def __init__(self) -> None:
        self.update = Completed(0, "", "")
        self.install = Completed(0, URIS, "")
        self.files: dict[str, bytes] = {}
        self.dead: set[str] = set()
        self.requests: list[list[str]] = []
        self.sources = ""
        self.temporary: set[str] = set()
        self.releases = {"m.example_debian_dists_bookworm_InRelease": "1"}
        self.settings = 'APT::Install-Suggests "0";\n'
        self.version = "apt 2.6.1"

    def count(self, verb: str) -> int:
        """How often a program was started with this word, without the search for the host's archives."""
        return sum(verb in words and words[1] != "--print-uris" for words in self.requests)

    def __call__(
        self, argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None, timeout: float | None = None
    ) -> Completed:
        words = [str(word) for word in argv]
        self.requests.append(words)
        if words[0] == "apt-config":
            return Completed(0, self.settings, "")
        if "--version" in words:
            return Completed(0, self.version, "")
        if env and "APT_CONFIG" in env:
            self.temporary.add(Path(env["TMPDIR"]).name)
            config = Path(env["APT_CONFIG"])
            self.sources = config.with_name("sources.list").read_text(encoding="utf-8")
            if "update" in words:
                for name, text in self.releases.items():
                    (config.parent / "lists" / name).write_text(text, encoding="utf-8")
        if words[0].endswith("apt-helper"):
            return self._download(words[words.index("download-file") + 1 :])
        if words == ["apt-get", "--print-uris", "update"]:
            return Completed(0, UPDATE, "")
        return self.update if "update" in words else self.install

    def _download(self, words: list[str]) -> Completed:
        notes = []
        for address, target, wanted in zip(words[::3], words[1::3], words[2::3], strict=True):
            if any(address.startswith(root) for root in self.dead):
                notes.append(f"E: Failed to fetch {address}  Could not connect")
            elif address not in self.files:
                notes.append(f"E: Failed to fetch {address}  404  Not Found")
            elif f"SHA256:{hashlib.sha256(self.files[address]).hexdigest()}" != wanted:
                notes.append(f"E: Failed to fetch {address}  Hash Sum mismatch")
            else:
                Path(target).write_bytes(self.files[address])
        return Completed(100 if notes else 0, "", "\n".join(notes))


@pytest.fixture
def host_apt(monkeypatch: pytest.MonkeyPatch) -> Apt:
    found = Apt()
    monkeypatch.setattr(apt_resolution_and_download, "run", found)
    monkeypatch.setattr(apt_resolution_and_download, "_host_codename", lambda: "bookworm")
    return found


def configure(**values: str) -> None:
    file = user_folders.config_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{key}: {value}\n" for key, value in values.items()), encoding="utf-8")
    forget()


def made(name: str, content: bytes) -> Deb:
    path = f"pool/main/{name[0]}/{name}/{name}_1.0+b1_amd64.deb"
    return Deb(name, "2:1.0+b1", hashlib.sha256(content).hexdigest(), len(content), path)


# sources


def test_apts_own_sources_are_used_with_the_suites_name(host_apt: Apt) -> None:
    expected = [
        ("http://m.example/debian", ""),
        ("http://m.example/debian", "-updates"),
        ("http://s.example/debian-security", "-security"),
    ]
    for suite in ("bookworm", "trixie"):
        assert apt_resolution_and_download.apt_archives(suite) == [
            AptArchive(root, f"{suite}{pocket}") for root, pocket in expected
        ]


def test_a_codename_is_not_used_as_a_pattern(host_apt: Apt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apt_resolution_and_download, "_host_codename", lambda: "book.orm")
    with pytest.raises(NetworkError, match="no Debian archive for a trixie base is configured in apt"):
        apt_resolution_and_download.apt_archives("trixie")


def test_a_sites_mirror_comes_before_apts(host_apt: Apt) -> None:
    configure(debian_mirror="http://site.example/debian/", debian_security_mirror="http://site.example/security")
    assert apt_resolution_and_download.apt_archives("trixie") == [
        AptArchive("http://site.example/debian", "trixie"),
        AptArchive("http://site.example/debian", "trixie-updates"),
        AptArchive("http://site.example/security", "trixie-security"),
    ]
    configure(debian_mirror="http://site.example/debian")
    assert [archive.suite for archive in apt_resolution_and_download.apt_archives("trixie")] == [
        "trixie",
        "trixie-updates",
    ]
    assert host_apt.requests == []


def test_without_apt_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> Completed:
        raise ProcessMissing("apt-get is not installed or not on PATH")

    monkeypatch.setattr(apt_resolution_and_download, "run", missing)
    with pytest.raises(ProcessMissing) as caught:
        apt_resolution_and_download.resolve_debs("bookworm", ["less"])
    assert "base image" in str(caught.value.hint)


# resolution


def test_leftovers_of_a_killed_apt_are_swept(host_apt: Apt) -> None:
    """apt's signature check creates temporary files. The kernel kills apt together with envbuild, so these files
    remain."""
    apt_resolution_and_download.resolve_debs("bookworm", ["less"])
    assert host_apt.temporary and all(name.startswith("envbuild-tmp-apt-") for name in host_apt.temporary)


def test_packages_are_what_apt_would_fetch(host_apt: Apt) -> None:
    found = apt_resolution_and_download.resolve_debs("bookworm", ["less"])
    assert [(item.name, item.version, item.path, item.bytes) for item in found] == [
        ("apt", "2.6.2", "pool/updates/main/a/apt/apt_2.6.2_amd64.deb", 1373116),
        ("bsdutils", "1:2.38.1-5+deb12u3", "pool/main/u/util-linux/bsdutils_2.38.1-5+deb12u3_amd64.deb", 95000),
        ("libstdc++6", "12.2.0-14", "pool/main/g/gcc-12/libstdc++6_12.2.0-14_amd64.deb", 613000),
        ("tzdata", "2025b-0+deb12u2", "pool/main/t/tzdata/tzdata_2025b-0+deb12u2_all.deb", 296000),
    ]
    assert {item.sha256 for item in found} == {HASH}
    assert found[1].file == "bsdutils_2.38.1-5+deb12u3_amd64.deb"


def test_kept_packages_are_asked_for_at_their_versions(host_apt: Apt) -> None:
    apt_resolution_and_download.resolve_debs("bookworm", ["less"], [made("libc6", b"")])
    assert host_apt.requests[-1][-3:] == ["?essential", "less", "libc6=2:1.0+b1"]


def test_every_source_is_signed_by_debian(host_apt: Apt) -> None:
    apt_resolution_and_download.resolve_debs("trixie", [])
    lines = host_apt.sources.splitlines()
    assert len(lines) == 3
    assert all(line.startswith(f"deb [signed-by={apt_resolution_and_download.KEYRING}] http://") for line in lines)
    assert lines[0].endswith(" http://m.example/debian trixie main")


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        ("E: Unable to locate package nosuch\nE: Unable to locate package other", "has no package nosuch, other"),
        ("E: Package 'virtual' has no installation candidate", "has no package virtual"),
        ("E: Unable to correct problems, you have held broken packages.", "cannot resolve"),
    ],
)
def test_a_package_that_is_not_there_is_a_fault_of_the_profile(host_apt: Apt, stderr: str, words: str) -> None:
    host_apt.install = Completed(100, "", stderr)
    with pytest.raises(ProfileError, match=words):
        apt_resolution_and_download.resolve_debs("bookworm", ["nosuch"])


def test_other_components_are_asked_for_where_they_are_wanted(host_apt: Apt) -> None:
    apt_resolution_and_download.resolve_debs("trixie", ["nvidia-cuda-toolkit"], components=("main", "non-free"))
    assert {line.split(" ", 4)[4] for line in host_apt.sources.splitlines()} == {"main non-free"}


@pytest.mark.parametrize("stderr", ["E: Unable to locate package x", "E: Package 'x' has no installation candidate"])
def test_a_package_that_a_mirror_lacks_is_reported_as_the_mirrors_fault(host_apt: Apt, stderr: str) -> None:
    """For example a mirror that has only the component main."""
    host_apt.install = Completed(100, "", stderr)
    with pytest.raises(NetworkError, match="no configured mirror has x for Debian trixie") as caught:
        apt_resolution_and_download.resolve_debs("trixie", ["x"], components=("main", "contrib", "non-free"))
    assert "main, contrib, non-free" in str(caught.value.hint) and "debian_mirror" in str(caught.value.hint)


def test_a_mirror_that_does_not_answer_is_an_error_of_the_network(host_apt: Apt) -> None:
    host_apt.update = Completed(100, "", "E: Failed to fetch http://m.example/debian  Could not resolve host")
    with pytest.raises(NetworkError, match="did not answer") as caught:
        apt_resolution_and_download.resolve_debs("bookworm", [])
    assert "Could not resolve" in str(caught.value.hint)


def test_a_repository_that_debian_did_not_sign_is_left_out(host_apt: Apt) -> None:
    host_apt.update = Completed(100, "", "E: The repository 'http://x.example bookworm InRelease' is not signed.")
    assert len(apt_resolution_and_download.resolve_debs("bookworm", [])) == 4
    host_apt.update = Completed(100, "", f"{host_apt.update.stderr}\nE: Failed to fetch http://m.example/debian")
    forget()
    with pytest.raises(NetworkError):
        apt_resolution_and_download.resolve_debs("bookworm", ["asked-again"])


@pytest.mark.parametrize(
    "line", ["'http://m.example/pool/x.deb' x_1_all.deb 5 MD5Sum:00", "'http://m.example/pool/x.deb' x_1_all.deb 5"]
)
def test_a_package_without_its_hash_is_refused(host_apt: Apt, line: str) -> None:
    host_apt.install = Completed(0, line + "\n", "")
    with pytest.raises(NetworkError, match="no sha256"):
        apt_resolution_and_download.resolve_debs("bookworm", [])


# the cache of results


def resolve_in_new_process(*packages: str, suite: str = "bookworm") -> list[Deb]:
    forget()
    return apt_resolution_and_download.resolve_debs(suite, packages)


def test_a_second_process_fetches_only_release_files(host_apt: Apt) -> None:
    first = resolve_in_new_process("less")
    assert (host_apt.count("update"), host_apt.count("install")) == (2, 1)
    host_apt.requests.clear()
    assert resolve_in_new_process("less") == first
    assert (host_apt.count("update"), host_apt.count("install")) == (1, 0)
    (update,) = (words for words in host_apt.requests if "update" in words and words[1] != "--print-uris")
    assert set(apt_resolution_and_download._RELEASES_ONLY) <= set(update)


def test_a_process_fetches_package_lists_once(host_apt: Apt) -> None:
    for package in ("less", "git", "curl"):
        apt_resolution_and_download.resolve_debs("bookworm", [package])
    assert (host_apt.count("update"), host_apt.count("install")) == (2, 3)
    apt_resolution_and_download.resolve_debs("bookworm", ["less"], components=("main", "contrib"))
    assert host_apt.count("update") == 4


def test_a_cached_result_is_used_only_for_the_same_inputs(host_apt: Apt) -> None:
    name = next(iter(host_apt.releases))
    resolve_in_new_process("less")

    def resolved_again(*packages: str, suite: str = "bookworm") -> bool:
        before = host_apt.count("install")
        resolve_in_new_process(*packages, suite=suite)
        return host_apt.count("install") > before

    assert not resolved_again("less")
    host_apt.settings += 'Acquire::http::Proxy "http://user:secret@proxy.example";\n'
    assert not resolved_again("less"), "a proxy does not change the result"
    assert resolved_again("less", "git")
    assert resolved_again("less", suite="trixie")
    host_apt.settings = 'APT::Install-Suggests "1";\n'
    assert resolved_again("less")
    host_apt.version = "apt 3.0.0"
    assert resolved_again("less")
    host_apt.releases[name] = "2"
    assert resolved_again("less")
    host_apt.releases["m.example_debian_dists_bookworm-updates_InRelease"] = "1"
    assert resolved_again("less")
    assert not resolved_again("less")


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-40], lambda raw: raw.replace(b"2.6.2", b"2.6.3"), lambda raw: b""]
)
def test_a_damaged_result_is_resolved_again(host_apt: Apt, damage: Callable[[bytes], bytes]) -> None:
    first = resolve_in_new_process("less")
    (file,) = user_folders.cache_folder(apt_result_cache.FOLDER).iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert resolve_in_new_process("less") == first
    assert host_apt.count("install") == 2
    assert file.read_bytes() == whole, "the damaged file is replaced"


def test_an_interrupted_write_leaves_no_result(host_apt: Apt, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            resolve_in_new_process("less")
    assert len(resolve_in_new_process("less")) == 4
    assert host_apt.count("install") == 2
    assert len(list(user_folders.cache_folder(apt_result_cache.FOLDER).iterdir())) == 1


def test_a_full_disk_does_not_prevent_a_result(host_apt: Apt, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("envbuild.util.atomic_files.write_atomically", full)
    assert len(resolve_in_new_process("less")) == 4


def test_without_mirrors_a_cached_result_is_not_used(host_apt: Apt) -> None:
    resolve_in_new_process("less")
    host_apt.update = Completed(100, "", "E: Failed to fetch http://m.example/debian  Could not resolve host")
    with pytest.raises(NetworkError, match="did not answer"):
        resolve_in_new_process("less")


def test_a_result_without_some_package_lists_is_not_cached(host_apt: Apt) -> None:
    """On a full disk, apt may exit with 0 although it could not write a package list."""
    prefix, digest = "m.example_debian_dists_bookworm-security_", hashlib.sha256(b"lists").hexdigest()
    host_apt.releases[f"{prefix}InRelease"] = f"SHA256:\n {digest}  5 main/binary-amd64/Packages\n"
    for text, count in ((None, 2), ("list", 4), ("lists", 5)):
        if text:
            host_apt.releases[f"{prefix}main_binary-amd64_Packages"] = text
        resolve_in_new_process("less")
        resolve_in_new_process("less")
        assert host_apt.count("install") == count


@pytest.mark.parametrize("setting", ["AllowInsecureRepositories", "AllowWeakRepositories"])
def test_results_from_unsigned_archives_are_not_cached(host_apt: Apt, setting: str) -> None:
    """No signed Release file contains the hashes of their package lists."""
    host_apt.settings = f'Acquire::{setting} "true";\n'
    resolve_in_new_process("less")
    resolve_in_new_process("less")
    assert host_apt.count("install") == 2
    host_apt.settings = f'Acquire::{setting} "0";\n'
    resolve_in_new_process("less")
    resolve_in_new_process("less")
    assert host_apt.count("install") == 3


def test_the_cache_contains_no_password(host_apt: Apt) -> None:
    configure(debian_mirror="http://user:secret@m.example/debian")
    host_apt.settings += 'Acquire::http::Proxy "http://user:secret@proxy.example";\n'
    archives = tuple(apt_resolution_and_download.apt_archives("bookworm"))
    assert "secret" not in "".join(apt_resolution_and_download._inputs_by_releases(archives, ("main",)))
    resolve_in_new_process("less")
    (file,) = user_folders.cache_folder(apt_result_cache.FOLDER).iterdir()
    assert b"secret" not in file.read_bytes()


# fetching


def test_packages_come_from_the_first_root_that_has_them(host_apt: Apt) -> None:
    one, two = made("one", b"1"), made("two", b"2")
    quoted = [item.path.replace("+", "%2B") for item in (one, two)]
    host_apt.files = {
        f"http://m.example/debian/{quoted[0]}": b"1",
        f"http://s.example/debian-security/{quoted[1]}": b"2",
    }
    assert apt_resolution_and_download.fetch_debs([one, two], "bookworm", sha256_file_store.debs(), None) == 2
    assert sha256_file_store.debs().path(two.sha256, two.file).read_bytes() == b"2"
    host_apt.requests.clear()
    assert apt_resolution_and_download.fetch_debs([one, two], "bookworm", sha256_file_store.debs(), None) == 0
    assert host_apt.requests == []


def test_packages_that_no_mirror_has_are_named(host_apt: Apt) -> None:
    wanted = [made(f"package{number}", b"x") for number in range(7)]
    with pytest.raises(AptUnavailable, match=r"package0 2:1\.0\+b1, .* and 2 more") as caught:
        apt_resolution_and_download.fetch_debs(wanted, "bookworm", sha256_file_store.debs(), "20261121T000000Z")
    assert caught.value.missing == tuple(wanted)
    assert (caught.value.code, caught.value.kind) == (7, "mirror")
    assert "debian_snapshot" in str(caught.value.hint)
    assert [path for path in sha256_file_store.debs().folder.rglob("*") if path.is_file()] == []


def test_another_file_under_the_name_counts_as_gone(host_apt: Apt) -> None:
    wanted = made("one", b"1")
    host_apt.files = {f"http://m.example/debian/{wanted.path.replace('+', '%2B')}": b"spoiled"}
    with pytest.raises(AptUnavailable):
        apt_resolution_and_download.fetch_debs([wanted], "bookworm", sha256_file_store.debs(), None)


def test_the_snapshot_is_asked_last_at_the_time_of_the_lock(host_apt: Apt) -> None:
    configure(debian_snapshot="http://snap.example/archive/{timestamp}/")
    wanted = made("one", b"1")
    host_apt.files = {f"http://snap.example/archive/20261121T000000Z/{wanted.path.replace('+', '%2B')}": b"1"}
    assert (
        apt_resolution_and_download.fetch_debs([wanted], "bookworm", sha256_file_store.debs(), "20261121T000000Z") == 1
    )
    roots = [words[-3].partition("/pool/")[0] for words in host_apt.requests if words[0].endswith("apt-helper")]
    assert roots == [
        "http://m.example/debian",
        "http://s.example/debian-security",
        "http://snap.example/archive/20261121T000000Z",
    ]
    with pytest.raises(AptUnavailable):
        apt_resolution_and_download.fetch_debs([made("two", b"2")], "bookworm", sha256_file_store.debs(), None)


def test_an_unreachable_index_is_not_a_removed_package(host_apt: Apt) -> None:
    host_apt.dead = {"http://m.example"}
    with pytest.raises(NetworkError) as caught:
        apt_resolution_and_download.fetch_debs([made("one", b"1")], "bookworm", sha256_file_store.debs(), None)
    assert not isinstance(caught.value, AptUnavailable)
    assert isinstance(caught.value, EnvbuildError)
    assert "Could not connect" in str(caught.value.hint)


def test_where_apt_goes_on_without_room_it_is_the_disks_fault(host_apt: Apt, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk, apt exits with 0 although it could write no package list, and then finds no package."""
    host_apt.install = Completed(100, "", "E: Unable to locate package python3")
    with pytest.raises(ProfileError):
        apt_resolution_and_download.resolve_debs("bookworm", ["python3"])
    monkeypatch.setattr("envbuild.util.disk_space.is_none", lambda folder: True)
    with pytest.raises(DiskError, match="the disk is full"):
        apt_resolution_and_download.resolve_debs("bookworm", ["python3"])
