// Command load keeps a guest as busy as the benchmark wants it: it brings the
// memory in use to a size, part of which is random, keeps dirtying some of it,
// writes to the disk, and sends a stream of a thousand messages a second. It
// is no part of the product.
//
//	load -port PORT -in-use MIB -random MIB -dirty MIB/S
//
// It listens on the loopback once the memory is in use. A connection sends one
// line and gets one line, beginning with "ok" or with "error":
//
//	ping            nothing
//	stream          then 8 bytes each millisecond, for ever
//	disk MIB        writes so much to the disk each second from now on
//	fill BYTES      fills as many bytes of memory with new random data
//	speed BYTES     nanoseconds for a sequential write and for random reads of as many bytes
//	pull BYTES ADDRESS, push BYTES ADDRESS
//	                nanoseconds to get so much from a server outside, or to send it
package main

import (
	"bufio"
	"encoding/binary"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	mib       = 1 << 20
	pageBytes = 4096
	// streamPace is that of the stream's messages.
	streamPace = time.Millisecond
	// burst is how often a second memory is dirtied and the disk is written to.
	burst = 20
	// dirtied is the part of the random data that is dirtied again and again.
	dirtied = 16 * mib
	// diskFile is written to in a circle of diskBytes.
	diskFile  = "/var/tmp/bench-load"
	diskBytes = 64 * mib
)

func main() {
	port := flag.Int("port", 9900, "where to listen on the loopback")
	inUse := flag.Int64("in-use", 200, "bring the guest's memory in use to so many MiB")
	random := flag.Int64("random", 64, "so many MiB of it random")
	dirty := flag.Int64("dirty", 1, "dirty so many MiB each second")
	flag.Parse()
	err := run(*port, *inUse*mib, *random*mib, *dirty*mib) // for ever
	fmt.Fprintln(os.Stderr, "load:", err)
	os.Exit(1)
}

// load is the memory, and what is done to it.
type load struct {
	// random is dirtied at its beginning and filled from its end.
	random []byte
	filled int
	noise  noise
	disk   atomic.Int64  // bytes a second
	wake   chan struct{} // has one when disk has changed

	// block is what speed is measured in.
	measured sync.Mutex
	block    []byte
}

func run(port int, inUse, random, dirty int64) error {
	l := &load{noise: noise{state: uint64(time.Now().UnixNano())}, wake: make(chan struct{}, 1)}
	var err error
	if l.random, err = anonymous(random); err != nil {
		return err
	}
	l.noise.fill(l.random)
	if _, err := fillUp(inUse); err != nil {
		return err
	}
	listener, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return err
	}
	go l.keepDirtying(dirty)
	go l.keepWriting()
	for {
		conn, err := listener.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer func() { _ = conn.Close() }()
			line, err := bufio.NewReader(conn).ReadString('\n')
			if err == nil {
				err = l.answer(conn, strings.Fields(line))
			}
			if err != nil {
				fmt.Fprintln(os.Stderr, "load:", err)
			}
		}()
	}
}

