"""The cache of apt's results, with the real apt and an archive that is signed and served on this machine."""

from __future__ import annotations

import functools
import hashlib
import http.server
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from envbuild.fetch import apt_resolution_and_download, apt_result_cache
from envbuild.util import user_folders
from envbuild.util.errors import NetworkError, ProfileError
from unit.conftest import forget
from unit.served import served

MISSING = [name for name in ("apt-get", "gpg", "gpgv") if shutil.which(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"no {' and no '.join(MISSING)} on PATH")


class SignedArchive:
    """An archive with two packages, `requests` by name of the file."""

    def __init__(self, folder: Path) -> None:
        self.root, self.home, self.key = folder / "site", folder / "gpg", folder / "key.gpg"
        self.requests: list[str] = []
        self.suite = self.root / "dists" / "bookworm"
        (self.suite / "main" / "binary-amd64").mkdir(parents=True)
        self.home.mkdir(mode=0o700)
        self.gpg("--passphrase", "", "--quick-gen-key", "test@example.com", "ed25519", "sign", "never")
        self.gpg("--output", self.key, "--export")
        archive = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                archive.requests.append(self.path.rpartition("/")[2])
                super().do_GET()

            def log_message(self, format: str, *args: object) -> None:
                """Print nothing."""

        handler = functools.partial(Handler, directory=self.root)
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)

    def gpg(self, *arguments: str | Path) -> None:
        argv = ["gpg", "--homedir", self.home, "--batch", "--yes", *arguments]
        subprocess.run(argv, check=True, capture_output=True, timeout=60)

    def publish(self, version: str, date: str, damaged: bool = False, signed: bool = True) -> None:
        lists = "".join(
            f"Package: {name}\nVersion: {version}\nArchitecture: amd64\nEssential: {essential}\nSize: 5\n"
            f"Filename: pool/main/{name}_{version}_amd64.deb\nSHA256: {hashlib.sha256(name.encode()).hexdigest()}\n"
            f"Maintainer: x\nDescription: x\n\n"
            for name, essential in (("base-files", "yes"), ("less", "no"))
        )
        digest = hashlib.sha256(lists.encode()).hexdigest()
        (self.suite / "main" / "binary-amd64" / "Packages").write_text(lists + ("x" if damaged else ""))
        (self.suite / "Release").write_text(
            f"Suite: stable\nCodename: bookworm\nDate: {date}\nArchitectures: amd64\nComponents: main\n"
            f"SHA256:\n {digest} {len(lists)} main/binary-amd64/Packages\n"
        )
        (self.suite / "InRelease").unlink(missing_ok=True)
        if signed:
            self.gpg("--output", self.suite / "InRelease", "--clearsign", self.suite / "Release")


NEW, OLD = "Tue, 03 Nov 2026 12:00:00 UTC", "Mon, 02 Nov 2026 12:00:00 UTC"


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SignedArchive]:
    made = SignedArchive(tmp_path)
    monkeypatch.setattr(apt_resolution_and_download, "KEYRING", made.key)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    root = f"http://user:secret@127.0.0.1:{made.server.server_port}"
    archives = [apt_resolution_and_download.AptArchive(root, "bookworm")]
    monkeypatch.setattr(apt_resolution_and_download, "apt_archives", lambda suite: archives)
    with served(made.server):
        yield made
    subprocess.run(["gpgconf", "--homedir", made.home, "--kill", "all"], check=False, timeout=60)


def versions() -> dict[str, str]:
    """Resolve as a new process would."""
    forget()
    return {deb.name: deb.version for deb in apt_resolution_and_download.resolve_debs("bookworm", ["less"])}


def test_package_lists_are_fetched_only_after_a_change(archive: SignedArchive) -> None:
    for version, date in (("2", OLD), ("3", NEW), ("2.1", OLD)):  # the last one is a mirror that went back in time
        archive.publish(version, date)
        for requests in (["InRelease", "InRelease", "Packages"], ["InRelease"]):
            archive.requests.clear()
            assert versions() == {"base-files": version, "less": version}
            assert archive.requests == requests
    for file in user_folders.cache_folder(apt_result_cache.FOLDER).iterdir():
        assert b"secret" not in file.read_bytes()


def test_an_unusable_archive_fails_as_with_an_empty_cache(archive: SignedArchive) -> None:
    archive.publish("2", OLD)
    versions()
    archive.publish("3", NEW, damaged=True)
    with pytest.raises(NetworkError, match="did not answer"):
        versions()
    archive.publish("2", OLD, signed=False)
    with pytest.raises(ProfileError, match="has no package less"):
        versions()
    shutil.rmtree(archive.suite)
    with pytest.raises(NetworkError, match="did not answer") as caught:
        versions()
    assert "secret" not in str(caught.value.hint)


def test_two_processes_at_once_get_the_same_result(archive: SignedArchive) -> None:
    archive.publish("2", OLD)
    code = (
        "import sys; from pathlib import Path; from envbuild.fetch import apt_resolution_and_download as module; "
        "module.KEYRING = Path(sys.argv[1]); "
        "module.apt_archives = lambda suite: [module.AptArchive(sys.argv[2], suite)]; "
        "print([deb.version for deb in module.resolve_debs('bookworm', ['less'])])"
    )
    root = f"http://127.0.0.1:{archive.server.server_port}"
    argv: list[str | Path] = [sys.executable, "-c", code, archive.key, root]
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda _: subprocess.run(argv, capture_output=True, text=True, timeout=60), range(2)))
    assert [(one.stdout, one.stderr) for one in done] == [("['2', '2']\n", "")] * 2
    assert len(list(user_folders.cache_folder(apt_result_cache.FOLDER).iterdir())) == 1
