// Package monitor is the life of one machine's run: the parent process of its
// QEMU, which outlives the daemon, and the daemon's side of talking to it.
//
// The process (Run) launches or adopts the run, keeps the conversation with
// the guest agent alive, serves MonitorService and forwards AgentService on
// one unix socket, begins a new run when the guest reboots, and writes the run
// record before each change of phase. The daemon's side (Start, Ensure,
// Connect, Client) spawns it detached and notices its death.
//
// It is no policy: it decides neither when a machine starts nor what happens
// after its exit, has no database, and knows nothing of checkpoints.
package monitor
