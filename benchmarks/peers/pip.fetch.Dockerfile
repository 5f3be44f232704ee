# Brings a wheel into the cache mount of pip.Dockerfile, and leaves nothing else.
ARG BASE
FROM ${BASE}
ARG PIP_INDEX_URL WHEEL
RUN --mount=type=cache,target=/root/.cache/pip \
    pip download --no-deps --dest /tmp/unused "${WHEEL}" && rm -rf /tmp/unused
