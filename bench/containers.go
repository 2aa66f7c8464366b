//go:build linux

package main

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"connectrpc.com/connect"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/bench/stage"
	"github.com/holdpoint/holdpoint/bench/table"
	"github.com/holdpoint/holdpoint/client"
)

const (
	// containerFiles is how many files the container image has.
	containerFiles  = 10_000
	containerTarget = 2
	containerRounds = 3
)

// measureImport imports a Debian as docker save writes it, in turns with the
// tools that make a root disk of its one layer.
func measureImport(ctx context.Context, s *stage.Stage, t *table.Table) (err error) {
	dir, err := os.MkdirTemp("/var/tmp", "hpimport.")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	layer, saved := filepath.Join(dir, "layer.tar"), filepath.Join(dir, "saved.tar")
	if err := packDebian(ctx, s, dir, layer); err != nil {
		return err
	}
	if err := save(layer, saved); err != nil {
		return err
	}
	ours, tools, err := table.InTurns(containerRounds, func() (time.Duration, error) {
		begun := time.Now()
		_, _, err := s.Operate(ctx, func(ctx context.Context) (*connect.Response[client.Operation], error) {
			return s.Client.Images.Import(ctx, connect.NewRequest(&holdpointv1.ImportImageRequest{
				RequestId: client.NewRequestID(), Name: "imported", Path: saved, DiskBytes: 1 << 30,
			}))
		})
		return time.Since(begun), err
	}, func() (time.Duration, error) { return unpackAndFormat(ctx, dir, layer) })
	if err != nil {
		return err
	}
	t.Add(table.Row{
		What: fmt.Sprintf("`image import` of a Debian with %d files from `docker save`", containerFiles), Measured: table.MS(ours),
		Against: "tar x + mkfs.ext4 -d, 1 GiB: " + table.MS(tools), Ratio: table.Ratio(ours, tools),
		Target: fmt.Sprintf("≤ %d ×", containerTarget), Met: table.Ratio(ours, tools) <= containerTarget,
		Phases: "the digests of layers and image, and syncs, included",
	})
	return nil
}

// unpackAndFormat is what root would do by hand.
func unpackAndFormat(ctx context.Context, dir, layer string) (took time.Duration, err error) {
	tree, disk := filepath.Join(dir, "tree"), filepath.Join(dir, "disk")
	defer func() { err = errors.Join(err, os.RemoveAll(tree), os.RemoveAll(disk)) }()
	begun := time.Now()
	if err := os.Mkdir(tree, 0o755); err != nil {
		return 0, err
	}
	for _, args := range [][]string{
		{"tar", "-C", tree, "--numeric-owner", "-xpf", layer}, {"mkfs.ext4", "-q", "-F", "-m", "0", "-E", "root_owner=0:0", "-d", tree, disk, "1G"},
	} {
		if err := tool(ctx, args...); err != nil {
			return 0, err
		}
	}
	return time.Since(begun), nil
}

func tool(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Env = append(os.Environ(), "PATH="+os.Getenv("PATH")+":/usr/sbin:/sbin")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", args[0], err, out)
	}
	return nil
}

// packDebian makes a layer of the first files of the image's root, with the
// folders and links among them.
func packDebian(ctx context.Context, s *stage.Stage, dir, layer string) error {
	image, err := s.Image()
	if err != nil {
		return err
	}
	root := filepath.Join(dir, "root")
	if err := os.Mkdir(root, 0o755); err != nil {
		return err
	}
	if err := tool(ctx, "debugfs", "-R", "rdump / "+root, filepath.Join(image, "root.img")); err != nil {
		return err
	}
	var names []string
	count := 0
	err = filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.Type().IsRegular() {
			if count++; count > containerFiles {
				return fs.SkipAll
			}
		}
		name, err := filepath.Rel(root, path)
		names = append(names, "./"+name)
		return err
	})
	if err == nil && count < containerFiles {
		err = fmt.Errorf("the image has %d files, fewer than %d", count, containerFiles)
	}
	if err != nil {
		return err
	}
	list := filepath.Join(dir, "names")
	if err := os.WriteFile(list, []byte(strings.Join(names, "\x00")), 0o600); err != nil {
		return err
	}
	if err := tool(ctx, "tar", "-C", root, "--numeric-owner", "--null", "--no-recursion", "-T", list, "-cf", layer); err != nil {
		return err
	}
	return os.RemoveAll(root)
}

// save writes what docker save writes of an image of one layer.
func save(layer, saved string) error {
	f, err := os.Open(layer)
	if err != nil {
		return err
	}
	defer f.Close()
	h := sha256.New()
	size, err := io.Copy(h, f)
	if err != nil {
		return err
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return err
	}
	id := hex.EncodeToString(h.Sum(nil))
	config := fmt.Appendf(nil, `{"os":"linux","architecture":"amd64","config":{},"rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}`, id)
	name := fmt.Sprintf("%x.json", sha256.Sum256(config))
	manifest, err := json.Marshal([]map[string]any{{"Config": name, "RepoTags": []string{"debian:12"}, "Layers": []string{id + "/layer.tar"}}})
	if err != nil {
		return err
	}
	out, err := os.Create(saved)
	if err != nil {
		return err
	}
	defer out.Close()
	w := tar.NewWriter(out)
	for _, part := range []struct {
		name    string
		size    int64
		content io.Reader
	}{{name, int64(len(config)), strings.NewReader(string(config))}, {id + "/layer.tar", size, f}, {"manifest.json", int64(len(manifest)), strings.NewReader(string(manifest))}} {
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: part.name, Mode: 0o644, Size: part.size}); err != nil {
			return err
		}
		if _, err := io.Copy(w, part.content); err != nil {
			return err
		}
	}
	return errors.Join(w.Close(), out.Close())
}