func anonymous(bytes int64) ([]byte, error) {
	return unix.Mmap(-1, 0, int(bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
}

// fillUp uses memory until as much is in use. It holds what compresses well.
func fillUp(inUse int64) (kept [][]byte, err error) {
	for {
		var info unix.Sysinfo_t
		if err := unix.Sysinfo(&info); err != nil {
			return nil, err
		}
		left := inUse - int64(info.Totalram-info.Freeram)*int64(info.Unit)
		if left < mib {
			return kept, nil
		}
		block, err := anonymous(min(left, 16*mib) / pageBytes * pageBytes)
		if err != nil {
			return nil, err
		}
		for o := 0; o < len(block); o += 16 {
			binary.LittleEndian.PutUint64(block[o:], uint64(len(kept)))
			binary.LittleEndian.PutUint64(block[o+8:], uint64(o))
		}
		kept = append(kept, block)
	}
}

// noise is xorshift64*, which no compressor sees through.
type noise struct{ state uint64 }

func (n *noise) fill(b []byte) {
	s := n.state
	for o := 0; o+8 <= len(b); o += 8 {
		s ^= s >> 12
		s ^= s << 25
		s ^= s >> 27
		binary.LittleEndian.PutUint64(b[o:], s*2685821657736338717)
	}
	n.state = s
}

func (l *load) keepDirtying(rate int64) {
	own := noise{state: 1}
	pages := int(rate / burst / pageBytes)
	if pages == 0 {
		return // what has nothing to do does not wake the guest
	}
	place := 0
	for range time.Tick(time.Second / burst) {
		for range pages {
			// A step that meets each page, and no neighbor of the last one.
			place = (place + 1009*pageBytes) % min(dirtied, len(l.random))
			own.fill(l.random[place : place+pageBytes])
		}
	}
}

func (l *load) keepWriting() {
	f, err := os.OpenFile(diskFile, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		fmt.Fprintln(os.Stderr, "load:", err)
		return
	}
	own := noise{state: 2}
	block := make([]byte, mib)
	var owed, at int64
	for n := 0; ; n++ {
		for l.disk.Load() == 0 {
			<-l.wake
		}
		time.Sleep(time.Second / burst)
		for owed += l.disk.Load() / burst; owed >= mib; owed -= mib {
			own.fill(block)
			if _, err := f.WriteAt(block, at); err != nil {
				fmt.Fprintln(os.Stderr, "load:", err)
				return
			}
			at = (at + mib) % diskBytes
		}
		// To the disk, and not only into the page cache.
		if n%(burst/4) == 0 {
			if err := unix.Fdatasync(int(f.Fd())); err != nil {
				fmt.Fprintln(os.Stderr, "load:", err)
			}
		}
	}
}

func (l *load) answer(w io.Writer, words []string) error {
	if len(words) == 0 {
		return nil
	}
	argument := int64(0)
	if len(words) > 1 {
		var err error
		if argument, err = strconv.ParseInt(words[1], 10, 64); err != nil {
			return err
		}
	}
	text := "ok"
	switch words[0] {
	case "ping":
	case "stream":
		if _, err := fmt.Fprintln(w, text); err != nil {
			return err
		}
		return stream(w)
	case "disk":
		l.disk.Store(argument * mib)
		select {
		case l.wake <- struct{}{}:
		default:
		}
	case "fill":
		l.fillNew(int(argument))
	case "speed":
		write, read, err := l.speed(argument)
		if err != nil {
			return err
		}
		text = fmt.Sprintf("ok %d %d", write.Nanoseconds(), read.Nanoseconds())
	case "pull", "push":
		letter := byte(letterPull)
		if words[0] == "push" {
			letter = letterPush
		}
		took, err := transfer(letter, argument, words[len(words)-1])
		if text = fmt.Sprintf("ok %d", took.Nanoseconds()); err != nil {
			text = "error: " + err.Error()
		}
	default:
		text = "error: unknown command " + words[0]
	}
	_, err := fmt.Fprintln(w, text)
	return err
}

// fillNew takes the part that is not dirtied, block after block.
func (l *load) fillNew(bytes int) {
	room := l.random[min(dirtied, len(l.random)/2):]
	for bytes > 0 {
		if l.filled >= len(room) {
			l.filled = 0
		}
		part := room[l.filled:min(len(room), l.filled+bytes)]
		l.noise.fill(part)
		l.filled += len(part)
		bytes -= len(part)
	}
}

func stream(w io.Writer) error {
	var b [8]byte
	for n := uint64(0); ; n++ {
		binary.LittleEndian.PutUint64(b[:], n)
		if _, err := w.Write(b[:]); err != nil {
			return err
		}
		time.Sleep(streamPace)
	}
}

// speed measures memory that nothing else touches; a second run of it in the
// same memory is not the first write after a checkpoint any more, so the
// memory is kept.
func (l *load) speed(bytes int64) (write, read time.Duration, err error) {
	l.measured.Lock()
	defer l.measured.Unlock()
	if int64(len(l.block)) != bytes {
		if l.block, err = anonymous(bytes); err != nil {
			return 0, 0, err
		}
	}
	block := l.block
	begin := time.Now()
	for o := 0; o < len(block); o += 8 {
		binary.NativeEndian.PutUint64(block[o:], uint64(o))
	}
	write = time.Since(begin)
	sum, place := uint64(0), uint64(1)
	begin = time.Now()
	for range len(block) / 64 {
		place = place*6364136223846793005 + 1442695040888963407
		sum += binary.NativeEndian.Uint64(block[(place>>20)%uint64(len(block)/8)*8:])
	}
	read = time.Since(begin)
	if sum == 0 {
		return 0, 0, fmt.Errorf("memory of %d bytes reads as zeros", bytes)
	}
	return write, read, nil
}
