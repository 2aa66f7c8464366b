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
//	header    64 bytes
//	payloads  those of all frames, in order
//	table     all frames, in order
//	trailer   80 bytes
//
// Header:
//
//	 0   8  "HPMEMORY"
//	 8   4  version: 1
//	12   4  page size: 4096
//	16   8  memory size in bytes, whole pages, at most 2^36
//	24  16  layer id, lower-case hexadecimal digits
//	40  16  id of the layer below, or zero bytes: all memory is zero below
//	56   8  reserved
//
// Frame, in the table. It stands for some runs of pages:
//
//	 0   4  length of its payload S, at most P × 4096
//	 4   4  codec: 0 the pages as they are (S = P × 4096), 1 one zstd frame (S < P × 4096)
//	 8   4  number of runs R, 1 … 4096
//	12   4  number of pages with data P, 0 … 256
//	16  32  digest of its payload
//	48  16 × R  the runs
//	…   16 × P  for each page with data, the first 16 bytes of its digest
//
// Run. The runs of a file are ascending and do not overlap, over all frames:
//
//	 0   8  first page
//	 8   4  number of pages, at least 1
//	12   4  0: the pages are zero; 1: their data is in the payload
//
// Payload: the pages of all the frame's runs with data, one after another. The
// first begins at 64, each other one where the one before ends.
//
// Trailer:
//
//	 0   8  "HPMEMEND"
//	 8   8  offset of the table in the file, where the last payload ends
//	16   8  number of frames, at most 2^24
//	24   8  number of pages with data in the file
//	32   8  number of zero pages in the file
//	40   8  reserved
//	48  32  digest of the header, the table and the 48 bytes before
//
// So the last 32 bytes stand for the whole file: through the table they cover
// each payload, and no byte belongs to none of the four parts. They are the
// digest of the layer. A reader begins at the end. The table has at most 512
// MiB; that of a layer with all of 16 GiB has 70.
//
// A page that no layer of a chain has is zero. A page that is in the layer and
// below counts as in the layer.
//
// # Choices
//
// The digests of single pages are there so that a page can be told to be the
// same as below without decoding anything. Half a SHA-256 is enough: the only
// one who gains from a collision is the guest, and it spoils its own memory.
//
// The writer puts at most 64 pages with data into a frame (256 KiB). Zero pages
// have no payload and adjacent runs of them are one, so that memory which was
// freed costs next to nothing.
//
// # Figures
//
// By BenchmarkStore: 192 MiB of which 64 do not compress and 128 are machine
// code, stored as 122 to 138 MiB (Linux 6.18, AMD EPYC with SHA instructions, two CPUs
// that other work kept busy: CPU time, which two workers share):
//
//	write            1.3–2.0 s   100–150 MiB/s for each CPU
//	verify           0.5 s       400 MiB/s
//	materialize      0.5 s       400 MiB/s, without the sync; half of it is zstd, a quarter SHA-256
//	compare 2048 single pages with a layer that has all    20 ms
//	the same by decoding, without digests of pages         690 ms
package store
