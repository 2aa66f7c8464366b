package qmp

import (
	"bufio"
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"
)

// A batch is in the peer's hands as a whole before any answer, and each answer
// can be had as soon as it is there.
func TestBatchAnswersOneByOne(t *testing.T) {
	second := make(chan struct{})
	c := start(t, func(s *server) {
		var ids []string
		for range 3 {
			q, _ := s.next()
			ids = append(ids, q.ID)
		}
		s.send(`{"return": {"n": 1}, "id": %q}`, ids[0])
		<-second
		s.send(`{"error": {"class": "GenericError", "desc": "no"}, "id": %q}`, ids[1])
		s.send(`{"return": {}, "id": %q}`, ids[2])
		s.next()
	})
	var one struct{ N int }
	before := time.Now()
	b, err := c.Start(ctxOf(t), Command{Name: "a", Result: &one}, Command{Name: "b"}, Command{Name: "c"})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Forget()
	at, err := b.Await(ctxOf(t), 0)
	if err != nil || one.N != 1 || at.Before(before) || at.After(time.Now()) {
		t.Errorf("first answer: %v at %v, %v", one, at, err)
	}
	ctx, cancel := context.WithCancel(ctxOf(t))
	cancel()
	if at, err := b.Await(ctx, 1); !errors.Is(err, context.Canceled) || !at.IsZero() {
		t.Errorf("cancelled: %v, %v", at, err)
	}
	close(second)
	third, err := b.Await(ctxOf(t), 2)
	if err != nil {
		t.Error(err)
	}
	var refused *Error
	if at, err := b.Await(ctxOf(t), 1); !errors.As(err, &refused) || refused.Desc != "no" || at.After(third) || at.Before(before) {
		t.Errorf("refused: %v, %v", at, err)
	}
}

// What comes after Forget, or after a client has ended, is nobody's.
func TestBatchForgotten(t *testing.T) {
	answer := make(chan struct{})
	c := start(t, func(s *server) {
		q, _ := s.next()
		<-answer
		s.send(`{"return": {}, "id": %q}`, q.ID)
		echo(s)
	})
	b, err := c.Start(ctxOf(t), Command{Name: "a"})
	if err != nil {
		t.Fatal(err)
	}
	b.Forget()
	close(answer)
	if err := c.Execute(ctxOf(t), "b", map[string]any{"n": 1}, nil); err != nil {
		t.Error(err)
	}
	_ = c.Close()
	if _, err := c.Start(ctxOf(t), Command{Name: "c"}); !errors.Is(err, ErrClosed) || c.Err() == nil {
		t.Errorf("start on a closed client: %v", err)
	}
	if _, err := b.Await(ctxOf(t), 0); !errors.Is(err, ErrClosed) {
		t.Errorf("await on a closed client: %v", err)
	}
}

// Reading ahead is asked for where it is offered, and only there.
func TestReadsAhead(t *testing.T) {
	for offer, want := range map[string]bool{`["oob"]`: true, `[]`: false, `["other"]`: false} {
		mine, peer := pair(t)
		asked := make(chan request, 1)
		var wg sync.WaitGroup
		wg.Go(func() {
			defer peer.Close()
			s := &server{t: t, conn: peer, r: bufio.NewReader(peer)}
			_, _ = peer.Write([]byte(strings.Replace(greeting, `["oob"]`, offer, 1)))
			q, _ := s.next()
			s.send(`{"return": {}, "id": %q}`, q.ID)
			asked <- q
		})
		c, err := Connect(ctxOf(t), mine)
		if err != nil {
			t.Fatal(err)
		}
		_, enables := (<-asked).Arguments["enable"]
		if enables != want {
			t.Errorf("offered %s: enables is %v", offer, enables)
		}
		_ = c.Close()
		wg.Wait()
	}
}
