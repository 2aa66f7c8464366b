//go:build linux

// The guest of the memory tests: it writes memory and reads its disk all the
// time, past the page cache and through it. With a test program in its
// initramfs it runs that instead.
package main

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	arena = 64 << 20
	disk  = 32 << 20
)

func main() {
	for dir, fs := range map[string]string{"/proc": "proc", "/sys": "sysfs", "/dev": "devtmpfs"} {
		_ = os.Mkdir(dir, 0o755)
		_ = unix.Mount(fs, dir, fs, 0, "")
	}
	if _, err := os.Stat("/dirty.test"); err == nil {
		test()
	}
	text, err := os.ReadFile("/holdpoint/modules")
	check(err)
	for _, path := range strings.Fields(string(text)) {
		f, err := os.Open(path)
		check(err)
		if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil {
			fmt.Println("guest: load", path, err)
		}
	}
	mem, err := unix.Mmap(-1, 0, arena, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	check(err)
	for i := 0; i < arena; i += 4096 {
		mem[i] = 1
	}
	go read(mem[:arena/2], unix.O_DIRECT)
	go read(mem[arena/2:arena/2+1<<20], 0)
	fmt.Println("guest: ready")
	for {
		rest := mem[arena/2+1<<20:]
		for range 64 {
			at := rand.IntN(len(rest) / 8)
			rest[at*8] = byte(rand.Int())
		}
		time.Sleep(time.Millisecond)
	}
}

// test runs the test program and says how it went.
func test() {
	_ = os.Mkdir("/tmp", 0o777)
	cmd := exec.Command("/dirty.test", "-test.v", "-test.skip=QEMU|OtherKernel|ManyRuns", "-test.timeout=10m")
	cmd.Dir, cmd.Stdout, cmd.Stderr = "/", os.Stdout, os.Stdout
	err := cmd.Run()
	fmt.Println("guest: tests ended:", err)
	select {}
}

// read fills b from the disk at random places.
func read(b []byte, flags int) {
	fd, err := unix.Open("/dev/vda", unix.O_RDONLY|flags, 0)
	check(err)
	for {
		const size = 64 << 10
		from := rand.IntN(disk/size) * size
		to := rand.IntN(len(b)/size) * size
		_, err := unix.Pread(fd, b[to:to+size], int64(from))
		check(err)
		if flags == 0 {
			_ = unix.Fadvise(fd, 0, disk, unix.FADV_DONTNEED)
		}
		time.Sleep(time.Millisecond)
	}
}

func check(err error) {
	if err != nil {
		fmt.Println("guest: failed:", err)
		select {}
	}
}
