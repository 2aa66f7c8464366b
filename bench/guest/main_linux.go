// Command guest is the other end of the benchmark's plain byte stream: as the
// init of a guest it opens the machine's virtio serial port and moves bytes
// for the host, with nothing of holdpoint between. It is not the guest agent
// and no part of the product.
package main

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// portName is how QEMU calls the port of the agent link.
const portName = "holdpoint.agent"

// chunkBytes is the size of each read and write: the size at which a port is
// fastest in both directions.
const chunkBytes = 256 << 10

func main() {
	if err := run(); err != nil {
		fmt.Println("bench guest:", err)
	}
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
}

func run() error {
	for _, m := range []struct{ fs, dir string }{{"proc", "/proc"}, {"sysfs", "/sys"}, {"devtmpfs", "/dev"}} {
		_ = os.Mkdir(m.dir, 0o755)
		if err := unix.Mount(m.fs, m.dir, m.fs, 0, ""); err != nil {
			return fmt.Errorf("mount %s: %w", m.dir, err)
		}
	}
	if err := loadModules(); err != nil {
		return err
	}
	port, err := openPort()
	if err != nil {
		return err
	}
	if _, err := io.WriteString(port, "READY\n"); err != nil {
		return err
	}
	return serve(port)
}

// loadModules loads those of the image's list; what is built in already fails
// harmlessly.
func loadModules() error {
	list, err := os.Open("/holdpoint/modules")
	if err != nil {
		return err
	}
	defer func() { _ = list.Close() }()
	for in := bufio.NewScanner(list); in.Scan(); {
		f, err := os.Open(in.Text())
		if err != nil {
			return err
		}
		if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && err != unix.EEXIST {
			return fmt.Errorf("load %s: %w", in.Text(), err)
		}
		_ = f.Close()
	}
	return nil
}

func openPort() (*os.File, error) {
	const tries, pause = 500, 10 * time.Millisecond
	for range tries {
		names, _ := filepath.Glob("/sys/class/virtio-ports/*/name")
		for _, n := range names {
			if name, _ := os.ReadFile(n); strings.TrimSpace(string(name)) == portName {
				return os.OpenFile("/dev/"+filepath.Base(filepath.Dir(n)), os.O_RDWR, 0)
			}
		}
		time.Sleep(pause) // the device appears within a few milliseconds of its module
	}
	return nil, fmt.Errorf("no port %s", portName)
}

// serve obeys commands of nine bytes: a letter and a count. 'u' takes count
// bytes and answers with one; 'd' gives count bytes; 'q' ends.
func serve(port io.ReadWriter) error {
	var head [9]byte
	chunk := make([]byte, chunkBytes)
	for {
		if _, err := io.ReadFull(port, head[:]); err != nil {
			return err
		}
		left := binary.BigEndian.Uint64(head[1:])
		switch head[0] {
		case 'u':
			for left > 0 {
				n, err := port.Read(chunk[:min(left, chunkBytes)])
				if err != nil {
					return err
				}
				left -= uint64(n)
			}
			if _, err := port.Write(chunk[:1]); err != nil {
				return err
			}
		case 'd':
			for left > 0 {
				n, err := port.Write(chunk[:min(left, chunkBytes)])
				if err != nil {
					return err
				}
				left -= uint64(n)
			}
		default:
			return nil
		}
	}
}
