"""A base image from a private registry: TLS by an authority of our own, user and password, no mmdebstrap."""

from __future__ import annotations

import base64
import gzip
import io
import json
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from envbuild.image import debian_base_tar
from envbuild.lock import lock_file
from envbuild.registry import oci_types
from envbuild.registry.oci_types import Manifest, Reference
from envbuild.registry.registry_client import Repository

from .registries import USER, Registry
from .support import Project, Proved, docker, in_layers, path_without

pytestmark = pytest.mark.engine


def push_tar(tar: Path, login: Path, name: str) -> str:
    """Push an image with one layer to the registry, without the engine, whose compression takes ten times as long.
    Return its digest reference."""
    content = tar.read_bytes()
    layer = gzip.compress(content, 1, mtime=0)
    rootfs = {"type": "layers", "diff_ids": [oci_types.digest_of(content)]}
    config = json.dumps({"architecture": "amd64", "os": "linux", "config": {}, "rootfs": rootfs}).encode()
    blobs = ((oci_types.CONFIG, config), (oci_types.LAYER_GZIP, layer))
    described = [oci_types.descriptor(media_type, raw) for media_type, raw in blobs]
    document = {"schemaVersion": 2, "mediaType": oci_types.MANIFEST, "config": described[0], "layers": described[1:]}
    manifest = Manifest(json.dumps(document).encode(), oci_types.MANIFEST)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_CONFIG", str(login))
        repository = Repository(Reference.parse(name))
        for _, raw in blobs:
            repository.put_blob(raw)
        repository.put_manifest(name.rpartition(":")[2], manifest)
    return f"{name.rpartition(':')[0]}@{manifest.digest}"


@pytest.fixture(scope="module")
def base_image(registry: Registry, quick: Proved, run_id: str) -> str:
    """Our own bookworm base image, in the registry only. Its digest is the same in each run on one day."""
    found = lock_file.read(quick.project.lock(quick.name))
    assert found
    return push_tar(debian_base_tar.tar_file(found), registry.login, f"{registry.host}/e2e-{run_id}:base")


@pytest.fixture(scope="module")
def private(registry: Registry, light_index: Mapping[str, str], workplace: Path) -> Project:
    folder = workplace / "from-registry"
    project = Project.create(folder).with_required_alone().with_cache(folder, "wheels")
    return project.with_env(PATH=path_without(workplace / "no-mmdebstrap", "mmdebstrap"), **light_index)


@pytest.fixture(scope="module")
def name(private: Project, base_image: str, run_id: str) -> str:
    made = f"e2e-registry-{run_id}"
    private.write(
        made, base={"image": base_image}, python="3.11", torch="2.13.0+cpu",
        selftest={"level": "quick", "require": ["env.libs"]},
    )  # fmt: skip
    return made


def test_a_missing_login_is_reported(private: Project, name: str, registry: Registry, base_image: str) -> None:
    done = private.run("build", name, "--json", DOCKER_CONFIG=str(registry.stranger))
    assert (done.code, done.error["kind"]) == (7, "network")
    assert base_image in done.error["message"]
    assert "401" in done.words or "authoriz" in done.words or "authentication" in done.words
    assert f"docker login {registry.host}" in done.error["hint"]
    assert [step["name"] for step in done.document["steps"]] == ["load profile", "resolve", "lock", "render"]


def test_with_a_login_it_is_made_and_verified(private: Project, name: str, registry: Registry, base_image: str) -> None:
    done = private.run("make", name, "--json", DOCKER_CONFIG=str(registry.login))
    assert (done.code, done.document.get("state")) == (0, "verified"), f"{done.stdout}\n{done.stderr}"
    found = lock_file.read(private.lock(name))
    assert found
    assert (found.image, found.base) == (base_image, ())
    assert f"ARG BASE={base_image}\nFROM ${{BASE}}\n" in private.dockerfile(name).read_text(encoding="utf-8")

    tag = done.document["tags"][0]
    known = [registry.password, base64.b64encode(f"{USER}:{registry.password}".encode()).decode()]
    written = [path for root in (private.state, private.folder) for path in root.rglob("*") if path.is_file()]
    output = docker("history", "--no-trunc", tag) + docker("inspect", tag) + done.stdout + done.stderr
    for secret in known:
        assert secret not in output
        assert [path for path in written if secret.encode() in path.read_bytes()] == []
    assert not in_layers(tag, [secret.encode() for secret in known])
    again = private.run("build", name, "--no-cache", "--json", DOCKER_CONFIG=str(registry.stranger))
    assert (again.code, again.document["image"]) == (0, done.document["image"]), f"{again.stdout}\n{again.stderr}"


def test_a_tag_is_locked_to_its_digest_and_the_release_of_a_devel_images_nvcc_is_read_from_its_layers(
    indexed: Project, registry: Registry, quick: Proved, run_id: str, scratch: Path
) -> None:
    found = lock_file.read(quick.project.lock(quick.name))
    assert found
    shutil.copy(debian_base_tar.tar_file(found), scratch / "devel.tar")
    script = b"#!/bin/sh\necho 'Cuda compilation tools, release 12.6, V12.6.85'\n"
    member = tarfile.TarInfo("./usr/local/cuda/bin/nvcc")
    member.size, member.mode = len(script), 0o755
    with tarfile.open(scratch / "devel.tar", "a") as tar:
        tar.addfile(member, io.BytesIO(script))
    tagged = f"{registry.host}/e2e-{run_id}:devel"
    image = push_tar(scratch / "devel.tar", registry.login, tagged)
    name = f"e2e-devel-{run_id}"
    indexed.write(name, base={"image": tagged}, python="3.11", torch="2.7.1", gpus=["a100"], variant="devel",
                  toolchain="base")  # fmt: skip
    done = indexed.run("build", name, "--json", DOCKER_CONFIG=str(registry.login))
    assert done.code == 0, f"{done.stdout}\n{done.stderr}"
    locked = lock_file.read(indexed.lock(name))
    assert locked and (locked.image, locked.image_tag) == (image, tagged)
    tag = done.document["tags"][0]
    assert "release 12.6" in docker("run", "--rm", "--network", "none", tag, "nvcc", "--version")

    indexed.change(name, torch="2.6.0")
    other = indexed.run("build", name, "--json", DOCKER_CONFIG=str(registry.login))
    assert (other.code, other.error["kind"]) == (6, "build")
    expected = "/usr/local/cuda/bin/nvcc of the base image is of CUDA 12.6; torch needs CUDA 12.4"
    assert expected in other.error["message"]
