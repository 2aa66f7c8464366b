package rootdisk_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/image/rootdisk"
	"github.com/holdpoint/holdpoint/internal/oci"
	"github.com/holdpoint/holdpoint/internal/oci/ocitest"
)

// searchPath finds the tools for a user whose own PATH leaves them out.
const searchPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

func needTools(t testing.TB) {
	t.Helper()
	t.Setenv("PATH", searchPath+":"+os.Getenv("PATH"))
	for _, name := range []string{"mkfs.ext4", "debugfs", "e2fsck"} {
		if _, err := exec.LookPath(name); err != nil {
			t.Skip(err)
		}
	}
}

// makeDisk makes a disk of an image in a folder, and returns its path.
func makeDisk(t testing.TB, dir, image string, size int64) (string, error) {
	t.Helper()
	img, err := oci.Open(t.Context(), image, oci.Options{})
	if err != nil {
		return "", err
	}
	defer img.Close()
	cfg := rootdisk.Config{Dir: filepath.Join(dir, "work"), Path: filepath.Join(dir, "root.raw"), Bytes: size, Log: io.Discard}
	if _, ok := t.(*testing.T); ok {
		cfg.Log = t.Output()
	}
	scratch := filepath.Join(dir, "scratch")
	for _, d := range []string{cfg.Dir, scratch} {
		if err := os.Mkdir(d, 0o700); err != nil {
			return "", err
		}
	}
	files, err := img.Merge(t.Context(), scratch, nil)
	if err != nil {
		return "", err
	}
	return cfg.Path, rootdisk.Make(t.Context(), files, cfg)
}

// debugfs runs one request.
func debugfs(t *testing.T, disk, request string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "debugfs", "-R", request, disk).Output()
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

func entry(kind byte, name string, mode int64, uid, gid int, content string) ocitest.Entry {
	return ocitest.Entry{Header: tar.Header{
		Typeflag: kind, Name: name, Mode: mode, Uid: uid, Gid: gid, Format: tar.FormatPAX,
	}, Content: content}
}

// capability is what setcap cap_net_raw=ep sets.
const capability = "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"

const manyFiles = 500

func smallImage(t testing.TB) string {
	old := entry(tar.TypeReg, "old", 0o644, 0, 0, "")
	old.ModTime = time.Unix(-1_000_000_000, 250_000_000)
	late := entry(tar.TypeReg, "late", 0o644, 0, 0, "")
	late.ModTime = time.Unix(5_000_000_000, 0)
	ping := entry(tar.TypeReg, "bin/ping", 0o755, 0, 0, "ping")
	ping.PAXRecords = map[string]string{"SCHILY.xattr.security.capability": capability, "SCHILY.xattr.user.note": "a note"}
	odd := entry(tar.TypeReg, "odd/line\nfeed \"quoted\"", 0o600, 3, 4, "odd")
	null := entry(tar.TypeChar, "dev/null", 0o666, 0, 0, "")
	null.Devmajor, null.Devminor = 1, 3
	disk := entry(tar.TypeBlock, "dev/disk", 0o660, 0, 6, "")
	disk.Devmajor, disk.Devminor = 259, 70000
	lower := ocitest.Layer(t,
		entry(tar.TypeDir, "./", 0o711, 11, 12, ""),
		entry(tar.TypeDir, "bin", 0o755, 0, 0, ""),
		entry(tar.TypeReg, "bin/su", 0o4755, 0, 0, "su"), ping, odd,
		entry(tar.TypeReg, "gone", 0o644, 0, 0, "gone"), entry(tar.TypeReg, "cache/old", 0o644, 0, 0, "old"),
		null, disk, old, late, entry(tar.TypeFifo, "run/pipe", 0o620, 5, 6, ""),
	)
	link := entry(tar.TypeSymlink, "lib", 0o777, 7, 8, "")
	link.Linkname = "usr/lib"
	hard := entry(tar.TypeLink, "home/again", 0o640, 1000, 100_000, "")
	hard.Linkname = "home/file"
	// A folder of many blocks, between which the content of its files lies, so
	// that its extents do not fit into its inode.
	many := []ocitest.Entry{}
	for i := range manyFiles {
		many = append(many, entry(tar.TypeReg, fmt.Sprintf("many/%s%04d", strings.Repeat("n", 200), i), 0o604, i, 9, "content"))
	}
	upper := ocitest.Layer(t, append(many,
		entry(tar.TypeDir, "tmp", 0o1777, 0, 0, ""), entry(tar.TypeDir, "secret", 0, 1000, 1000, ""), entry(tar.TypeReg, "secret/file", 0, 70_000, 4_000_000_000, "hidden"),
		entry(tar.TypeReg, "home/file", 0o640, 1000, 100_000, strings.Repeat("content ", 10_000)), link, hard,
		ocitest.File(".wh.gone", ""), ocitest.File("cache/.wh..wh..opq", ""), entry(tar.TypeReg, "cache/new", 0o644, 0, 0, "new"),
		entry(tar.TypeReg, "holes", 0o644, 0, 0, strings.Repeat("\x00", 4<<20)+"end"),
	)...)
	return ocitest.Legacy(t, "small:1", nil, lower, upper).WriteTar(t)
}

