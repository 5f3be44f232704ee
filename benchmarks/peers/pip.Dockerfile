# As pip's best users write it: one layer, a cache mount, exact pins of which none is resolved again.
ARG BASE
FROM ${BASE}
ARG PIP_INDEX_URL
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,source=requirements.txt,target=/requirements.txt \
    pip install --no-deps -r /requirements.txt
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
CMD ["python"]
