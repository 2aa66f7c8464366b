// Package qemu implements machine.Hypervisor with stock QEMU: the command
// line, the probes of what QEMU and the host can do, and the life of one
// process from launch to proven exit. It keeps no machines, restarts nothing
// and creates no disk.
//
// A run outlives whoever launched it, so all that a successor needs is kept by
// the QEMU process or its kernel objects. QMP and the agent link are sockets
// on which QEMU itself listens. A second QMP monitor writes every event into
// the file events.out, so that a SHUTDOWN nobody was connected for is still
// known. QEMU removes its pid file on the way out, so that its absence tells
// an exit of its own accord from a kill or a crash when the exit status went to
// another process.
package qemu
