"""Run a module that uses the GPU: `python -m gpu_plan.launch MODULE ARGUMENT...`, as `python -m MODULE` would.

With the variable GPU_CHECK_FIRST=MODULE:FUNCTION that function is called before, without arguments: a pretended GPU is
put in place there, in every process of the plan that uses one.
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
