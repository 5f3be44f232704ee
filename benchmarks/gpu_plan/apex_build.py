"""Compiles two of apex's modules in place, with torch's support for extensions: `python -m gpu_plan.apex_build FOLDER`.

Compiling all twelve modules takes 1619 s on four cores (benchmarks/results/apex_h200.md); norm.apex and
optim.apex call only these two.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

import setuptools

MODULES = ("fused_layer_norm_cuda", "amp_C")


def main(folder: str) -> None:
    """Run apex's own setup.py, but compile only MODULES. setup.py reads from environment variables what to compile, and
    how many modules at once. Raises SystemExit if setup.py does not compile MODULES."""
    setup = setuptools.setup

    def chosen(*args: Any, ext_modules: Any = (), **options: Any) -> Any:
        found = [module for module in ext_modules if module.name in MODULES]
        missing = set(MODULES) - {module.name for module in found}
        if missing:
            raise SystemExit(f"apex's setup.py does not compile {', '.join(sorted(missing))}")
        return setup(*args, ext_modules=found, **options)

    setuptools.setup = chosen
    os.environ.update(APEX_CPP_EXT="1", APEX_CUDA_EXT="1", APEX_PARALLEL_BUILD=str(len(MODULES)))
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.argv = ["setup.py", "build_ext", "--inplace"]
    runpy.run_path("setup.py", run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1])
