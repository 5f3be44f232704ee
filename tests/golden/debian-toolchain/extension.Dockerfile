# Compiles the extensions of the lock sha256:ef27c4dd90a243912ae7c92cdba742ef626678530022cca6882dd75bcd583735.
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
     "3.13"]

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

# nvcc, of Debian
RUN --network=none --mount=type=tmpfs,target=/mnt --mount=type=bind,source=bin,target=/mnt/bin --mount=type=bind,source=builder/debs,target=/mnt/debs \
    ["/bin/sh", \
     "/mnt/bin/install", \
     "debs", \
     "1704067200", \
     "nvidia-cuda-toolkit_1.0-1_amd64.deb", \
     "g++-13_1.0-1_amd64.deb"]

# builder
RUN --network=none --mount=type=tmpfs,target=/mnt --mount=type=bind,source=bin,target=/mnt/bin --mount=type=bind,from=wheels-builder,target=/mnt/wheels \
    ["/bin/sh", \
     "/mnt/bin/install", \
     "wheels", \
     "1704067200", \
     "ninja==1.0 --hash=sha256:db9aee878af5d3721053e386e2e92fd10d2f65796d284553b6d54e3427836ebb", \
     "setuptools==1.0 --hash=sha256:0a65f1d294132391eed038acb05cf7f18509d6fea028ba01f5cb82bba68324d6", \
     "wheel==1.0 --hash=sha256:5c0a2d19c6afce6bd8c9e054edc860aa283cc7c9bde15c96e7bd44cac598af73"]

# nvcc, of torch's CUDA
RUN --network=none --mount=type=tmpfs,target=/mnt --mount=type=bind,source=bin,target=/mnt/bin \
    ["/bin/sh", \
     "/mnt/bin/install", \
     "nvcc", \
     "1704067200", \
     "/usr", \
     "12.4"]

FROM builder AS compiled-kernels
ARG MAX_JOBS

# kernels from git cccccccccccccccccccccccccccccccccccccccc
RUN --network=none --mount=type=tmpfs,target=/mnt --mount=type=bind,source=bin,target=/mnt/bin --mount=type=bind,source=sources/kernels,target=/mnt/source \
    ["/bin/sh", \
     "/mnt/bin/install", \
     "compile", \
     "1704067200", \
     "/usr/bin/env", \
     "CC=gcc-13", \
     "CUDA_HOME=/usr", \
     "CXX=g++-13", \
     "HOME=/build", \
     "NVCC_APPEND_FLAGS=--objdir-as-tempdir", \
     "PATH=/opt/venv/bin:/usr/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", \
     "PYTHONHASHSEED=0", \
     "SOURCE_DATE_EPOCH=1704067200", \
     "TORCH_CUDA_ARCH_LIST=8.0", \
     "/opt/venv/bin/python", \
     "-m", \
     "pip", \
     "wheel", \
     "--verbose", \
     "--disable-pip-version-check", \
     "--no-build-isolation", \
     "--no-deps", \
     "--no-index", \
     "--no-cache-dir", \
     "--wheel-dir", \
     "/out", \
     "."]

FROM scratch AS wheel-kernels
COPY --from=compiled-kernels /out /
