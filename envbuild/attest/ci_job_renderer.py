"""Renders CI jobs that check an image's evidence, and then use the image by digest. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from envbuild.util.errors import UsageError

_HEAD = """\
# {file}; policy.yaml in the root of the repository says what is required:
#   keys: [team.pub]
#   gpus: [{gpus}]
#   max_age: 90d
# {secrets}
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
      - name: log in
        env:
          REGISTRY_USER: ${{{{ secrets.REGISTRY_USER }}}}
          REGISTRY_PASSWORD: ${{{{ secrets.REGISTRY_PASSWORD }}}}
        run: |
          echo "$REGISTRY_PASSWORD" | docker login {host} --username "$REGISTRY_USER" --password-stdin
      - name: install
        run: |
          python3 -m venv .envbuild
          {install}
      - id: verify
        run: |
          digest=$(.envbuild/bin/envbuild verify {image}:verified --profile {name} --policy policy.yaml)
          echo "digest=$digest" >> "$GITHUB_OUTPUT"
  use:
    needs: verify
    runs-on: {runner}
    container:
      image: {image}@${{{{ needs.verify.outputs.digest }}}}
      credentials:
        username: ${{{{ secrets.REGISTRY_USER }}}}
        password: ${{{{ secrets.REGISTRY_PASSWORD }}}}
{options}\
    steps:
      - uses: actions/checkout@v4
      - run: python -c "import torch; print(torch.__version__)"
"""

_GITLAB = """\
verify:
  image: python:3.11
  script:
    - mkdir -p ~/.docker && echo "$DOCKER_AUTH_CONFIG" > ~/.docker/config.json
    - |
      python3 -m venv .envbuild
      {install}
    - digest=$(.envbuild/bin/envbuild verify {image}:verified --profile {name} --policy policy.yaml)
    - echo "DIGEST=$digest" >> digest.env
  artifacts:
    reports:
      dotenv: digest.env

use:
  needs: [verify]
  image: {image}@$DIGEST
{options}\
  script:
    - python -c "import torch; print(torch.__version__)"
"""

# For each CI system: the path of the file, the credentials that the job needs, the job, and its additional lines for a
# GPU.
_SYSTEMS: Mapping[str, tuple[str, str, str, str]] = {
    "github": (
        ".github/workflows/{name}.yml",
        "secrets: REGISTRY_USER and REGISTRY_PASSWORD, of an account with read access to the registry",
        _GITHUB,
        "      options: --gpus all\n",
    ),
    "gitlab": (
        ".gitlab-ci.yml",
        "variable: DOCKER_AUTH_CONFIG, docker's config.json with a login that may read the registry",
        _GITLAB,
        '  tags: [gpu]  # a runner with gpus = "all" in [runners.docker]\n',
    ),
}
SYSTEMS = tuple(sorted(_SYSTEMS))

_URL = r"[A-Za-z0-9._~:/@%+-]+"
_GIT = re.compile(rf"git\+(https|ssh)://{_URL}@[0-9a-f]{{40}}")
_PATH = r"[A-Za-z0-9._/@%+-]+"
_WHEEL = re.compile(rf"(?P<file>((?P<scheme>https)://{_URL}|{_PATH})\.whl)#sha256=(?P<sha256>[0-9a-f]{{64}})")
HINT = """\
set ci_install in config.yaml, or --install, to one of:
  git+https://HOST/PATH@COMMIT                          (all 40 digits of the commit)
  https://HOST/envbuild-VERSION-py3-none-any.whl#sha256=HEX
  PATH/envbuild-VERSION-py3-none-any.whl#sha256=HEX     (a file in the repository of the job)"""


def render(system: str, name: str, image: str, gpus: Sequence[str], source: str | None) -> str:
    """Render the job's file for one CI system. `image`: a repository without a tag. `gpus`: the profile's GPU models.

    `source`: what the job installs envbuild from. Raises UsageError unless `source` is pinned to a commit or to the
    sha256 of a wheel: on a package index, anybody can own a name.
    """
    file, secrets, template, more = _SYSTEMS[system]
    on_gpu = tuple(gpus) != ("cpu",)
    return (_HEAD + template).format(
        name=name,
        image=image,
        host=image.partition("/")[0],
        gpus=", ".join(gpus),
        runner="gpu" if on_gpu else "ubuntu-latest",
        options=more if on_gpu else "",
        file=file.format(name=name),
        secrets=secrets,
        install=("\n" + " " * (10 if system == "github" else 6)).join(_install(source)),
    )


def _install(source: str | None) -> list[str]:
    """Return the shell commands that install envbuild. pip checks the hash in a URL; sha256sum checks a file in the
    repository."""
    if not source:
        raise UsageError("No source to install envbuild from in the job", hint=HINT)
    wheel = _WHEEL.fullmatch(source)
    if not wheel and not _GIT.fullmatch(source):
        raise UsageError(f"Not a pinned source of envbuild: {source[:200]!r}", hint=HINT)
    if not wheel or wheel["scheme"]:
        return [f".envbuild/bin/pip install '{source}'"]
    path = f"./{wheel['file'].removeprefix('./')}"
    return [f"echo '{wheel['sha256']}  {path}' | sha256sum -c -", f".envbuild/bin/pip install '{path}'"]
