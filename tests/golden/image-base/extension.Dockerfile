# Compiles the extensions of the lock sha256:7571903b09d561d6d90761b86213de256fb714f9721fe89cea90f50af4daaf28.
# `envbuild build` creates its build contexts: one with bin/ (uv and the installer), debs/ and base.tar, and a context
# wheels-<layer> for each layer of wheels, so that one is transferred while the wheels of another are installed.
# No step has network; every file is checked against the lock's sha256; every new modification time is 1704067200.
FROM registry.example:5000/team/python@sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa AS builder
USER 0
ENTRYPOINT []

# the virtual environment, /opt/venv
RUN --network=none --mount=type=tmpfs,target=/mnt --mount=type=bind,source=bin,target=/mnt/bin \
    ["/bin/sh", \
     "/mnt/bin/install", \
     "venv", \
     "1704067200", \
     "3.12"]

# python
RUN --network=none --mount=type=tmpfs,target=/mnt --mount=type=bind,source=bin,target=/mnt/bin --mount=type=bind,from=wheels-python,target=/mnt/wheels \
    ["/bin/sh", \
     "/mnt/bin/install", \
     "wheels", \
     "1704067200", \
     "pip==1.0 --hash=sha256:ba50a427a3fa9dbf0057575a44852c097d56b7a2170f784cd031aca2404b29ac"]

# torch
RUN --network=none --mount=type=tmpfs,target=/mnt --mount=type=bind,source=bin,target=/mnt/bin --mount=type=bind,from=wheels-torch,target=/mnt/wheels \
    ["/bin/sh", \
     "/mnt/bin/install", \
     "wheels", \
     "1704067200", \
     "torch==2.13.0 --hash=sha256:06c5c01e36f6688a6afd5995b3bfa7ffaaf0552489d8d4eb96ee621d9a89da9d"]
