# Takes out of the tree $1 what is the host's and not the guest's: its name, its
# name servers, and the options the build gave to apt and dpkg.
set -eu
rm -f "$1/etc/resolv.conf" "$1/etc/hostname" \
    "$1/etc/apt/apt.conf.d/99mmdebstrap" "$1/etc/dpkg/dpkg.cfg.d/99mmdebstrap"
: >"$1/etc/resolv.conf"
echo localhost >"$1/etc/hostname"
printf '127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n' >"$1/etc/hosts"
rm -f "$1"/etc/ssh/ssh_host_*
