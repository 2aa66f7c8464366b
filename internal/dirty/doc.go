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
//     protects them again in one step, while the guest runs. Only pages that
//     are QEMU's own already are ever protected: an untouched one becomes its
//     own by a write, unprotected. So it can be armed at any time.
//   - soft-dirty (kernels with CONFIG_MEM_SOFT_DIRTY, such as Debian 12's
//     6.1): bit 55 of /proc/PID/pagemap, cleared through /proc/PID/clear_refs.
//     These are two calls, so the guest has to stand still for both.
//   - untracked: all pages that are QEMU's own, which is what was written
//     since the run began.
//
// Each reports at least the pages that were written, swapped out or not, and
// none that the guest only read. It may report more: soft-dirty after QEMU
// changed its mappings, userfaultfd in Arm when the kernel has reclaimed pages
// of F that it had protected in passing.
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
// Means of 20 by BenchmarkUserfaultfd, a process with 512 MiB (Linux 6.18, two
// CPUs that other work kept busy, so that these are upper bounds):
//
//	inject one system call                              0.6 ms
//	attach to a process that has a userfaultfd          0.3 ms
//	arm, nothing private                                0.04 ms
//	arm, all 512 MiB private                            9.5 ms
//	scan, nothing written, nothing private              0.1 ms
//	scan, nothing written, all 512 MiB private          0.6 ms
//	scan, 256 single pages written                      0.4 ms, copying them 0.6 ms
//	scan, 2048 single pages written                     0.9 ms, copying them 4.6 ms
//
// To protect all pages instead, untouched ones too, makes a scan twice as fast
// (0.3 ms), but arming takes 12 ms with nothing private and 160 ms with all,
// and each process then has page tables for all of its memory.
package dirty
