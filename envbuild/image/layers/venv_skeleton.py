"""The files of an empty virtual environment, as `python3.N -m venv --without-pip` makes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from envbuild.image.layers.layer_writer import LayerEntry, LayerFile, LayerFolder, LayerLink
from envbuild.resolve.plan_resolver import VENV

_CONFIG = """home = {folder}
include-system-site-packages = false
version = {version}
executable = {executable}
command = {interpreter} -m venv --without-pip {environment}
"""


def venv_files(
    interpreter: str, version: str, executable: str, templates: Mapping[str, bytes], environment: str = VENV
) -> Iterator[LayerEntry]:
    """Yield the entries of an empty environment.

    `interpreter`: the path that it is started with, such as /usr/bin/python3.11; `version`: such as "3.11.2";
    `executable`: the path behind all links; `templates`: activation scripts by name, from the folders scripts/common
    and scripts/posix of this Python's module venv. Python 3.13 also writes a .gitignore, which an image does not need.
    """
    root, python = environment.lstrip("/"), f"python{'.'.join(version.split('.')[:2])}"
    yield LayerFolder(f"{root}/include/{python}")
    yield LayerFolder(f"{root}/lib/{python}/site-packages")
    yield LayerLink(f"{root}/lib64", "lib")
    name = interpreter.rpartition("/")[2]
    yield LayerLink(f"{root}/bin/{name}", interpreter)
    for other in sorted({"python", "python3", python} - {name}):
        yield LayerLink(f"{root}/bin/{other}", name)
    text = _CONFIG.format(
        folder=interpreter.rpartition("/")[0],
        version=version,
        executable=executable,
        interpreter=interpreter,
        environment=environment,
    )
    yield LayerFile(f"{root}/pyvenv.cfg", text.encode())
    short = environment.rpartition("/")[2]
    values = {
        "__VENV_DIR__": environment,
        "__VENV_NAME__": short,
        "__VENV_PROMPT__": f"({short}) ",
        "__VENV_BIN_NAME__": "bin",
        "__VENV_PYTHON__": f"{environment}/bin/{name}",
    }
    for script, template in sorted(templates.items()):
        for key, value in values.items():
            template = template.replace(key.encode(), value.encode())
        yield LayerFile(f"{root}/bin/{script}", template)
