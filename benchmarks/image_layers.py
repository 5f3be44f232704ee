"""Writes or pushes the layers of a profile's lock with envbuild's own functions, for the benchmark of builds.

python benchmarks/image_layers.py write NAME                    write all layers again, as `verify --rebuild` does
python benchmarks/image_layers.py push NAME REGISTRY/NAME       find what is missing, and push it, as `push` does
python benchmarks/image_layers.py push-zstd NAME REGISTRY/NAME  the same as `push --zstd`

The commands `verify --rebuild` and `push` do more: they check and send evidence, which needs a verified image.
"""

from __future__ import annotations

import sys

from options import program

from envbuild.image import registry_push, zstd_push
from envbuild.image.oci import image_upload
from envbuild.lock import lock_file
from envbuild.pipeline.image_steps import load_profile, resolve_profile
from envbuild.pipeline.layer_steps import write_layers
from envbuild.pipeline.step_context import StepContext
from envbuild.registry.registry_client import Repository


def main() -> None:
    work, name, *targets = sys.argv[1:]
    context = StepContext(lambda event: None)
    loaded = load_profile(name).value
    plan = resolve_profile(loaded).value
    lock = lock_file.current_lock(loaded, plan)
    image = write_layers(context, plan, lock, (), again=work == "write").value
    for target in targets:
        send = zstd_push.push_layers if work == "push-zstd" else image_upload.upload_image
        send(Repository(registry_push.parse_repository(target)), image, lock.short, lambda line: None)


if __name__ == "__main__":
    program(main)
