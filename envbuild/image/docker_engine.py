"""The Docker Engine, found as docker's own client finds it and accessed through its API; builds run through buildx."""

from __future__ import annotations

import json
import logging
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import docker
import docker.errors
import requests

from envbuild.image import build_records
from envbuild.image.engine_endpoint_and_errors import UnusableEngine, endpoint, invalid_value, why
from envbuild.registry.byte_block_streams import Blocks
from envbuild.util import disk_space, user_folders
from envbuild.util.atomic_files import write_atomically
from envbuild.util.errors import DiskError, EngineError, NetworkError

MINIMUM = (23, 0)
_LOG = logging.getLogger(__name__)
_BLOCK = 1 << 20
_PODMAN = (
    "Podman's socket has no BuildKit, and envbuild is not tested with Podman; point DOCKER_HOST or a "
    "docker context at a Docker Engine. To run an image in Podman: verify, then podman pull by digest"
)
_BOUNDS = {"memory": "MemoryLimit", "processes": "PidsLimit"}
_NO_ROOM = "free space where it runs: docker system df; docker buildx prune; docker image prune"
_GONE = "if the engine ended, its log says why; once docker version answers, run the same command again"
_GONE_FULL = "free space there, start the engine again (its log says why it ended), then run the same command again"
START = "start one (in a checkout: make engine), or point DOCKER_HOST or a docker context at one"


@dataclass(frozen=True)
class Image:
    """An image in the engine.

    `id` is the sha256 of its configuration, the same in every engine and registry. `handle` is the id in this engine's
    API (on the containerd store that is the manifest's digest). `layers` are diff ids. `user`: the user of its
    containers; empty for root.
    """

    id: str
    handle: str
    layers: tuple[str, ...]
    labels: Mapping[str, str]
    environment: Mapping[str, str]
    size: int
    user: str = ""


