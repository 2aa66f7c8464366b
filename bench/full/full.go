//go:build linux

// Package full measures full checkpoints: what they cost the guest, how long
// until they are kept, and how fast machines go on from them, next to QEMU's
// own snapshots and to libvirt's in the same run.
package full

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/bench/peer"
	"github.com/holdpoint/holdpoint/bench/stage"
	"github.com/holdpoint/holdpoint/bench/table"
	"github.com/holdpoint/holdpoint/bench/talk"
	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/image"
	"github.com/holdpoint/holdpoint/internal/qemu/host"
)

// What the guest has, unless a row says something else.
const (
	inUse  = 200 // MiB of memory, 64 of them random
	dirty  = 1   // MiB dirtied each second
	warmUp = 2   // rounds that do not count
)

// Bench is all measurements of full checkpoints. Its life: New, then any of
// the Measure methods, each of which leaves nothing behind.
type Bench struct {
	stage *stage.Stage
	table *table.Table
	// rounds of each figure, after the warm-up.
	rounds int
	// load is the program bench/load.
	load []byte
}

// New builds the load.
func New(ctx context.Context, s *stage.Stage, t *table.Table, rounds int) (*Bench, error) {
	path := filepath.Join(s.Home.Dir(), "bench-load")
	build := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", path, "./bench/load")
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64")
	if out, err := build.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build the load of the guests: %w: %s", err, out)
	}
	load, err := os.ReadFile(path)
	return &Bench{stage: s, table: t, rounds: rounds, load: load}, err
}

// machine runs a machine with the load in it. Its accelerator is known then.
func (b *Bench) machine(ctx context.Context, name string, memory int64, inUse, dirty int) (*holdpointv1.Machine, talk.Load, error) {
	return b.machineOf(ctx, name, &holdpointv1.Spec{MemoryBytes: memory}, inUse, dirty)
}

func (b *Bench) machineOf(ctx context.Context, name string, spec *holdpointv1.Spec, inUse, dirty int) (*holdpointv1.Machine, talk.Load, error) {
	m, _, err := b.stage.Machine(ctx, name, "debian", spec)
	if err != nil {
		return nil, talk.Load{}, err
	}
	load, err := talk.StartLoad(b.stage.Guest(ctx, name), b.load, inUse, dirty)
	return m, load, err
}

// peerConfig is the same machine for QEMU alone, in a folder of its own.
func (b *Bench) peerConfig(ctx context.Context, m *holdpointv1.Machine) (peer.Config, error) {
	folder, err := b.stage.Image()
	if err != nil {
		return peer.Config{}, err
	}
	img, err := image.Open(folder)
	if err != nil {
		return peer.Config{}, err
	}
	initramfs, err := img.BootInitramfs(ctx, b.stage.Home.Cache())
	if err != nil {
		// A bench that was built without the agent takes what the daemon made.
		found, _ := filepath.Glob(filepath.Join(b.stage.Home.Cache(), "boot", img.BuildID+"-*"))
		if len(found) == 0 {
			return peer.Config{}, err
		}
		initramfs = found[0]
	}
	caps, err := host.New(host.Config{Accelerator: m.GetAccelerator()}).Probe(ctx)
	if err != nil {
		return peer.Config{}, err
	}
	dir, err := os.MkdirTemp("/tmp", "hppeer.")
	return peer.Config{
		Dir: dir, Image: img, Initramfs: initramfs, Capabilities: caps, Accelerator: m.GetAccelerator(),
		MemoryBytes: m.GetSpec().GetMemoryBytes(), CPUs: int(m.GetSpec().GetCpus()),
		NIC: m.GetSpec().GetNetwork() != "none",
	}, err
}

// peer boots the same machine as m by QEMU alone, with the same load.
func (b *Bench) peer(ctx context.Context, m *holdpointv1.Machine, dirty int) (*peer.Peer, talk.Load, error) {
	fmt.Fprintln(b.stage.Log, "booting the same machine by QEMU alone …")
	cfg, err := b.peerConfig(ctx, m)
	if err != nil {
		return nil, talk.Load{}, err
	}
	p, err := peer.New(ctx, cfg)
	if err != nil {
		return nil, talk.Load{}, errors.Join(err, os.RemoveAll(cfg.Dir))
	}
	if _, err := p.Boot(ctx); err != nil {
		return nil, talk.Load{}, errors.Join(err, p.Close())
	}
	load, err := talk.StartLoad(p.Guest(ctx), b.load, inUse, dirty)
	if err != nil {
		return nil, talk.Load{}, errors.Join(err, p.Close())
	}
	return p, load, nil
}

// operate is an operation of which only the end counts.
func (b *Bench) operate(ctx context.Context, call func(context.Context) (*connect.Response[client.Operation], error)) (*holdpointv1.OperationResult, error) {
	op, _, err := b.stage.Operate(ctx, call)
	return op.GetResult(), err
}

func (b *Bench) checkpoint(ctx context.Context, machine string) (*holdpointv1.CheckpointResult, error) {
	r, err := b.operate(ctx, func(ctx context.Context) (*connect.Response[client.Operation], error) {
		return b.stage.Client.Checkpoints.Create(ctx, connect.NewRequest(&holdpointv1.CreateCheckpointRequest{
			RequestId: client.NewRequestID(), Machine: machine, Kind: "full",
		}))
	})
	return r.GetCheckpoint(), err
}

// times collects one figure, in milliseconds.
type times []float64

func (t times) at(part float64) float64 {
	if len(t) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(t))
	return sorted[min(len(sorted)-1, int(part*float64(len(sorted))))]
}

func (t times) p50() float64 { return t.at(0.5) }

func (t times) p95() float64 { return t.at(0.95) }

func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// stream is the stream from the guest, each message stamped as it comes.
type stream struct {
	conn    *talk.Conn
	largest atomic.Int64
	ended   chan error
}

// watch opens the stream and waits for its first message.
func watch(l talk.Load) (*stream, error) {
	conn, err := l.Stream()
	if err != nil {
		return nil, err
	}
	s := &stream{conn: conn, ended: make(chan error, 1)}
	buffer := make([]byte, 64<<10)
	if _, err := conn.Read(buffer); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	go func() {
		last := time.Now()
		for {
			_, err := conn.Read(buffer)
			if err != nil {
				s.ended <- err
				return
			}
			now := time.Now()
			gap := int64(now.Sub(last))
			last = now
			for old := s.largest.Load(); gap > old && !s.largest.CompareAndSwap(old, gap); old = s.largest.Load() {
			}
		}
	}()
	return s, nil
}

// take gives the largest gap since it was asked last.
func (s *stream) take() time.Duration { return time.Duration(s.largest.Swap(0)) }

func (s *stream) close() {
	_ = s.conn.Close()
	<-s.ended
}

// names of the machines.
const (
	busyName = "busy"
	bigName  = "big"
)
