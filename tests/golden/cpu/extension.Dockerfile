# Compiles the extensions of the lock sha256:ba4d51a2211637428be95da8faef00be362fdd1ef073a785691a8d6bfd5c0aeb.
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
     "torch==2.13.0+cpu --hash=sha256:7ef60359c2e152b34a9a10ed0130cd8d3ff63aadf73e20ad1f68693a6b24267c"]
