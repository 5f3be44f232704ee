"""HPCCM's Dockerfile for torch and a cuBLAS of another version, as its users write it: a pip block for each.

python benchmarks/peers/hpccm_recipe.py BASE TORCH NUMPY CUBLAS        each a requirement but the base, an image
"""

from __future__ import annotations

import sys

import hpccm
from hpccm.building_blocks import pip
from hpccm.primitives import baseimage, environment, raw


def dockerfile(base: str, torch: str, numpy: str, cublas: str) -> str:
    stage = hpccm.Stage()
    stage += baseimage(image=base, _distro="ubuntu22")
    stage += raw(docker="ARG PIP_INDEX_URL")
    # the base has pip: none of the distribution's is wanted
    stage += pip(packages=[torch, numpy], pip="pip3", ospackages=[])
    stage += pip(packages=[cublas], pip="pip3", ospackages=[])
    stage += environment(variables={"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"})
    return str(stage)


if __name__ == "__main__":
    print(dockerfile(*sys.argv[1:]))
