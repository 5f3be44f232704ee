# xdit-apex, lock d947c20bb4f5, Python 3.11; made by: envbuild export dockerfile xdit-apex
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
accelerate==1.15.0 --hash=sha256:97eacca0b73e45cb867dbf8c5d5d4dc32219544300e0c8992c7334dc2ef33cec
annotated-doc==0.0.7 --hash=sha256:6bc31bbbec6dfaaedc1676dbc11dbda96fe22a2b5c400e9ebad113fec44a9dc6
annotated-types==0.8.0 --hash=sha256:f072f4d804ea359e4eaf198b1af7a8b0943881a87f31bb764f8bf219bb9419e0
anyio==4.16.0 --hash=sha256:c66ae634e0b8228396b801741beb3294326d4b6102f7bba4041c0dfb58c29026
av==18.1.0 --hash=sha256:8a032e8d8ebc73dec079364b9b4a6837638a2d106e8472314e685ffbf163e700
beautifulsoup4==4.15.0 --hash=sha256:d6f88de62e1d4e38ecb1077eb9724cd0eff29d2a08ca16a401e9b9e93f117cf9
certifi==2026.10.18 --hash=sha256:73191c47aaa79da394e8fee2dbc2ec827432cab56311122c9e47abf79e390f62
charset-normalizer==3.5.2 --hash=sha256:211d5a3eb6af8f513b8d4ca19a8c1b7accab1b5f0d3175f9826b03c1a920dc1f
click==8.5.1 --hash=sha256:8bb5376d2006950386f8c6427613334a2acadc5f559cb80e638d00b4df957e37
cuda-bindings==13.5.0 --hash=sha256:08b7e8d674c3266facb00453a7e34ea7d3ea965c2f594bb728f269f45f39fbe2
cuda-pathfinder==1.9.0 --hash=sha256:622df7440f7702f36b7a02a1699aa0b084fe04034d9939188fee9b16d0c36366
cuda-toolkit==13.0.2 --hash=sha256:b198824cf2f54003f50d64ada3a0f184b42ca0846c1c94192fa269ecd97a66eb
diffusers==0.42.1 --hash=sha256:9154faa704ce00e0b77f568e0d64786064368528aab5fc14eeea92f87d788014
distvae==0.1.0 --hash=sha256:860d77853873eaa7a1dada5c53069e7691117a385ad4afc4c90b19aa98aa87ec
einops==0.8.2 --hash=sha256:54058201ac7087911181bfec4af6091bb59380360f069276601256a76af08193
filelock==4.2.11 --hash=sha256:020e229e4bb9d410fc799c07ddf45fa217cba970278f40b30751d94f309b69e2
fsspec==2026.9.0 --hash=sha256:8dd6e646e99ea382bd85f97a45e6b526a442d79423a7dc673f1e2756d05fcb5f
h11==0.16.0 --hash=sha256:63cf8bbe7522de3bf65932fda1d9c2772064ffb3dae62d55932da54b31cb6c86
hf-xet==1.8.0 --hash=sha256:29dab7c904cd1914a0439c6e1306c12c7497c8bd32290fbe563ebf51ca4b6d6d
httpcore2==2.16.2 --hash=sha256:16051ae2a42f776007543f32de9349a317b23d2cbb4e1456b4bac0e88b87419a
httpx2==2.16.2 --hash=sha256:f05c13aade4c45dbf1c9060647a1058f0acad62398fad96e741269edb33d46f5
huggingface-hub==2.4.0 --hash=sha256:42ecfd93ede47bdd333daebbf66a32d7bfe2e18752754fe4d2d4f98a0179d801
idna==3.20 --hash=sha256:ab7ae7122974553370f0bdb919e1a960b2cd1bc1ef0276416d896db81c14582c
importlib-metadata==10.2.0 --hash=sha256:c7a4bf1c7479601f6b8e437cfc14f4f77028ba62a8f34ae95cd93d9774dfba51
jinja2==3.1.6 --hash=sha256:85ece4451f492d0c13c5dd7c13a64681a86afae63a5f347908daf103ce6d2f67
lazy-importer==0.1.0 --hash=sha256:bd93fab7bef18e842eea02b839410954d37889140dc64ca4d9680aec6880c739
llvmlite==0.50.0 --hash=sha256:a6ffde00d4be8772a24e3e8b3af6bf86a79e7cf066d944ef56136b3957d707dc
markdown-it-py==4.3.0 --hash=sha256:7aa1511a46c39138de78d9eba92ce47e63124d8003fc98b3a351909e04239efa
markupsafe==3.0.4 --hash=sha256:6da83a088f8ef93b2d483a8232a4dbf4d69d3d8496b568a03c56becac43e1808
mdurl==0.1.2 --hash=sha256:84008a41e51615a49fc9966191ff91509e3c40b939176e643fd50a5c2196b8f8
mpmath==1.3.0 --hash=sha256:a0b2b9fe80bbcd81a6647ff13108738cfb482d481d826cc0e02f5b35e5c88d2c
networkx==3.6.1 --hash=sha256:d47fbf302e7d9cbbb9e2555a0d267983d2aa476bac30e90dfbe5669bd57f3762
numba==0.68.1 --hash=sha256:58fe7a3810261cf13797d8aa94c018cfe91e1e8adf634df60eb60ef834f9367b
numpy==2.4.6 --hash=sha256:89cd468399cfd2504718f0ba50e410dca55a170b61a02ad92bb18c8a65186e93
nvidia-cublas==13.1.0.3 --hash=sha256:ee8722c1f0145ab246bccb9e452153b5e0515fd094c3678df50b2a0888b8b171
nvidia-cuda-cupti==13.0.85 --hash=sha256:4eb01c08e859bf924d222250d2e8f8b8ff6d3db4721288cf35d14252a4d933c8
nvidia-cuda-nvrtc==13.0.88 --hash=sha256:ad9b6d2ead2435f11cbb6868809d2adeeee302e9bb94bcf0539c7a40d80e8575
nvidia-cuda-runtime==13.0.96 --hash=sha256:7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548
nvidia-cudnn-cu13==9.19.0.56 --hash=sha256:d20e1734305e9d68889a96e3f35094d733ff1f83932ebe462753973e53a572bf
nvidia-cufft==12.0.0.61 --hash=sha256:6c44f692dce8fd5ffd3e3df134b6cdb9c2f72d99cf40b62c32dde45eea9ddad3
nvidia-cufile==1.15.1.6 --hash=sha256:08a3ecefae5a01c7f5117351c64f17c7c62efa5fffdbe24fc7d298da19cd0b44
nvidia-curand==10.4.0.35 --hash=sha256:1aee33a5da6e1db083fe2b90082def8915f30f3248d5896bcec36a579d941bfc
nvidia-cusolver==12.0.4.66 --hash=sha256:0a759da5dea5c0ea10fd307de75cdeb59e7ea4fcb8add0924859b944babf1112
nvidia-cusparse==12.6.3.3 --hash=sha256:2b3c89c88d01ee0e477cb7f82ef60a11a4bcd57b6b87c33f789350b59759360b
nvidia-cusparselt-cu13==0.8.0 --hash=sha256:25e30a8a7323935d4ad0340b95a0b69926eee755767e8e0b1cf8dd85b197d3fd
nvidia-nccl-cu13==2.28.9 --hash=sha256:e4553a30f34195f3fa1da02a6da3d6337d28f2003943aa0a3d247bbc25fefc42
nvidia-nvjitlink==13.0.88 --hash=sha256:13a74f429e23b921c1109976abefacc69835f2f433ebd323d3946e11d804e47b
nvidia-nvshmem-cu13==3.4.5 --hash=sha256:290f0a2ee94c9f3687a02502f3b9299a9f9fe826e6d0287ee18482e78d495b80
nvidia-nvtx==13.0.85 --hash=sha256:4936d1d6780fbe68db454f5e72a42ff64d1fd6397df9f363ae786930fd5c1cd4
packaging==26.3 --hash=sha256:d7193f7c8e4e93f444fde0262bf90af30e16fa0ad0ad44cb553c87339b23cd1c
peft==0.21.2 --hash=sha256:106ab6077ff72c54d21577f9af5970e34bac7582cb14209f7b2b511e322a4eae
pillow==13.0.0 --hash=sha256:a625df9a2a5597fa5e5266e01aefc82604bb85d291e3547981e863560d75da6c
pip==26.3 --hash=sha256:f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13
protobuf==7.36.2 --hash=sha256:89f23aa53c24553a2416fd4fd1ec06f74fa42b14b546d8883128813f775bbfd2
psutil==7.2.2 --hash=sha256:076a2d2f923fd4821644f5ba89f059523da90dc9014e85f8e45a5774ca5bc6f9
pydantic==2.14.3 --hash=sha256:3f7b347782ab7e4cf4c798496ae3a82787d9f21ec12676a9c564355eeef8daa8
pydantic-core==2.50.4 --hash=sha256:0574866e05f6adeecc520d87e87dd06210c0a51706341f6ef8421572f5a64444
pygments==2.21.0 --hash=sha256:2363c69b61c4a97c838da3b130dcd6468f4848992b21a82f2a63ec34377137d9
pyyaml==6.0.3 --hash=sha256:b8bb0864c5a28024fac8a632c443c87c5aa6f215c0b126c449ae1a150412f31d
regex==2026.11.15 --hash=sha256:aafeb64c8569d69edfbf772feba49d2a001d3dca0f43e6a71e3735587ecb8222
requests==2.34.2 --hash=sha256:2a0d60c172f83ac6ab31e4554906c0f3b3588d37b5cb939b1c061f4907e278e0
rich==15.0.0 --hash=sha256:33bd4ef74232fb73fe9279a257718407f169c09b78a87ad3d296f548e27de0bb
safetensors==0.8.0 --hash=sha256:fd6f3f93c9a0a7cc2788ee63fb763353d4bd2e89b0751bc78fcf7dda00bea774
sentencepiece==0.2.3 --hash=sha256:141dc0bef1e28a5cf7e41c8354ad6cc14525758278045286dcb5429b9906d39f
setuptools==81.0.0 --hash=sha256:fdd925d5c5d9f62e4b74b30d6dd7828ce236fd6ed998a08d81de62ce5a6310d6
shellingham==1.5.4 --hash=sha256:7ecfff8f2fd72616f7481040475a65b2bf8af90a56c89140852d1120324e8686
soupsieve==2.10 --hash=sha256:8596eb8967d744174820280fa62b4542a2e955bfaccca73ed8a13c6eb8e9b502
sympy==1.14.0 --hash=sha256:e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5
tokenizers==0.23.3 --hash=sha256:376851d22bcf9d650a5c3090bb83e6cf9e895fbf0595369fa4cd43c1f69b5f87
torch==2.11.0 --hash=sha256:7aa2f9bbc6d4595ba72138026b2074be1233186150e9292865e04b7a63b8c67a
tqdm==4.70.1 --hash=sha256:c293e525e6fef9c20e8728fd4612df02a0aa31bb5fe91ecd93e123b1b7bffa73
transformers==5.23.0 --hash=sha256:018e82fd07490ad5bb58414f65e31576033dc7f36bed10c574843f69b90991bf
triton==3.6.0 --hash=sha256:e8e323d608e3a9bfcc2d9efcc90ceefb764a82b99dea12a86d643c72539ad5d3
truststore==0.10.5 --hash=sha256:9aaaedaefaf06d8b206278cf8b5012bc897f485a874503501e12d776df78951c
typer==0.29.2 --hash=sha256:f30731f8ca758368b836b3714872e58e395cef8fcaff918c853b1969ed5274e7
typing-extensions==4.16.0 --hash=sha256:481caa481374e813c1b176ada14e97f1f67a4539ce9cfeb3f350d78d6370c2e8
typing-inspection==0.4.5 --hash=sha256:bc210535442b39e1bf2805e0c7a17dfd6a4ace760c84c7f7d16245d23a6b1c39
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
LABEL io.envbuild.lock="sha256:d947c20bb4f53486e922d7764c3d5fd505ba933e6895fcc3ec34b4cbedf7119d"
CMD ["python"]
