"""Work in a new interpreter: for what reads its environment when it is loaded or starts, as CUDA does."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from envbuild.selftest.apart import Tell, Work, attempt

# It looks for modules where this interpreter does, and calls one function of one.
_BOOT = """
import json, sys
sys.path[:], fd, function, arguments = json.loads(sys.argv[1])
from envbuild.selftest import fresh
fresh.begin(fd, function, arguments)
"""


def work(function: str, *arguments: Any, **variables: str) -> Work:
    """Work for apart.run, in an interpreter whose environment holds `variables` before anything is loaded into it.

    `function` is "module:name" and is called with a Tell and the arguments, which JSON can hold.
    """

    def become(tell: Tell) -> None:
        os.set_inheritable(tell.fd, True)
        order = json.dumps([sys.path, tell.fd, function, arguments])
        os.execve(sys.executable, [sys.executable, "-I", "-c", _BOOT, order], {**os.environ, **variables})

    return become


def begin(fd: int, function: str, arguments: Sequence[Any]) -> NoReturn:
    """Call the function in the new interpreter, and leave without Python's shutdown."""
    faulthandler.enable(file=2, all_threads=False)
    module, _, name = function.partition(":")
    os._exit(attempt(lambda tell: getattr(importlib.import_module(module), name)(tell, *arguments), Tell(fd)))
