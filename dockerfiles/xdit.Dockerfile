# xdit, lock ecdac02697d5, Python 3.11; made by: envbuild export dockerfile xdit
# docker build -t NAME - < FILE
# with the configuration of pip: docker build --secret id=pip,src=/etc/pip.conf -t NAME - < FILE
# Pinned: the version and sha256 of every wheel.
# Pinned by changed metadata of the packages: nvidia-nccl-cu12==2.26.2 (torch requires ==2.20.5);
# a later pip install keeps the override.
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
accelerate==1.15.0 --hash=sha256:97eacca0b73e45cb867dbf8c5d5d4dc32219544300e0c8992c7334dc2ef33cec
av==18.1.0 --hash=sha256:8a032e8d8ebc73dec079364b9b4a6837638a2d106e8472314e685ffbf163e700
beautifulsoup4==4.15.0 --hash=sha256:d6f88de62e1d4e38ecb1077eb9724cd0eff29d2a08ca16a401e9b9e93f117cf9
certifi==2026.10.18 --hash=sha256:73191c47aaa79da394e8fee2dbc2ec827432cab56311122c9e47abf79e390f62
charset-normalizer==3.5.2 --hash=sha256:211d5a3eb6af8f513b8d4ca19a8c1b7accab1b5f0d3175f9826b03c1a920dc1f
diffusers==0.35.2 --hash=sha256:d50d5e74fdd6dcf55e5c1d304bc52cc7c2659abd1752740d736d7b54078b4db5
distvae==0.1.0 --hash=sha256:860d77853873eaa7a1dada5c53069e7691117a385ad4afc4c90b19aa98aa87ec
einops==0.8.2 --hash=sha256:54058201ac7087911181bfec4af6091bb59380360f069276601256a76af08193
filelock==4.2.11 --hash=sha256:020e229e4bb9d410fc799c07ddf45fa217cba970278f40b30751d94f309b69e2
fsspec==2026.9.0 --hash=sha256:8dd6e646e99ea382bd85f97a45e6b526a442d79423a7dc673f1e2756d05fcb5f
hf-xet==1.8.0 --hash=sha256:29dab7c904cd1914a0439c6e1306c12c7497c8bd32290fbe563ebf51ca4b6d6d
huggingface-hub==0.36.2 --hash=sha256:48f0c8eac16145dfce371e9d2d7772854a4f591bcb56c9cf548accf531d54270
idna==3.20 --hash=sha256:ab7ae7122974553370f0bdb919e1a960b2cd1bc1ef0276416d896db81c14582c
importlib-metadata==10.2.0 --hash=sha256:c7a4bf1c7479601f6b8e437cfc14f4f77028ba62a8f34ae95cd93d9774dfba51
jinja2==3.1.6 --hash=sha256:85ece4451f492d0c13c5dd7c13a64681a86afae63a5f347908daf103ce6d2f67
lazy-importer==0.1.0 --hash=sha256:bd93fab7bef18e842eea02b839410954d37889140dc64ca4d9680aec6880c739
llvmlite==0.50.0 --hash=sha256:a6ffde00d4be8772a24e3e8b3af6bf86a79e7cf066d944ef56136b3957d707dc
markupsafe==3.0.4 --hash=sha256:6da83a088f8ef93b2d483a8232a4dbf4d69d3d8496b568a03c56becac43e1808
mpmath==1.3.0 --hash=sha256:a0b2b9fe80bbcd81a6647ff13108738cfb482d481d826cc0e02f5b35e5c88d2c
networkx==3.6.1 --hash=sha256:d47fbf302e7d9cbbb9e2555a0d267983d2aa476bac30e90dfbe5669bd57f3762
numba==0.68.1 --hash=sha256:58fe7a3810261cf13797d8aa94c018cfe91e1e8adf634df60eb60ef834f9367b
numpy==1.26.4 --hash=sha256:666dbfb6ec68962c033a450943ded891bed2d54e6755e35e5835d63f4f6931d5
nvidia-cublas-cu12==12.1.3.1 --hash=sha256:ee53ccca76a6fc08fb9701aa95b6ceb242cdaab118c3bb152af4e579af792728
nvidia-cuda-cupti-cu12==12.1.105 --hash=sha256:e54fde3983165c624cb79254ae9818a456eb6e87a7fd4d56a2352c24ee542d7e
nvidia-cuda-nvrtc-cu12==12.1.105 --hash=sha256:339b385f50c309763ca65456ec75e17bbefcbbf2893f462cb8b90584cd27a1c2
nvidia-cuda-runtime-cu12==12.1.105 --hash=sha256:6e258468ddf5796e25f1dc591a31029fa317d97a0a94ed93468fc86301d61e40
nvidia-cudnn-cu12==9.1.0.70 --hash=sha256:165764f44ef8c61fcdfdfdbe769d687e06374059fbb388b6c89ecb0e28793a6f
nvidia-cufft-cu12==11.0.2.54 --hash=sha256:794e3948a1aa71fd817c3775866943936774d1c14e7628c74f6f7417224cdf56
nvidia-curand-cu12==10.3.2.106 --hash=sha256:9d264c5036dde4e64f1de8c50ae753237c12e0b1348738169cd0f8a536c0e1e0
nvidia-cusolver-cu12==11.4.5.107 --hash=sha256:8a7ec542f0412294b15072fa7dab71d31334014a69f953004ea7a118206fe0dd
nvidia-cusparse-cu12==12.1.0.106 --hash=sha256:f3b50f42cf363f86ab21f720998517a659a48131e8d538dc02f8768237bd884c
nvidia-nccl-cu12==2.26.2 --hash=sha256:694cf3879a206553cc9d7dbda76b13efaf610fdb70a50cba303de1b0d1530ac6
nvidia-nvjitlink-cu12==12.9.86 --hash=sha256:e3f1171dbdc83c5932a45f0f4c99180a70de9bd2718c1ab77d14104f6d7147f9
nvidia-nvtx-cu12==12.1.105 --hash=sha256:dc21cf308ca5691e7c04d962e213f8a4aa9bbfa23d95412f452254c2caeb09e5
packaging==26.3 --hash=sha256:d7193f7c8e4e93f444fde0262bf90af30e16fa0ad0ad44cb553c87339b23cd1c
peft==0.21.2 --hash=sha256:106ab6077ff72c54d21577f9af5970e34bac7582cb14209f7b2b511e322a4eae
pillow==13.0.0 --hash=sha256:a625df9a2a5597fa5e5266e01aefc82604bb85d291e3547981e863560d75da6c
pip==26.3 --hash=sha256:f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13
protobuf==7.36.2 --hash=sha256:89f23aa53c24553a2416fd4fd1ec06f74fa42b14b546d8883128813f775bbfd2
psutil==7.2.2 --hash=sha256:076a2d2f923fd4821644f5ba89f059523da90dc9014e85f8e45a5774ca5bc6f9
pyyaml==6.0.3 --hash=sha256:b8bb0864c5a28024fac8a632c443c87c5aa6f215c0b126c449ae1a150412f31d
regex==2026.11.15 --hash=sha256:aafeb64c8569d69edfbf772feba49d2a001d3dca0f43e6a71e3735587ecb8222
requests==2.34.2 --hash=sha256:2a0d60c172f83ac6ab31e4554906c0f3b3588d37b5cb939b1c061f4907e278e0
safetensors==0.8.0 --hash=sha256:fd6f3f93c9a0a7cc2788ee63fb763353d4bd2e89b0751bc78fcf7dda00bea774
sentencepiece==0.2.3 --hash=sha256:141dc0bef1e28a5cf7e41c8354ad6cc14525758278045286dcb5429b9906d39f
soupsieve==2.10 --hash=sha256:8596eb8967d744174820280fa62b4542a2e955bfaccca73ed8a13c6eb8e9b502
sympy==1.14.0 --hash=sha256:e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5
tokenizers==0.22.2 --hash=sha256:369cc9fc8cc10cb24143873a0d95438bb8ee257bb80c71989e3ee290e8d72c67
torch==2.4.1 --hash=sha256:0b5f88afdfa05a335d80351e3cea57d38e578c8689f751d35e0ff36bce872113
tqdm==4.70.1 --hash=sha256:c293e525e6fef9c20e8728fd4612df02a0aa31bb5fe91ecd93e123b1b7bffa73
transformers==4.57.6 --hash=sha256:4c9e9de11333ddfe5114bc872c9f370509198acf0b87a832a0ab9458e2bd0550
triton==3.0.0 --hash=sha256:5ce8520437c602fb633f1324cc3871c47bee3b67acf9756c1a66309b60e3216c
typing-extensions==4.16.0 --hash=sha256:481caa481374e813c1b176ada14e97f1f67a4539ce9cfeb3f350d78d6370c2e8
urllib3==2.8.0 --hash=sha256:0cf3cae568d36aa9576b28dfb35f11328f1cb974ca7647d9475ebb86c75ac6e3
yunchang==0.6.4 --hash=sha256:cce4295058e9de2c0592d69cfe1e3e679711def5f315fd1b68dbed2d54bc9255
zipp==4.1.2 --hash=sha256:b30cb6cd253122169c47de245ca24a86bac2a5d3802ba15bf7ba6414eb9e144d
REQUIREMENTS
RUN python3.11 -m venv --without-pip /opt/venv
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=cache,target=/var/cache/envbuild \
    python3.11 -m venv /tmp/tools && \
    /tmp/tools/bin/pip install --quiet --no-cache-dir uv==0.13.9 && \
    /tmp/tools/bin/pip download --quiet --no-cache-dir --no-deps --require-hashes --dest /var/cache/envbuild -r /opt/requirements.txt && \
    env -i PATH="$PATH" HOME=/tmp/tools UV_NO_INSTALLER_METADATA=1 /tmp/tools/bin/uv pip install --quiet --no-config --offline --no-cache --no-index --no-deps --require-hashes --find-links /var/cache/envbuild --python /opt/venv/bin/python -r /opt/requirements.txt && \
    rm -rf /tmp/tools /opt/venv/.lock
