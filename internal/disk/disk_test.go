package disk

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

const mib = 1 << 20

func newDisk(t *testing.T, fs *durable.FS) *Disk {
	t.Helper()
	if _, err := exec.LookPath("qemu-img"); err != nil {
		t.Skip("qemu-img is not installed")
	}
	return New(Config{FS: fs})
}

func ctxOf(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// qemuIO runs commands on the chain.
func qemuIO(t *testing.T, chain []Layer, writable bool, cmds ...string) {
	t.Helper()
	opts, err := ChainJSON(chain, writable)
	if err != nil {
		t.Fatal(err)
	}
	args := []string{}
	for _, c := range cmds {
		args = append(args, "-c", c)
	}
	if !writable {
		args = append(args, "-r")
	}
	out, err := exec.Command("qemu-io", append(args, "json:"+string(opts))...).CombinedOutput()
	if err != nil || strings.Contains(string(out), "Pattern verification failed") {
		t.Fatalf("qemu-io %q: %v\n%s", cmds, err, out)
	}
}

func rawBase(t *testing.T, dir string, size int) Layer {
	t.Helper()
	l := Layer{ID: strings.Repeat("b", 64), Path: filepath.Join(dir, "base, with \"odd\" name.raw"), Format: Raw}
	if err := os.WriteFile(l.Path, bytes.Repeat([]byte{7}, size), 0o400); err != nil {
		t.Fatal(err)
	}
	return l
}

func TestOverlayIsSyncedAndStandsAlone(t *testing.T) {
	var steps []string
	d := newDisk(t, &durable.FS{Before: func(s durable.Step) error {
		steps = append(steps, string(s.Op)+" "+filepath.Base(s.Path))
		return nil
	}})
	dir := t.TempDir()
	l := Layer{ID: "one", Path: filepath.Join(dir, "one.qcow2"), Format: Qcow2}
	if err := d.Create(ctxOf(t), l.Path, 8<<30); err != nil {
		t.Fatal(err)
	}
	if n, err := d.Seal(ctxOf(t), l.Path); err != nil || n <= 0 {
		t.Fatal(err)
	}
	want := []string{"create one.qcow2", "sync one.qcow2", "syncdir " + filepath.Base(dir), "chmod one.qcow2"}
	if !slices.Equal(steps, want) {
		t.Errorf("steps %q, want %q", steps, want)
	}
	st, err := os.Stat(l.Path)
	if err != nil || st.Mode().Perm() != 0o400 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
	h, err := ReadHeader(l.Path)
	if err != nil || h.CheckStandalone() != nil || h.Version != 3 || 1<<h.ClusterBits != clusterSize {
		t.Errorf("header %+v, %v", h, err)
	}
	if n, err := VirtualSize(l); err != nil || n != 8<<30 {
		t.Errorf("virtual size %d, %v", n, err)
	}
	if n, err := Allocated(l.Path); err != nil || n <= 0 || n > mib {
		t.Errorf("allocated %d, %v", n, err)
	}
	if err := d.Create(ctxOf(t), l.Path, mib); !errdefs.Is(err, errdefs.AlreadyExists) {
		t.Errorf("second create: %v", err)
	}
}

func TestCreateFailureLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	stop := errors.New("power cut")
	for _, op := range []durable.Op{durable.OpSync, durable.OpSyncDir} {
		d := newDisk(t, &durable.FS{Before: func(s durable.Step) error {
			if s.Op == op {
				return stop
			}
			return nil
		}})
		if err := d.Create(ctxOf(t), filepath.Join(dir, "x"), mib); !errors.Is(err, stop) {
			t.Errorf("stop at %s: %v", op, err)
		}
	}
	d := New(Config{ImgBinary: filepath.Join(dir, "no-qemu-img")})
	if err := d.Create(ctxOf(t), filepath.Join(dir, "x"), mib); !errdefs.Is(err, errdefs.Unsupported) {
		t.Errorf("no qemu-img: %v", err)
	}
	if err := d.Create(ctxOf(t), filepath.Join(dir, "x"), 100); !errdefs.Is(err, errdefs.Invalid) {
		t.Errorf("odd size: %v", err)
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("left %v", left)
	}
}