func TestMake(t *testing.T) {
	needTools(t)
	disk, err := makeDisk(t, t.TempDir(), smallImage(t), 64<<20)
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), "e2fsck", "-fn", disk).CombinedOutput(); err != nil {
		t.Errorf("e2fsck: %v: %s", err, out)
	}
	// debugfs prints owners as signed numbers.
	for path, wants := range map[string][]string{
		"/":            {"Type: directory", "Mode:  0711", "User:    11", "Group:    12", "mtime: 0x5f5e1000"},
		"/bin/su":      {"Type: regular", "Mode:  04755", "User:     0", "Group:     0", "mtime: 0x5f5e1000"},
		"/bin/ping":    {"Mode:  0755"},
		"/tmp":         {"Type: directory", "Mode:  01777"},
		"/secret":      {"Mode:  0000", "User:  1000", "Group:  1000"},
		"/secret/file": {"Mode:  0000", "User: 70000", "Group: -294967296", "Size: 6"},
		"/home/file":   {"Mode:  0640", "User:  1000", "Group: 100000", "Links: 2", "Size: 80000"},
		"/lib":         {"Type: symlink", "User:     7", "Group:     8", `Fast link dest: "usr/lib"`},
		"/dev/null":    {"Type: character special", "Mode:  0666", "01:03"},
		"/dev/disk":    {"Type: block special", "Mode:  0660", "Group:     6", "259:70000"},
		"/run/pipe":    {"Type: FIFO", "Mode:  0620", "User:     5", "Group:     6"},
		"/cache/new":   {"Type: regular"},
		"/holes":       {"Size: 4194307"},
		"/old":         {"mtime: 0xc4653600:3b9aca00"},
		"/late":        {"mtime: 0x2a05f200:00000001"},
		"/gone":        {"File not found"},
		"/cache/old":   {"File not found"},
	} {
		cmd := exec.CommandContext(t.Context(), "debugfs", "-R", "stat "+path, disk)
		out, err := cmd.CombinedOutput()
		for _, want := range wants {
			if err != nil || !strings.Contains(string(out), want) {
				t.Errorf("%s: no %q (%v) in:\n%s", path, want, err, out)
			}
		}
	}
	value := filepath.Join(t.TempDir(), "value")
	for name, want := range map[string]string{"security.capability": capability, "user.note": "a note"} {
		debugfs(t, disk, "ea_get -f "+value+" /bin/ping "+name)
		if got, err := os.ReadFile(value); err != nil || string(got) != want {
			t.Errorf("%s is %q (%v)", name, got, err)
		}
	}
	inode := func(path string) string { return strings.Fields(debugfs(t, disk, "stat "+path))[1] }
	if a, b := inode("/home/file"), inode("/home/again"); a != b {
		t.Errorf("a hard link is a copy: inodes %s and %s", a, b)
	}
	if got := debugfs(t, disk, "cat /home/again"); got != strings.Repeat("content ", 10_000) {
		t.Errorf("the content has %d bytes", len(got))
	}
	listing := debugfs(t, disk, "ls -p /many")
	for i := range manyFiles {
		if want := fmt.Sprintf("/100604/%d/9/%s%04d/7/", i, strings.Repeat("n", 200), i); !strings.Contains(listing, want) {
			t.Fatalf("no %q among:\n%s", want, listing)
		}
	}
	if tree := debugfs(t, disk, "extents /many"); !strings.Contains(tree, "1/ 1") {
		t.Errorf("the folder has no extents outside of its inode:\n%s", tree)
	}
	if got := debugfs(t, disk, "ls -p /odd"); !strings.Contains(got, "/100600/3/4/line") {
		t.Errorf("no odd name in %q", got)
	}
}

