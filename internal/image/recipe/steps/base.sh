# Fills the tree $1 with another one, the tar $base, before packages are added to
# it. Devices are left out: mmdebstrap makes them itself.
set -eu
tar -C "$1" --numeric-owner --xattrs --xattrs-include='*' --exclude='./dev/*' -xpf "$base"
