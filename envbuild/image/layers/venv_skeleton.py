"""Generates the files of an empty virtual environment, as `python3.N -m venv --without-pip` makes them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping

from envbuild.image.layers.layer_writer import LayerEntry, LayerFile, LayerFolder, LayerLink
from envbuild.resolve.plan_resolver import VENV

VERSION = 1
"""Increment this number with every change that gives different files for the same templates."""
_CONFIG = """home = {folder}
include-system-site-packages = false
version = {version}
"""
_CONFIG_SINCE_3_11 = """executable = {executable}
command = {interpreter} -m venv --without-pip {environment}
"""
# In Python releases with the fix of CVE-2024-9287, venv quotes each value, and the templates do not. Debian's 3.11.2
# has that fix too.
_UNQUOTED = b"VIRTUAL_ENV=__VENV_DIR__"
# Found in templates that add the parentheses of the prompt themselves.
_PARENTHESES = re.compile(rb"""\(["']?__VENV_PROMPT__""")


def venv_files(
    interpreter: str, version: str, executable: str, templates: Mapping[str, bytes], environment: str = VENV
) -> Iterator[LayerEntry]:
    """Yield the entries of an empty environment.

    `interpreter`: the path by which Python is called, such as /usr/bin/python3.11; `version`: such as "3.11.2";
    `executable`: the path behind all links; `templates`: activation scripts by name, from the folders scripts/common
    and scripts/posix of this Python's module venv. Python 3.13 also writes a .gitignore, which an image does not need.
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    root, python, new = environment.lstrip("/"), f"python{major}.{minor}", (major, minor) >= (3, 11)
    yield LayerFolder(f"{root}/include/{python}" if new else f"{root}/include")
    yield LayerFolder(f"{root}/lib/{python}/site-packages")
    yield LayerLink(f"{root}/lib64", "lib")
    name = interpreter.rpartition("/")[2]
    yield LayerLink(f"{root}/bin/{name}", interpreter)
    for other in sorted({"python", "python3", python} - {name}):
        yield LayerLink(f"{root}/bin/{other}", name)
    text = (_CONFIG + _CONFIG_SINCE_3_11 if new else _CONFIG).format(
        folder=interpreter.rpartition("/")[0],
        version=version,
        executable=executable,
        interpreter=interpreter,
        environment=environment,
    )
    yield LayerFile(f"{root}/pyvenv.cfg", text.encode())
    short = environment.rpartition("/")[2]
    activate = templates.get("activate", b"")
    quote = shlex.quote if _UNQUOTED in activate else str
    values = {
        "__VENV_DIR__": environment,
        "__VENV_NAME__": short,
        "__VENV_PROMPT__": short if _PARENTHESES.search(activate) else f"({short}) ",
        "__VENV_BIN_NAME__": "bin",
        "__VENV_PYTHON__": f"{environment}/bin/{name}",
    }
    for script, template in sorted(templates.items()):
        for key, value in values.items():
            template = template.replace(key.encode(), quote(value).encode())
        yield LayerFile(f"{root}/bin/{script}", template)
