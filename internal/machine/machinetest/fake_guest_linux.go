package machinetest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/machine"
)

// fakeKeeperMain starts the guest and ends with it: when its standard input
// ends (the machine's process is gone) or the guest does, all processes below
// are killed. It is their subreaper, so none gets away.
func fakeKeeperMain() error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return err
	}
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.Command(exe, fakeArg, "guest")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.ExtraFiles = []*os.File{os.NewFile(3, "port"), os.NewFile(4, "services")}
	started := os.NewFile(5, "started")
	unix.CloseOnExec(5)
	if err := cmd.Start(); err != nil {
		return err
	}
	started.Close()
	for _, f := range cmd.ExtraFiles {
		f.Close()
	}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		_ = unix.Kill(cmd.Process.Pid, unix.SIGKILL)
	}()
	// The guest's orphans come to us as well: reap until it is the guest.
	for {
		pid, err := unix.Wait4(-1, nil, 0, nil)
		if pid == cmd.Process.Pid || errors.Is(err, unix.ECHILD) {
			break
		}
	}
	for {
		_ = signalTree(os.Getpid(), unix.SIGKILL)
		if _, err := unix.Wait4(-1, nil, 0, nil); errors.Is(err, unix.ECHILD) {
			return nil
		}
	}
}

// guestServices is the guest's line to its machine.
type guestServices struct {
	mu   sync.Mutex
	file *os.File
	dec  *json.Decoder
}

func (s *guestServices) ask(req request) (answer, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var a answer
	if err := json.NewEncoder(s.file).Encode(req); err != nil {
		return a, err
	}
	if err := s.dec.Decode(&a); err != nil {
		return a, err
	}
	if a.Error != "" {
		return a, errors.New(a.Error)
	}
	return a, nil
}

// fakeGuestMain is the body of the guest's first process.
func fakeGuestMain() error {
	var spec fakeSpec
	if err := json.Unmarshal([]byte(os.Getenv("HOLDPOINT_FAKE_SPEC")), &spec); err != nil {
		return err
	}
	if err := os.Unsetenv("HOLDPOINT_FAKE_SPEC"); err != nil {
		return err
	}
	for fd := 3; fd <= 4; fd++ {
		unix.CloseOnExec(fd)
		if err := unix.SetNonblock(fd, true); err != nil {
			return err
		}
	}
	file := os.NewFile(4, "services")
	services := &guestServices{file: file, dec: json.NewDecoder(file)}
	if spec.Run.Incoming == nil {
		fmt.Printf("fake guest of machine %s boots, run %s\n", spec.Run.MachineName, spec.Run.RunID)
		awaitGone(faultPath(spec, "boot-waits"))
		if text, ok := readFault(spec, "boot-fails"); ok {
			fmt.Println(text)
			_, err := services.ask(request{Op: "end", Reason: machine.GuestShutdown})
			return err
		}
	}
	portFile := os.NewFile(3, "port")
	port, err := net.FileConn(portFile)
	if err != nil {
		return err
	}
	portFile.Close()
	if err := serveAgent(context.Background(), spec, port, services); err != nil {
		return fmt.Errorf("fake guest: %w", err)
	}
	return nil
}

// awaitGone waits until there is no file at path.
func awaitGone(path string) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	if _, err := unix.InotifyAddWatch(fd, filepath.Dir(path), unix.IN_DELETE|unix.IN_MOVED_FROM); err != nil {
		return
	}
	buf := make([]byte, 4096)
	for {
		if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
			return
		}
		if _, err := unix.Read(fd, buf); err != nil && !errors.Is(err, unix.EINTR) {
			return
		}
	}
}
