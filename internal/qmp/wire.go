package qmp

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// message is any line the peer may send: a greeting, an answer or an event.
type message struct {
	Greeting *struct {
		Version struct {
			QEMU struct {
				Major int `json:"major"`
				Minor int `json:"minor"`
				Micro int `json:"micro"`
			} `json:"qemu"`
			Package string `json:"package"`
		} `json:"version"`
		Capabilities []string `json:"capabilities"`
	} `json:"QMP"`
	ID        json.RawMessage `json:"id"`
	Return    json.RawMessage `json:"return"`
	Error     *Error          `json:"error"`
	Event     string          `json:"event"`
	Data      json.RawMessage `json:"data"`
	Timestamp struct {
		Seconds      int64 `json:"seconds"`
		Microseconds int64 `json:"microseconds"`
	} `json:"timestamp"`
}

// parse decodes one line and checks that it is exactly one kind of message.
func parse(line []byte) (message, error) {
	var m message
	if err := json.Unmarshal(line, &m); err != nil {
		return message{}, fmt.Errorf("decode qmp message: %w", err)
	}
	kinds := 0
	for _, is := range []bool{m.Greeting != nil, m.Return != nil, m.Error != nil, m.Event != ""} {
		if is {
			kinds++
		}
	}
	if kinds != 1 {
		return message{}, errors.New("decode qmp message: not one of greeting, return, error and event")
	}
	return m, nil
}

// ParseEvent decodes a line that QEMU wrote to a monitor. ok is false when it
// is no event.
func ParseEvent(line []byte) (e Event, ok bool) {
	m, err := parse(line)
	if err != nil || m.Event == "" {
		return Event{}, false
	}
	return m.event(), true
}

func (m message) event() Event {
	return Event{
		Name: m.Event, Data: m.Data,
		Time: time.Unix(m.Timestamp.Seconds, m.Timestamp.Microseconds*1000),
	}
}

// id is the answer's id, or "" when it has none or not one of ours.
func (m message) id() string {
	var s string
	if len(m.ID) == 0 || json.Unmarshal(m.ID, &s) != nil {
		return ""
	}
	return s
}

// readLine returns the next line without its end; a longer one than maxLine
// is an error. The slice is valid until the next call.
func readLine(r *bufio.Reader) ([]byte, error) {
	line, err := r.ReadSlice('\n')
	if !errors.Is(err, bufio.ErrBufferFull) {
		return line, err
	}
	long := append([]byte(nil), line...)
	for errors.Is(err, bufio.ErrBufferFull) {
		if len(long) > maxLine {
			return nil, fmt.Errorf("read qmp message: longer than %d bytes", maxLine)
		}
		line, err = r.ReadSlice('\n')
		long = append(long, line...)
	}
	return long, err
}

// read is the one reader of the connection. It never waits for a caller or a
// subscriber. greeted is closed after the greeting.
func (c *Client) read(greeted chan<- struct{}) {
	defer close(c.readerGone)
	r := bufio.NewReaderSize(c.conn, 16<<10)
	seen := false
	for {
		line, err := readLine(r)
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = fmt.Errorf("connection closed by qemu: %w", io.ErrUnexpectedEOF)
			}
			c.fail(err)
			return
		}
		m, err := parse(line)
		if err != nil {
			c.fail(err)
			return
		}
		switch {
		case m.Greeting != nil && !seen:
			seen = true
			v := m.Greeting.Version
			c.version = Version{v.QEMU.Major, v.QEMU.Minor, v.QEMU.Micro, v.Package}
			c.offers = m.Greeting.Capabilities
			close(greeted)
		case m.Event != "":
			c.publish(m.event())
		default:
			c.deliver(m)
		}
	}
}

// deliver gives an answer to its caller. One for a caller that has gone, or
// for an earlier client of the same socket, is dropped.
func (c *Client) deliver(m message) {
	id := m.id()
	c.mu.Lock()
	defer c.mu.Unlock()
	if ch, ok := c.pending[id]; ok {
		delete(c.pending, id)
		ch <- reply{ret: m.Return, err: m.Error, at: time.Now()} // has room for its one answer
	}
}

func (c *Client) publish(e Event) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for s := range c.subs {
		s.add(e)
	}
}

// send writes data, and file with it. When ctx ends in the middle of a write
// the conversation is over: nobody could tell where the next command begins.
func (c *Client) send(ctx context.Context, data []byte, file *os.File) error {
	select {
	case c.sending <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	case <-c.done:
		return c.Err()
	}
	defer func() { <-c.sending }()
	if err := ctx.Err(); err != nil {
		return err
	}
	expired := make(chan struct{})
	unwatch := context.AfterFunc(ctx, func() {
		_ = c.conn.SetWriteDeadline(time.Unix(1, 0)) // fails on a closed connection only
		close(expired)
	})
	n, err := c.write(data, file)
	if !unwatch() {
		<-expired
		_ = c.conn.SetWriteDeadline(time.Time{})
	}
	switch {
	case err == nil:
		return nil
	case n == 0 && ctx.Err() != nil:
		return ctx.Err()
	}
	c.fail(fmt.Errorf("write to qemu: %w", err))
	return c.Err()
}

// write returns how many bytes were written.
func (c *Client) write(data []byte, file *os.File) (int, error) {
	if file == nil {
		return c.conn.Write(data)
	}
	raw, err := file.SyscallConn()
	if err != nil {
		return 0, err
	}
	// The descriptor is used inside Control only, so that file stays open.
	var n int
	var werr error
	err = raw.Control(func(fd uintptr) {
		n, _, werr = c.conn.WriteMsgUnix(data, unix.UnixRights(int(fd)), nil)
	})
	if err = errors.Join(err, werr); err != nil || n == len(data) {
		return n, err
	}
	rest, err := c.conn.Write(data[n:])
	return n + rest, err
}

// PassFile gives QEMU a duplicate of file under name (getfd), for arguments
// such as "fd:NAME". The caller keeps its own.
func (c *Client) PassFile(ctx context.Context, name string, file *os.File) error {
	return c.executeWithFile(ctx, file, Command{Name: "getfd", Args: map[string]any{"fdname": name}})
}

// AddFile puts a duplicate of file into QEMU's fd set (add-fd), to be opened
// as /dev/fdset/SET. QEMU picks, from the set, a descriptor of the access mode
// it wants, so file must be opened in just that mode.
func (c *Client) AddFile(ctx context.Context, set int, file *os.File) error {
	return c.executeWithFile(ctx, file, Command{Name: "add-fd", Args: map[string]any{"fdset-id": set}})
}

// executeWithFile sends one command with a file. QEMU keeps only the file that
// came last, so the next one waits until this command was executed.
func (c *Client) executeWithFile(ctx context.Context, file *os.File, cmd Command) error {
	select {
	case c.sendingFile <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	case <-c.done:
		return c.Err()
	}
	defer func() { <-c.sendingFile }()
	b, err := c.start(ctx, file, cmd)
	if err != nil {
		return err
	}
	defer b.Forget()
	return b.awaitAll(ctx)
}
