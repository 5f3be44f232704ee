# Compiles the extensions of the lock sha256:6d459cb15d5ee519767ab86da0faf74d74bbbdba9f353d6e7174eb91f52b954f.
# `envbuild build` creates its build contexts: one with bin/ (uv and the installer), debs/ and base.tar, and a context
# wheels-<layer> for each layer of wheels, so that one is transferred while the wheels of another are installed.
# No step has network; every file is checked against the lock's sha256; every new modification time is 1704067200.
FROM scratch AS builder
ADD base.tar /

# the virtual environment, /opt/venv
RUN --network=none --mount=type=tmpfs,target=/mnt --mount=type=bind,source=bin,target=/mnt/bin \
    ["/bin/sh", \
     "/mnt/bin/install", \
     "venv", \
     "1704067200", \
     "3.11"]

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
     "torch==1.0 --hash=sha256:ea32f47f1996ab0061766f74f57f166c6c562f81063c1a007871ce45bf60547a"]

# toolchain
RUN --network=none --mount=type=tmpfs,target=/mnt --mount=type=bind,source=bin,target=/mnt/bin --mount=type=bind,from=wheels-toolchain,target=/mnt/wheels \
    ["/bin/sh", \
     "/mnt/bin/install", \
     "wheels", \
     "1704067200", \
     "cuda-toolkit==1.0 --hash=sha256:20ed5bfddbb0af4e6b4d346a5a57011fc3889036973b5d150003e2de19b67687"]
