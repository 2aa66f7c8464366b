# Runs the user's script, /tmp/holdpoint-script in the tree $1, as root in the
# tree: by its #! line, without one by sh.
set -eu
chmod 0700 "$1/tmp/holdpoint-script"
status=0
chroot "$1" env HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    sh -c 'cd / && exec /tmp/holdpoint-script' </dev/null || status=$?
rm -f "$1/tmp/holdpoint-script"
if [ "$status" != 0 ]; then
    echo "holdpoint: the script ended with exit code $status" >&2
    exit 1
fi
