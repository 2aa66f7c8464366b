// Package host says what this host can do for guests: which QEMU there is and
// what it can, and whether KVM really works. It remembers the answers, runs no
// guest but the one that tries KVM, and fixes nothing.
package host
