// Package store writes and reads memory layers: files that hold the pages of a
// guest's memory that changed since the layer below. It also puts a chain of
// layers together into the memory file that QEMU maps. It does not know which
// pages changed, what a layer belongs to, or when one may be deleted.
//
// # Format, version 1
//
// All numbers are little-endian and unsigned. Reserved bytes are zero, and a
// reader refuses others. A page is 4096 bytes; page n begins at n × 4096 of the
// memory. Digests are SHA-256. The four parts follow each other without gaps:
//
//	header   64 bytes
//	frames   0 … 1,048,576, of any length each
//	index    56 bytes for each frame
//	trailer  80 bytes
//
// Header:
//
//	 0   8  "HPMEMORY"
//	 8   4  version: 1
//	12   4  page size: 4096
//	16   8  memory size in bytes, whole pages, at most 2^40
//	24  16  layer id, lower-case hexadecimal digits
//	40  16  id of the layer below, or zero bytes: all memory is zero below
//	56   8  reserved
//
// Frame, which holds some runs of pages in ascending order:
//
//	 0   4  number of runs R, 1 … 4096
//	 4   4  number of pages with data P, 0 … 256
//	 8   4  length of the payload S, at most P × 4096
//	12   1  codec: 0 the pages as they are (S = P × 4096), 1 one zstd frame (S < P × 4096)
//	13   3  reserved
//	16  16 × R  the runs
//	…    S  payload: the pages of all runs with data, one after another
//
// Run. The runs of a file are ascending and do not overlap, over all frames:
//
//	 0   8  first page
//	 8   4  number of pages, at least 1
//	12   4  0: the pages are zero; 1: their data is in the payload
//
// Index entry, for frame i the i-th:
//
//	 0   8  offset of the frame in the file
//	 8   8  its first page
//	16   8  the page behind its last
//	24  32  digest of the whole frame
//
// Trailer:
//
//	 0   8  "HPMEMEND"
//	 8   8  offset of the index in the file
//	16   8  number of frames
//	24   8  number of pages with data in the file
//	32   8  number of zero pages in the file
//	40   8  reserved
//	48  32  digest of the header, the index and the 48 bytes before
//
// So the last 32 bytes stand for the whole file: through the index they cover
// each frame, and no byte belongs to none of the four parts. They are the
// digest of the layer. A reader begins at the end.
//
// A page that no layer of a chain has is zero. A page that is in the layer and
// below counts as in the layer.
//
// # Choices
//
// The writer puts at most 64 pages with data into a frame (256 KiB): a page
// that is compared with the layer below then costs the decoding of little else.
// Zero pages take no part of a payload and adjacent runs of them are one, so
// that memory which was freed costs next to nothing.
package store