// The second overlay of a size is made without qemu-img, of the same bytes.
func TestNextOverlayIsTheSame(t *testing.T) {
	d, dir := newDisk(t, nil), t.TempDir()
	for _, size := range []int64{mib, 8 << 30, 2 << 40} {
		first, next := filepath.Join(dir, "first"), filepath.Join(dir, "next")
		if err := d.Create(ctxOf(t), first, size); err != nil {
			t.Fatal(err)
		}
		img := d.img
		d.img = filepath.Join(dir, "no-qemu-img")
		err := d.Create(ctxOf(t), next, size)
		d.img = img
		if err != nil {
			t.Fatal(err)
		}
		a, err := os.ReadFile(first)
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(next)
		if err != nil || !bytes.Equal(a, b) {
			t.Errorf("overlay of %d bytes: %d and %d bytes differ, %v", size, len(a), len(b), err)
		}
		if out, err := exec.Command(img, "check", "-q", "-f", Qcow2, next).CombinedOutput(); err != nil {
			t.Errorf("check: %v: %s", err, out)
		}
		for _, path := range []string{first, next} {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func TestChainShowsEachLayerAndGrows(t *testing.T) {
	d, dir := newDisk(t, nil), t.TempDir()
	chain := []Layer{rawBase(t, dir, 4*mib)}
	for i, id := range []string{"a", "b", "c"} {
		l := Layer{ID: id, Path: filepath.Join(dir, id), Format: Qcow2}
		if err := d.Create(ctxOf(t), l.Path, int64(8+i)*mib); err != nil {
			t.Fatal(err)
		}
		chain = append(chain, l)
		qemuIO(t, chain, true, "write -P "+string('1'+rune(i))+" "+string('1'+rune(i))+"M 64k", "flush")
		if n, err := d.Seal(ctxOf(t), l.Path); err != nil || n <= 0 {
			t.Fatal(err)
		}
	}
	qemuIO(t, chain, false, "read -P 7 0 1M", "read -P 1 1M 64k", "read -P 2 2M 64k", "read -P 3 3M 64k",
		"read -P 7 3200k 800k", "read -P 0 4M 6M")
	qemuIO(t, chain[:2], false, "read -P 1 1M 64k", "read -P 7 2M 64k", "read -P 0 4M 4M")
	if err := d.Check(ctxOf(t), chain); err != nil {
		t.Fatal(err)
	}
	// A zero write frees clusters instead of taking some.
	before, _ := Allocated(chain[3].Path)
	if err := os.Chmod(chain[3].Path, 0o600); err != nil {
		t.Fatal(err)
	}
	qemuIO(t, chain, true, "write -P 0 5M 4M", "flush")
	if after, _ := Allocated(chain[3].Path); after > before+512<<10 {
		t.Errorf("4 MiB of zeros took %d bytes", after-before)
	}
	damage(t, chain[2].Path)
	if err := d.Check(ctxOf(t), chain); !errdefs.Is(err, errdefs.Storage) {
		t.Errorf("check of a damaged chain: %v", err)
	}
}

// damage points the first used L1 entry into the header.
func damage(t *testing.T, path string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	at := binary.BigEndian.Uint64(b[40:])
	if binary.BigEndian.Uint64(b[at:]) == 0 {
		t.Fatal("first L1 entry is unused")
	}
	binary.BigEndian.PutUint64(b[at:], 1<<63|clusterSize)
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestChainJSON(t *testing.T) {
	chain := []Layer{
		{ID: "img", Path: "/i", Format: Raw},
		{ID: "l1", Path: "/1", Format: Qcow2},
		{ID: strings.Repeat("f", 40), Path: "/2", Format: Qcow2},
	}
	b, err := ChainJSON(chain, true)
	if err != nil {
		t.Fatal(err)
	}
	for depth := 0; ; depth++ {
		var n node
		if err := json.Unmarshal(b, &n); err != nil {
			t.Fatal(err)
		}
		top := depth == 0
		if *n.ReadOnly == top || n.File.ReadOnly != nil || n.File.AIO != "threads" || n.File.Cache.Direct || len(n.NodeName) > 31 {
			t.Errorf("depth %d: %+v", depth, n)
		}
		if depth == 2 {
			if n.Driver != Raw || n.Backing != nil {
				t.Errorf("lowest: %+v", n)
			}
			break
		}
		b = n.Backing
	}
	alone, err := ChainJSON(chain[1:2], false)
	if err != nil || !strings.Contains(string(alone), `"backing":null`) {
		t.Errorf("layer alone: %s, %v", alone, err)
	}
	raw, err := ChainJSON(chain[:1], true)
	if err != nil || !strings.Contains(string(raw), `"read-only":false`) || strings.Contains(string(raw), "backing") {
		t.Errorf("raw layer alone: %s, %v", raw, err)
	}
	for name, bad := range map[string][]Layer{
		"empty": nil, "raw above": {chain[1], chain[0]},
		"relative": {{ID: "x", Path: "x", Format: Qcow2}}, "format": {{ID: "x", Path: "/x", Format: "vmdk"}},
	} {
		if _, err := ChainJSON(bad, true); !errdefs.Is(err, errdefs.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestHostileHeadersAreRefused(t *testing.T) {
	newDisk(t, nil)
	dir := t.TempDir()
	secret := filepath.Join(dir, "secret")
	if err := os.WriteFile(secret, make([]byte, mib), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, args := range map[string][]string{
		"backing":   {"-b", secret, "-F", "raw"},
		"data file": {"-o", "data_file=" + filepath.Join(dir, "data"), "1M"},
		"encrypted": {"--object", "secret,id=s,data=x", "-o", "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10", "1M"},
	} {
		path := filepath.Join(dir, "h")
		args = append([]string{"create", "-q", "-f", "qcow2", path}, args...)
		if strings.Contains(args[len(args)-1], "M") { // the size follows the path
			args = append(append(append([]string{}, args[:4]...), args[5:len(args)-1]...), path, "1M")
		}
		if out, err := exec.Command("qemu-img", args...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v %s", name, err, out)
		}
		h, err := ReadHeader(path)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if err := h.CheckStandalone(); !errdefs.Is(err, errdefs.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
		_ = os.Remove(path)
	}
	if _, err := ReadHeader(secret); !errdefs.Is(err, errdefs.Invalid) {
		t.Errorf("raw file: %v", err)
	}
	if _, err := ReadHeader(filepath.Join(dir, "none")); !errdefs.Is(err, errdefs.NotFound) {
		t.Errorf("no file: %v", err)
	}
}

func FuzzParseHeader(f *testing.F) {
	b := make([]byte, 200)
	binary.BigEndian.PutUint32(b, qcowMagic)
	b[7], b[23], b[103] = 3, 17, 112
	f.Add(b)
	b2 := slices.Clone(b)
	b2[15], b2[19] = 180, 9
	binary.BigEndian.PutUint32(b2[112:], extensionDataFile)
	f.Add(b2)
	f.Fuzz(func(t *testing.T, data []byte) {
		h, err := ParseHeader(bytes.NewReader(data))
		if err == nil && h.CheckStandalone() == nil && h.BackingFile != "" {
			t.Error("accepted a backing file")
		}
	})
}
