//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/bench/stage"
	"github.com/holdpoint/holdpoint/bench/table"
	"github.com/holdpoint/holdpoint/client"
)

const (
	proxyHost    = "bench.localhost"
	proxyRounds  = 3
	proxyBytes   = 64 << 20
	manyRequests = 10_000
	manyClients  = 32
)

// measureProxy compares a download through the proxy with the same bytes of
// the same server through the API's Dial.
func measureProxy(ctx context.Context, s *stage.Stage, t *table.Table) error {
	m, err := s.Shared(ctx)
	if err != nil {
		return err
	}
	prepare := fmt.Sprintf("head -c %d /dev/urandom > /var/www/html/big && echo small > /var/www/html/small", proxyBytes)
	if _, err := s.Exec(ctx, m.GetName(), "sh", "-c", prepare); err != nil {
		return err
	}
	_, _, err = s.Operate(ctx, func(ctx context.Context) (*connect.Response[client.Operation], error) {
		return s.Client.Routes.Expose(ctx, connect.NewRequest(&holdpointv1.ExposeRequest{
			RequestId: client.NewRequestID(), Machine: m.GetName(), Port: 80, Host: proxyHost,
		}))
	})
	if err != nil {
		return err
	}
	status, err := s.Client.Daemon.Status(ctx, connect.NewRequest(&holdpointv1.DaemonStatusRequest{}))
	if err != nil {
		return err
	}
	web := newWebClient(status.Msg.GetProxy())
	defer web.CloseIdleConnections()
	proxied, raw, err := table.InTurns(proxyRounds,
		func() (time.Duration, error) { return fetch(ctx, web, "/big", proxyBytes) },
		func() (time.Duration, error) { return dialed(ctx, s, m.GetName(), "/big") })
	if err != nil {
		return err
	}
	r := table.Ratio(raw, proxied)
	t.Add(table.Row{
		What: "proxy, a download of 64 MiB", Measured: table.Rate(proxyBytes, proxied), Against: "the same bytes through `Dial`: " + table.Rate(proxyBytes, raw),
		Ratio: r, Target: "≥ 0.5 ×", Met: r >= 0.5,
	})
	return manySmall(ctx, web, t)
}

// newWebClient reaches the proxy whatever the resolver thinks of *.localhost.
func newWebClient(addr string) *http.Client {
	return &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", addr)
		},
		MaxConnsPerHost:     manyClients,
		MaxIdleConnsPerHost: manyClients,
	}}
}

func fetch(ctx context.Context, web *http.Client, path string, want int64) (time.Duration, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+proxyHost+path, nil)
	if err != nil {
		return 0, err
	}
	begin := time.Now()
	resp, err := web.Do(req)
	if err != nil {
		return 0, err
	}
	defer func() { _ = resp.Body.Close() }()
	n, err := io.Copy(io.Discard, resp.Body)
	if err != nil {
		return 0, err
	}
	if resp.StatusCode != http.StatusOK || want > 0 && n != want {
		return 0, fmt.Errorf("GET %s: %s, %d bytes", path, resp.Status, n)
	}
	return time.Since(begin), nil
}

// dialed downloads a path with a request written by hand over the API's Dial.
func dialed(ctx context.Context, s *stage.Stage, name, path string) (time.Duration, error) {
	begin := time.Now()
	stream := s.Client.Guest.Dial(ctx)
	defer func() { _ = stream.CloseResponse() }()
	send := func(machine string, m *agentv1.DialRequest) error {
		err := stream.Send(&holdpointv1.GuestDialRequest{Machine: machine, Message: m})
		if errors.Is(err, io.EOF) {
			return nil // Receive has the reason
		}
		return err
	}
	if err := send(name, &agentv1.DialRequest{Message: &agentv1.DialRequest_Port{Port: 80}}); err != nil {
		return 0, err
	}
	request := "GET " + path + " HTTP/1.0\r\nHost: " + proxyHost + "\r\n\r\n"
	if err := send("", &agentv1.DialRequest{Message: &agentv1.DialRequest_Data{Data: []byte(request)}}); err != nil {
		return 0, err
	}
	var n int64
	for {
		msg, err := stream.Receive()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return 0, err
		}
		n += int64(len(msg.GetMessage().GetData()))
	}
	if n < proxyBytes {
		return 0, fmt.Errorf("dial port 80: %d bytes", n)
	}
	return time.Since(begin), stream.CloseRequest()
}

func manySmall(ctx context.Context, web *http.Client, t *table.Table) error {
	var wg sync.WaitGroup
	var failed atomic.Int64
	var first atomic.Pointer[error]
	var next atomic.Int64
	begin := time.Now()
	for range manyClients {
		wg.Go(func() {
			for next.Add(1) <= manyRequests {
				if _, err := fetch(ctx, web, "/small", 0); err != nil {
					failed.Add(1)
					first.CompareAndSwap(nil, &err)
				}
			}
		})
	}
	wg.Wait()
	took := time.Since(begin)
	r := table.Row{
		What:     "proxy, 10,000 requests over 32 connections",
		Measured: fmt.Sprintf("%.0f requests/s, %d errors", manyRequests/took.Seconds(), failed.Load()),
		Target:   "no error", Met: failed.Load() == 0,
	}
	if err := first.Load(); err != nil {
		r.Phases = "first error: " + (*err).Error()
	}
	t.Add(r)
	return ctx.Err()
}
