"""Debian's docker-registry killed with SIGKILL during `push` and `verify`, and started again."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import shutil
import socket
import subprocess
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from e2e.engines import die_with_parent
from e2e.support import Result, until

from chaos.invariant import WRONG, Breach
from chaos.place import NAME, PATIENCE, VARIANTS, Place
from chaos.rounds import Struck, wait, words
from envbuild.attest import oci

_ALLOWED = {0, 7}  # it came back in time, or: the registry


@dataclass
class Server:
    """On loopback, without TLS or password, which envbuild and docker do with this machine alone."""

    folder: Path
    program: Path
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        if not self.port:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.port = free.getsockname()[1]
        config = self.folder / "config.yml"
        config.write_text(
            f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {self.folder}/data}}}}\n"
            f"http: {{addr: '{self.host}', secret: {secrets.token_hex(8)}}}\n",
            encoding="utf-8",
        )
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [self.program, "serve", config], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={**os.environ, "OTEL_TRACES_EXPORTER": "none"}, preexec_fn=die_with_parent,
            )  # fmt: skip
        until(f"the registry, see {self.folder}/log", lambda: self._ask("/v2/"))

    def kill(self) -> None:
        assert self.process
        self.process.kill()
        self.process.wait()

    def image(self, repository: str, tag: str) -> str | None:
        """The id of the image that a tag names; None where there is no such tag."""
        found = self._ask(f"/v2/{repository}/manifests/{tag}")
        return str(json.loads(found)["config"]["digest"]) if found else None

    def _ask(self, path: str) -> bytes:
        """Nothing where it does not answer, or says no."""
        asked = urllib.request.Request(f"http://{self.host}{path}", headers={"Accept": ", ".join(oci.MANIFESTS)})
        try:
            with urllib.request.urlopen(asked, timeout=10) as answer:
                return bytes(answer.read())
        except OSError:
            return b""


def program(folder: Path) -> Path | None:
    """The one installed, else Debian's, unpacked in `folder`; None where there is neither. Needs the network."""
    installed = shutil.which("docker-registry")
    if installed:
        return Path(installed)
    if not shutil.which("apt-get"):
        return None
    folder.mkdir(parents=True)
    subprocess.run(["apt-get", "download", "docker-registry"], cwd=folder, check=True, capture_output=True)
    (package,) = folder.glob("*.deb")
    subprocess.run(["dpkg", "-x", package, folder], check=True, capture_output=True)
    return folder / "usr" / "bin" / "docker-registry"


@dataclass
class Registries:
    """`push` goes to a new repository in each round; the layers are there already, but in one round of eight."""

    program: Path
    name: str = "registry"
    seconds: dict[str, float] = field(default_factory=dict)
    repository: str = ""
    kind: str = "push"
    server: Server = field(init=False)

    def prepare(self, place: Place) -> None:
        self.server = Server(place.root / "registry", self.program)
        self.server.start()
        place.want(VARIANTS[0])
        place.make(VARIANTS[0])
        phrase = secrets.token_hex(16)
        made = place.run("keygen", "-o", str(place.root / "team"), ENVBUILD_KEY_PASSPHRASE=phrase)
        assert made.code == 0, made.stderr
        place.project = place.project.with_env(
            ENVBUILD_KEY_PASSPHRASE=phrase, ENVBUILD_SIGNING_KEY=str(place.root / "team.key")
        )
        self.seconds["fresh"] = self._whole(place, "first")
        self.seconds["push"] = self._whole(place, "second")
        self.repository = "second"
        done = self._verify(place)
        assert done.code == 0, done.stdout
        self.seconds["verify"] = done.seconds

    def _whole(self, place: Place, repository: str) -> float:
        done = place.run("push", NAME, f"{self.server.host}/{repository}", "--json")
        assert done.code == 0, done.stdout
        return done.seconds

    def _verify(self, place: Place) -> Result:
        reference = f"{self.server.host}/{self.repository}:verified"
        return place.run("verify", reference, "--key", str(place.root / "team.pub"), "--json")

    def strike(self, place: Place, dice: random.Random, number: int) -> Struck | None:
        self.kind = "verify" if number % 3 == 2 else "fresh" if number % 8 == 7 else "push"
        if self.kind == "fresh":
            self.server.kill()
            shutil.rmtree(self.server.folder / "data")
            self.server.start()
        if self.kind != "verify":
            self.repository = f"r{dice.getrandbits(40):x}"
        elif not self.server.image(self.repository, "verified"):
            self._whole(place, self.repository)
        pause = dice.choice([0.0, 0.3, 2.0, 20.0])
        delay = dice.uniform(0.3, self.seconds[self.kind])
        target = f"{self.server.host}/{self.repository}"
        key = str(place.root / "team.pub")
        asked = ("verify", f"{target}:verified", "--key", key) if self.kind == "verify" else ("push", NAME, target)
        running = place.start(*asked, "--json")
        if wait(delay, lambda: not running.alive()):
            running.finish()
            return None
        self.server.kill()
        wait(pause, lambda: not running.alive())
        self.server.start()
        ended = running.finish(PATIENCE)
        said = words(ended)
        kind = {"fresh": "push of all layers", "push": "push", "verify": "verify"}[self.kind]
        where = f"{delay:.3f} s, back after {pause} s at most"
        return Struck(kind, where, ended.code, round(ended.seconds, 2), said, ended.code in _ALLOWED)

    def again(self, place: Place) -> Result:
        """What a reader finds meanwhile is nothing, or a proved image; then the same command once more."""
        if self.server.image(self.repository, "verified"):
            done = self._verify(place)
            assert done.code == 0, f"the tag verified is there, and does not verify: {done.stdout}"
        if self.kind != "verify":
            self._whole(place, self.repository)
        return self._verify(place)

    def extra(self, place: Place) -> list[Breach]:
        done = self._verify(place)
        if done.code:
            return [Breach(WRONG, f"{self.repository} does not verify: {done.stdout[:300]}")]
        image, found = place.images[VARIANTS[0]], self.server.image(self.repository, "verified")
        return [] if image == found else [Breach(WRONG, f"{self.repository}:verified is {found}, not {image}")]

    def close(self) -> None:
        with contextlib.suppress(AttributeError):
            self.server.kill()
