"""A commented starting profile: the text that `envbuild new` writes. Pure."""

from __future__ import annotations

from envbuild.profile.source import Source


def starter_profile(name: str, parent: Source) -> str:
    """A profile that builds on `parent`: what it inherits stands in comments, ready to be changed."""
    base = parent.profile
    kept = [
        f'# python: "{base.python}"',
        f"# torch: {base.torch}",
        *(["# pins:  # versions that differ from torch's own, each with its reason"] if base.gpus else []),
        *(['#   cublas: {version: 12.6.4.1, reason: "..."}'] if base.gpus else []),
        "# apt: [git]  # Debian packages, a late layer",
        '# env: {OMP_NUM_THREADS: "4"}',
    ]
    packages = ", ".join(f'"{text}"' for text in base.packages)
    return "\n".join(
        [
            f"# `envbuild show {name}` explains every pin, `envbuild make {name}` builds and proves the image.",
            f'description: "{name}, on {parent.name}"',
            f"extends: {parent.name}  # mappings merge with it, everything else replaces",
            f"packages: [{packages}]  # as in requirements.txt; replaces those of {parent.name}",
            *kept,
            "# selftest:",
            f"#   level: {base.selftest.level}  # quick, standard or full",
            f"#   require: [{', '.join(base.selftest.require)}]",
            "",
        ]
    )
