# Creates the user whose name is put before this, in the tree $1.
chroot "$1" useradd --create-home --uid 1000 --user-group --shell /bin/bash "$user"
