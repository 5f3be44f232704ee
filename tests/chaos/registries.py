"""Kill Debian's docker-registry with SIGKILL during `push` and `verify`, and restart the registry."""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from e2e.openregistry import OpenRegistry
from e2e.support import Result

from chaos.invariant import WRONG, Breach
from chaos.place import NAME, PATIENCE, Place
from chaos.products import VARIANTS
from chaos.rounds import Struck, wait, words
from envbuild.registry import oci_types

_ALLOWED = {0, 7}  # 0: the registry came back in time; 7: registry error


class Server(OpenRegistry):
    def image(self, repository: str, tag: str) -> str | None:
        """The id of the image that a tag names; None if the tag does not exist."""
        found = self.ask(f"/v2/{repository}/manifests/{tag}", Accept=", ".join(oci_types.MANIFESTS))
        return str(json.loads(found)["config"]["digest"]) if found else None


@dataclass
class Registries:
    """Faults of the registry. A push uses a new repository in each round. The registry has the layers already in
    another repository, except in a round of the kind `fresh`, before which all its data is removed."""

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
            shutil.rmtree(self.server.data)
            self.server.start()
        if self.kind != "verify":
            self.repository = f"r{dice.getrandbits(40):x}"
        elif not self.server.image(self.repository, "verified"):
            self._whole(place, self.repository)
        pause = dice.choice([0.0, 0.3, 2.0, 20.0])
        delay = dice.uniform(0.3, self.seconds[self.kind])
        target = f"{self.server.host}/{self.repository}"
        key = str(place.root / "team.pub")
        command = ("verify", f"{target}:verified", "--key", key) if self.kind == "verify" else ("push", NAME, target)
        running = place.start(*command, "--json")
        if wait(delay, lambda: not running.alive()):
            running.finish()
            return None
        self.server.kill()
        wait(pause, lambda: not running.alive())
        self.server.start()
        ended = running.finish(PATIENCE)
        message = words(ended)
        kind = {"fresh": "push of all layers", "push": "push", "verify": "verify"}[self.kind]
        where = f"{delay:.3f} s, back after {pause} s at most"
        return Struck(kind, where, ended.code, round(ended.seconds, 2), message, ended.code in _ALLOWED)

    def again(self, place: Place) -> Result:
        """Check that a reader finds no image or a verified one. Then run the same command again."""
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
