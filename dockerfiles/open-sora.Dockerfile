# open-sora, lock 9eec8d9b5a5e, Python 3.11; made by: envbuild export dockerfile open-sora
# docker build -t NAME - < FILE
# with the configuration of pip: docker build --secret id=pip,src=/etc/pip.conf -t NAME - < FILE
# Pinned: the version and sha256 of every wheel.
# Pinned by changed metadata of the packages: nvidia-cublas-cu12==12.4.5.8 (torch requires ==12.1.3.1);
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
absl-py==2.5.1 --hash=sha256:721200f2f0e9960f2ca9dc3a2a706b201f5f75d812c158f059cbbe29eeafbdb8
accelerate==1.15.0 --hash=sha256:97eacca0b73e45cb867dbf8c5d5d4dc32219544300e0c8992c7334dc2ef33cec
addict==2.4.0 --hash=sha256:249bb56bbfd3cdc2a004ea0ff4c2b6ddc84d53bc2194761636eb314d5cfa5dfc
annotated-types==0.8.0 --hash=sha256:f072f4d804ea359e4eaf198b1af7a8b0943881a87f31bb764f8bf219bb9419e0
anyio==4.16.0 --hash=sha256:c66ae634e0b8228396b801741beb3294326d4b6102f7bba4041c0dfb58c29026
av==13.1.0 --hash=sha256:5ce894d7847897da7be63277a0875bd93c51327134ac226c67978de014c7979f
certifi==2026.10.19.post1 --hash=sha256:1324c476b4811eff41a8bc2122cd0bbd4d9c7234c725446d99ab1612b3a7fdd2
cfgv==3.5.0 --hash=sha256:a8dc6b26ad22ff227d2634a65cb388215ce6cc96bbcc5cfde7641ae87e8dacc0
charset-normalizer==3.5.3 --hash=sha256:2a6f937e0b70133d1f826d0a253331b6fe1a4c874808cc12e16f2fb8177042f4
click==8.5.1 --hash=sha256:8bb5376d2006950386f8c6427613334a2acadc5f559cb80e638d00b4df957e37
contourpy==1.3.3 --hash=sha256:51e79c1f7470158e838808d4a996fa9bac72c498e93d8ebe5119bc1e6becb0db
cwevals==0.0.1b1 --hash=sha256:6936baf0ccdc5d9092abd5c2ab628cedcdae9bb72edfdf730f7aaac19118855a
cycler==0.12.1 --hash=sha256:85cef7cff222d8644161529808465972e51340599459b8ac3ccbac5a854e0d30
distlib==0.4.4 --hash=sha256:cf09d55b1e85a89576b036aeb71550bfd68320f3f21761ca329eadadad918638
distro==1.9.0 --hash=sha256:7bffd925d65168f85027d8da9af6bddab658135b840670a223589bc0c8ef02b2
filelock==4.2.11 --hash=sha256:020e229e4bb9d410fc799c07ddf45fa217cba970278f40b30751d94f309b69e2
fonttools==4.68.0 --hash=sha256:4b9c89b5876f1a74b1341632dfaf4c4c2be565d76c060445df401ebe7a4ceefa
fsspec==2026.9.0 --hash=sha256:8dd6e646e99ea382bd85f97a45e6b526a442d79423a7dc673f1e2756d05fcb5f
ftfy==6.3.1 --hash=sha256:7c70eb532015cd2f9adb53f101fb6c7945988d023a085d127d1573dc49dd0083
googleapis-common-protos==1.76.0 --hash=sha256:59e13344a9f3651aa201a03e2bee815a3bf43a4baf1f9ff8a9b62a840ce25fac
grpcio==1.85.3 --hash=sha256:f2948333a1f462c0e559b5ea436655ed36822fa448f5713d6de2d483bed6e03f
h11==0.16.0 --hash=sha256:63cf8bbe7522de3bf65932fda1d9c2772064ffb3dae62d55932da54b31cb6c86
hf-xet==1.8.0 --hash=sha256:29dab7c904cd1914a0439c6e1306c12c7497c8bd32290fbe563ebf51ca4b6d6d
httpcore==1.0.9 --hash=sha256:2d400746a40668fc9dec9810239072b40b4484b640a8c38fd654a024c7a1bf55
httpcore2==2.16.2 --hash=sha256:16051ae2a42f776007543f32de9349a317b23d2cbb4e1456b4bac0e88b87419a
httpx==0.28.1 --hash=sha256:d909fcccc110f8c7faf814ca82a9a4d816bc5a6dbfea25d6591d6985b8ba59ad
httpx2==2.16.2 --hash=sha256:f05c13aade4c45dbf1c9060647a1058f0acad62398fad96e741269edb33d46f5
huggingface-hub==2.4.0 --hash=sha256:42ecfd93ede47bdd333daebbf66a32d7bfe2e18752754fe4d2d4f98a0179d801
identify==2.6.20 --hash=sha256:6a16b69b93187244e0548cbfd25b3e4a6f9a7a2ad784625c3bec2b8d27b81aaa
idna==3.20 --hash=sha256:ab7ae7122974553370f0bdb919e1a960b2cd1bc1ef0276416d896db81c14582c
jinja2==3.1.6 --hash=sha256:85ece4451f492d0c13c5dd7c13a64681a86afae63a5f347908daf103ce6d2f67
jiter==0.19.0 --hash=sha256:cc4a2b70ecd4f102583344c1f8cc5dc11618665b1889286bb3b4279c19b337dd
kiwisolver==1.5.1 --hash=sha256:95a02752aa032eef4aed01cda6d9b687c669bd0396bf4519eef8bba22a286720
liger-kernel==0.5.2 --hash=sha256:31a7409ac9db20fc77e7caf8ab146f56d37d4a1d22e3cefd08661560a99d0c46
markdown==3.11.3 --hash=sha256:e1a31a112232504d753e5c01bb8c2de90d3f0ba986b063e10770cf7695b09e73
markdown-it-py==4.3.0 --hash=sha256:7aa1511a46c39138de78d9eba92ce47e63124d8003fc98b3a351909e04239efa
markupsafe==3.0.4 --hash=sha256:6da83a088f8ef93b2d483a8232a4dbf4d69d3d8496b568a03c56becac43e1808
matplotlib==3.11.2 --hash=sha256:07d9b9fa60cd4c393692f50d0bb03123242ddf61c99bb0e95e75feb354e7c1a8
mdurl==0.1.2 --hash=sha256:84008a41e51615a49fc9966191ff91509e3c40b939176e643fd50a5c2196b8f8
mmengine==0.10.7 --hash=sha256:262ac976a925562f78cd5fd14dd1bc9b680ed0aa81f0d85b723ef782f99c54ee
mpmath==1.3.0 --hash=sha256:a0b2b9fe80bbcd81a6647ff13108738cfb482d481d826cc0e02f5b35e5c88d2c
networkx==3.6.1 --hash=sha256:d47fbf302e7d9cbbb9e2555a0d267983d2aa476bac30e90dfbe5669bd57f3762
nodeenv==1.12.0 --hash=sha256:80644d65c10cc2be12e3e4b54b3367ff288c7ad24ae75c2dcc65454fc7449d4d
numpy==1.26.4 --hash=sha256:666dbfb6ec68962c033a450943ded891bed2d54e6755e35e5835d63f4f6931d5
nvidia-cublas-cu12==12.4.5.8 --hash=sha256:2fc8da60df463fdefa81e323eef2e36489e1c94335b5358bcb38360adf75ac9b
nvidia-cuda-cupti-cu12==12.1.105 --hash=sha256:e54fde3983165c624cb79254ae9818a456eb6e87a7fd4d56a2352c24ee542d7e
nvidia-cuda-nvrtc-cu12==12.1.105 --hash=sha256:339b385f50c309763ca65456ec75e17bbefcbbf2893f462cb8b90584cd27a1c2
nvidia-cuda-runtime-cu12==12.1.105 --hash=sha256:6e258468ddf5796e25f1dc591a31029fa317d97a0a94ed93468fc86301d61e40
nvidia-cudnn-cu12==9.1.0.70 --hash=sha256:165764f44ef8c61fcdfdfdbe769d687e06374059fbb388b6c89ecb0e28793a6f
nvidia-cufft-cu12==11.0.2.54 --hash=sha256:794e3948a1aa71fd817c3775866943936774d1c14e7628c74f6f7417224cdf56
nvidia-curand-cu12==10.3.2.106 --hash=sha256:9d264c5036dde4e64f1de8c50ae753237c12e0b1348738169cd0f8a536c0e1e0
nvidia-cusolver-cu12==11.4.5.107 --hash=sha256:8a7ec542f0412294b15072fa7dab71d31334014a69f953004ea7a118206fe0dd
nvidia-cusparse-cu12==12.1.0.106 --hash=sha256:f3b50f42cf363f86ab21f720998517a659a48131e8d538dc02f8768237bd884c
nvidia-nccl-cu12==2.20.5 --hash=sha256:057f6bf9685f75215d0c53bf3ac4a10b3e6578351de307abad9e18a99182af56
nvidia-nvjitlink-cu12==12.9.86 --hash=sha256:e3f1171dbdc83c5932a45f0f4c99180a70de9bd2718c1ab77d14104f6d7147f9
nvidia-nvtx-cu12==12.1.105 --hash=sha256:dc21cf308ca5691e7c04d962e213f8a4aa9bbfa23d95412f452254c2caeb09e5
omegaconf==2.4.0 --hash=sha256:f141a664c777582405e3cc6e0545ecc79429e79f844995b1a6e71c35946a025c
openai==3.57.0 --hash=sha256:f97bc74024c06ced8428b56c4a3594066709d3082779bf9d0b4b6092fbf587a8
opencv-python==4.11.0.86 --hash=sha256:6b02611523803495003bd87362db3e1d2a0454a6a63025dc6658a9830570aa0d
opentelemetry-api==1.45.2 --hash=sha256:2cbd737377e710ee740d261c94e93fa0f08e6d037c18f17513cc0a2d94479a34
opentelemetry-exporter-http-transport==0.66b2 --hash=sha256:fd5f5b490c099acda1cd7b909d5e8981436bf18cc8c6098d302d114c271720e9
opentelemetry-exporter-otlp-common==0.66b2 --hash=sha256:ace86efb75489f925f1ef809856ae5f0c7db534e4afdc624530222228b1236a5
opentelemetry-exporter-otlp-proto-common==1.45.2 --hash=sha256:af483b24217028892f017096731b794b196b785025d2e6808874720fd0b05a80
opentelemetry-exporter-otlp-proto-http==1.45.2 --hash=sha256:6e4d025138829d0ee57946930c2ccad6491ad4d92a958e9c7eea69278fe60cfc
opentelemetry-proto==1.45.2 --hash=sha256:03a7ca1b43f89fd5b965d5975902bb2515c0c86e2428b456836e9a6149c6235a
opentelemetry-sdk==1.45.2 --hash=sha256:ff974ea70ee4f1d51e2ec152db37c2b626c7bf82bb3f7d86114fd8704e7199c6
opentelemetry-semantic-conventions==0.66b2 --hash=sha256:4cbe61e5f9275d57ab31708446e7938ef4291ebbe6a7fca6f7a629c5acae87d8
packaging==26.4 --hash=sha256:81383611a09c1bc0b08b76e0fd5829d7c6824c65b27a6aee339da133f4233ea2
pandas==3.0.6 --hash=sha256:47121f9571503f724c9b93e297ab6254ac99c77adf5e9ed085ea419fd585c258
pillow==13.0.0 --hash=sha256:a625df9a2a5597fa5e5266e01aefc82604bb85d291e3547981e863560d75da6c
pip==26.3 --hash=sha256:f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13
platformdirs==4.14.8 --hash=sha256:1e34af590de4d978631b751eb2202f2fee4497537a17c1720b12fcf57b331392
pre-commit==4.7.0 --hash=sha256:2e229038ad3656081b70c27913157e4b636ef306f643f024a8a8e3f0f7b2f877
protobuf==7.36.2 --hash=sha256:89f23aa53c24553a2416fd4fd1ec06f74fa42b14b546d8883128813f775bbfd2
psutil==7.2.2 --hash=sha256:076a2d2f923fd4821644f5ba89f059523da90dc9014e85f8e45a5774ca5bc6f9
pyarrow==26.0.1 --hash=sha256:39cb0f2418282c24bea6ceda77b03e5a8f0a5766b63a8bf194d4e2a2c423548c
pydantic==2.14.4 --hash=sha256:653a2ad9f6d8858529c77c72717d0ea991d6c6837fe683246b2f4b2bbfc3fadc
pydantic-core==2.50.5 --hash=sha256:488319076ec92908b91fc6265ce761f1d78748f69f85518564fd16bf333e1b70
pygments==2.21.0 --hash=sha256:2363c69b61c4a97c838da3b130dcd6468f4848992b21a82f2a63ec34377137d9
pyparsing==3.3.3 --hash=sha256:ece8c00a69cf01b45d0b1dedabb469c90d8caf996d4fda40f147627a122849a4
python-dateutil==4.0.0 --hash=sha256:a5e246f79eb80475e691bf93862cead98decd8a498cf53ba0516fcdc0f50dc1c
python-discovery==1.9.6 --hash=sha256:93b10b90363d4151964cdeee2ec6601f3041b17fc2b253a1c3da7d6e7ddd8337
pyyaml==6.0.4 --hash=sha256:622aa875fa6533f25fedcffe23079357d65a690d462200afed5d8e9d0e01ebee
requests==2.34.2 --hash=sha256:2a0d60c172f83ac6ab31e4554906c0f3b3588d37b5cb939b1c061f4907e278e0
rich==15.0.0 --hash=sha256:33bd4ef74232fb73fe9279a257718407f169c09b78a87ad3d296f548e27de0bb
safetensors==0.8.0 --hash=sha256:fd6f3f93c9a0a7cc2788ee63fb763353d4bd2e89b0751bc78fcf7dda00bea774
setuptools==84.2.1 --hash=sha256:ca140b45d5325a9478f880e351484f62fef15f336462e449ca0c03c873d589c2
sniffio==1.3.1 --hash=sha256:2f6da418d1f1e0fddd844478f41680e794e6051915791a034ff65e5f100525a2
sympy==1.14.0 --hash=sha256:e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5
tensorboard==2.21.0 --hash=sha256:7279316dcb6bd5bc391d623dea841531299cde1887310e8133bc34a996d32255
tensorboard-data-server==0.7.2 --hash=sha256:7e0610d205889588983836ec05dc098e80f97b7e7bbff7e994ebb78f578d0ddb
termcolor==3.3.0 --hash=sha256:cf642efadaf0a8ebbbf4bc7a31cec2f9b5f21a9f726f4ccbb08192c9c26f43a5
torch==2.4.0 --hash=sha256:e743adadd8c8152bb8373543964551a7cb7cc20ba898dc8f9c0cdbe47c283de0
torchvision==0.19.0 --hash=sha256:ec4162dc71d9db7f0b51d0f92491929c1419605ff436e1305e50de13504a1c30
tqdm==4.70.1 --hash=sha256:c293e525e6fef9c20e8728fd4612df02a0aa31bb5fe91ecd93e123b1b7bffa73
triton==3.0.0 --hash=sha256:5ce8520437c602fb633f1324cc3871c47bee3b67acf9756c1a66309b60e3216c
truststore==0.10.5 --hash=sha256:9aaaedaefaf06d8b206278cf8b5012bc897f485a874503501e12d776df78951c
typing-extensions==4.16.0 --hash=sha256:481caa481374e813c1b176ada14e97f1f67a4539ce9cfeb3f350d78d6370c2e8
typing-inspection==0.4.5 --hash=sha256:bc210535442b39e1bf2805e0c7a17dfd6a4ace760c84c7f7d16245d23a6b1c39
tzdata==2026.6 --hash=sha256:0a10eec6e13ef16b627fabed9a5f2ba61a62b1c67f327305f4e7e412a70b4aec
urllib3==2.8.0 --hash=sha256:0cf3cae568d36aa9576b28dfb35f11328f1cb974ca7647d9475ebb86c75ac6e3
virtualenv==21.15.11 --hash=sha256:0390c40275487b5e677a1e559e30204ff061db4c5fec39c81d0dff1b24d2b774
wandb==0.31.0 --hash=sha256:009bcf370598d5e7a3d3bb66e33510f78c17fcc0505f8aa7ecf51dbc4378f979
wcwidth==0.9.4 --hash=sha256:b185c8b927b23af2721be1783499d1cfa5c028b098b0858951b4ae224477f1c2
werkzeug==3.1.9 --hash=sha256:6392e50c78460ba618e5b21f08a71f59c99ce99cdc6cf6e3dd7e6ccca8754fab
xxhash==4.1.0 --hash=sha256:5e713f5db9e1a8aafac59a45cc1ffce11ca507730f5dc12e212ea7b73d9debde
yapf==0.43.0 --hash=sha256:224faffbc39c428cb095818cf6ef5511fdab6f7430a10783fdfb292ccf2852ca
REQUIREMENTS
RUN python3.11 -m venv --without-pip /opt/venv
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=cache,target=/var/cache/envbuild \
    python3.11 -m venv /tmp/tools && \
    /tmp/tools/bin/pip install --quiet --no-cache-dir uv==0.13.9 && \
    /tmp/tools/bin/pip download --quiet --no-cache-dir --no-deps --require-hashes --dest /var/cache/envbuild -r /opt/requirements.txt && \
    env -i PATH="$PATH" HOME=/tmp/tools UV_NO_INSTALLER_METADATA=1 /tmp/tools/bin/uv pip install --quiet --no-config --offline --no-cache --no-index --no-deps --require-hashes --find-links /var/cache/envbuild --python /opt/venv/bin/python -r /opt/requirements.txt && \
    rm -rf /tmp/tools /opt/venv/.lock
RUN sed -i -e 's/^\(Requires-Dist: *nvidia[-_.]\+cublas[-_.]\+cu12 *\(\[[^]]*\]\)\?\) *(\?[<>=!~][^;]*/\1==12.4.5.8 /I' /opt/venv/lib/python3.11/site-packages/*.dist-info/METADATA
RUN if /opt/venv/bin/python -m pip check | grep -i -e ' has requirement nvidia[-_.]\+cublas[-_.]\+cu12[^-_.a-z0-9]'; then exit 1; fi
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
LABEL io.envbuild.lock="sha256:9eec8d9b5a5ea3a5bb288886dd8c5b49fb780a6fd730dc776f2ddda2143d3f07"
CMD ["python"]
