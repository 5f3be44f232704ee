"""Prints the Dockerfile that HPCCM generates for torch and a different version of cuBLAS, with the recipe that users of
HPCCM would write: one block of pip for torch and one for cuBLAS.

python benchmarks/peers/hpccm_recipe.py BASE TORCH NUMPY CUBLAS        BASE: an image; the others: requirements
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
    # the base has pip, so the distribution's pip is not installed
    stage += pip(packages=[torch, numpy], pip="pip3", ospackages=[])
    stage += pip(packages=[cublas], pip="pip3", ospackages=[])
    stage += environment(variables={"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"})
    return str(stage)


if __name__ == "__main__":
    print(dockerfile(*sys.argv[1:]))
