# onediff-svd, lock 418282f7b9da, Python 3.9; made by: envbuild export dockerfile onediff-svd
# docker build -t NAME - < FILE
# with the configuration of pip: docker build --secret id=pip,src=/etc/pip.conf -t NAME - < FILE
# Pinned: the version and sha256 of every wheel.
# Pinned: the version of every Debian package. Most mirrors keep only the newest version: if another one
# is missing, use a snapshot of the mirror, or --build-arg DEBIAN_VERSIONS=newest. With
# DEBIAN_VERSIONS=none the base image (BASE) must have the packages.
# Not pinned: the base image, a tag.
# Not pinned: the sha256 of uv 0.13.9, which installs the wheels.
ARG BASE=debian:bullseye-slim
FROM ${BASE}
USER 0
ENTRYPOINT []
COPY <<'PACKAGES' /opt/packages.txt
adduser=3.118+deb11u1
apt=2.2.4
base-files=11.1+deb11u11
base-passwd=3.5.51
bash=5.1-2+deb11u1
binutils=2.35.2-2
binutils-common=2.35.2-2
binutils-x86-64-linux-gnu=2.35.2-2
bsdutils=1:2.36.1-8+deb11u2
ca-certificates=20250419~deb12u1~deb11u1
coreutils=8.32-4+b1
cpp=4:10.2.1-1
cpp-10=10.2.1-6
dash=0.5.11+git20200708+dd9ef66-5
debconf=1.5.77
debian-archive-keyring=2021.1.1+deb11u1
debianutils=4.11.2
diffutils=1:3.7-5
dpkg=1.20.14
findutils=4.8.0-1
g++=4:10.2.1-1
g++-10=10.2.1-6
gcc=4:10.2.1-1
gcc-10=10.2.1-6
gcc-10-base=10.2.1-6
gpgv=2.2.27-2+deb11u3
grep=3.6-1+deb11u1
gzip=1.10-4+deb11u1
hostname=3.23
ibverbs-providers=33.2-1
init-system-helpers=1.60
libacl1=2.2.53-10
libapt-pkg6.0=2.2.4
libasan6=10.2.1-6
libatomic1=10.2.1-6
libattr1=1:2.4.48-6
libaudit-common=1:3.0-2
libaudit1=1:3.0-2
libbinutils=2.35.2-2
libblkid1=2.36.1-8+deb11u2
libbz2-1.0=1.0.8-4
libc-bin=2.31-13+deb11u14
libc-dev-bin=2.31-13+deb11u14
libc6=2.31-13+deb11u14
libc6-dev=2.31-13+deb11u14
libcap-ng0=0.7.9-2.2+b1
libcc1-0=10.2.1-6
libcom-err2=1.46.2-2+deb11u1
libcrypt-dev=1:4.4.18-4
libcrypt1=1:4.4.18-4
libctf-nobfd0=2.35.2-2
libctf0=2.35.2-2
libdb5.3=5.3.28+dfsg1-0.8
libdebconfclient0=0.260
libexpat1=2.2.10-2+deb11u7
libexpat1-dev=2.2.10-2+deb11u7
libffi7=3.3-6
libgcc-10-dev=10.2.1-6
libgcc-s1=10.2.1-6
libgcrypt20=1.8.7-6
libgmp10=2:6.2.1+dfsg-1+deb11u1
libgnutls30=3.7.1-5+deb11u10
libgomp1=10.2.1-6
libgpg-error0=1.38-2
libgssapi-krb5-2=1.18.3-6+deb11u8
libhogweed6=3.7.3-1
libibverbs1=33.2-1
libidn2-0=2.3.0-5
libisl23=0.23-1
libitm1=10.2.1-6
libjs-jquery=3.5.1+dfsg+~3.5.5-7
libjs-sphinxdoc=3.4.3-2
libjs-underscore=1.9.1~dfsg-3
libk5crypto3=1.18.3-6+deb11u8
libkeyutils1=1.6.1-2
libkrb5-3=1.18.3-6+deb11u8
libkrb5support0=1.18.3-6+deb11u8
liblsan0=10.2.1-6
liblz4-1=1.9.3-2
liblzma5=5.2.5-2.1~deb11u2
libmount1=2.36.1-8+deb11u2
libmpc3=1.2.0-1
libmpdec3=2.5.1-1
libmpfr6=4.1.0-3
libncursesw6=6.2+20201114-2+deb11u2
libnettle8=3.7.3-1
libnl-3-200=3.4.0-1+b1
libnl-route-3-200=3.4.0-1+b1
libnsl-dev=1.3.0-2
libnsl2=1.3.0-2
libnuma1=2.0.12-1+b1
libp11-kit0=0.23.22-1
libpam-modules=1.4.0-9+deb11u2
libpam-modules-bin=1.4.0-9+deb11u2
libpam-runtime=1.4.0-9+deb11u2
libpam0g=1.4.0-9+deb11u2
libpcre2-8-0=10.36-2+deb11u1
libpcre3=2:8.39-13
libpython3-dev=3.9.2-3
libpython3-stdlib=3.9.2-3
libpython3.9=3.9.2-1+deb11u7
libpython3.9-dev=3.9.2-1+deb11u7
libpython3.9-minimal=3.9.2-1+deb11u7
libpython3.9-stdlib=3.9.2-1+deb11u7
libquadmath0=10.2.1-6
librdmacm1=33.2-1
libreadline8=8.1-1
libseccomp2=2.5.1-1+deb11u1
libselinux1=3.1-3
libsemanage-common=3.1-1
libsemanage1=3.1-1+b2
libsepol1=3.1-1+deb11u1
libsmartcols1=2.36.1-8+deb11u2
libsqlite3-0=3.34.1-3+deb11u1
libssl1.1=1.1.1w-0+deb11u8
libstdc++-10-dev=10.2.1-6
libstdc++6=10.2.1-6
libsystemd0=247.3-7+deb11u8
libtasn1-6=4.16.0-2+deb11u2
libtinfo6=6.2+20201114-2+deb11u2
libtirpc-common=1.3.1-1+deb11u1
libtirpc-dev=1.3.1-1+deb11u1
libtirpc3=1.3.1-1+deb11u1
libtsan0=10.2.1-6
libubsan1=10.2.1-6
libudev1=247.3-7+deb11u8
libunistring2=0.9.10-4
libuuid1=2.36.1-8+deb11u2
libxxhash0=0.8.0-2
libzstd1=1.4.8+dfsg-2.1
linux-libc-dev=5.10.262-1
login=1:4.8.1-1+deb11u1
lsb-base=11.1.0
mawk=1.3.4.20200120-2
media-types=4.0.0
ncurses-base=6.2+20201114-2+deb11u2
ncurses-bin=6.2+20201114-2+deb11u2
openssl=1.1.1w-0+deb11u8
passwd=1:4.8.1-1+deb11u1
perl-base=5.32.1-4+deb11u5
python3=3.9.2-3
python3-dev=3.9.2-3
python3-distutils=3.9.2-1
python3-lib2to3=3.9.2-1
python3-minimal=3.9.2-3
python3.9=3.9.2-1+deb11u7
python3.9-dev=3.9.2-1+deb11u7
python3.9-minimal=3.9.2-1+deb11u7
python3.9-venv=3.9.2-1+deb11u7
readline-common=8.1-1
sed=4.7-1
sysvinit-utils=2.96-7+deb11u1
tar=1.34+dfsg-1+deb11u1
tzdata=2026b-0+deb11u1
util-linux=2.36.1-8+deb11u2
zlib1g=1:1.2.11.dfsg-2+deb11u2
zlib1g-dev=1:1.2.11.dfsg-2+deb11u2
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
accelerate==1.10.1 --hash=sha256:3621cff60b9a27ce798857ece05e2b9f56fcc71631cfb31ccf71f0359c311f11
certifi==2026.10.19.post1 --hash=sha256:1324c476b4811eff41a8bc2122cd0bbd4d9c7234c725446d99ab1612b3a7fdd2
charset-normalizer==3.5.3 --hash=sha256:39229c222445415db07a0be4dff8ad1addc3126644d7aa72d73f1575b637d69e
diffusers==0.29.2 --hash=sha256:d5e9bb13c8097b4eed10df23d1294d2e5a418f53e3f89c7ef228b5b982970428
filelock==3.19.1 --hash=sha256:d38e30481def20772f5baf097c122c3babc4fcdb7e14e57049eb9d88c6dc017d
fsspec==2025.10.0 --hash=sha256:7c7712353ae7d875407f97715f0e1ffcc21e33d5b24556cb1e090ae9409ec61d
huggingface-hub==0.25.0 --hash=sha256:e2f357b35d72d5012cfd127108c4e14abcd61ba4ebc90a5a374dc2456cb34e12
idna==3.20 --hash=sha256:ab7ae7122974553370f0bdb919e1a960b2cd1bc1ef0276416d896db81c14582c
importlib-metadata==8.7.1 --hash=sha256:5a1f80bf1daa489495071efbb095d75a634cf28a8bc299581244063b53176151
jinja2==3.1.6 --hash=sha256:85ece4451f492d0c13c5dd7c13a64681a86afae63a5f347908daf103ce6d2f67
markupsafe==3.0.4 --hash=sha256:5e8b3d0b18fd623afa12ecb2ce8d8becef69f9b5440c6330c7972200e0bb84b0
mpmath==1.3.0 --hash=sha256:a0b2b9fe80bbcd81a6647ff13108738cfb482d481d826cc0e02f5b35e5c88d2c
networkx==3.2.1 --hash=sha256:f18c69adc97877c42332c170849c96cefa91881c99a7cb3e95b7c659ebdc1ec2
numpy==1.26.4 --hash=sha256:f870204a840a60da0b12273ef34f7051e98c3b5961b61b0c2c1be6dfd64fbcd3
nvidia-cublas-cu12==12.1.3.1 --hash=sha256:ee53ccca76a6fc08fb9701aa95b6ceb242cdaab118c3bb152af4e579af792728
nvidia-cuda-cupti-cu12==12.1.105 --hash=sha256:e54fde3983165c624cb79254ae9818a456eb6e87a7fd4d56a2352c24ee542d7e
nvidia-cuda-nvrtc-cu12==12.1.105 --hash=sha256:339b385f50c309763ca65456ec75e17bbefcbbf2893f462cb8b90584cd27a1c2
nvidia-cuda-runtime-cu12==12.1.105 --hash=sha256:6e258468ddf5796e25f1dc591a31029fa317d97a0a94ed93468fc86301d61e40
nvidia-cudnn-cu12==8.9.2.26 --hash=sha256:5ccb288774fdfb07a7e7025ffec286971c06d8d7b4fb162525334616d7629ff9
nvidia-cufft-cu12==11.0.2.54 --hash=sha256:794e3948a1aa71fd817c3775866943936774d1c14e7628c74f6f7417224cdf56
nvidia-curand-cu12==10.3.2.106 --hash=sha256:9d264c5036dde4e64f1de8c50ae753237c12e0b1348738169cd0f8a536c0e1e0
nvidia-cusolver-cu12==11.4.5.107 --hash=sha256:8a7ec542f0412294b15072fa7dab71d31334014a69f953004ea7a118206fe0dd
nvidia-cusparse-cu12==12.1.0.106 --hash=sha256:f3b50f42cf363f86ab21f720998517a659a48131e8d538dc02f8768237bd884c
nvidia-nccl-cu12==2.18.1 --hash=sha256:1a6c4acefcbebfa6de320f412bf7866de856e786e0462326ba1bac40de0b5e71
nvidia-nvjitlink-cu12==12.9.86 --hash=sha256:e3f1171dbdc83c5932a45f0f4c99180a70de9bd2718c1ab77d14104f6d7147f9
nvidia-nvtx-cu12==12.1.105 --hash=sha256:dc21cf308ca5691e7c04d962e213f8a4aa9bbfa23d95412f452254c2caeb09e5
onediff==1.2.0 --hash=sha256:84bb2285ae7f38e450229779ab96b591e4f530e1f22b7320f41b06f7aec181a3
packaging==26.3 --hash=sha256:d7193f7c8e4e93f444fde0262bf90af30e16fa0ad0ad44cb553c87339b23cd1c
pillow==11.3.0 --hash=sha256:cadc9e0ea0a2431124cde7e1697106471fc4c1da01530e679b2391c37d3fbb3a
pip==26.0.1 --hash=sha256:bdb1b08f4274833d62c1aa29e20907365a2ceb950410df15fc9521bad440122b
psutil==7.2.2 --hash=sha256:076a2d2f923fd4821644f5ba89f059523da90dc9014e85f8e45a5774ca5bc6f9
pyyaml==6.0.3 --hash=sha256:0150219816b6a1fa26fb4699fb7daa9caf09eb1999f3b70fb6e786805e80375a
regex==2026.1.15 --hash=sha256:55e9d0118d97794367309635df398bdfd7c33b93e2fdfa0b239661cd74b4c14e
requests==2.32.5 --hash=sha256:2462f94637a34fd532264295e186976db0f5d453d1cdd31473c85a6a161affb6
safetensors==0.7.0 --hash=sha256:dac7252938f0696ddea46f5e855dd3138444e82236e3be475f54929f0c510d48
sympy==1.14.0 --hash=sha256:e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5
tokenizers==0.19.1 --hash=sha256:b4c89aa46c269e4e70c4d4f9d6bc644fcc39bb409cb2a81227923404dd6f5227
torch==2.1.0 --hash=sha256:556d8dd3e0c290ed9d4d7de598a213fb9f7c59135b4fee144364a8a887016a55
tqdm==4.70.1 --hash=sha256:c293e525e6fef9c20e8728fd4612df02a0aa31bb5fe91ecd93e123b1b7bffa73
transformers==4.41.2 --hash=sha256:05555d20e43f808de1ef211ab64803cdb513170cef70d29a888b589caebefc67
triton==2.1.0 --hash=sha256:21544e522c02005a626c8ad63d39bdff2f31d41069592919ef281e964ed26446
typing-extensions==4.16.0 --hash=sha256:481caa481374e813c1b176ada14e97f1f67a4539ce9cfeb3f350d78d6370c2e8
urllib3==2.6.3 --hash=sha256:bf272323e553dfb2e87d9bfd225ca7b0f467b919d7bbd355436d3fd37cb0acd4
zipp==3.23.1 --hash=sha256:0b3596c50a5c700c9cb40ba8d86d9f2cc4807e9bedb06bcdf7fac85633e444dc
REQUIREMENTS
RUN python3.9 -m venv --without-pip /opt/venv
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=cache,target=/var/cache/envbuild \
    python3.9 -m venv /tmp/tools && \
    /tmp/tools/bin/pip install --quiet --no-cache-dir uv==0.13.9 && \
    /tmp/tools/bin/pip download --quiet --no-cache-dir --no-deps --require-hashes --dest /var/cache/envbuild -r /opt/requirements.txt && \
    env -i PATH="$PATH" HOME=/tmp/tools UV_NO_INSTALLER_METADATA=1 /tmp/tools/bin/uv pip install --quiet --no-config --offline --no-cache --no-index --no-deps --require-hashes --find-links /var/cache/envbuild --python /opt/venv/bin/python -r /opt/requirements.txt && \
    rm -rf /tmp/tools /opt/venv/.lock
