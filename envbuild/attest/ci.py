"""CI jobs that use an image only after its evidence was checked, and then by digest. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_HEAD = """\
# {file}; policy.yaml beside it says what is asked for:
#   keys: [team.pub]
#   gpus: [{gpus}]
#   max_age: 90d
"""

_GITHUB = """\
name: {name}
on: [push]
jobs:
  verify:
    runs-on: ubuntu-latest
    outputs:
      digest: ${{{{ steps.verify.outputs.digest }}}}
    steps:
      - uses: actions/checkout@v4
      - run: python3 -m venv .envbuild && .envbuild/bin/pip install envbuild
      - id: verify
        run: |
          digest=$(.envbuild/bin/envbuild verify {image}:verified --policy policy.yaml)
          echo "digest=$digest" >> "$GITHUB_OUTPUT"
  use:
    needs: verify
    runs-on: {runner}
    container:
      image: {image}@${{{{ needs.verify.outputs.digest }}}}
    steps:
      - uses: actions/checkout@v4
      - run: python -c "import torch; print(torch.__version__)"
"""

_GITLAB = """\
verify:
  image: python:3.11
  script:
    - pip install envbuild
    - digest=$(envbuild verify {image}:verified --policy policy.yaml)
    - echo "DIGEST=$digest" >> digest.env
  artifacts:
    reports:
      dotenv: digest.env

use:
  needs: [verify]
  image: {image}@$DIGEST
  tags: [{runner}]
  script:
    - python -c "import torch; print(torch.__version__)"
"""

SYSTEMS: Mapping[str, tuple[str, str]] = {
    "github": (".github/workflows/{name}.yml", _GITHUB),
    "gitlab": (".gitlab-ci.yml", _GITLAB),
}


def job(system: str, name: str, image: str, gpus: Sequence[str]) -> str:
    """The file for one CI system; `gpus` are the profile's models, `image` a repository without a tag."""
    file, template = SYSTEMS[system]
    runner = "ubuntu-latest" if system == "github" and gpus == ("cpu",) else "gpu"
    values = {"name": name, "image": image, "gpus": ", ".join(gpus), "runner": runner, "file": file.format(name=name)}
    return (_HEAD + template).format(**values)
