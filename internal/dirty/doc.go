// Package dirty says which pages of a guest's memory were written, by looking
// into the QEMU process from outside; stock QEMU offers nothing for it that
// costs no pause. It changes nothing in the guest and copies no memory: what
// is done with the pages, and when the guest is paused, others decide.
//
// The guest's memory is one file F that QEMU maps privately: what the guest
// writes becomes pages of QEMU's own, F never changes. A page is named by its
// offset in F. There are three strategies, best first:
//
//   - userfaultfd (Linux ≥ 6.7): a userfaultfd is created inside QEMU, and the
//     PAGEMAP_SCAN ioctl of /proc/PID/pagemap tells the written pages and
//     protects them again in one step, while the guest runs.
//   - soft-dirty (kernels with CONFIG_MEM_SOFT_DIRTY, such as Debian 12's
//     6.1): bit 55 of /proc/PID/pagemap, cleared through /proc/PID/clear_refs.
//     These are two calls, so the guest has to stand still for both.
//   - untracked: all pages that are QEMU's own, which is what was written
//     since the run began.
//
// Each reports at least the pages that were written. The first two may report
// more after a fork of QEMU or a change of its mappings, and the kernel's
// swapping never hides a page from them. A page that the guest only read is
// not reported.
//
// # What escapes
//
// Writes of the kernel into pages that it has pinned (reads with O_DIRECT,
// io_uring, vhost, passed-through devices) are seen by none of the three once
// the page was reported. Guests' disks are therefore opened with cache.direct=off and
// aio=threads, and a machine that is set up otherwise has no full checkpoints.
//
// # A descriptor from inside
//
// The userfaultfd must be made by QEMU itself, in whose memory it works: see
// package inject, and what it demands of the caller. It is fetched with
// pidfd_getfd and stays open in QEMU too, where a successor of this process
// finds it; a second one could not be registered (EBUSY).
//
// # Figures
//
// Medians of 20, measured by BenchmarkUserfaultfd of this package on a
// process with 512 MiB (Linux 6.18, 2 shared cores): see docs/benchmarks.md.
package dirty
