//go:build linux

package host

import (
	"os"
	"os/user"
	"slices"
	"strconv"
	"syscall"
)

// accessFix is what a person can do to be allowed to open the device. Where its
// group may, joining that is enough; a device that is root's alone, as where no
// udev has given it to the group kvm, must be given to that first.
func accessFix(device string) string {
	fi, err := os.Stat(device)
	if err != nil {
		return "look at it with: ls -l " + device
	}
	st, found := fi.Sys().(*syscall.Stat_t)
	if !found {
		return "look at it with: ls -l " + device
	}
	group, err := user.LookupGroupId(strconv.FormatUint(uint64(st.Gid), 10))
	if err != nil || st.Gid == 0 || fi.Mode().Perm()&0o060 != 0o060 {
		return "sudo sh -c 'groupadd -f -r kvm && chgrp kvm " + device + " && chmod 0660 " + device + "' && sudo usermod -aG kvm $USER, then log in again"
	}
	if joined(group.Gid) {
		return "log in again: you are in the group " + group.Name + ", but this session began before"
	}
	return "sudo usermod -aG " + group.Name + " $USER, then log in again"
}

// joined reports whether the user is a member of the group on record, which
// counts from the next login on.
func joined(gid string) bool {
	me, err := user.Current()
	if err != nil {
		return false
	}
	groups, err := me.GroupIds()
	return err == nil && slices.Contains(groups, gid)
}
