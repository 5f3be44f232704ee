"""A profile that was built and verified, a simulated engine that has its image, and a registry to push to."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import io
import json
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from envbuild.attest import keys_and_signatures
from envbuild.evidence import evidence_statements_and_store, profile_proofs_and_image_states
from envbuild.fetch import sha256_file_store
from envbuild.image import build_records
from envbuild.image.docker_engine import Image
from envbuild.image.image_naming import LOCK_LABEL
from envbuild.image.layers.layer_writer import WrittenLayer
from envbuild.image.oci import lock_image_lookup_and_recipe
from envbuild.image.oci.image_description import DescribedLayer, OciImage
from envbuild.lock import lock_file
from envbuild.lock.lock_file import Lock
from envbuild.pipeline import layer_steps, push_save_and_load
from envbuild.pipeline.model import StepResult
from envbuild.pipeline.step_context import StepContext
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.registry import oci_types
from envbuild.registry.oci_types import Reference
from envbuild.registry.registry_client import Repository
from unit.evidence.runs import passed_run
from unit.registries import Registry, serving
from unit.support import PROFILE, CommandResult, envbuild, lock_for, plan_of, profile_of, sha, write_wheel

SECRET = "correct horse battery staple"


@dataclasses.dataclass
class Engine:
    """A simulated engine with one image, which `push` writes to the registry without its layers. `instead`: an image
    configuration that is pushed instead of `config`; `layer`: the content of the layer in a saved image."""

    registry: Registry
    image: Image
    config: bytes
    instead: bytes | None = None
    layer: bytes = b"layer"
    bytes_of_layers: tuple[int, ...] | None = (5,)
    tags: list[str] = dataclasses.field(default_factory=list)
    loaded: dict[str, bytes] = dataclasses.field(default_factory=dict)

    def tag(self, image: Image, repository: str, tag: str) -> None:
        self.tags.append(f"{repository}:{tag}")

    def remove(self, reference: str) -> None:
        self.tags = [tag for tag in self.tags if tag != reference]

    def saved(self, image: Image) -> tarfile.TarFile:
        listed = [{"Config": "config.json", "Layers": ["one/layer.tar"], "RepoTags": None}]
        files = {"one/layer.tar": self.layer, "config.json": self.config, "manifest.json": json.dumps(listed).encode()}
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for name, raw in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(raw)
                archive.addfile(member, io.BytesIO(raw))
        return tarfile.open(fileobj=io.BytesIO(buffer.getvalue()), mode="r|")

    def layer_sizes(self, image: Image) -> tuple[int, ...] | None:
        return self.bytes_of_layers

    def load(self, archive: Iterator[bytes]) -> None:
        with tarfile.open(fileobj=io.BytesIO(b"".join(archive))) as tar:
            self.loaded = {m.name: f.read() for m in tar.getmembers() for f in [tar.extractfile(m)] if f}

    def find(self, reference: str) -> Image | None:
        return self.image

    containerd_store = False

    def images(self, prefix: str) -> list[tuple[str, str, int]]:
        return []

    def get(self, reference: str) -> Image:
        return self.image

    def note_id(self, handle: str, image_id: str) -> None:
        pass

    def upload(self, context: StepContext, place: Repository, proved: Any, zstd: bool, tag: str) -> None:
        """With zstd, call the real upload. Otherwise write no layers: only put a manifest into the registry."""
        if zstd:
            upload_layers(context, place, proved, zstd, tag)
        else:
            self.push("", tag, print)

    def push(self, repository: str, tag: str, on_line: Callable[[str], None]) -> None:
        config = self.registry.add_blob(self.instead or self.config)
        layers = [{"mediaType": LAYER_TYPE, "digest": LAYER}]
        document = {"mediaType": oci_types.MANIFEST, "config": {"digest": config}, "layers": layers}
        self.registry.put(oci_types.MANIFEST, document, tag)


upload_layers = push_save_and_load._upload_layers
LAYER = f"sha256:{sha('layer')}"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"


def config_of(layers: list[str], labels: dict[str, str], env: list[str] | None = None) -> bytes:
    inner = {"Labels": labels, "Env": env or ["PATH=/bin"]}
    return json.dumps({"config": inner, "rootfs": {"type": "layers", "diff_ids": layers}}).encode()


@dataclasses.dataclass(frozen=True)
class PlainLayer:
    """A layer that is not compressed."""

    raw: bytes = b"layer"
    keeps_blob = False

    @property
    def key(self) -> str:
        return sha(f"plain {self.raw!r}")

    def write(self, packed: Callable[[bytes], object], plain: Callable[[bytes], object]) -> WrittenLayer:
        packed(self.raw)
        plain(self.raw)
        digest = oci_types.digest_of(self.raw)
        return WrittenLayer(digest, len(self.raw), digest, len(self.raw))


@dataclasses.dataclass(frozen=True)
class PlainDescription:
    """An image with one layer that is not compressed."""

    configuration: bytes
    layers: tuple[DescribedLayer, ...] = (DescribedLayer("layer", "", PlainLayer(), LAYER_TYPE),)

    def with_layers(self, layers: Sequence[WrittenLayer]) -> OciImage:
        return OciImage(self.configuration, self.layers, tuple(layers))


@dataclasses.dataclass
class Site:
    """A profile that was made and proved, and a registry to push it to."""

    registry: Registry
    engine: Engine
    loaded: LoadedProfile
    lock: Lock

    def push(self, *arguments: str) -> CommandResult:
        return envbuild("push", "sample", f"{self.registry.host}/team/sample", *arguments)

    @property
    def place(self) -> Repository:
        return Repository(Reference.parse(f"{self.registry.host}/team/sample"))

    def prove(self, run: Any = None, day: int = 0) -> Path:
        wanted = profile_proofs_and_image_states.wanted("sample", self.loaded.profile, self.lock)
        finished = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=day)
        record = evidence_statements_and_store.run_record(
            self.engine.image, wanted, run or passed_run(), "docker 26", finished
        )
        return evidence_statements_and_store.save(record)


@contextlib.contextmanager
def proved(project: Path, monkeypatch: pytest.MonkeyPatch, day: int = 0) -> Iterator[Site]:
    """A verified profile. `day`: when it was verified, relative to today."""
    loaded, plan = profile_of(project, PROFILE), plan_of(project, PROFILE)
    wheels = []
    for item in lock_for(plan).wheels:  # real wheels, so that their contents can be read
        file = write_wheel(project / "wheels", item.wheel.name, item.wheel.version)
        real = dataclasses.replace(item.wheel, file=file.name, sha256=sha256_file_store.file_digest(file))
        sha256_file_store.wheel_store().put(file, real.sha256, real.file)
        wheels.append(dataclasses.replace(item, wheel=real))
    made = dataclasses.replace(lock_for(plan), wheels=tuple(wheels))
    lock_file.write(made, loaded.lock_file, "sample")
    config = config_of([LAYER], {LOCK_LABEL: made.id})
    image = Image(oci_types.digest_of(config), "handle", (LAYER,), {}, {}, 1)
    record = build_records.Record(image.id, "handle", made.id, sha("recipe"), image.layers, "docker 26")
    monkeypatch.setattr(build_records, "all_records", lambda image_id=None: iter([record]))
    with serving(Registry()) as registry:
        engine = Engine(registry, image, config)
        monkeypatch.setattr(lock_image_lookup_and_recipe, "matching_records", lambda lock: [record])
        monkeypatch.setattr(push_save_and_load, "_upload_layers", engine.upload)
        monkeypatch.setattr(layer_steps, "describe_image", lambda *_: StepResult(PlainDescription(config)))
        monkeypatch.setattr(StepContext, "engine", engine)
        monkeypatch.setattr(push_save_and_load, "Engine", lambda: engine)
        found = Site(registry, engine, loaded, made)
        found.prove(day=day)
        yield found


@contextlib.contextmanager
def pushed(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Like `proved`; then the image is pushed to team/sample, with evidence signed by the key of team.pub."""
    Path("team.pub").write_bytes(new_key(monkeypatch).pem)
    with proved(project, monkeypatch) as found:
        assert found.push().code == 0
        yield found


def new_key(monkeypatch: pytest.MonkeyPatch) -> keys_and_signatures.PublicKey:
    """Create a key pair, configure it as the signing key, and return its public key."""
    monkeypatch.setenv("ENVBUILD_KEY_PASSPHRASE", SECRET)
    monkeypatch.setenv("ENVBUILD_SIGNING_KEY", keys_and_signatures.generate(SECRET)[0].decode())
    signer = keys_and_signatures.configured_signer()
    assert signer is not None
    return signer.public
