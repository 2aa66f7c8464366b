package rootdisk

import (
	"archive/tar"
	"path"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/oci/tree"
)

const (
	// maxNames is how many names ext4 lets a file have (EXT4_LINK_MAX).
	maxNames = 65_000
	// mostCrowded bounds the time that mkfs.ext4 takes, which looks through all of
	// a folder for each file that it adds: what each folder's files are, times the
	// bytes of the folder, adds up to this at most. One folder of 40,000 files with
	// short names is just that. With e2fsprogs 1.47.0 one of 10,000 took 5 s, of
	// 20,000 24 s and of 40,000 91 s, and of 20,000 with names of 205 bytes 267 s
	// (measured).
	mostCrowded = 40_000 * (40_000 * 16)
)

// limits are what ext4, or mkfs.ext4 within reason, takes of a tree.
type limits struct{ folders map[string]folder }

// folder is how large a folder is on an ext4 disk.
type folder struct{ files, bytes int }

func (f folder) crowd() int { return f.files * f.bytes }

// add looks at an entry.
func (l limits) add(e tree.Entry) error {
	if e.Path == "/" {
		return nil
	}
	dir, base := path.Split(e.Path)
	in := l.folders[dir]
	in.files++
	in.bytes += (8 + len(base) + 3) &^ 3
	l.folders[dir] = in
	switch {
	case e.Links > maxNames:
		return errdefs.New(errdefs.Invalid, "the file %.300q has %d names, and at most %d can be; make some of its hard links copies or symbolic links", e.Path, e.Links, maxNames)
	case e.Path == "/lost+found" && e.Type != tar.TypeDir:
		return errdefs.New(errdefs.Invalid, "%q is no folder, which each ext4 file system has there; remove it from the container image", e.Path)
	}
	return nil
}

// crowd refuses folders that have too many files.
func (l limits) crowd() error {
	sum, largest := 0, ""
	for dir, f := range l.folders {
		sum += f.crowd()
		if most := l.folders[largest].crowd(); f.crowd() > most || f.crowd() == most && dir < largest {
			largest = dir
		}
	}
	if sum > mostCrowded {
		return errdefs.New(errdefs.Invalid, "the folder %.300q has %d files, which would take too long to make; spread them over several folders, or put them into an archive", largest, l.folders[largest].files)
	}
	return nil
}
