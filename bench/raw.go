//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/u-root/u-root/pkg/cpio"

	"github.com/holdpoint/holdpoint/bench/stage"
	"github.com/holdpoint/holdpoint/internal/disk"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/image"
	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/qemu"
	"github.com/holdpoint/holdpoint/internal/qemu/host"
)

// rawPort is a machine like any other, of which the guest's side of the
// virtio serial port is held by bench/guest instead of the guest agent. Its
// life: newRawPort builds and boots it; close ends it.
type rawPort struct {
	dir  string
	run  machine.Run
	conn net.Conn
}

func newRawPort(ctx context.Context, s *stage.Stage) (r *rawPort, err error) {
	dir, err := os.MkdirTemp("/tmp", "hpraw.")
	if err != nil {
		return nil, err
	}
	r = &rawPort{dir: dir}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.close(ctx))
		}
	}()
	folder, err := s.Image()
	if err != nil {
		return nil, err
	}
	img, err := image.Open(folder)
	if err != nil {
		return nil, err
	}
	initramfs, err := rawInitramfs(ctx, dir, filepath.Join(folder, "initramfs"))
	if err != nil {
		return nil, err
	}
	top := machine.Layer{ID: durable.NewID(), Path: filepath.Join(dir, "top.qcow2"), Format: disk.Qcow2}
	if err := disk.New(disk.Config{FS: &durable.FS{}}).Create(ctx, top.Path, img.DiskBytes); err != nil {
		return nil, err
	}
	r.run, err = qemu.New(qemu.Config{Host: host.New(host.Config{Accelerator: s.Web.GetAccelerator()})}).Launch(ctx, machine.RunConfig{
		RunID: durable.NewID(), Dir: dir, SocketDir: dir, MachineID: durable.NewID(), MachineName: "raw",
		MemoryBytes: machine.DefaultMemory, CPUs: machine.DefaultCPUs, Kernel: img.Kernel(), Initramfs: initramfs,
		Disk:        []machine.Layer{{ID: durable.NewID(), Path: img.Root(), Format: disk.Raw}, top},
		Accelerator: s.Web.GetAccelerator(),
	})
	if err != nil {
		return nil, err
	}
	if r.conn, err = r.run.DialLink(ctx); err != nil {
		return nil, err
	}
	if err := r.run.Resume(ctx); err != nil {
		return nil, err
	}
	return r, r.awaitReady()
}

// awaitReady reads what the guest says first.
func (r *rawPort) awaitReady() error {
	const limit = time.Minute
	if err := r.conn.SetReadDeadline(time.Now().Add(limit)); err != nil {
		return err
	}
	ready := make([]byte, len("READY\n"))
	if _, err := io.ReadFull(r.conn, ready); err != nil || string(ready) != "READY\n" {
		return fmt.Errorf("boot the guest of the plain byte stream: got %q: %w", ready, err)
	}
	return r.conn.SetReadDeadline(time.Time{})
}

// rawInitramfs is the image's, with bench/guest as its init.
func rawInitramfs(ctx context.Context, dir, base string) (string, error) {
	guest := filepath.Join(dir, "guest")
	build := exec.CommandContext(ctx, "go", "build", "-o", guest, "./bench/guest")
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the guest of the plain byte stream: %w: %s", err, out)
	}
	program, err := os.ReadFile(guest)
	if err != nil {
		return "", err
	}
	modules, err := os.ReadFile(base)
	if err != nil {
		return "", err
	}
	var archive bytes.Buffer
	archive.Write(modules)
	for archive.Len()%4 != 0 {
		archive.WriteByte(0)
	}
	records := []cpio.Record{
		cpio.Directory("dev", 0o755), cpio.CharDev("dev/console", 0o600, 5, 1),
		cpio.StaticFile("init", string(program), 0o755),
	}
	w := cpio.Newc.Writer(&archive)
	if err := cpio.WriteRecords(w, records); err != nil {
		return "", err
	}
	if err := cpio.WriteTrailer(w); err != nil {
		return "", err
	}
	path := filepath.Join(dir, "initramfs")
	return path, os.WriteFile(path, archive.Bytes(), 0o600)
}

// upload is how long it takes until the guest has taken n bytes.
func (r *rawPort) upload(n int64) (time.Duration, error) {
	begin := time.Now()
	if err := r.command('u', n); err != nil {
		return 0, err
	}
	chunk := make([]byte, 256<<10)
	for left := n; left > 0; {
		size := min(left, int64(len(chunk)))
		if _, err := r.conn.Write(chunk[:size]); err != nil {
			return 0, err
		}
		left -= size
	}
	_, err := io.ReadFull(r.conn, chunk[:1])
	return time.Since(begin), err
}

// download is how long it takes to get n bytes from the guest.
func (r *rawPort) download(n int64) (time.Duration, error) {
	begin := time.Now()
	if err := r.command('d', n); err != nil {
		return 0, err
	}
	_, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, io.LimitReader(r.conn, n), make([]byte, 256<<10))
	return time.Since(begin), err
}

func (r *rawPort) command(letter byte, n int64) error {
	head := binary.BigEndian.AppendUint64([]byte{letter}, uint64(n))
	_, err := r.conn.Write(head)
	return err
}

func (r *rawPort) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
	defer cancel()
	var errs []error
	if r.conn != nil {
		errs = append(errs, r.conn.Close())
	}
	if r.run != nil {
		errs = append(errs, r.run.Kill(ctx))
	}
	return errors.Join(append(errs, os.RemoveAll(r.dir))...)
}
