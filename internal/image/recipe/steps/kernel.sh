# Puts Debian's cloud kernel into the tree $1 without installing its package,
# which would pull in an initramfs generator: the kernel and its version into
# /.holdpoint, where the build takes them from, the modules where modprobe
# looks for them. apt is the host's, with the tree's configuration.
set -eu
root=$1
apt() { APT_CONFIG=$MMDEBSTRAP_APT_CONFIG "$@" -o APT::Sandbox::User=root; }

package=$(apt apt-cache depends --no-recommends --no-suggests linux-image-cloud-amd64 |
    sed -n 's/^ *Depends: \(linux-image-[^ ]*\)$/\1/p' | head -n 1)
if [ -z "$package" ]; then
    echo 'holdpoint: the mirror has no kernel package linux-image-cloud-amd64' >&2
    exit 1
fi
version=${package#linux-image-}

mkdir -m 0700 "$root/.holdpoint"
cd "$root/.holdpoint"
apt apt-get -q download "$package"
chroot "$root" sh -c 'dpkg-deb -x /.holdpoint/*.deb /.holdpoint/tree'
rm -f ./*.deb
mkdir -p "$root/usr/lib/modules"
mv "tree/lib/modules/$version" "$root/usr/lib/modules/$version"
mv "tree/boot/vmlinuz-$version" kernel
printf '%s\n' "$version" >version
rm -rf tree
chroot "$root" depmod "$version"