// TestMakeAsAnOrdinaryUser runs TestMake once more as somebody who is nobody.
func TestMakeAsAnOrdinaryUser(t *testing.T) {
	needTools(t)
	if os.Getuid() != 0 {
		t.Skip("TestMake has run as an ordinary user")
	}
	// The test's own folders are for root alone.
	dir, err := os.MkdirTemp("/var/tmp", "holdpoint-test-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(dir, "test")
	if err := os.WriteFile(program, self, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), program, "-test.run=^TestMake$", "-test.v")
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "TMPDIR="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65_534, Gid: 65_534}}
	out, err := cmd.CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("--- PASS: TestMake")) {
		t.Errorf("%v: %s", err, out)
	}
}

func TestWhatDoesNotFit(t *testing.T) {
	needTools(t)
	big := ocitest.Layer(t, ocitest.File("a", strings.Repeat("x", 16<<20)))
	_, err := makeDisk(t, t.TempDir(), ocitest.New(t, nil, nil, big).WriteDir(t), 8<<20)
	if !errdefs.Is(err, errdefs.Invalid) || !strings.Contains(err.Error(), "do not fit into 8 MiB") {
		t.Errorf("got %v", err)
	}
	odd := entry(tar.TypeReg, "line\nfeed", 0o600, 0, 0, "")
	odd.PAXRecords = map[string]string{"SCHILY.xattr.user.a": "b"}
	_, err = makeDisk(t, t.TempDir(), ocitest.New(t, nil, nil, ocitest.Layer(t, odd)).WriteDir(t), 8<<20)
	if !errdefs.Is(err, errdefs.Unsupported) || strings.Contains(err.Error(), "\n") {
		t.Errorf("got %v", err)
	}
	// A path beyond 8 KiB, of pieces that links join: debugfs would take what
	// is beyond for another line, here one that it gives to the shell.
	deep := strings.Repeat(strings.Repeat("d", 200)+"/", 14)
	link := func(name, target string) ocitest.Entry { return ocitest.Link(tar.TypeSymlink, name, target) }
	plain := entry(tar.TypeReg, "l2/"+deep+"!touch owned", 0o600, 0, 0, "")
	plain.PAXRecords = map[string]string{"SCHILY.xattr.user.a": "b"}
	layer := ocitest.Layer(t, link("l", deep), link("l/l2", deep), link("l2", "l/l2"), plain)
	_, err = makeDisk(t, t.TempDir(), ocitest.New(t, nil, nil, layer).WriteDir(t), 8<<20)
	if !errdefs.Is(err, errdefs.Unsupported) || !strings.Contains(err.Error(), "too long for debugfs") {
		t.Errorf("got %v", err)
	}
}

