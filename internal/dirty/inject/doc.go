// Package inject makes single system calls inside another process, for
// descriptors that only it can make. It is not a debugger: the process's main
// thread stands still for some hundred microseconds and then goes on as if
// nothing had been, and no code is put into it.
//
// The thread is stopped by PTRACE_SEIZE and PTRACE_INTERRUPT, its signals are
// held back by PTRACE_SETSIGMASK, and it executes a `syscall` instruction that
// is there already: the one in front of its instruction pointer when it sleeps
// in the kernel, else one in the vdso. Its registers are put back, and the
// kernel restarts the call that it was interrupted in. While the registers are
// not its own, PTRACE_O_EXITKILL is set: if we die in these microseconds, the
// process ends instead of running on with wrong registers.
//
// While a process is injected into nobody may be in a blocking wait for it
// (wait4, waitid): the kernel would hand them its stops.
package inject
