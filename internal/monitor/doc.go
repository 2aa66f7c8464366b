// Package monitor is how the daemon deals with the monitors of its machines.
// A monitor is the process that is the parent of one machine's QEMU; it outlives
// the daemon. Here are the files of a run's folder (Config, Record, the lock),
// and Start, Ensure and Client, which spawn a monitor detached, talk to it, and
// notice its death. The body of the process is package process below; what
// it forwards to the guest goes through package relay.
//
// It is no policy: it decides neither when a machine starts nor what happens
// after its exit, has no database, and knows nothing of checkpoints.
package monitor
