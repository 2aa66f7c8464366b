//go:build linux

package qemu

import (
	"context"
	"os"
	"path/filepath"

	"github.com/holdpoint/holdpoint/internal/machine"
	"github.com/holdpoint/holdpoint/internal/qemu/ending"
	"github.com/holdpoint/holdpoint/internal/qemu/logs"
)

// watch waits for the process's exit and says how it was.
func (r *run) watch() {
	status, err := r.proc.Wait()
	if err != nil {
		return // closed
	}
	r.mu.Lock()
	_, err = os.Stat(filepath.Join(r.cfg.Dir, killFile))
	r.exit = ending.Classify(ending.Evidence{
		Status: status, Killed: r.killed || err == nil,
		OwnAccord: isGone(filepath.Join(r.cfg.Dir, pidFile)),
		Reason:    ending.ShutdownReason(filepath.Join(r.cfg.Dir, eventsOut)),
		Printed:   printed(r.cfg),
	})
	client := r.client
	r.mu.Unlock()
	r.within.Clear()
	close(r.exited)
	r.stop()
	_ = client.Close() // its socket is closed already
	_ = r.proc.Close()
	for _, name := range []string{qmpSocket, linkSocket, netSocket, machine.ConsoleSocket} {
		_ = os.Remove(filepath.Join(r.cfg.SocketDir, name)) // QEMU does it when it can
	}
}

func isGone(path string) bool {
	_, err := os.Stat(path)
	return os.IsNotExist(err)
}

// keepLogs keeps what the guest and QEMU print from filling the host's disk.
func (r *run) keepLogs(ctx context.Context) {
	path := func(name string) string { return filepath.Join(r.cfg.Dir, name) }
	logs.Keep(ctx, logs.Config{
		Appended: []string{path(consoleFile), path(outputFile)}, Other: path(eventsOut), Log: r.log,
	})
}