class Engine:
    """A connection to the engine. Every method raises EngineError if the engine stops responding, or DiskError if the
    reason is a full disk."""

    def __init__(self, timeout: int = 120, builder: str | None = None) -> None:
        """`timeout`: seconds for one response; `builder`: the buildx builder to use, if not the engine's default.

        Raises UnusableEngine if no engine responds, if it is older than 23.0, if it is Podman, or if its address, the
        docker context or docker's configuration is invalid.
        """
        self.builder = builder
        self.host = os.environ.get("DOCKER_HOST") or "the default socket"
        try:
            self.host, tls = endpoint()
            self.client = docker.DockerClient(base_url=self.host, tls=tls or False, timeout=timeout)
            self.client.api.hooks["response"].append(_log_answer)
            version = self.client.version()
        except (docker.errors.DockerException, requests.RequestException, OSError) as error:
            raise UnusableEngine(f"no Docker Engine answers at {self.host}: {why(error)}", hint=START) from error
        except (AttributeError, TypeError, ValueError) as error:  # of docker-py, for an invalid value
            raise invalid_value(self.host, error) from error
        self.version: str = version.get("Version", "")
        self.platform = f"{version.get('Os')}/{version.get('Arch')}"
        if any("podman" in str(part.get("Name", "")).lower() for part in version.get("Components") or ()):
            raise UnusableEngine(f"{self.host} is Podman {self.version}, not a Docker Engine", hint=_PODMAN)
        if _numbers(self.version) < MINIMUM:
            raise UnusableEngine(
                f"the Docker Engine at {self.host} is {self.version}; 23.0 or newer is needed", hint="update the engine"
            )

    @cached_property
    def info(self) -> dict[str, Any]:
        """The engine's description of itself: /info of its API."""
        with asking(self):
            info: dict[str, Any] = self.client.info()
        return info

    def require_bounds(self) -> None:
        """Raise UnusableEngine if the engine would run a container without the limits that are set for it. Such an
        engine, for example a rootless one without cgroup v2, gives only a warning."""
        lacking = [what for what, key in _BOUNDS.items() if self.info.get(key) is False]
        if lacking:
            rootless = any("rootless" in option for option in self.info.get("SecurityOptions") or ())
            raise UnusableEngine(
                f"the {'rootless ' if rootless else ''}engine cannot limit a container's {' and '.join(lacking)}",
                hint="it needs cgroup v2, with the controllers memory and pids delegated by systemd: see docker info",
            )

    @cached_property
    def containerd_store(self) -> bool:
        return any("io.containerd.snapshotter" in str(item) for item in self.info.get("DriverStatus") or ())

    @property
    def identity(self) -> str:
        """The engine's own id, independent of the address it is reached at; the address if the engine reports no id."""
        return str(self.info.get("ID") or self.host)

    @property
    def cpus(self) -> int:
        return int(self.info.get("NCPU") or 1)

    @property
    def memory_bytes(self) -> int:
        return int(self.info.get("MemTotal") or 0)

    @property
    def data_folder(self) -> Path | None:
        """The directory where the engine stores its images; None if that is not on this machine."""
        folder = Path(self.info.get("DockerRootDir", ""))
        return folder if self.host.startswith("unix://") and folder.is_dir() else None

    def full(self) -> DiskError:
        """Return the error to raise if the engine reports a full disk; with numbers if the disk is on this machine."""
        if self.data_folder is None:
            return DiskError(f"the disk of the Docker Engine at {self.host} is full", hint=_NO_ROOM)
        return disk_space.full([self.data_folder], "the Docker Engine's disk is full")

    def without_room(self) -> DiskError | None:
        """Return the error to raise if the engine stopped responding and its disk is full, since a full disk can end
        dockerd itself. Return None if there is space, or if the engine's data folder is not known yet: an engine that
        does not respond cannot report it."""
        known = self.data_folder if "info" in vars(self) else None
        if known is None or not disk_space.is_low(known):
            return None
        return disk_space.full([known], "the Docker Engine stopped responding, and its disk is full", _GONE_FULL)

    def find(self, reference: str) -> Image | None:
        """Return the image of a tag, id or digest; None if the engine does not have it."""
        with asking(self):
            try:
                found: dict[str, Any] = self.client.api.inspect_image(reference)  # type: ignore[no-untyped-call]
            except docker.errors.ImageNotFound:
                return None
            except docker.errors.APIError as error:
                if error.status_code == 400:  # not a reference at all
                    return None
                raise
        config = found.get("Config") or {}
        return Image(
            id=self._image_id(found["Id"]),
            handle=found["Id"],
            layers=tuple((found.get("RootFS") or {}).get("Layers") or ()),
            labels=config.get("Labels") or {},
            environment=dict(item.partition("=")[::2] for item in config.get("Env") or ()),
            size=found.get("Size", 0),
            user=str(config.get("User") or ""),
        )

    def layer_sizes(self, image: Image) -> tuple[int, ...] | None:
        """Return the uncompressed size of each layer in bytes; None if the engine's history does not show which step
        made which layer."""
        with asking(self):
            history = self.client.api.history(image.handle)  # type: ignore[no-untyped-call]
        sizes = [int(step["Size"]) for step in reversed(history) if step["Size"]]
        return tuple(sizes) if len(sizes) == len(image.layers) else None

    def get(self, reference: str) -> Image:
        """Return the image of a tag, id or digest. Raises EngineError if the engine does not have it."""
        image = self.find(reference)
        if image is None:
            raise EngineError(f"the engine has no image {reference}", hint="docker image ls; docker pull")
        return image

    def _image_id(self, handle: str) -> str:
        """Return the configuration's digest. The containerd store does not report it: it is read from the cache, a
        build record or an export, in this order."""
        if not self.containerd_store:
            return handle
        known = user_folders.cache_folder("image-ids") / handle.replace(":", "-")
        if not known.is_file():
            recorded = (record.image for record in build_records.all_records() if record.handle == handle)
            write_atomically(known, next(recorded, None) or self._exported_id(handle))
        return known.read_text(encoding="utf-8")

    def _exported_id(self, handle: str) -> str:
        with asking(self), self._archive(handle) as archive:
            for member in archive:
                if member.name == "manifest.json":
                    content = archive.extractfile(member)
                    assert content is not None
                    name = json.load(content)[0]["Config"]
                    return f"sha256:{Path(name).stem}"
        raise EngineError(f"the engine exports {handle} without a manifest")

    def note_id(self, handle: str, image_id: str) -> None:
        """Cache the id of a loaded image, which would otherwise be read from an export of the image. `handle`: the
        digest of its manifest."""
        if self.containerd_store:
            write_atomically(user_folders.cache_folder("image-ids") / handle.replace(":", "-"), image_id)

    def layers_of(self, handle: str) -> tuple[str, ...]:
        """Return the diff ids of an image's layers; none if it is gone."""
        with asking(self):
            try:
                found = self.client.api.inspect_image(handle)  # type: ignore[no-untyped-call]
            except docker.errors.ImageNotFound:
                return ()
        return tuple((found.get("RootFS") or {}).get("Layers") or ())

    def tag(self, image: Image, repository: str, tag: str) -> None:
        with asking(self):
            self.client.api.tag(image.handle, repository, tag)

    def push(self, repository: str, tag: str, on_line: Callable[[str], None]) -> None:
        """Push a tag with docker's current login. Raises NetworkError with the engine's message."""
        with asking(self):
            for message in self.client.api.push(repository, tag, stream=True, decode=True):
                if "error" in message:
                    text = f"the engine could not push to {repository}"
                    host = repository.partition("/")[0]
                    hint = f"docker login {host}; put the registry's CA into the engine's certs.d/{host}"
                    raise NetworkError(text, hint=f"{message['error']}\n{hint}")
                on_line(" ".join(filter(None, (message.get("id"), message.get("status"), message.get("progress")))))

    def saved(self, image: Image) -> tarfile.TarFile:
        """Return the image as a tar archive, which can only be read once from beginning to end."""
        with asking(self):
            return self._archive(image.handle)

    def _archive(self, handle: str) -> tarfile.TarFile:
        return tarfile.open(None, "r|", fileobj=Blocks(self.client.api.get_image(handle)), bufsize=_BLOCK)

    def load(self, archive: Iterator[bytes]) -> None:
        """Load the images of an archive into the engine."""
        with asking(self):
            for message in self.client.api.load_image(archive):  # type: ignore[no-untyped-call]
                if "error" in message:
                    if disk_space.lacked(message["error"]):
                        raise self.full()
                    raise EngineError(f"the engine could not load the image: {message['error']}")

    def remove(self, reference: str) -> None:
        """Remove a tag; without its last tag, the image is removed too. Does nothing if a container uses the image, or
        if the tag does not exist."""
        with asking(self):
            try:
                self.client.api.remove_image(reference)
            except docker.errors.ImageNotFound:
                return
            except docker.errors.APIError as error:
                if error.status_code != 409:
                    raise

    def images(self, prefix: str) -> list[tuple[str, str, int]]:
        """Return (tag, handle, bytes) of every tagged image whose name begins with `prefix`, sorted by tag.

        The engine lists images of the same age in no fixed order, and reproducible images all have the same age.
        """
        with asking(self):
            listed = self.client.api.images()
        return sorted(
            (name, item["Id"], item["Size"])
            for item in listed
            for name in item.get("RepoTags") or ()
            if name.startswith(prefix)
        )

    def untagged(self, label: str) -> list[tuple[str, str, int]]:
        """Return (value of `label`, handle, bytes) of the images that have the label and no longer have a tag."""
        with asking(self):
            listed = self.client.api.images(filters={"dangling": True, "label": label})
        return [((item.get("Labels") or {}).get(label, ""), item["Id"], item["Size"]) for item in listed]

    def used(self) -> set[str]:
        """Return the handles of the images that a container uses, running or not."""
        with asking(self):
            return {container["ImageID"] for container in self.client.api.containers(all=True)}

    def tags(self, repository: str) -> dict[str, str]:
        """Return tag -> handle for every image of a repository."""
        with asking(self):
            listed = self.client.api.images(repository)
        names = {name: item["Id"] for item in listed for name in item.get("RepoTags") or ()}
        return {name.rpartition(":")[2]: handle for name, handle in names.items()}


class asking:
    """Converts errors of the client library to EngineError, or to DiskError if the engine's disk is full."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, docker.errors.DockerException | requests.RequestException):
            explanation = getattr(error, "explanation", None)
            if disk_space.lacked(explanation or str(error)):
                raise self._engine.full() from error
            text = explanation or why(error) or type(error).__name__
            gone = isinstance(error, requests.ConnectionError | requests.exceptions.ChunkedEncodingError)
            if gone and (full := self._engine.without_room()):
                raise full from error
            raise EngineError(f"the Docker Engine failed: {text}", hint=_GONE if gone else None) from error


def _log_answer(answer: requests.Response, **options: Any) -> None:
    address, seconds = (answer.request.url or "").partition("?")[0], answer.elapsed.total_seconds()
    _LOG.info("%s %s: %d after %.2f s", answer.request.method, address, answer.status_code, seconds)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2])
