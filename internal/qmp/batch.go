package qmp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"
)

// Batch is some commands that were sent in one write. QEMU executes them in
// order and does not stop at a refused one. Its life: Client.Start; Await for
// each command whose answer matters, in any order, once; Forget.
type Batch struct {
	client *Client
	cmds   []Command
	calls  []call
}

// Start sends the commands in one write and does not wait for the answers.
// After an error nothing was sent, unless the client has ended (Client.Err).
func (c *Client) Start(ctx context.Context, cmds ...Command) (*Batch, error) {
	return c.start(ctx, nil, cmds...)
}

func (c *Client) start(ctx context.Context, file *os.File, cmds ...Command) (*Batch, error) {
	calls, data, err := c.prepare(cmds)
	if err != nil {
		return nil, err
	}
	b := &Batch{client: c, cmds: cmds, calls: calls}
	if err := c.send(ctx, data, file); err != nil {
		b.Forget()
		return nil, fmt.Errorf("send %s: %w", cmds[0].Name, err)
	}
	return b, nil
}

// Await waits for the answer to command i, decodes it into its Result, and
// returns when it was read. A refusal is an *Error. When ctx ends first the
// command may still be executed.
func (b *Batch) Await(ctx context.Context, i int) (time.Time, error) {
	cmd := b.cmds[i]
	r, err := b.awaitReply(ctx, b.calls[i])
	switch {
	case err != nil:
		return time.Time{}, fmt.Errorf("await %s: %w", cmd.Name, err)
	case r.err != nil:
		return r.at, fmt.Errorf("execute %s: %w", cmd.Name, r.err)
	case cmd.Result != nil:
		if err := json.Unmarshal(r.ret, cmd.Result); err != nil {
			return r.at, fmt.Errorf("decode answer of %s: %w", cmd.Name, err)
		}
	}
	return r.at, nil
}

// awaitAll joins the errors of all commands; without an answer it gives up.
func (b *Batch) awaitAll(ctx context.Context) error {
	var errs []error
	for i := range b.cmds {
		at, err := b.Await(ctx, i)
		if err != nil {
			errs = append(errs, err)
		}
		if at.IsZero() {
			break
		}
	}
	if len(errs) == 1 {
		return errs[0]
	}
	return errors.Join(errs...)
}

// Forget drops the answers that are still to come.
func (b *Batch) Forget() { b.client.forget(b.calls) }

func (b *Batch) awaitReply(ctx context.Context, l call) (reply, error) {
	select {
	case r := <-l.reply:
		return r, nil
	case <-ctx.Done():
	case <-b.client.done:
	}
	select { // an answer that is already here counts
	case r := <-l.reply:
		return r, nil
	default:
	}
	if err := b.client.Err(); err != nil {
		return reply{}, err
	}
	return reply{}, ctx.Err()
}
