//go:build linux

package agent

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/internal/agent/gauge"
	"github.com/holdpoint/holdpoint/internal/wire"
)

// tcpListen is the state LISTEN in /proc/net/tcp (include/net/tcp_states.h).
const tcpListen = "0A"

// Facts reports processes and listening ports. In an ordinary process these
// are those of its own commands and what they started.
func (a *Agent) Facts(context.Context, *connect.Request[agentv1.FactsRequest]) (*connect.Response[agentv1.FactsResponse], error) {
	processes, err := readProcesses()
	if err != nil {
		return nil, wire.Encode(err)
	}
	if !a.cfg.Init {
		processes = a.own(processes)
	}
	names := map[string]string{} // socket inode → process
	for _, p := range processes {
		for _, inode := range sockets(p.GetPid()) {
			names[inode] = p.GetName()
		}
	}
	resp := &agentv1.FactsResponse{Processes: processes}
	for _, table := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		for _, l := range readListeners(table) {
			name, known := names[l.inode]
			if !known && !a.cfg.Init {
				continue
			}
			resp.Listeners = append(resp.Listeners, &agentv1.Listener{
				Port: uint32(l.addr.Port()), Address: l.addr.Addr().Unmap().String(), Process: name,
			})
		}
	}
	return connect.NewResponse(resp), nil
}

// Usage tells what the guest uses.
func (a *Agent) Usage(context.Context, *connect.Request[agentv1.UsageRequest]) (*connect.Response[agentv1.UsageResponse], error) {
	u, err := gauge.Read()
	return connect.NewResponse(u), wire.Encode(err)
}

// own keeps the agent's commands and what they started: descendants, and
// orphans in the sessions of commands.
func (a *Agent) own(all []*agentv1.Process) []*agentv1.Process {
	mine := map[int32]bool{}
	for _, c := range a.commands.List() {
		mine[int32(c.PID())] = true
	}
	for grew := true; grew; {
		grew = false
		for _, p := range all {
			if !mine[p.GetPid()] && (mine[p.GetPpid()] || mine[session(p.GetPid())]) {
				mine[p.GetPid()] = true
				grew = true
			}
		}
	}
	return slices.DeleteFunc(all, func(p *agentv1.Process) bool { return !mine[p.GetPid()] })
}

func session(pid int32) int32 {
	f := statFields(strconv.Itoa(int(pid)))
	if len(f) < 4 {
		return 0
	}
	n, _ := strconv.ParseInt(f[3], 10, 32) // 0 is nobody's session
	return int32(n)
}

// statFields are the fields of /proc/PID/stat from the third on.
func statFields(pid string) []string {
	b, err := os.ReadFile("/proc/" + pid + "/stat")
	if err != nil {
		return nil
	}
	_, rest, _ := strings.Cut(string(b[strings.LastIndexByte(string(b), ')')+1:]), " ")
	return strings.Fields(rest)
}

// readProcesses lists the processes, kernel threads left out. One that ends
// meanwhile is left out too.
func readProcesses() ([]*agentv1.Process, error) {
	list, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var out []*agentv1.Process
	for _, e := range list {
		pid, err := strconv.ParseInt(e.Name(), 10, 32)
		if err != nil {
			continue
		}
		f := statFields(e.Name())
		fi, err := os.Stat("/proc/" + e.Name())
		if len(f) < 2 || err != nil {
			continue
		}
		ppid, _ := strconv.ParseInt(f[1], 10, 32)
		if pid == 2 || ppid == 2 {
			continue // kthreadd and its threads
		}
		out = append(out, &agentv1.Process{
			Pid: int32(pid), Ppid: int32(ppid), Name: text(e.Name(), "comm"),
			Cmdline: text(e.Name(), "cmdline"), Uid: owner(fi),
		})
	}
	return out, nil
}

// text is a file of a process, NULs as spaces, at most 4 KiB.
func text(pid, file string) string {
	b, err := os.ReadFile("/proc/" + pid + "/" + file)
	if err != nil {
		return ""
	}
	b = b[:min(len(b), 4<<10)]
	return strings.ToValidUTF8(strings.TrimSpace(strings.ReplaceAll(string(b), "\x00", " ")), "?")
}

// sockets are the inodes of a process's sockets.
func sockets(pid int32) []string {
	dir := "/proc/" + strconv.Itoa(int(pid)) + "/fd"
	list, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	var out []string
	for _, e := range list {
		target, err := os.Readlink(dir + "/" + e.Name())
		if inode, ok := strings.CutPrefix(target, "socket:["); err == nil && ok {
			out = append(out, strings.TrimSuffix(inode, "]"))
		}
	}
	return out
}

type listener struct {
	addr  netip.AddrPort
	inode string
}

// readListeners reads a table of the kernel (proc(5)); one that is not there
// has none.
func readListeners(table string) []listener {
	b, err := os.ReadFile(table)
	if err != nil {
		return nil
	}
	var out []listener
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) < 10 || f[3] != tcpListen {
			continue
		}
		if addr, ok := parseAddr(f[1]); ok {
			out = append(out, listener{addr, f[9]})
		}
	}
	return out
}

// parseAddr reads "0100007F:1F90": words of the address in host order.
func parseAddr(s string) (netip.AddrPort, bool) {
	host, port, _ := strings.Cut(s, ":")
	raw, err := hex.DecodeString(host)
	n, perr := strconv.ParseUint(port, 16, 16)
	if err != nil || perr != nil || len(raw)%4 != 0 {
		return netip.AddrPort{}, false
	}
	for i := 0; i < len(raw); i += 4 {
		binary.BigEndian.PutUint32(raw[i:], binary.NativeEndian.Uint32(raw[i:]))
	}
	addr, ok := netip.AddrFromSlice(raw)
	return netip.AddrPortFrom(addr, uint16(n)), ok
}
