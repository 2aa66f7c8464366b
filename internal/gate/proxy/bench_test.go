package proxy

import (
	"io"
	"net"
	"net/http"
	"testing"
)

const benchBytes = 64 << 20

// BenchmarkThroughput compares a body through the proxy with the same bytes
// over the connection that the backend makes.
func BenchmarkThroughput(b *testing.B) {
	f := start(b)
	chunk := make([]byte, 256<<10)
	write := func(w io.Writer) {
		for range benchBytes / len(chunk) {
			if _, err := w.Write(chunk); err != nil {
				return
			}
		}
	}
	f.publish("app.localhost", web(), serveHTTP(b, func(w http.ResponseWriter, _ *http.Request) { write(w) }))
	raw := web()
	raw.Port = 1
	f.publish("raw.localhost", raw, serveTCP(b, func(c net.Conn) { write(c) }))

	b.Run("raw", func(b *testing.B) {
		b.SetBytes(benchBytes)
		for b.Loop() {
			c, err := f.Dial(b.Context(), raw)
			if err != nil {
				b.Fatal(err)
			}
			drain(b, c)
			_ = c.Close()
		}
	})
	b.Run("proxy", func(b *testing.B) {
		b.SetBytes(benchBytes)
		for b.Loop() {
			req, _ := http.NewRequest("GET", "http://"+f.proxy.Addr()+"/", nil)
			req.Host = "app.localhost"
			resp, err := f.client.Do(req)
			if err != nil {
				b.Fatal(err)
			}
			drain(b, resp.Body)
			_ = resp.Body.Close()
		}
	})
}

func drain(b *testing.B, r io.Reader) {
	buf := make([]byte, 256<<10)
	n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{r}, buf)
	if err != nil || n != benchBytes {
		b.Fatalf("%d bytes, %v", n, err)
	}
}

// BenchmarkRequests is the cost of one small request over kept connections.
func BenchmarkRequests(b *testing.B) {
	f := start(b)
	f.publish("app.localhost", web(), serveHTTP(b, say("hello")))
	b.ReportAllocs()
	for b.Loop() {
		if resp, _ := f.get(b, "GET", "app.localhost", "", nil); resp.StatusCode != 200 {
			b.Fatal(resp.Status)
		}
	}
}
