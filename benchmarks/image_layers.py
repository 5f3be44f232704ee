"""Writes or pushes the layers of a profile's lock with envbuild's own functions, for the benchmark of builds.

python benchmarks/image_layers.py write NAME                    write all layers again, as `verify --rebuild` does
python benchmarks/image_layers.py push NAME REGISTRY/NAME       find what is missing, and push it, as `push` does
python benchmarks/image_layers.py push-zstd NAME REGISTRY/NAME  the same as `push --zstd`
python benchmarks/image_layers.py archive NAME FILE [OTHER]     write what an engine gets that has the image of OTHER
python benchmarks/image_layers.py changed NAME OTHER            write the layers that OTHER lacks, discard the bytes

The commands `verify --rebuild` and `push` do more: they check and send evidence, which needs a verified image.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from options import program

from envbuild.image import registry_push, zstd_push
from envbuild.image.layers import layer_cache
from envbuild.image.oci import image_upload
from envbuild.image.oci.docker_archive import docker_archive
from envbuild.image.oci.image_description import OciImage
from envbuild.lock import lock_file
from envbuild.lock.lock_file import Lock
from envbuild.pipeline.image_steps import load_profile, resolve_profile
from envbuild.pipeline.layer_steps import write_layers
from envbuild.pipeline.step_context import StepContext
from envbuild.registry.registry_client import Repository


def main() -> None:
    work, name, *targets = sys.argv[1:]
    lock, image = _layers(name, again=work == "write")
    if work == "archive":
        file, *others = targets
        left_out = {diff_id for other in others for diff_id in _begins_alike(image, _layers(other)[1])}
        with Path(file).open("wb") as stream:
            stream.writelines(docker_archive(image.to_load, f"{name}:1", left_out, lambda _: None))
        return
    if work == "changed":
        there = set(_begins_alike(image, _layers(targets[0])[1]))
        for described, layer in zip(image.described, image.layers, strict=True):
            if layer.diff_id not in there:
                layer_cache.write_again(described.recipe, lambda block: None)
        return
    for target in targets:
        send = zstd_push.push_layers if work == "push-zstd" else image_upload.upload_image
        send(Repository(registry_push.parse_repository(target)), image, lock.short, lambda line: None)


def _begins_alike(one: OciImage, other: OciImage) -> Iterator[str]:
    """Yield the diff ids of the layers with which both images begin. A graph driver reuses no others, because it
    identifies a layer by itself and all layers below it."""
    for layer, same in zip(one.layers, other.layers, strict=False):
        if layer.diff_id != same.diff_id:
            return
        yield layer.diff_id


def _layers(name: str, *, again: bool = False) -> tuple[Lock, OciImage]:
    loaded = load_profile(name).value
    plan = resolve_profile(loaded).value
    lock = lock_file.current_lock(loaded, plan)
    return lock, write_layers(StepContext(lambda event: None), plan, lock, (), again=again).value


if __name__ == "__main__":
    program(main)
