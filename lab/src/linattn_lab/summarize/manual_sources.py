"""Which Debian packages the manual pages are taken from: some that are rich in them, and many small ones."""

import hashlib
from collections.abc import Mapping

from ..data import Package

RICH = """
allegro4-doc alsa-utils apache2 apache2-utils apt apt-utils aspell autoconf autofs bash bcftools bind9-dnsutils
bind9-utils binutils-common bluez bpfcc-tools bpftrace btrfs-progs cifs-utils cmake-data coreutils corosync debconf
debhelper devscripts docbook-utils dpkg dpkg-dev drbd-utils e2fsprogs emboss erlang-manpages ffmpeg freebsd-manpages
freeipa-client gdal-bin ghostscript git-man gmt graphicsmagick graphviz groff-base haproxy hdf5-tools heimdal-docs
infiniband-diags iproute2 iptables kmod krb5-user ldap-utils libacl1-dev libaio-dev libarchive-dev libattr1-dev
libaudit-dev libbsd-dev libcap-dev libcurl4-doc libelf-dev libgetdata-doc libibverbs-dev libjpeg-turbo-progs
libkeyutils-dev libpcap0.8-dev libpfm4-dev libpng-dev librdmacm-dev libreswan libselinux1-dev libssl-doc
libsystemd-dev libtiff-tools libunwind-dev libvirt-clients libx11-doc libzmq3-dev lighttpd linux-cpupower lvm2
manpages manpages-dev mdadm moreutils mount mpich-doc mtools mutt nco ncurses-doc netcdf-bin netpbm nfs-common
nvme-cli ocaml-man openmpi-doc openssh-client openssl pacemaker parallel patchutils pciutils perl-doc policycoreutils
poppler-utils postfix ppp procmail procps proj-bin psmisc pulseaudio-utils qemu-system-common qemu-utils quilt rcs
rdma-core redis-tools rsync samba-common-bin samtools sg3-utils slapd slurm-client smartmontools sox sssd-tools
strongswan-starter subversion systemd tcl8.6-doc tk8.6-doc tklib tor usbutils util-linux varnish vim-common
wireless-tools wpasupplicant x11-apps x11-utils x11-xserver-utils xfsprogs
""".split()
SECTIONS = frozenset(
    "admin comm database devel editors electronics graphics hamradio mail math misc net otherosfs perl science shells sound"
    " text utils vcs video web x11".split()
)
LARGEST = 250_000  # bytes of a small package
SMALL = 1000  # of them for training


def manual_packages(index: Mapping[str, Package], sides: Mapping[str, str]) -> list[str]:
    """Names of packages: the rich ones, and small ones of SECTIONS in the order of a digest of their names.

    Of the small ones all that are not for training, and SMALL that are: few sources are on the other sides.

    Args:
        index: all packages by name.
        sides: of source packages: train, validation or test.
    """
    small = [name for name, package in index.items() if package.section in SECTIONS and package.size <= LARGEST]
    small.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    learnt = [name for name in small if sides.get(index[name].source) == "train"]
    asked = [name for name in small if sides.get(index[name].source) in ("validation", "test")]
    return list(dict.fromkeys([name for name in RICH if name in index] + asked + learnt[:SMALL]))
