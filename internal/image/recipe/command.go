package recipe

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdpoint/holdpoint/internal/durable"
)

// grace is how long a canceled tool may take to clean up behind itself.
const grace = 20 * time.Second

// searchPath finds tools for a user whose own PATH leaves out the folders of
// mkfs and chroot.
const searchPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Command is one run of a tool with all it starts.
type Command struct {
	// Args are the tool's name and arguments; it is looked for in the folders
	// of system tools.
	Args []string
	// Env is added to the process's own environment.
	Env    []string
	Stdin  io.Reader
	Stdout io.Writer
	Stderr io.Writer
	// Limits, when set, are for a tool that reads what a stranger made. It has to
	// be one process: the kernel ends it with ours, whatever ends that.
	Limits *Limits
}

// Limits are those of one process, see setrlimit(2).
type Limits struct {
	// Memory is the address space, and File how long a file it may write, in
	// bytes.
	Memory, File int64
	// CPU is its processor time, in whole seconds.
	CPU time.Duration
}

// script sets the limits, if any, and becomes the tool. fakeroot and dpkg close
// every descriptor there could be at each start: with a limit of a million that
// takes longer than the work.
func (l *Limits) script() string {
	limits := "ulimit -n 1024; "
	if l != nil {
		// In KiB, 512 bytes and seconds (ulimit(1)).
		limits += fmt.Sprintf("ulimit -c 0; ulimit -v %d && ulimit -f %d && ulimit -t %d || exit 125; ",
			l.Memory>>10, (l.File+511)/512, int64(l.CPU/time.Second))
	}
	return limits + `exec "$@"`
}

// Run returns when the tool and everything it started have ended. When ctx
// ends they are asked to end (SIGTERM), and after grace are killed.
func (c Command) Run(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("run %s: %w", c.Args[0], err)
	}
	args := append([]string{"-c", c.Limits.script(), "sh"}, c.Args...)
	cmd := exec.CommandContext(ctx, "/bin/sh", args...)
	cmd.Dir, cmd.Stdin, cmd.Stdout, cmd.Stderr = "/", c.Stdin, c.Stdout, c.Stderr
	mark := markName + durable.NewID()
	cmd.Env = slices.Concat(os.Environ(), []string{"PATH=" + searchPath, "LC_ALL=C.UTF-8", mark}, c.Env)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if c.Limits != nil {
		// It is the thread's end that the kernel looks at.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		cmd.SysProcAttr.Pdeathsig = unix.SIGKILL
	}
	cmd.Cancel = func() error {
		err := unix.Kill(-cmd.Process.Pid, unix.SIGTERM)
		endMarked(mark)
		return err
	}
	cmd.WaitDelay = grace
	err := cmd.Run()
	if cmd.Process != nil {
		// What is still there of the group has outlived its leader.
		_ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL)
	}
	if err != nil {
		endMarked(mark)
	}
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("run %s: %w", c.Args[0], ctx.Err())
	case err != nil:
		return fmt.Errorf("run %s: %w", c.Args[0], err)
	}
	return nil
}

// markName begins the variable that marks what a Command started.
const markName = "HOLDPOINT_COMMAND="

// endMarked ends what left the tool's group: fakeroot's daemon does so and
// outlives a fakeroot that is killed. It is asked to end, for it has message
// queues to remove.
func endMarked(mark string) {
	environs, _ := filepath.Glob("/proc/[0-9]*/environ") // the pattern is good
	for _, path := range environs {
		env, err := os.ReadFile(path)
		if err != nil || !slices.Contains(strings.Split(string(env), "\x00"), mark) {
			continue // ended meanwhile, or somebody else's
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path))); err == nil {
			_ = unix.Kill(pid, unix.SIGTERM)
		}
	}
}

// FindTool returns the path of a tool on searchPath.
func FindTool(name string) (string, error) {
	for _, dir := range filepath.SplitList(searchPath) {
		path := filepath.Join(dir, name)
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode().Perm()&0o111 != 0 {
			return path, nil
		}
	}
	return "", fmt.Errorf("find %s: %w", name, exec.ErrNotFound)
}
