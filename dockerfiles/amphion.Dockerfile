# amphion, lock 3742e9e1340d, Python 3.9; made by: envbuild export dockerfile amphion
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
ffmpeg=7:4.3.9-0+deb11u2
findutils=4.8.0-1
fontconfig=2.13.1-4.2
fontconfig-config=2.13.1-4.2
fonts-dejavu-core=2.37-2
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
libaom0=1.0.0.errata1-3+deb11u2
libapt-pkg6.0=2.2.4
libasan6=10.2.1-6
libasound2=1.2.4-1.1+deb11u1
libasound2-data=1.2.4-1.1+deb11u1
libass9=1:0.15.0-2
libasyncns0=0.8-6+b2
libatomic1=10.2.1-6
libattr1=1:2.4.48-6
libaudit-common=1:3.0-2
libaudit1=1:3.0-2
libavc1394-0=0.5.4-5
libavcodec58=7:4.3.9-0+deb11u2
libavdevice58=7:4.3.9-0+deb11u2
libavfilter7=7:4.3.9-0+deb11u2
libavformat58=7:4.3.9-0+deb11u2
libavresample4=7:4.3.9-0+deb11u2
libavutil56=7:4.3.9-0+deb11u2
libbinutils=2.35.2-2
libblas3=3.9.0-3+deb11u1
libblkid1=2.36.1-8+deb11u2
libbluray2=1:1.2.1-4+deb11u2
libbrotli1=1.0.9-2+b2
libbs2b0=3.1.0+dfsg-2.2+b1
libbsd0=0.11.3-1+deb11u1
libbz2-1.0=1.0.8-4
libc-bin=2.31-13+deb11u14
libc-dev-bin=2.31-13+deb11u14
libc6=2.31-13+deb11u14
libc6-dev=2.31-13+deb11u14
libcaca0=0.99.beta19-2.2+deb11u1
libcairo-gobject2=1.16.0-5
libcairo2=1.16.0-5
libcap-ng0=0.7.9-2.2+b1
libcc1-0=10.2.1-6
libcdio-cdda2=10.2+2.0.0-1+b2
libcdio-paranoia2=10.2+2.0.0-1+b2
libcdio19=2.1.0-2
libchromaprint1=1.5.0-2
libcodec2-0.9=0.9.2-4
libcom-err2=1.46.2-2+deb11u1
libcrypt-dev=1:4.4.18-4
libcrypt1=1:4.4.18-4
libctf-nobfd0=2.35.2-2
libctf0=2.35.2-2
libdatrie1=0.2.13-1
libdav1d4=0.7.1-3+deb11u1
libdb5.3=5.3.28+dfsg1-0.8
libdbus-1-3=1.12.28-0+deb11u1
libdc1394-25=2.2.6-3
libdebconfclient0=0.260
libdeflate0=1.7-1
libdrm-amdgpu1=2.4.104-1
libdrm-common=2.4.104-1
libdrm-intel1=2.4.104-1
libdrm-nouveau2=2.4.104-1
libdrm-radeon1=2.4.104-1
libdrm2=2.4.104-1
libedit2=3.1-20191231-2+b1
libelf1=0.183-1
libexpat1=2.2.10-2+deb11u7
libexpat1-dev=2.2.10-2+deb11u7
libffi7=3.3-6
libfftw3-double3=3.3.8-2
libflac8=1.3.3-2+deb11u2
libflite1=2.2-2
libfontconfig1=2.13.1-4.2
libfreetype6=2.10.4+dfsg-1+deb11u2
libfribidi0=1.0.8-2+deb11u1
libgbm1=20.3.5-1+deb11u1
libgcc-10-dev=10.2.1-6
libgcc-s1=10.2.1-6
libgcrypt20=1.8.7-6
libgdk-pixbuf-2.0-0=2.42.2+dfsg-1+deb11u5
libgdk-pixbuf2.0-common=2.42.2+dfsg-1+deb11u5
libgfortran5=10.2.1-6
libgl1=1.3.2-1
libgl1-mesa-dri=20.3.5-1+deb11u1
libglapi-mesa=20.3.5-1+deb11u1
libglib2.0-0=2.66.8-1+deb11u8
libglvnd0=1.3.2-1
libglx-mesa0=20.3.5-1+deb11u1
libglx0=1.3.2-1
libgme0=0.6.3-2
libgmp10=2:6.2.1+dfsg-1+deb11u1
libgnutls30=3.7.1-5+deb11u10
libgomp1=10.2.1-6
libgpg-error0=1.38-2
libgraphite2-3=1.3.14-1
libgsm1=1.0.18-2
libgssapi-krb5-2=1.18.3-6+deb11u8
libharfbuzz0b=2.7.4-1
libhogweed6=3.7.3-1
libibverbs1=33.2-1
libicu67=67.1-7+deb11u1
libidn2-0=2.3.0-5
libiec61883-0=1.2.0-4
libisl23=0.23-1
libitm1=10.2.1-6
libjack-jackd2-0=1.9.17~dfsg-1
libjbig0=2.1-3.1+b2
libjpeg62-turbo=1:2.0.6-4
libjs-jquery=3.5.1+dfsg+~3.5.5-7
libjs-sphinxdoc=3.4.3-2
libjs-underscore=1.9.1~dfsg-3
libk5crypto3=1.18.3-6+deb11u8
libkeyutils1=1.6.1-2
libkrb5-3=1.18.3-6+deb11u8
libkrb5support0=1.18.3-6+deb11u8
liblapack3=3.9.0-3+deb11u1
liblilv-0-0=0.24.12-2
libllvm11=1:11.0.1-2
liblsan0=10.2.1-6
liblz4-1=1.9.3-2
liblzma5=5.2.5-2.1~deb11u2
libmd0=1.0.3-3
libmfx1=21.1.0-1
libmount1=2.36.1-8+deb11u2
libmp3lame0=3.100-3
libmpc3=1.2.0-1
libmpdec3=2.5.1-1
libmpfr6=4.1.0-3
libmpg123-0=1.26.4-1+deb11u1
libmysofa1=1.2~dfsg0-1
libncursesw6=6.2+20201114-2+deb11u2
libnettle8=3.7.3-1
libnl-3-200=3.4.0-1+b1
libnl-route-3-200=3.4.0-1+b1
libnorm1=1.5.9+dfsg-2
libnsl-dev=1.3.0-2
libnsl2=1.3.0-2
libnuma1=2.0.12-1+b1
libogg0=1.3.4-0.1
libopenal-data=1:1.19.1-2
libopenal1=1:1.19.1-2
libopenjp2-7=2.4.0-3+deb11u3
libopenmpt0=0.4.11-1
libopus0=1.3.1-0.1
libp11-kit0=0.23.22-1
libpam-modules=1.4.0-9+deb11u2
libpam-modules-bin=1.4.0-9+deb11u2
libpam-runtime=1.4.0-9+deb11u2
libpam0g=1.4.0-9+deb11u2
libpango-1.0-0=1.46.2-3
libpangocairo-1.0-0=1.46.2-3
libpangoft2-1.0-0=1.46.2-3
libpciaccess0=0.16-1
libpcre2-8-0=10.36-2+deb11u1
libpcre3=2:8.39-13
libpgm-5.3-0=5.3.128~dfsg-2
libpixman-1-0=0.40.0-1.1~deb11u1
libpng16-16=1.6.37-3+deb11u4
libpocketsphinx3=0.8+5prealpha+1-13
libpostproc55=7:4.3.9-0+deb11u2
libpulse0=14.2-2
libpython3-dev=3.9.2-3
libpython3-stdlib=3.9.2-3
libpython3.9=3.9.2-1+deb11u7
libpython3.9-dev=3.9.2-1+deb11u7
libpython3.9-minimal=3.9.2-1+deb11u7
libpython3.9-stdlib=3.9.2-1+deb11u7
libquadmath0=10.2.1-6
librabbitmq4=0.10.0-1+deb11u3
libraw1394-11=2.1.2-2
librdmacm1=33.2-1
libreadline8=8.1-1
librsvg2-2=2.50.3+dfsg-1+deb11u1
librubberband2=1.9.0-1
libsamplerate0=0.2.1+ds0-1
libsdl2-2.0-0=2.0.14+dfsg2-3+deb11u2
libseccomp2=2.5.1-1+deb11u1
libselinux1=3.1-3
libsemanage-common=3.1-1
libsemanage1=3.1-1+b2
libsensors-config=1:3.6.0-7
libsensors5=1:3.6.0-7
libsepol1=3.1-1+deb11u1
libserd-0-0=0.30.10-2
libshine3=3.1.1-2
libslang2=2.3.2-5
libsmartcols1=2.36.1-8+deb11u2
libsnappy1v5=1.1.8-1
libsndfile1=1.0.31-2+deb11u2
libsndio7.0=1.5.0-3
libsodium23=1.0.18-1+deb11u1
libsord-0-0=0.16.8-2
libsoxr0=0.1.3-4
libspeex1=1.2~rc1.2-1.1
libsphinxbase3=0.8+5prealpha+1-12
libsqlite3-0=3.34.1-3+deb11u1
libsratom-0-0=0.6.8-1
libsrt1.4-gnutls=1.4.2-1.3
libssh-gcrypt-4=0.9.8-0+deb11u2
libssl1.1=1.1.1w-0+deb11u8
libstdc++-10-dev=10.2.1-6
libstdc++6=10.2.1-6
libswresample3=7:4.3.9-0+deb11u2
libswscale5=7:4.3.9-0+deb11u2
libsystemd0=247.3-7+deb11u8
libtasn1-6=4.16.0-2+deb11u2
libthai-data=0.1.28-3
libthai0=0.1.28-3
libtheora0=1.1.1+dfsg.1-15
libtiff5=4.2.0-1+deb11u8
libtinfo6=6.2+20201114-2+deb11u2
libtirpc-common=1.3.1-1+deb11u1
libtirpc-dev=1.3.1-1+deb11u1
libtirpc3=1.3.1-1+deb11u1
libtsan0=10.2.1-6
libtwolame0=0.4.0-2
libubsan1=10.2.1-6
libudev1=247.3-7+deb11u8
libudfread0=1.1.1-1
libunistring2=0.9.10-4
libusb-1.0-0=2:1.0.24-3
libuuid1=2.36.1-8+deb11u2
libva-drm2=2.10.0-1
libva-x11-2=2.10.0-1
libva2=2.10.0-1
libvdpau1=1.4-3
libvidstab1.1=1.1.0-2+b1
libvorbis0a=1.3.7-1
libvorbisenc2=1.3.7-1
libvorbisfile3=1.3.7-1
libvpx6=1.9.0-1+deb11u5
libvulkan1=1.2.162.0-1
libwavpack1=5.4.0-1
libwayland-client0=1.18.0-2~exp1.1
libwayland-cursor0=1.18.0-2~exp1.1
libwayland-egl1=1.18.0-2~exp1.1
libwayland-server0=1.18.0-2~exp1.1
libwebp6=0.6.1-2.1+deb11u2
libwebpmux3=0.6.1-2.1+deb11u2
libwrap0=7.6.q-31
libx11-6=2:1.7.2-1+deb11u2
libx11-data=2:1.7.2-1+deb11u2
libx11-xcb1=2:1.7.2-1+deb11u2
libx264-160=2:0.160.3011+gitcde9a93-2.1
libx265-192=3.4-2
libxau6=1:1.0.9-1
libxcb-dri2-0=1.14-3
libxcb-dri3-0=1.14-3
libxcb-glx0=1.14-3
libxcb-present0=1.14-3
libxcb-render0=1.14-3
libxcb-shape0=1.14-3
libxcb-shm0=1.14-3
libxcb-sync1=1.14-3
libxcb-xfixes0=1.14-3
libxcb1=1.14-3
libxcursor1=1:1.2.0-2
libxdamage1=1:1.1.5-2
libxdmcp6=1:1.1.2-3
libxext6=2:1.3.3-1.1
libxfixes3=1:5.0.3-2
libxi6=2:1.7.10-1
libxinerama1=2:1.1.4-2
libxkbcommon0=1.0.3-2
libxml2=2.9.10+dfsg-6.7+deb11u10
libxrandr2=2:1.5.1-1
libxrender1=1:0.9.10-1
libxshmfence1=1.3-1
libxss1=1:1.2.3-1
libxv1=2:1.0.11-1
libxvidcore4=2:1.3.7-1
libxxf86vm1=1:1.1.4-1+b2
libxxhash0=0.8.0-2
libz3-4=4.8.10-1
libzmq5=4.3.4-1+deb11u1
libzstd1=1.4.8+dfsg-2.1
libzvbi-common=0.2.35-18+deb11u1
libzvbi0=0.2.35-18+deb11u1
linux-libc-dev=5.10.262-1
login=1:4.8.1-1+deb11u1
lsb-base=11.1.0
mawk=1.3.4.20200120-2
media-types=4.0.0
ncurses-base=6.2+20201114-2+deb11u2
ncurses-bin=6.2+20201114-2+deb11u2
ocl-icd-libopencl1=2.2.14-2
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
sensible-utils=0.0.14
shared-mime-info=2.0-1
sysvinit-utils=2.96-7+deb11u1
tar=1.34+dfsg-1+deb11u1
tzdata=2026b-0+deb11u1
ucf=3.0043+deb11u2
util-linux=2.36.1-8+deb11u2
x11-common=1:7.7+22
xkb-data=2.29-2
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
absl-py==2.3.1 --hash=sha256:eeecf07f0c2a93ace0772c92e596ace6d3d3996c042b2128459aaae2a76de11d
accelerate==0.24.1 --hash=sha256:866dec394da60e8da964be212379d8cf6cc0d0e5e28a7c0d7e09507715d21c61
attrs==26.1.0 --hash=sha256:c647aa4a12dfbad9333ca4e71fe62ddc36f4e63b2d260a37a8b83d2f043ac309
audiomentations==0.42.0 --hash=sha256:7c0b6f2198184c02f850c1ac169459f3fb2cf7a1354cddd347af9acfc45461fc
audioread==3.1.0 --hash=sha256:b30d1df6c5d3de5dcef0fb0e256f6ea17bdcf5f979408df0297d8a408e2971b4
babel==2.19.0 --hash=sha256:6d49734aed1d595b2c065d012174df8c83964692f26fc461702281634dd7555b
black==24.1.1 --hash=sha256:3897ae5a21ca132efa219c029cce5e6bfc9c3d34ed7e892113d199c0b1b444a2
certifi==2026.10.19.post1 --hash=sha256:1324c476b4811eff41a8bc2122cd0bbd4d9c7234c725446d99ab1612b3a7fdd2
cffi==2.0.0 --hash=sha256:61d028e90346df14fedc3d1e5441df818d095f3b87d286825dfcbd6459b7ef63
charset-normalizer==3.5.3 --hash=sha256:39229c222445415db07a0be4dff8ad1addc3126644d7aa72d73f1575b637d69e
click==8.1.8 --hash=sha256:63c132bbbed01578a06712a2d1f497bb62d9c1c0d329b7903a866228027263b2
cmake==4.4.5 --hash=sha256:85625a9b6d5e88ff99c7eb79123d85570844e77ac076366cf75c609cc0b1b579
colorama==0.4.6 --hash=sha256:4f1d9991f5acc0ca119f9d443620b77f9d6b33703e51011c16baf57afb285fc6
contourpy==1.3.0 --hash=sha256:68a32389b06b82c2fdd68276148d7b9275b5f5cf13e5417e4252f6d1a34f72a2
csvw==4.1.1 --hash=sha256:fce2c461899290771eaec28c770e2fd0f6bc1324edb81d688c89e09cf222fcdb
cycler==0.12.1 --hash=sha256:85cef7cff222d8644161529808465972e51340599459b8ac3ccbac5a854e0d30
cython==3.3.1 --hash=sha256:55102da0e7700c533cea2bec1456ee6169cc13ace6b9f6048c31f55cca76bc51
decorator==5.3.1 --hash=sha256:f47fe6fdbd2edd623ecfe36875d37aba411624e2670dd395dddae1358689bb3c
diffsptk==1.0.1 --hash=sha256:9bd208714e767dc481e37183f3a2721fc9cb4371b775c064095e119c2798d29d
diffusers==0.29.2 --hash=sha256:d5e9bb13c8097b4eed10df23d1294d2e5a418f53e3f89c7ef228b5b982970428
dlinfo==2.0.0 --hash=sha256:b32cc18e3ea67c0ca9ca409e5b41eed863bd1363dbc9dd3de90fedf11b61e7bc
easydict==1.14 --hash=sha256:5c39cce9403961b4d281767cbc7f048271d4ee7a703b40505e728807f9264082
einops==0.8.2 --hash=sha256:54058201ac7087911181bfec4af6091bb59380360f069276601256a76af08193
ffmpeg-python==0.2.0 --hash=sha256:ac441a0404e053f8b6a1113a77c0f452f1cfc62f6344a769475ffdc0f56c23c5
filelock==3.19.1 --hash=sha256:d38e30481def20772f5baf097c122c3babc4fcdb7e14e57049eb9d88c6dc017d
fonttools==4.60.2 --hash=sha256:38ce703b60a906e421e12d9e3a7f064883f5e61bb23e8961f4be33cfe578500b
frechet-audio-distance==0.1.2 --hash=sha256:dc742afb4f31bdee637aae22f2cd0a14d9a6fa6f75e5a20e5eeefdc9bcd0579c
fsspec==2025.10.0 --hash=sha256:7c7712353ae7d875407f97715f0e1ffcc21e33d5b24556cb1e090ae9409ec61d
future==1.0.0 --hash=sha256:929292d34f5872e70396626ef385ec22355a1fae8ad29e1a734c3e43f9fbc216
grpcio==1.80.1 --hash=sha256:c87817d7280b2a648ac817fa7869ce677ce8a7928edf0c2ee60db8c1518fc908
hf-xet==1.8.0 --hash=sha256:29dab7c904cd1914a0439c6e1306c12c7497c8bd32290fbe563ebf51ca4b6d6d
huggingface-hub==0.36.2 --hash=sha256:48f0c8eac16145dfce371e9d2d7772854a4f591bcb56c9cf548accf531d54270
humanfriendly==10.0 --hash=sha256:1697e1a8a8f550fd43c2865cd84542fc175a61dcb779b6fee18cf6b6ccba1477
idna==3.20 --hash=sha256:ab7ae7122974553370f0bdb919e1a960b2cd1bc1ef0276416d896db81c14582c
importlib-metadata==8.7.1 --hash=sha256:5a1f80bf1daa489495071efbb095d75a634cf28a8bc299581244063b53176151
importlib-resources==6.5.2 --hash=sha256:789cfdc3ed28c78b67a06acb8126751ced69a3d5f79c095a98298cd8a760ccec
inflect==7.5.0 --hash=sha256:2aea70e5e70c35d8350b8097396ec155ffd68def678c7ff97f51aa69c1d92344
isodate==0.7.2 --hash=sha256:28009937d8031054830160fce6d409ed342816b543597cece116d966c6d99e15
jinja2==3.1.6 --hash=sha256:85ece4451f492d0c13c5dd7c13a64681a86afae63a5f347908daf103ce6d2f67
joblib==1.5.3 --hash=sha256:5fc3c5039fc5ca8c0276333a188bbd59d6b7ab37fe6632daa76bc7f9ec18e713
json5==0.17.3 --hash=sha256:2c8b22a893c35cd6a3c5ccbf1dd1c7d02c25dc1b5897fea658f9bf08c2e05f9a
jsonschema==4.25.1 --hash=sha256:3fba0169e345c7175110351d456342c364814cfcf3b964ba4587f22915230a63
jsonschema-specifications==2025.9.1 --hash=sha256:98802fee3a11ee76ecaca44429fda8a41bff98b00a0f2838151b113f210cc6fe
kiwisolver==1.4.7 --hash=sha256:dda56c24d869b1193fcc763f1284b9126550eaf84b88bbc7256e15028f19188a
language-tags==1.2.0 --hash=sha256:d815604622242fdfbbfd747b40c31213617fd03734a267f2e39ee4bd73c88722
librosa==0.9.1 --hash=sha256:c2bb61a8008367cca89a3f1dad352d8e55fe5ca5f7414fb5d5258eb52765db33
lightning-utilities==0.15.2 --hash=sha256:ad3ab1703775044bbf880dbf7ddaaac899396c96315f3aa1779cec9d618a9841
lion-pytorch==0.2.5 --hash=sha256:77089f28bda82f1cee829cabab8a104fe8aabf66af1941b0fc6ce400aabb28cc
lit==23.1.5 --hash=sha256:12f75fc36013a136cd065e4c431291fdb9243acf308c2a082ede1e23b50865c0
llvmlite==0.43.0 --hash=sha256:bc9efc739cc6ed760f795806f67889923f7274276f0eb45092a1473e40d9b867
loguru==0.7.3 --hash=sha256:31a33c10c8e1e10422bfd431aeb5d351c7cf7fa671e3c4df004162264b28220c
markdown==3.9 --hash=sha256:9f4d91ed810864ea88a6f32c07ba8bee1346c0cc1f6b1f9f6c822f2a9667d280
markupsafe==3.0.4 --hash=sha256:5e8b3d0b18fd623afa12ecb2ce8d8becef69f9b5440c6330c7972200e0bb84b0
matplotlib==3.9.4 --hash=sha256:57aa235109e9eed52e2c2949db17da185383fa71083c00c6c143a60e07e0888c
more-itertools==10.8.0 --hash=sha256:52d4362373dcf7c52546bc4af9a86ee7c4579df9a8dc268be0a2f949d376cc9b
mpmath==1.3.0 --hash=sha256:a0b2b9fe80bbcd81a6647ff13108738cfb482d481d826cc0e02f5b35e5c88d2c
munch==4.0.0 --hash=sha256:71033c45db9fb677a0b7eb517a4ce70ae09258490e419b0e7f00d1e386ecb1b4
mypy-extensions==1.1.0 --hash=sha256:1be4cccdb0f2482337c4743e60421de3a356cd97508abadd57d47403e94f5505
networkx==3.2.1 --hash=sha256:f18c69adc97877c42332c170849c96cefa91881c99a7cb3e95b7c659ebdc1ec2
nnaudio==0.3.4 --hash=sha256:48db0c54443f4f3f54057d416bd9ba304110552b4bba32f897e864f55deaa87c
numba==0.60.0 --hash=sha256:c151748cd269ddeab66334bd754817ffc0cabd9433acb0f551697e5151917d25
numpy==1.23.5 --hash=sha256:33161613d2269025873025b33e879825ec7b1d831317e68f4f2f0f84ed14c719
numpy-minmax==0.3.1 --hash=sha256:9172dc55458617f8208a9fa452001ab789c10d98be8cf533419b4680ffa3b103
numpy-rms==0.4.2 --hash=sha256:db118e117ff51c3467aba7f4d12c87f129f65b5d2216f9640621838711fe72dd
nvidia-cublas-cu11==11.10.3.66 --hash=sha256:d32e4d75f94ddfb93ea0a5dda08389bcc65d8916a25cb9f37ac89edaeed3bded
nvidia-cuda-cupti-cu11==11.7.101 --hash=sha256:e0cfd9854e1f2edaa36ca20d21cd0bdd5dcfca4e3b9e130a082e05b33b6c5895
nvidia-cuda-nvrtc-cu11==11.7.99 --hash=sha256:9f1562822ea264b7e34ed5930567e89242d266448e936b85bc97a3370feabb03
nvidia-cuda-runtime-cu11==11.7.99 --hash=sha256:cc768314ae58d2641f07eac350f40f99dcb35719c4faff4bc458a7cd2b119e31
nvidia-cudnn-cu11==8.5.0.96 --hash=sha256:402f40adfc6f418f9dae9ab402e773cfed9beae52333f6d86ae3107a1b9527e7
nvidia-cufft-cu11==10.9.0.58 --hash=sha256:e21037259995243cc370dd63c430d77ae9280bedb68d5b5a18226bfc92e5d748
nvidia-curand-cu11==10.2.10.91 --hash=sha256:eecb269c970fa599a2660c9232fa46aaccbf90d9170b96c462e13bcb4d129e2c
nvidia-cusolver-cu11==11.4.0.1 --hash=sha256:72fa7261d755ed55c0074960df5904b65e2326f7adce364cbe4945063c1be412
nvidia-cusparse-cu11==11.7.4.91 --hash=sha256:a3389de714db63321aa11fbec3919271f415ef19fda58aed7f2ede488c32733d
nvidia-nccl-cu11==2.14.3 --hash=sha256:5e5534257d1284b8e825bc3a182c6f06acd6eb405e9f89d49340e98cd8f136eb
nvidia-nvtx-cu11==11.7.91 --hash=sha256:b22c64eee426a62fc00952b507d6d29cf62b4c9df7a480fcc417e540e05fd5ac
packaging==26.3 --hash=sha256:d7193f7c8e4e93f444fde0262bf90af30e16fa0ad0ad44cb553c87339b23cd1c
pandas==2.3.3 --hash=sha256:bf1f8a81d04ca90e32a0aceb819d34dbd378a98bf923b6398b9a3ec0bf44de29
pathspec==1.1.1 --hash=sha256:a00ce642f577bf7f473932318056212bc4f8bfdf53128c78bbd5af0b9b20b189
pedalboard==0.9.19 --hash=sha256:a683370b594a1c6abfacacb61321ce7478b4919e7eb78ab9f547b2994b456925
phonemizer==3.2.1 --hash=sha256:65eef55cd180c1f0be245f68de12bd6014a102ecce0ed8af2584fda853c75ac7
pillow==11.3.0 --hash=sha256:cadc9e0ea0a2431124cde7e1697106471fc4c1da01530e679b2391c37d3fbb3a
pip==26.0.1 --hash=sha256:bdb1b08f4274833d62c1aa29e20907365a2ceb950410df15fc9521bad440122b
platformdirs==4.4.0 --hash=sha256:abd01743f24e5287cd7a5db3752faf1a2d65353f38ec26d98e25a6db65958c85
pooch==1.9.0 --hash=sha256:f265597baa9f760d25ceb29d0beb8186c243d6607b0f60b83ecf14078dbc703b
praat-parselmouth==0.4.7 --hash=sha256:c1c1fed66b517630dc03a550ee0e641213d887592df04ae6c1d6bfc7d888c140
protobuf==6.33.6 --hash=sha256:e9db7e292e0ab79dd108d7f1a94fe31601ce1ee3f7b79e0692043423020b0593
psutil==7.2.2 --hash=sha256:076a2d2f923fd4821644f5ba89f059523da90dc9014e85f8e45a5774ca5bc6f9
ptwt==0.1.9 --hash=sha256:87ebc0e8163b31ee967a7636419b6f1f8b2d0970901b873c3a18ece32a829d4a
pycparser==2.23 --hash=sha256:e5c6e8d3fbad53479cab09ac03729e0a9faf2bee3db8208a550daf5af81a5934
pyparsing==3.3.3 --hash=sha256:ece8c00a69cf01b45d0b1dedabb469c90d8caf996d4fda40f147627a122849a4
pypinyin==0.48.0 --hash=sha256:38b8a478b4af17c5b4211482ea35c68eb0ca3a81661e5fb2abe6f9cc66d1634b
python-dateutil==3.0.0 --hash=sha256:3c79630202e4152c6add678446984236efe4f57e84d8e892aab0637bab82e9fd
python-stretch==0.3.1 --hash=sha256:c22885df4826323676ec354d1171f81c97db1d4c4fb8e18af1d17da483740766
pytz==2026.6 --hash=sha256:7fed3fee8fd6bd4a2b7b75a8d56021d0624127bf69bd5691f115db929ac570b3
pywavelets==1.6.0 --hash=sha256:4021ef69ec9f3862f66580fc4417be728bd78722914394594b48212fd1fcaf21
pyyaml==6.0.3 --hash=sha256:0150219816b6a1fa26fb4699fb7daa9caf09eb1999f3b70fb6e786805e80375a
rdflib==7.6.0 --hash=sha256:30c0a3ebf4c0e09215f066be7246794b6492e054e782d7ac2a34c9f70a15e0dd
referencing==0.36.2 --hash=sha256:e8699adbbf8b5c7de96d8ffa0eb5c158b3beafce084968e2ea8bb08c6794dcd0
regex==2026.1.15 --hash=sha256:55e9d0118d97794367309635df398bdfd7c33b93e2fdfa0b239661cd74b4c14e
requests==2.32.5 --hash=sha256:2462f94637a34fd532264295e186976db0f5d453d1cdd31473c85a6a161affb6
resampy==0.4.3 --hash=sha256:ad2ed64516b140a122d96704e32bc0f92b23f45419e8b8f478e5a05f83edcebd
rfc3986==1.5.0 --hash=sha256:a86d6e1f5b1dc238b218b012df0aa79409667bb209e58da56d0b94704e712a97
rpds-py==0.27.1 --hash=sha256:2fd50659a069c15eef8aa3d64bbef0d69fd27bb4a50c9ab4f17f83a16cbf8905
ruamel-yaml==0.19.1 --hash=sha256:27592957fedf6e0b62f281e96effd28043345e0e66001f97683aa9a40c667c93
safetensors==0.7.0 --hash=sha256:dac7252938f0696ddea46f5e855dd3138444e82236e3be475f54929f0c510d48
scikit-learn==1.6.1 --hash=sha256:b8b7a3b86e411e4bce21186e1c180d792f3d99223dcfa3b4f597ecc92fa1a422
scipy==1.13.1 --hash=sha256:637e98dcf185ba7f8e663e122ebf908c4702420477ae52a04f9908707456ba4d
segments==2.4.0 --hash=sha256:4021dc67f201cc03c864c74c618bdb163b1af629da3040babbaa37d8813f3db0
setuptools==80.10.2 --hash=sha256:95b30ddfb717250edb492926c92b5221f7ef3fbcc2b07579bcd4a27da21d0173
six==1.17.0 --hash=sha256:4721f391ed90541fddacab5acf947aa0d3dc7d27b2e1e8eda2be8970586c3274
soundfile==0.13.1 --hash=sha256:03267c4e493315294834a0870f31dbb3b28a95561b80b134f0bd3cf2d5f0e618
soxr==0.5.0.post1 --hash=sha256:9c8e9c980637e03d3f345a4fd81d56477a58c294fb26205fa121bc4eb23d9d01
speechtokenizer==1.0.1 --hash=sha256:bb898a1505d72bebe336fae773baa85cd368cea815590b8b6c05199d8deb9424
sympy==1.14.0 --hash=sha256:e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5
tabulate==0.9.0 --hash=sha256:024ca478df22e9340661486f85298cff5f6dcdba14f3813e8830015b9ed1948f
tensorboard==2.21.0 --hash=sha256:7279316dcb6bd5bc391d623dea841531299cde1887310e8133bc34a996d32255
tensorboard-data-server==0.7.2 --hash=sha256:7e0610d205889588983836ec05dc098e80f97b7e7bbff7e994ebb78f578d0ddb
tensorboardx==2.6.5 --hash=sha256:c10b891d00af306537cb8b58a039b2ba41571f0da06f433a41c4ca8d6abe1373
termcolor==3.1.0 --hash=sha256:591dd26b5c2ce03b9e43f391264626557873ce1d379019786f99b0c2bee140aa
tgt==1.5 --hash=sha256:df4566f0f9b1765691dcc984a78963496bca961a27ac7f10050be2db277df5e8
threadpoolctl==3.7.0 --hash=sha256:cd8b60b5641b45c67bbf73c64c843235fc2d8a480c87389f52f5dbee893b86be
tokenizers==0.19.1 --hash=sha256:b4c89aa46c269e4e70c4d4f9d6bc644fcc39bb409cb2a81227923404dd6f5227
tomli==2.5.0 --hash=sha256:32a7b79ac57a2e83670ce329ccf675798bc5a2094783a63676866b70503f2e2b
torch==2.0.1 --hash=sha256:e10e1597f2175365285db1b24019eb6f04d53dcd626c735fc502f1e8b6be9875
torchaudio==2.0.2 --hash=sha256:6c617d5978a6b8a29d6675dcd18196e6dc541daac44b7b2b6eeb31aed82f3203
torchcrepe==0.0.18 --hash=sha256:c8e4c66450ca94498b3f5300dc7d131e101175b3b57e61be3fb8a5a07a131579
torchlibrosa==0.1.0 --hash=sha256:89b65fd28b833ceb6bc74a3d0d87e2924ddc5a845d0a246b194952a4e12a38cb
torchlpc==0.6 --hash=sha256:2d0ec8152a63e47fbc1c54d59042ffd9899ef0aee0cc5518c1b6cac16a5f7ac0
torchmetrics==1.8.2 --hash=sha256:08382fd96b923e39e904c4d570f3d49e2cc71ccabd2a94e0f895d1f0dac86242
torchvision==0.15.2 --hash=sha256:63df26673e66cba3f17e07c327a8cafa3cce98265dbc3da329f1951d45966838
tqdm==4.70.1 --hash=sha256:c293e525e6fef9c20e8728fd4612df02a0aa31bb5fe91ecd93e123b1b7bffa73
transformers==4.41.2 --hash=sha256:05555d20e43f808de1ef211ab64803cdb513170cef70d29a888b589caebefc67
triton==2.0.0 --hash=sha256:74f118c12b437fb2ca25e1a04759173b517582fcf4c7be11913316c764213656
typeguard==4.5.2 --hash=sha256:fcf9de18bd945cdb4c7b996e12b4c51ce83f92f191314a6d7cf1739586ec98cf
typing-extensions==4.16.0 --hash=sha256:481caa481374e813c1b176ada14e97f1f67a4539ce9cfeb3f350d78d6370c2e8
tzdata==2026.6 --hash=sha256:0a10eec6e13ef16b627fabed9a5f2ba61a62b1c67f327305f4e7e412a70b4aec
unidecode==1.4.0 --hash=sha256:c3c7606c27503ad8d501270406e345ddb480a7b5f38827eafe4fa82a137f0021
uritemplate==4.2.0 --hash=sha256:962201ba1c4edcab02e60f9a0d3821e82dfc5d2d6662a21abd533879bdb8a686
urllib3==2.6.3 --hash=sha256:bf272323e553dfb2e87d9bfd225ca7b0f467b919d7bbd355436d3fd37cb0acd4
vector-quantize-pytorch==1.12.5 --hash=sha256:28bacc26a50a6eece66eb757f175c70d0f07bea45b074992f42529d6f2b0da4d
werkzeug==3.1.9 --hash=sha256:6392e50c78460ba618e5b21f08a71f59c99ce99cdc6cf6e3dd7e6ccca8754fab
wheel==0.48.0 --hash=sha256:3217dcc807155e45db462d7ef2431f5ddda0d7273b700d05a67b271ceb1287ab
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
ENV HOME="/tmp"
ENV LANG="C.UTF-8"
ENV NCCL_DEBUG="WARN"
ENV NVIDIA_DRIVER_CAPABILITIES="compute,utility"
ENV NVIDIA_VISIBLE_DEVICES="all"
ENV PATH="/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENV PYTHONDONTWRITEBYTECODE="1"
ENV TORCHINDUCTOR_CACHE_DIR="/tmp/torchinductor"
ENV TORCH_CUDA_ARCH_LIST="8.0"
ENV TORCH_NCCL_ASYNC_ERROR_HANDLING="1"
ENV TRITON_CACHE_DIR="/tmp/triton"
ENV USER="envbuild"
ENV VIRTUAL_ENV="/opt/venv"
LABEL io.envbuild.lock="sha256:3742e9e1340d3fa93fc7f0b8fc37e3a8b81bbe6ebefe05ffa89710500acb9be4"
CMD ["python"]
