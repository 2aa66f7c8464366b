// Package window opens a window on a running machine: it copies the guest's
// memory while the guest runs, stops it for as little as possible to take what
// is left together with the devices and the disk, and always lets it go again.
// It leaves three files in a staging folder:
//
//   - memory, as long as the guest's memory and sparse: each page that changed
//     at its own offset, holes elsewhere;
//   - pages, which pages those are (dirty.Set in bytes);
//   - devices, the state of CPUs and devices as machine.Run.Window wrote it.
//
// None of them is synced. It publishes nothing, knows no checkpoints, and does
// not decide since when changed pages are counted: book.Book does.
//
// # The order
//
//	sync the disk's file from outside, so that the window has little to flush
//	look which pages were written, copy them, and look again, up to three
//	  times or until little is left
//	sync the disk's file again: what was written meanwhile
//	refuse if what is left cannot be copied within the deadline
//	enter: the caller records that the guest is about to be stopped
//	the window, in which the last pages go to memory of our own that was
//	  prepared before, so that no file system is waited for
//	write them, and the set, to their files
//
// Where the tracking needs the guest to stand still it is entered first, and
// each look is a short pause of its own.
package window
