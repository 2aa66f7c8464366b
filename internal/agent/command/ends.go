//go:build linux

package command

import (
	"os"
	"syscall"

	"github.com/holdpoint/holdpoint/internal/undo"
)

// ends are both sides of a command's input and output.
type ends struct {
	far  []*os.File // the command's: input, output, errors
	in   *os.File
	out  []*source
	term *os.File // the near side, if it is a terminal
}

func newEnds(spec Spec, who *syscall.Credential) (*ends, error) {
	if spec.TTY {
		near, far, err := openPTY(spec.Rows, spec.Cols)
		if err != nil {
			return nil, err
		}
		if who != nil {
			// As login does, so that programs may open their terminal by name.
			_ = far.Chown(int(who.Uid), int(who.Gid))
			_ = far.Chmod(0o620)
		}
		return &ends{far: []*os.File{far, far, far}, in: near, out: []*source{{f: near}}, term: near}, nil
	}
	var steps undo.Stack
	defer steps.Run()
	var pipes [3][2]*os.File
	for i := range pipes {
		r, w, err := os.Pipe()
		if err != nil {
			return nil, err
		}
		steps.Add(func() { _ = r.Close(); _ = w.Close() })
		pipes[i] = [2]*os.File{r, w}
	}
	widen(pipes[1][1])
	steps.Release()
	return &ends{
		far: []*os.File{pipes[0][0], pipes[1][1], pipes[2][1]},
		in:  pipes[0][1],
		out: []*source{{f: pipes[1][0]}, {f: pipes[2][0], stderr: true}},
	}, nil
}

func (e *ends) closeFar() {
	for _, f := range e.far {
		_ = f.Close() // of a terminal three times the same
	}
}

func (e *ends) closeNear() {
	_ = e.in.Close()
	for _, s := range e.out {
		_ = s.f.Close()
	}
}
