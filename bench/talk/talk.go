// Package talk runs commands in a guest, and asks the benchmark's load there,
// through the guest agent: the same for a machine of holdpoint's, whose agent
// the daemon reaches, and for a guest of the bare QEMU that it is compared with.
package talk

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"strings"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
)

// ExecStream is a call of AgentService.Exec, however it gets there.
type ExecStream interface {
	Send(m *agentv1.ExecRequest) error
	Receive() (*agentv1.ExecResponse, error)
	CloseRequest() error
	CloseResponse() error
}

// DialStream is a call of AgentService.Dial, however it gets there.
type DialStream interface {
	Send(m *agentv1.DialRequest) error
	Receive() (*agentv1.DialResponse, error)
	CloseRequest() error
	CloseResponse() error
}

// stdinBytes is the size of the messages in which input goes.
const stdinBytes = 256 << 10

// Exec runs a command to its end and gives what it printed. An exit code other
// than 0 is an error. A detached one is only started.
func Exec(stream ExecStream, start *agentv1.ExecStart, stdin []byte) (string, error) {
	defer func() { _ = stream.CloseResponse() }()
	send := func(m *agentv1.ExecRequest) error {
		if err := stream.Send(m); !errors.Is(err, io.EOF) {
			return err
		}
		return nil // Receive has the reason
	}
	err := send(&agentv1.ExecRequest{Message: &agentv1.ExecRequest_Start{Start: start}})
	for len(stdin) > 0 && err == nil {
		n := min(len(stdin), stdinBytes)
		err = send(&agentv1.ExecRequest{Message: &agentv1.ExecRequest_Stdin{Stdin: stdin[:n]}})
		stdin = stdin[n:]
	}
	if err == nil {
		err = send(&agentv1.ExecRequest{Message: &agentv1.ExecRequest_StdinEnd{StdinEnd: &agentv1.StdinEnd{}}})
	}
	if err != nil {
		return "", fmt.Errorf("exec %q: %w", start.GetArgv(), err)
	}
	var out strings.Builder
	for {
		msg, err := stream.Receive()
		if err != nil {
			return "", fmt.Errorf("exec %q: %w", start.GetArgv(), err)
		}
		switch m := msg.GetMessage().(type) {
		case *agentv1.ExecResponse_Started:
			if start.GetDetach() {
				return "", stream.CloseRequest()
			}
		case *agentv1.ExecResponse_Stdout:
			out.Write(m.Stdout)
		case *agentv1.ExecResponse_Stderr:
			out.Write(m.Stderr)
		case *agentv1.ExecResponse_Exit:
			if m.Exit.GetCode() != 0 {
				return "", fmt.Errorf("exec %q: exit code %d: %s%s", start.GetArgv(), m.Exit.GetCode(), out.String(), m.Exit.GetError())
			}
			return out.String(), stream.CloseRequest()
		}
	}
}

// Conn is a TCP connection in the guest. Its life: Connect asks for it, Close ends it.
type Conn struct {
	stream DialStream
	rest   []byte
}

// Connect connects to a port on the guest's loopback.
func Connect(stream DialStream, port uint32) (*Conn, error) {
	c := &Conn{stream: stream}
	err := stream.Send(&agentv1.DialRequest{Message: &agentv1.DialRequest_Port{Port: port}})
	if err == nil || errors.Is(err, io.EOF) {
		_, err = stream.Receive() // it stands
	}
	if err != nil {
		_ = c.Close()
		return nil, fmt.Errorf("dial port %d: %w", port, err)
	}
	return c, nil
}

// Read gives what came from the guest.
func (c *Conn) Read(p []byte) (int, error) {
	for len(c.rest) == 0 {
		msg, err := c.stream.Receive()
		if err != nil {
			return 0, err
		}
		c.rest = msg.GetData()
	}
	n := copy(p, c.rest)
	c.rest = c.rest[n:]
	return n, nil
}

// Write sends to the guest.
func (c *Conn) Write(p []byte) (int, error) {
	err := c.stream.Send(&agentv1.DialRequest{Message: &agentv1.DialRequest_Data{Data: p}})
	if err != nil {
		return 0, err
	}
	return len(p), nil
}

// Close ends the connection.
func (c *Conn) Close() error {
	return errors.Join(c.stream.CloseRequest(), c.stream.CloseResponse())
}

// Guest is one that can be talked to.
type Guest interface {
	// Exec starts a command, as the function Exec does.
	Exec(start *agentv1.ExecStart, stdin []byte) (string, error)
	Dial(port uint32) (*Conn, error)
}

// Load is the program bench/load in a guest.
type Load struct {
	Guest Guest
}

// port is where the load listens, program where it is in the guest.
const (
	port    = 9900
	program = "/run/bench-load"
)

// StartLoad puts the program into the guest, and returns when its memory is in
// use: inUse MiB of the guest's, 64 of it random, dirty dirtied each second.
func StartLoad(g Guest, content []byte, inUse, dirty int) (Load, error) {
	put := fmt.Sprintf("cat > %s && chmod +x %s", program, program)
	if _, err := g.Exec(&agentv1.ExecStart{Argv: []string{"sh", "-c", put}}, content); err != nil {
		return Load{}, err
	}
	run := []string{program, fmt.Sprintf("-port=%d", port), fmt.Sprintf("-in-use=%d", inUse), fmt.Sprintf("-dirty=%d", dirty)}
	if _, err := g.Exec(&agentv1.ExecStart{Argv: run, Detach: true}, nil); err != nil {
		return Load{}, err
	}
	// It listens once it is ready.
	wait := fmt.Sprintf("while ! grep -q :%04X /proc/net/tcp; do sleep 0.1; done", port)
	_, err := g.Exec(&agentv1.ExecStart{Argv: []string{"sh", "-c", wait}}, nil)
	return Load{g}, err
}

// Ask sends a line and gives the answer without its "ok".
func (l Load) Ask(line string) (answer string, err error) {
	conn, err := l.Guest.Dial(port)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	if _, err := fmt.Fprintln(conn, line); err != nil {
		return "", err
	}
	answer, err = bufio.NewReader(conn).ReadString('\n')
	text, ok := strings.CutPrefix(answer, "ok")
	if err != nil || !ok {
		return "", fmt.Errorf("ask the load in the guest for %q: %q %w", line, answer, err)
	}
	return strings.TrimSpace(text), nil
}

// Stream opens the stream of a message each millisecond.
func (l Load) Stream() (*Conn, error) {
	conn, err := l.Guest.Dial(port)
	if err != nil {
		return nil, err
	}
	if _, err := fmt.Fprintln(conn, "stream"); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return conn, nil
}