RUN sed -i -e 's/^\(Requires-Dist: *nvidia[-_.]\+nccl[-_.]\+cu12 *\(\[[^]]*\]\)\?\) *(\?[<>=!~][^;]*/\1==2.26.2 /I' /opt/venv/lib/python3.11/site-packages/*.dist-info/METADATA
RUN if /opt/venv/bin/python -m pip check | grep -i -e ' has requirement nvidia[-_.]\+nccl[-_.]\+cu12[^-_.a-z0-9]'; then exit 1; fi
ENV HOME="/tmp"
ENV LANG="C.UTF-8"
ENV NVIDIA_DRIVER_CAPABILITIES="compute,utility"
ENV NVIDIA_VISIBLE_DEVICES="all"
ENV PATH="/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENV PYTHONDONTWRITEBYTECODE="1"
ENV TORCHINDUCTOR_CACHE_DIR="/tmp/torchinductor"
ENV TORCH_CUDA_ARCH_LIST="8.0"
ENV TRITON_CACHE_DIR="/tmp/triton"
ENV USER="envbuild"
ENV VIRTUAL_ENV="/opt/venv"
LABEL io.envbuild.lock="sha256:ecdac02697d565cf0435e2d0c013fcc37567d735f41c94b02c707996dab1c648"
CMD ["python"]
