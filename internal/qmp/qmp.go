// Package qmp speaks QEMU's machine protocol over one connection. It matches
// replies to callers, keeps events for subscribers and passes files. It is not
// a model of QEMU: it knows no command but qmp_capabilities, getfd and add-fd,
// and it starts no process.
package qmp

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"
)

// maxLine bounds one message of the peer, in bytes. The longest real answer,
// query-qmp-schema, is about 250 KiB; a block graph of 100 layers about 300.
const maxLine = 16 << 20

// ErrClosed is why calls fail on a client that was closed by its own side.
var ErrClosed = errors.New("qmp: client closed")

// Error is QEMU's refusal of a command. The connection stays good.
type Error struct {
	// Class is one of QEMU's error classes, mostly GenericError.
	Class string `json:"class"`
	// Desc is one line for people. QEMU promises no stable wording.
	Desc string `json:"desc"`
}

// Error is the description alone, or the class where there is none.
func (e *Error) Error() string {
	if e.Desc == "" {
		return e.Class
	}
	return e.Desc
}

// Version is QEMU's own, as it greets.
type Version struct {
	Major, Minor, Micro int
	// Package is the distribution's name for it; may be empty.
	Package string
}

// Command is one request. Args is encoded as JSON; nil means none. If Result
// is not nil, the answer's return value is decoded into it.
type Command struct {
	Name   string
	Args   any
	Result any
}

// Client is one conversation. Its life: Connect (or Dial) greets and
// negotiates; any number of goroutines call Execute, Pipeline and the rest; it
// ends by Close or when the connection breaks, and then Done is closed and
// every call, waiting or new, fails with the reason. A socket on which QEMU
// listens takes a new Client afterwards; answers meant for the old one are
// dropped by the new one, because ids carry a random prefix per client.
type Client struct {
	conn    *net.UnixConn
	prefix  string
	version Version
	// offers are the capabilities that the peer has, from its greeting.
	offers []string
	// sending and sendingFile are semaphores and not mutexes, so that
	// waiting for them obeys a context. sendingFile is taken first.
	sending     chan struct{}
	sendingFile chan struct{}
	done        chan struct{}
	readerGone  chan struct{}

	mu      sync.Mutex
	err     error
	nextID  uint64
	pending map[string]chan reply
	subs    map[*Subscription]struct{}
}

type reply struct {
	ret json.RawMessage
	err *Error
	// at is when the answer was read.
	at time.Time
}

// Dial connects to the socket at path and negotiates; see Connect.
func Dial(ctx context.Context, path string, subs ...*Subscription) (*Client, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("dial qmp: %w", err)
	}
	return Connect(ctx, conn.(*net.UnixConn), subs...)
}

// Connect waits for the greeting on conn, which it owns from now on, also on
// error, and leaves negotiation mode. subs are subscribed before the first
// event can arrive. ctx bounds the handshake, not the client.
func Connect(ctx context.Context, conn *net.UnixConn, subs ...*Subscription) (*Client, error) {
	var salt [4]byte
	if _, err := rand.Read(salt[:]); err != nil {
		return nil, fmt.Errorf("read random bytes: %w", err)
	}
	c := &Client{
		conn: conn, prefix: hex.EncodeToString(salt[:]) + "-",
		sending: make(chan struct{}, 1), sendingFile: make(chan struct{}, 1),
		done: make(chan struct{}), readerGone: make(chan struct{}),
		pending: map[string]chan reply{}, subs: map[*Subscription]struct{}{},
	}
	for _, s := range subs {
		c.subs[s] = struct{}{}
	}
	greeted := make(chan struct{})
	go c.read(greeted)
	select {
	case <-greeted:
	case <-c.done:
	case <-ctx.Done():
		c.fail(ctx.Err())
	}
	if err := c.Err(); err != nil {
		c.join()
		return nil, fmt.Errorf("await qmp greeting: %w", err)
	}
	if err := c.Execute(ctx, "qmp_capabilities", c.capabilities(), nil); err != nil {
		c.fail(err)
		c.join()
		return nil, fmt.Errorf("negotiate qmp: %w", err)
	}
	return c, nil
}

// outOfBand is the capability that lets QEMU read commands while it executes
// one. Reading costs it some 5 µs for each byte, so that with it all but the
// first of a batch are read by the time they are to be executed.
const outOfBand = "oob"

// capabilities are the arguments of qmp_capabilities.
func (c *Client) capabilities() any {
	if !slices.Contains(c.offers, outOfBand) {
		return nil
	}
	return map[string]any{"enable": []string{outOfBand}}
}

// Version is the peer's, from its greeting.
func (c *Client) Version() Version { return c.version }

// Done is closed when the conversation has ended.
func (c *Client) Done() <-chan struct{} { return c.done }

// Err is why the conversation ended; nil while it goes on.
func (c *Client) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Close ends the conversation and returns when its reader is gone. QEMU goes on.
func (c *Client) Close() error {
	c.fail(ErrClosed)
	c.join()
	return nil
}

// Execute runs one command and decodes its return value into result unless
// that is nil. A refusal is an *Error. When ctx ends first the command may
// still be executed.
func (c *Client) Execute(ctx context.Context, name string, args, result any) error {
	return c.Pipeline(ctx, Command{Name: name, Args: args, Result: result})
}

// Pipeline sends the commands in one write and waits for all answers. QEMU
// executes them in order and does not stop at a refused one: the errors of
// all are joined, in order.
func (c *Client) Pipeline(ctx context.Context, cmds ...Command) error {
	b, err := c.Start(ctx, cmds...)
	if err != nil {
		return err
	}
	defer b.Forget()
	return b.awaitAll(ctx)
}

type call struct {
	id    string
	reply chan reply
}

// prepare registers the commands and encodes them.
func (c *Client) prepare(cmds []Command) ([]call, []byte, error) {
	if len(cmds) == 0 {
		return nil, nil, errors.New("qmp: no command")
	}
	calls := make([]call, len(cmds))
	var data []byte
	for i, cmd := range cmds {
		calls[i] = c.register()
		line, err := json.Marshal(struct {
			Execute string `json:"execute"`
			Args    any    `json:"arguments,omitempty"`
			ID      string `json:"id"`
		}{cmd.Name, cmd.Args, calls[i].id})
		if err != nil {
			c.forget(calls[:i+1])
			return nil, nil, fmt.Errorf("encode %s: %w", cmd.Name, err)
		}
		data = append(append(data, line...), '\n')
	}
	return calls, data, nil
}

func (c *Client) register() call {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.nextID++
	l := call{id: fmt.Sprintf("%s%d", c.prefix, c.nextID), reply: make(chan reply, 1)}
	c.pending[l.id] = l.reply
	return l
}

func (c *Client) forget(calls []call) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, l := range calls {
		delete(c.pending, l.id)
	}
}

// fail ends the conversation for the given reason; only the first one counts.
func (c *Client) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return
	}
	c.err = err
	for s := range c.subs {
		s.end(err)
	}
	close(c.done)
	_ = c.conn.Close() // it wakes the reader; there is nothing to lose
}

func (c *Client) join() { <-c.readerGone }
