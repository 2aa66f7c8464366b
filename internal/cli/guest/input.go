package guest

import (
	"os"
	"syscall"
	"time"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	"github.com/holdpoint/holdpoint/internal/cli/terminal"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// inputChunk is the largest piece of input sent at once, in bytes.
const inputChunk = 64 << 10

// signalLimit is how long a signal may hang behind input the command does not
// read before the stream is ended instead.
const signalLimit = time.Second

// patientSignals is how many interrupts and terminations in a row are passed on
// to a command; the next one ends the stream, as docker has it.
const patientSignals = 2

// givenUp is the end of a stream that was interrupted.
func (e *Exec) givenUp() error {
	became := "the command was hung up"
	if e.Attach != nil {
		became = "the command goes on"
	}
	return errdefs.New(errdefs.Interrupted, "%s in %s: interrupted; %s", e.Verb, e.Machine, became)
}

// passInput sends what is typed or piped until its end.
func (r *running) passInput() {
	keys := leaveKeys{enabled: r.exec.Leave}
	buf := make([]byte, inputChunk)
	for {
		n, err := r.input.Read(buf)
		data, leave := keys.filter(buf[:n])
		if len(data) > 0 {
			message := &agentv1.ExecRequest{Message: &agentv1.ExecRequest_Stdin{Stdin: data}}
			if r.post(message) != nil {
				return // receive says why
			}
		}
		if leave {
			r.end(errLeft)
			return
		}
		if err != nil {
			r.inputEnded()
			return
		}
	}
}

// inputEnded tells the command that there is no more to read; one that was
// attached to from a terminal that is gone is left.
func (r *running) inputEnded() {
	select {
	case <-r.done:
		return
	default:
	}
	if r.exec.Leave && !terminal.Is(r.exec.Stdin) {
		r.end(errLeft)
		return
	}
	_ = r.post(stdinEnd()) // receive says why
}

// leaves reports whether the signal leaves a console, or ends an attach and not its
// command: for that only what a person types to interrupt is meant.
func (e *Exec) leaves(s os.Signal) bool {
	return e.Console && !terminal.Resized(s) || e.Attach != nil && s != os.Interrupt && s != syscall.SIGQUIT && !terminal.Resized(s)
}

// passSignals forwards signals until the command ends, is left, or is given up:
// it does not end by them, or its guest does not answer.
func (r *running) passSignals() {
	started := false
	ending := 0 // how many in a row were to end it
	for {
		select {
		case <-r.done:
			return
		case s := <-r.exec.Signals:
			if !started {
				select {
				case <-r.started:
					started = true
				default:
				}
			}
			switch {
			case s == os.Interrupt || s == syscall.SIGTERM:
				ending++
			case !terminal.Resized(s):
				ending = 0
			}
			switch {
			case terminal.Resized(s):
				r.resize()
			case r.exec.leaves(s):
				r.end(errLeft)
			case !started:
				r.end(errdefs.New(errdefs.Interrupted, "%s in %s: interrupted before the command started", r.exec.Verb, r.exec.Machine))
			case ending > patientSignals || !r.signal(terminal.Number(s)):
				r.end(r.exec.givenUp())
			}
		}
	}
}

// signal sends the signal and reports whether it got through.
func (r *running) signal(number int32) bool {
	sent := make(chan error, 1)
	r.workers.Go(func() {
		sent <- r.post(&agentv1.ExecRequest{Message: &agentv1.ExecRequest_Signal{Signal: number}})
	})
	limit := time.NewTimer(signalLimit)
	defer limit.Stop()
	select {
	case err := <-sent:
		return err == nil
	case <-r.done:
		return true
	case <-limit.C:
		return false
	}
}

func (r *running) resize() {
	if r.exec.TTY == nil || r.exec.Console {
		return
	}
	_ = r.post(&agentv1.ExecRequest{Message: &agentv1.ExecRequest_Resize{Resize: SizeOf(r.exec.TTY)}}) // receive says why
}

// SizeOf is the size of the terminal; zeros where it is unknown.
func SizeOf(tty *os.File) *agentv1.WindowSize {
	rows, cols := terminal.Size(tty)
	return &agentv1.WindowSize{Rows: uint32(rows), Cols: uint32(cols)}
}

// leaveKeys watches typed input for Ctrl-P Ctrl-Q, docker's keys for it.
type leaveKeys struct {
	enabled bool
	// held is a Ctrl-P that was not passed on yet.
	held bool
}

const (
	ctrlP = 'P' - '@'
	ctrlQ = 'Q' - '@'
)

// filter gives what is to be sent, and whether the keys were typed.
func (k *leaveKeys) filter(typed []byte) (data []byte, leave bool) {
	if !k.enabled {
		return typed, false
	}
	data = make([]byte, 0, len(typed)+1)
	for _, b := range typed {
		if k.held && b == ctrlQ {
			return data, true
		}
		if k.held {
			data = append(data, ctrlP)
		}
		if k.held = b == ctrlP; !k.held {
			data = append(data, b)
		}
	}
	return data, false
}
