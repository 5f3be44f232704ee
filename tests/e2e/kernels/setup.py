"""A small extension that is configured like apex: without settings it builds nothing, and reports nothing.

The test that commits it replaces READS: an older commit knows the option alone.
"""

# mypy: ignore-errors
import os
import sys

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CUDAExtension

READS = ("KERNELS_CUDA",)  # variables

modules = []
wanted = any(os.environ.get(name) == "1" for name in READS)
if "--cuda_ext" in sys.argv:
    sys.argv.remove("--cuda_ext")
    wanted = True
if wanted:
    modules.append(CUDAExtension("kernels_cuda", ["kernels_cuda.cu"]))

setup(
    name="kernels", version="0.1", py_modules=["kernels"], ext_modules=modules, cmdclass={"build_ext": BuildExtension}
)
