# h20, lock 4e30bc1bd7fd, Python 3.11; made by: envbuild export dockerfile h20
# docker build -t NAME - < FILE
# with the configuration of pip: docker build --secret id=pip,src=/etc/pip.conf -t NAME - < FILE
# Pinned: the version and sha256 of every wheel.
# Pinned: the version of every Debian package. Most mirrors keep only the newest version: if another one
# is missing, use a snapshot of the mirror, or --build-arg DEBIAN_VERSIONS=newest. With
# DEBIAN_VERSIONS=none the base image (BASE) must have the packages.
# Not pinned: the base image, a tag.
# Not pinned: the sha256 of uv 0.13.9, which installs the wheels.
# Left out: apex, compiled from git 6424da3b4faa6c8f062da4a48c424fff3f02d42d
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
cuda-bindings==13.5.0 --hash=sha256:08b7e8d674c3266facb00453a7e34ea7d3ea965c2f594bb728f269f45f39fbe2
cuda-pathfinder==1.9.0 --hash=sha256:622df7440f7702f36b7a02a1699aa0b084fe04034d9939188fee9b16d0c36366
cuda-toolkit==13.0.3.0 --hash=sha256:d693caaa261214ddd7dbb60d68e71cbed884e68c2be7509778f3051da0b91c3f
filelock==4.2.11 --hash=sha256:020e229e4bb9d410fc799c07ddf45fa217cba970278f40b30751d94f309b69e2
fsspec==2026.9.0 --hash=sha256:8dd6e646e99ea382bd85f97a45e6b526a442d79423a7dc673f1e2756d05fcb5f
jinja2==3.1.6 --hash=sha256:85ece4451f492d0c13c5dd7c13a64681a86afae63a5f347908daf103ce6d2f67
markupsafe==3.0.4 --hash=sha256:6da83a088f8ef93b2d483a8232a4dbf4d69d3d8496b568a03c56becac43e1808
mpmath==1.3.0 --hash=sha256:a0b2b9fe80bbcd81a6647ff13108738cfb482d481d826cc0e02f5b35e5c88d2c
networkx==3.6.1 --hash=sha256:d47fbf302e7d9cbbb9e2555a0d267983d2aa476bac30e90dfbe5669bd57f3762
numpy==2.4.6 --hash=sha256:89cd468399cfd2504718f0ba50e410dca55a170b61a02ad92bb18c8a65186e93
nvidia-cublas==13.1.1.3 --hash=sha256:37936a16db8fe4ac1f065c2139360608a543a09275cb1a1af612e08cfa065436
nvidia-cuda-cupti==13.0.85 --hash=sha256:4eb01c08e859bf924d222250d2e8f8b8ff6d3db4721288cf35d14252a4d933c8
nvidia-cuda-nvrtc==13.0.88 --hash=sha256:ad9b6d2ead2435f11cbb6868809d2adeeee302e9bb94bcf0539c7a40d80e8575
nvidia-cuda-runtime==13.0.96 --hash=sha256:7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548
nvidia-cudnn-cu13==9.24.0.43 --hash=sha256:71f181cd810e90f9b6023b01186fe82d13d65f0ec098581ee201d39fad769e4b
nvidia-cufft==12.0.0.61 --hash=sha256:6c44f692dce8fd5ffd3e3df134b6cdb9c2f72d99cf40b62c32dde45eea9ddad3
nvidia-cufile==1.15.1.6 --hash=sha256:08a3ecefae5a01c7f5117351c64f17c7c62efa5fffdbe24fc7d298da19cd0b44
nvidia-curand==10.4.0.35 --hash=sha256:1aee33a5da6e1db083fe2b90082def8915f30f3248d5896bcec36a579d941bfc
nvidia-cusolver==12.0.4.66 --hash=sha256:0a759da5dea5c0ea10fd307de75cdeb59e7ea4fcb8add0924859b944babf1112
nvidia-cusparse==12.6.3.3 --hash=sha256:2b3c89c88d01ee0e477cb7f82ef60a11a4bcd57b6b87c33f789350b59759360b
nvidia-cusparselt-cu13==0.8.1 --hash=sha256:786ce87568c303fadb5afcc7102d454cd3040d75f6f8626f5db460d1871f4dd0
nvidia-nccl-cu13==2.30.7 --hash=sha256:cefa7fdb9710efd0f39c5f1be1d61ff6fc9a996c451265bd7fbdcf9455ed4b50
nvidia-nvjitlink==13.5.37 --hash=sha256:280d7cb9649704145f074b8dbde500de04ce02d0872e066e20a83c17bcaa93eb
nvidia-nvshmem-cu13==3.4.5 --hash=sha256:290f0a2ee94c9f3687a02502f3b9299a9f9fe826e6d0287ee18482e78d495b80
nvidia-nvtx==13.0.85 --hash=sha256:4936d1d6780fbe68db454f5e72a42ff64d1fd6397df9f363ae786930fd5c1cd4
packaging==26.4 --hash=sha256:81383611a09c1bc0b08b76e0fd5829d7c6824c65b27a6aee339da133f4233ea2
pip==26.3 --hash=sha256:f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13
setuptools==84.2.1 --hash=sha256:ca140b45d5325a9478f880e351484f62fef15f336462e449ca0c03c873d589c2
sympy==1.14.0 --hash=sha256:e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5
torch==2.14.0 --hash=sha256:8d9e232b6376c62f3090237889fb1cb6887c0ece9f73e6c1052e80fc1481f999
triton==3.8.0 --hash=sha256:68988ac85d5e7086baeda0ddc175af9667db7529b3c5e11a5c0601b8bef2200a
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
ENV TORCH_CUDA_ARCH_LIST="9.0"
ENV TRITON_CACHE_DIR="/tmp/triton"
ENV USER="envbuild"
ENV VIRTUAL_ENV="/opt/venv"
LABEL io.envbuild.lock="sha256:4e30bc1bd7fda123215ae7268b793ab42698dd12262eacac90390a6dc94283b1"
CMD ["python"]
