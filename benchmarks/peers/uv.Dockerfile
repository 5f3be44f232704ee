# As uv's own guide has it: one layer, a cache mount, exact pins of which none is resolved again.
ARG BASE UV
FROM ${UV} AS uv
FROM ${BASE}
ARG UV_DEFAULT_INDEX
ENV UV_LINK_MODE=copy VIRTUAL_ENV=/opt/venv
RUN --mount=type=cache,target=/root/.cache/uv \
    --mount=type=bind,source=requirements.txt,target=/requirements.txt \
    --mount=type=bind,from=uv,source=/uv,target=/bin/uv \
    uv pip install --no-deps -r /requirements.txt
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
CMD ["python"]
