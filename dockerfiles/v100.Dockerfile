# v100, lock 7986873f8a3f, Python 3.11; made by: envbuild export dockerfile v100
# docker build -t NAME - < FILE
# with the configuration of pip: docker build --secret id=pip,src=/etc/pip.conf -t NAME - < FILE
# Pinned: the version and sha256 of every wheel.
# Pinned: the version of every Debian package. Most mirrors keep only the newest version: if another one
# is missing, use a snapshot of the mirror, or --build-arg DEBIAN_VERSIONS=newest. With
# DEBIAN_VERSIONS=none the base image (BASE) must have the packages.
# Not pinned: the base image, a tag.
# Not pinned: the sha256 of uv 0.13.9, which installs the wheels.
ARG BASE=debian:bookworm-slim
FROM ${BASE}
USER 0
ENTRYPOINT []
COPY <<'PACKAGES' /opt/packages.txt
adduser=3.134
apt=2.6.2
base-files=12.4+deb12u15
base-passwd=3.6.1
bash=5.2.15-2+b13
binutils=2.40-2
binutils-common=2.40-2
binutils-x86-64-linux-gnu=2.40-2
bsdutils=1:2.38.1-5+deb12u3
ca-certificates=20250419~deb12u2
coreutils=9.1-1
cpp=4:12.2.0-3
cpp-12=12.2.0-14+deb12u1
dash=0.5.12-2
debconf=1.5.82
debian-archive-keyring=2023.3+deb12u2
debianutils=5.7-0.5~deb12u1
diffutils=1:3.8-4
dpkg=1.21.23
findutils=4.9.0-4
g++=4:12.2.0-3
g++-12=12.2.0-14+deb12u1
gcc=4:12.2.0-3
gcc-12=12.2.0-14+deb12u1
gcc-12-base=12.2.0-14+deb12u1
gpgv=2.2.40-1.1+deb12u2
grep=3.8-5
gzip=1.12-1
hostname=3.23+nmu1
ibverbs-providers=44.0-2
init-system-helpers=1.65.2+deb12u1
libacl1=2.3.1-3
libapt-pkg6.0=2.6.2
libasan8=12.2.0-14+deb12u1
libatomic1=12.2.0-14+deb12u1
libattr1=1:2.5.1-4
libaudit-common=1:3.0.9-1
libaudit1=1:3.0.9-1
libbinutils=2.40-2
libblkid1=2.38.1-5+deb12u3
libbz2-1.0=1.0.8-5+b1
libc-bin=2.36-9+deb12u14
libc-dev-bin=2.36-9+deb12u14
libc6=2.36-9+deb12u14
libc6-dev=2.36-9+deb12u14
libcap-ng0=0.8.3-1+b3
libcap2=1:2.66-4+deb12u3+b1
libcc1-0=12.2.0-14+deb12u1
libcom-err2=1.47.0-2+b2
libcrypt-dev=1:4.4.33-2
libcrypt1=1:4.4.33-2
libctf-nobfd0=2.40-2
libctf0=2.40-2
libdb5.3=5.3.28+dfsg2-1
libdebconfclient0=0.270
libexpat1=2.5.0-1+deb12u5
libexpat1-dev=2.5.0-1+deb12u5
libffi8=3.4.4-1
libfile-find-rule-perl=0.34-4~deb12u1
libgcc-12-dev=12.2.0-14+deb12u1
libgcc-s1=12.2.0-14+deb12u1
libgcrypt20=1.10.1-3+deb12u1
libgdbm-compat4=1.23-3
libgdbm6=1.23-3
libgmp10=2:6.2.1+dfsg1-1.1
libgnutls30=3.7.9-2+deb12u7
libgomp1=12.2.0-14+deb12u1
libgpg-error0=1.46-1
libgprofng0=2.40-2
libgssapi-krb5-2=1.20.1-2+deb12u5
libhogweed6=3.8.1-2
libibverbs1=44.0-2
libidn2-0=2.3.3-1+b1
libisl23=0.25-1.1
libitm1=12.2.0-14+deb12u1
libjansson4=2.14-2
libjs-jquery=3.6.1+dfsg+~3.5.14-1
libjs-sphinxdoc=5.3.0-4
libjs-underscore=1.13.4~dfsg+~1.11.4-3
libk5crypto3=1.20.1-2+deb12u5
libkeyutils1=1.6.3-2
libkrb5-3=1.20.1-2+deb12u5
libkrb5support0=1.20.1-2+deb12u5
liblsan0=12.2.0-14+deb12u1
liblz4-1=1.9.4-1
liblzma5=5.4.1-1+deb12u2
libmd0=1.0.4-2
libmount1=2.38.1-5+deb12u3
libmpc3=1.3.1-1
libmpfr6=4.2.0-1
libncursesw6=6.4-4
libnettle8=3.8.1-2
libnl-3-200=3.7.0-0.2+b1
libnl-route-3-200=3.7.0-0.2+b1
libnsl-dev=1.3.0-2
libnsl2=1.3.0-2
libnuma1=2.0.16-1
libnumber-compare-perl=0.03-3
libp11-kit0=0.24.1-2
libpam-modules=1.5.2-6+deb12u2
libpam-modules-bin=1.5.2-6+deb12u2
libpam-runtime=1.5.2-6+deb12u2
libpam0g=1.5.2-6+deb12u2
libpcre2-8-0=10.42-1+deb12u2
libperl5.36=5.36.0-7+deb12u4
libpython3-dev=3.11.2-1+b1
libpython3-stdlib=3.11.2-1+b1
libpython3.11=3.11.2-6+deb12u9
libpython3.11-dev=3.11.2-6+deb12u9
libpython3.11-minimal=3.11.2-6+deb12u9
libpython3.11-stdlib=3.11.2-6+deb12u9
libquadmath0=12.2.0-14+deb12u1
librdmacm1=44.0-2
libreadline8=8.2-1.3
libseccomp2=2.5.4-1+deb12u1
libselinux1=3.4-1+b6
libsemanage-common=3.4-1
libsemanage2=3.4-1+b5
libsepol2=3.4-2.1
libsmartcols1=2.38.1-5+deb12u3
libsqlite3-0=3.40.1-2+deb12u2
libssl3=3.0.22-1~deb12u2
libstdc++-12-dev=12.2.0-14+deb12u1
libstdc++6=12.2.0-14+deb12u1
libsystemd0=252.39-1~deb12u2
libtasn1-6=4.19.0-2+deb12u1
libtext-glob-perl=0.11-3
libtinfo6=6.4-4
libtirpc-common=1.3.3+ds-1
libtirpc-dev=1.3.3+ds-1
libtirpc3=1.3.3+ds-1
libtsan2=12.2.0-14+deb12u1
libubsan1=12.2.0-14+deb12u1
libudev1=252.39-1~deb12u2
libunistring2=1.0-2
libuuid1=2.38.1-5+deb12u3
libxxhash0=0.8.1-1
libzstd1=1.5.4+dfsg2-5
linux-libc-dev=6.1.192-2
login=1:4.13+dfsg1-1+deb12u2
mawk=1.3.4.20200120-3.1
media-types=10.0.0
ncurses-base=6.4-4
ncurses-bin=6.4-4
openssl=3.0.22-1~deb12u2
passwd=1:4.13+dfsg1-1+deb12u2
perl=5.36.0-7+deb12u4
perl-base=5.36.0-7+deb12u4
perl-modules-5.36=5.36.0-7+deb12u4
python3=3.11.2-1+b1
python3-dev=3.11.2-1+b1
python3-distutils=3.11.2-3
python3-lib2to3=3.11.2-3
python3-minimal=3.11.2-1+b1
python3.11=3.11.2-6+deb12u9
python3.11-dev=3.11.2-6+deb12u9
python3.11-minimal=3.11.2-6+deb12u9
python3.11-venv=3.11.2-6+deb12u9
readline-common=8.2-1.3
rpcsvc-proto=1.4.3-1
sed=4.9-1+deb12u1
sysvinit-utils=3.06-4
tar=1.34+dfsg-1.2+deb12u1
usrmerge=37~deb12u1
util-linux=2.38.1-5+deb12u3
util-linux-extra=2.38.1-5+deb12u3
zlib1g=1:1.2.13.dfsg-1
zlib1g-dev=1:1.2.13.dfsg-1
PACKAGES
ARG DEBIAN_VERSIONS=locked
RUN case "$DEBIAN_VERSIONS" in \
    locked) packages=$(cat /opt/packages.txt) ;; \
    newest) packages=$(sed 's/=.*//' /opt/packages.txt) ;; \
    none) exit 0 ;; \
    *) echo "DEBIAN_VERSIONS must be locked, newest or none" >&2; exit 2 ;; \
    esac && \
    apt-get update && \
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends --allow-downgrades $packages && \
    rm -rf /var/lib/apt/lists/*
COPY <<'REQUIREMENTS' /opt/requirements.txt
filelock==4.2.11 --hash=sha256:020e229e4bb9d410fc799c07ddf45fa217cba970278f40b30751d94f309b69e2
fsspec==2026.9.0 --hash=sha256:8dd6e646e99ea382bd85f97a45e6b526a442d79423a7dc673f1e2756d05fcb5f
jinja2==3.1.6 --hash=sha256:85ece4451f492d0c13c5dd7c13a64681a86afae63a5f347908daf103ce6d2f67
markupsafe==3.0.4 --hash=sha256:6da83a088f8ef93b2d483a8232a4dbf4d69d3d8496b568a03c56becac43e1808
mpmath==1.3.0 --hash=sha256:a0b2b9fe80bbcd81a6647ff13108738cfb482d481d826cc0e02f5b35e5c88d2c
networkx==3.6.1 --hash=sha256:d47fbf302e7d9cbbb9e2555a0d267983d2aa476bac30e90dfbe5669bd57f3762
numpy==2.4.6 --hash=sha256:89cd468399cfd2504718f0ba50e410dca55a170b61a02ad92bb18c8a65186e93
nvidia-cublas-cu12==12.6.4.1 --hash=sha256:08ed2686e9875d01b58e3cb379c6896df8e76c75e0d4a7f7dace3d7b6d9ef8eb
nvidia-cuda-cupti-cu12==12.6.80 --hash=sha256:6768bad6cab4f19e8292125e5f1ac8aa7d1718704012a0e3272a6f61c4bce132
nvidia-cuda-nvrtc-cu12==12.6.77 --hash=sha256:35b0cc6ee3a9636d5409133e79273ce1f3fd087abb0532d2d2e8fff1fe9efc53
nvidia-cuda-runtime-cu12==12.6.77 --hash=sha256:ba3b56a4f896141e25e19ab287cd71e52a6a0f4b29d0d31609f60e3b4d5219b7
nvidia-cudnn-cu12==9.5.1.17 --hash=sha256:30ac3869f6db17d170e0e556dd6cc5eee02647abc31ca856634d5a40f82c15b2
nvidia-cufft-cu12==11.3.0.4 --hash=sha256:ccba62eb9cef5559abd5e0d54ceed2d9934030f51163df018532142a8ec533e5
nvidia-cufile-cu12==1.11.1.6 --hash=sha256:cc23469d1c7e52ce6c1d55253273d32c565dd22068647f3aa59b3c6b005bf159
nvidia-curand-cu12==10.3.7.77 --hash=sha256:a42cd1344297f70b9e39a1e4f467a4e1c10f1da54ff7a85c12197f6c652c8bdf
nvidia-cusolver-cu12==11.7.1.2 --hash=sha256:e9e49843a7707e42022babb9bcfa33c29857a93b88020c4e4434656a655b698c
nvidia-cusparse-cu12==12.5.4.2 --hash=sha256:7556d9eca156e18184b94947ade0fba5bb47d69cec46bf8660fd2c71a4b48b73
nvidia-cusparselt-cu12==0.6.3 --hash=sha256:e5c8a26c36445dd2e6812f1177978a24e2d37cacce7e090f297a688d1ec44f46
nvidia-nccl-cu12==2.26.2 --hash=sha256:694cf3879a206553cc9d7dbda76b13efaf610fdb70a50cba303de1b0d1530ac6
nvidia-nvjitlink-cu12==12.6.85 --hash=sha256:eedc36df9e88b682efe4309aa16b5b4e78c2407eac59e8c10a6a47535164369a
nvidia-nvtx-cu12==12.6.77 --hash=sha256:b90bed3df379fa79afbd21be8e04a0314336b8ae16768b58f2d34cb1d04cd7d2
pip==26.3 --hash=sha256:f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13
setuptools==84.2.1 --hash=sha256:ca140b45d5325a9478f880e351484f62fef15f336462e449ca0c03c873d589c2
sympy==1.14.0 --hash=sha256:e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5
torch==2.7.1 --hash=sha256:06eea61f859436622e78dd0cdd51dbc8f8c6d76917a9cf0555a333f9eac31ec1
triton==3.3.1 --hash=sha256:b31e3aa26f8cb3cc5bf4e187bf737cbacf17311e1112b781d4a059353dfd731b
typing-extensions==4.16.0 --hash=sha256:481caa481374e813c1b176ada14e97f1f67a4539ce9cfeb3f350d78d6370c2e8
REQUIREMENTS
RUN python3.11 -m venv --without-pip /opt/venv
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=cache,target=/var/cache/envbuild \
    python3.11 -m venv /tmp/tools && \
    /tmp/tools/bin/pip install --quiet --no-cache-dir uv==0.13.9 && \
    /tmp/tools/bin/pip download --quiet --no-cache-dir --no-deps --require-hashes --dest /var/cache/envbuild -r /opt/requirements.txt && \
    env -i PATH="$PATH" HOME=/tmp/tools UV_NO_INSTALLER_METADATA=1 /tmp/tools/bin/uv pip install --quiet --no-config --offline --no-cache --no-index --no-deps --require-hashes --find-links /var/cache/envbuild --python /opt/venv/bin/python -r /opt/requirements.txt && \
    rm -rf /tmp/tools /opt/venv/.lock
ENV HOME="/tmp"
ENV LANG="C.UTF-8"
ENV NVIDIA_DRIVER_CAPABILITIES="compute,utility"
ENV NVIDIA_VISIBLE_DEVICES="all"
ENV PATH="/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENV PYTHONDONTWRITEBYTECODE="1"
ENV TORCHINDUCTOR_CACHE_DIR="/tmp/torchinductor"
ENV TORCH_CUDA_ARCH_LIST="7.0"
ENV TRITON_CACHE_DIR="/tmp/triton"
ENV USER="envbuild"
ENV VIRTUAL_ENV="/opt/venv"
LABEL io.envbuild.lock="sha256:7986873f8a3fe72b96db0dd80652b1ec2206524a673118e3689337c5c7b26940"
CMD ["python"]
