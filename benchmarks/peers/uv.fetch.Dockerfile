# Brings a wheel into the cache mount of uv.Dockerfile, and leaves nothing else.
ARG BASE UV
FROM ${UV} AS uv
FROM ${BASE}
ARG UV_DEFAULT_INDEX WHEEL
RUN --mount=type=cache,target=/root/.cache/uv \
    --mount=type=bind,from=uv,source=/uv,target=/bin/uv \
    uv pip install --no-deps --target /tmp/unused "${WHEEL}" && rm -rf /tmp/unused
