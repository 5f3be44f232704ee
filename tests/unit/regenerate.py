"""Regenerate the golden locks, Dockerfiles, exports, scripts, manifests and error texts: `python -m unit.regenerate` in
tests/.

Review the diff before you commit it.
"""

from __future__ import annotations

import os
from pathlib import Path

from envbuild.image import container_definition_export, extension_dockerfile
from envbuild.lock import lock_file
from envbuild.resolve import plan_resolver, profile_reader_and_overrides
from envbuild.util.atomic_files import write_atomically
from envbuild.util.errors import ProfileError
from unit.image import test_container_definition_export
from unit.runners import manifests, scripts
from unit.support import lock_for

GOLDEN = Path(__file__).parent.parent / "golden"


def error_text(folder: Path) -> str:
    """Return the error text of an invalid profile: the message, each fault, the hint; "no fault" for a valid one."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        plan_resolver.resolve(profile_reader_and_overrides.load("profile.yaml"))
    except ProfileError as error:
        lines = [
            error.message,
            *(f"  {fault}" for fault in error.faults),
            *([f"hint: {error.hint}"] if error.hint else []),
        ]
        return "\n".join(lines) + "\n"
    finally:
        os.chdir(before)
    return "no fault\n"


def main() -> None:
    for file in sorted(GOLDEN.glob("*/profile.yaml")):
        folder = file.parent
        made = lock_for(plan_resolver.resolve(profile_reader_and_overrides.load(str(file))))
        lock_file.write(made, folder / "lock.yaml", folder.name)
        write_atomically(folder / "extension.Dockerfile", extension_dockerfile.render(made))
        text = container_definition_export.standalone_dockerfile(made, folder.name)
        write_atomically(folder / "Dockerfile", text)
    for case in (*test_container_definition_export.CASES, "override"):
        text = test_container_definition_export.golden_text(case)
        write_atomically(GOLDEN / "exports" / f"{case}.txt", text)
    for case in scripts.CASES:
        write_atomically(GOLDEN / "slurm" / f"{case}.sh", scripts.rendered(case))
    for case in manifests.CASES:
        write_atomically(GOLDEN / "kubernetes" / f"{case}.yaml", manifests.rendered(case))
    for file in sorted(GOLDEN.glob("faults/*/profile.yaml")):
        write_atomically(file.parent / "expected.txt", error_text(file.parent))


if __name__ == "__main__":
    main()