// TestLimitsOfExt4: what ext4 cannot hold is INVALID and named; what it just
// can is there.
func TestLimitsOfExt4(t *testing.T) {
	needTools(t)
	attributes := func(sizes ...int) []ocitest.Entry {
		e := ocitest.File("the/file", "")
		e.Format, e.PAXRecords = tar.FormatPAX, map[string]string{}
		for i, size := range sizes {
			e.PAXRecords[fmt.Sprintf("SCHILY.xattr.user.%04d", i)] = strings.Repeat("b", size)
		}
		return []ocitest.Entry{e}
	}
	many := []ocitest.Entry{ocitest.File("the/file", "")}
	for i := range 70_000 {
		many = append(many, ocitest.Link(tar.TypeLink, fmt.Sprintf("d%d/%d", i/500, i), "the/file"))
	}
	crowd := make([]ocitest.Entry, 40_001)
	for i := range crowd {
		crowd[i] = ocitest.File(fmt.Sprintf("the/%06d", i), "")
	}
	for name, test := range map[string]struct {
		entries []ocitest.Entry
		says    string // nothing when it fits
	}{
		"attribute":         {attributes(4040), ""},
		"attribute, large":  {attributes(4041), `"the/file".*4060 bytes`},
		"attributes":        {attributes(1000, 1000, 1000, 1, 920), ""},
		"attributes, large": {attributes(60_000), `"the/file".*4060 bytes`},
		"names":             {many, `"/(the/file|d0/0)" has 70001 names, and at most 65000`},
		"crowd":             {crowd, `folder "/the/" has 40001 files`},
		"lost+found":        {[]ocitest.Entry{ocitest.Dir("lost+found"), ocitest.File("lost+found/the", "")}, ""},
		"lost+found, file":  {[]ocitest.Entry{ocitest.File("lost+found", "")}, `"/lost\+found" is no folder`},
		"lost+found, link":  {[]ocitest.Entry{ocitest.Link(tar.TypeSymlink, "lost+found", "/")}, `"/lost\+found" is no folder`},
	} {
		t.Run(name, func(t *testing.T) {
			disk, err := makeDisk(t, t.TempDir(), ocitest.New(t, nil, nil, ocitest.Layer(t, test.entries...)).WriteDir(t), 64<<20)
			if test.says != "" {
				if !errdefs.Is(err, errdefs.Invalid) || !regexp.MustCompile(test.says).MatchString(err.Error()) || strings.Contains(err.Error(), "\n") {
					t.Errorf("got %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if out, err := exec.CommandContext(t.Context(), "e2fsck", "-fn", disk).CombinedOutput(); err != nil {
				t.Errorf("e2fsck: %v: %s", err, out)
			}
		})
	}
}

func TestCancel(t *testing.T) {
	needTools(t)
	img, err := oci.Open(t.Context(), smallImage(t), oci.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer img.Close()
	files, err := img.Merge(t.Context(), t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	dir := t.TempDir()
	err = rootdisk.Make(ctx, files, rootdisk.Config{Dir: dir, Path: filepath.Join(dir, "root.raw"), Bytes: 64 << 20, Log: io.Discard})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

// benchImage is a docker save tar of 10,000 files in 500 folders, 120 MiB, and
// the tar of its one layer; the tar that HOLDPOINT_BENCH_LAYER names instead,
// if it is set.
func benchImage(b *testing.B) (image, layer string) {
	b.Helper()
	if layer = os.Getenv("HOLDPOINT_BENCH_LAYER"); layer != "" {
		data, err := os.ReadFile(layer)
		if err != nil {
			b.Fatal(err)
		}
		return ocitest.Legacy(b, "bench:1", nil, data).WriteTar(b), layer
	}
	var entries []ocitest.Entry
	text := make([]byte, 64<<10)
	for i := range text {
		text[i] = "etaoin shrdlu\n"[i*i%13]
	}
	for i := range 10_000 {
		if i%20 == 0 {
			entries = append(entries, ocitest.Dir(fmt.Sprintf("usr/d%03d", i/20)))
		}
		e := ocitest.File(fmt.Sprintf("usr/d%03d/file%05d", i/20, i), string(text[:(i*7919)%24_000]))
		e.Uid, e.ModTime = i%3, time.Unix(1_600_000_000+int64(i), 0)
		entries = append(entries, e)
	}
	data := ocitest.Layer(b, entries...)
	layer = filepath.Join(b.TempDir(), "layer.tar")
	if err := os.WriteFile(layer, data, 0o600); err != nil {
		b.Fatal(err)
	}
	return ocitest.Legacy(b, "bench:1", nil, data).WriteTar(b), layer
}

// BenchmarkMake measures a disk of a docker save tar of 10,000 files against
// tar and mkfs.ext4 doing the same, one after the other in each round, and
// reports both and their ratio. The latter does not keep owners unless root
// runs it.
func BenchmarkMake(b *testing.B) {
	needTools(b)
	image, layer := benchImage(b)
	var ours, theirs time.Duration
	rounds := 0
	for b.Loop() {
		rounds++
		ours += round(b, func(dir string) {
			if _, err := makeDisk(b, dir, image, 4<<30); err != nil {
				b.Fatal(err)
			}
		})
		theirs += round(b, func(dir string) {
			script := `mkdir tree && tar -C tree -xpf "$1" && exec mkfs.ext4 -q -F -m 0 -E root_owner=0:0,lazy_itable_init=0,lazy_journal_init=0 -d tree root.raw 4g`
			cmd := exec.CommandContext(b.Context(), "sh", "-c", script, "sh", layer)
			cmd.Dir = dir
			if out, err := cmd.CombinedOutput(); err != nil {
				b.Fatalf("%v: %s", err, out)
			}
		})
	}
	b.ReportMetric(ours.Seconds()/float64(rounds), "s/ours")
	b.ReportMetric(theirs.Seconds()/float64(rounds), "s/tar+mkfs")
	b.ReportMetric(ours.Seconds()/theirs.Seconds(), "ratio")
}

// round measures work in a folder of its own, with nothing left to be written
// from before.
func round(b *testing.B, work func(dir string)) time.Duration {
	dir, err := os.MkdirTemp(b.TempDir(), "")
	if err != nil {
		b.Fatal(err)
	}
	syscall.Sync()
	begun := time.Now()
	work(dir)
	took := time.Since(begun)
	if err := os.RemoveAll(dir); err != nil {
		b.Fatal(err)
	}
	return took
}
