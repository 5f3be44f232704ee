# What the peers' ways stand on: the same root file system as ours, with pip as images of Python have it.
FROM scratch
ADD base.tar /
RUN --mount=type=bind,source=pip,target=/pip \
    python3 -m venv --without-pip /opt/venv && \
    cd /pip && wheel=$(echo *.whl) && /opt/venv/bin/python "$wheel/pip" install --no-index --no-deps "$wheel"
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
