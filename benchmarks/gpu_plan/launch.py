"""Runs a module that uses the GPU, like `python -m MODULE`: `python -m gpu_plan.launch MODULE ARGUMENT...`.

If the variable GPU_CHECK_FIRST=MODULE:FUNCTION is set, that function is called first, without arguments. It can install
a simulated GPU, in every process of the plan that uses a GPU.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys

VARIABLE = "GPU_CHECK_FIRST"

if __name__ == "__main__":
    module, _, function = os.environ.get(VARIABLE, "").partition(":")
    if module:
        getattr(importlib.import_module(module), function)()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