ENV ENVBUILD_DTYPE="float16"
ENV HOME="/tmp"
ENV LANG="C.UTF-8"
ENV NVIDIA_DRIVER_CAPABILITIES="compute,utility"
ENV NVIDIA_TF32_OVERRIDE="0"
ENV NVIDIA_VISIBLE_DEVICES="all"
ENV ONEFLOW_ATTENTION_ALLOW_HALF_PRECISION_ACCUMULATION="0"
ENV ONEFLOW_ATTENTION_ALLOW_HALF_PRECISION_SCORE_ACCUMULATION_MAX_M="0"
ENV ONEFLOW_CONV_ALLOW_HALF_PRECISION_ACCUMULATION="0"
ENV ONEFLOW_MATMUL_ALLOW_HALF_PRECISION_ACCUMULATION="0"
ENV PATH="/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENV PYTHONDONTWRITEBYTECODE="1"
ENV TORCHINDUCTOR_CACHE_DIR="/tmp/torchinductor"
ENV TORCH_CUDA_ARCH_LIST="7.0;8.0"
ENV TRITON_CACHE_DIR="/tmp/triton"
ENV USER="envbuild"
ENV VIRTUAL_ENV="/opt/venv"
LABEL io.envbuild.lock="sha256:418282f7b9dac67e3278fb6a09929f6c0f32777373c29eb33dcbdcf74146438e"
CMD ["python"]
