//go:build linux

package agent

import (
	"bytes"
	"encoding/binary"
	"io"
	"net/http/httptest"
	"testing"
	"testing/iotest"

	"google.golang.org/protobuf/proto"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
)

// framed is a message as Connect sends it.
func framed(t *testing.T, m proto.Message) []byte {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(b))), b...)
}

func dataOf(b []byte) *agentv1.UploadRequest {
	return &agentv1.UploadRequest{Message: &agentv1.UploadRequest_Data{Data: b}}
}

func TestBulkReader(t *testing.T) {
	var stream, want []byte
	for _, n := range []int{1, 127, 128, 0, 70_000, 2 << 20} {
		p := bytes.Repeat([]byte{byte(n), 7, 9}, n/3+1)[:n]
		want = append(want, p...)
		stream = append(stream, framed(t, dataOf(p))...)
		stream = append(stream, framed(t, &agentv1.UploadRequest{})...) // says nothing
	}
	for name, in := range map[string]io.Reader{
		"whole": bytes.NewReader(stream), "halves": iotest.HalfReader(bytes.NewReader(stream)),
		"end with data": iotest.DataErrReader(bytes.NewReader(stream)),
	} {
		got, err := io.ReadAll(newBulkReader(&bulkCall{in: in}, 2))
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: read %d bytes, want %d, %v", name, len(got), len(want), err)
		}
	}
	small := framed(t, dataOf(make([]byte, 300)))
	for cut := 1; cut < len(small); cut++ {
		if _, err := io.ReadAll(newBulkReader(&bulkCall{in: bytes.NewReader(small[:cut])}, 2)); err == nil {
			t.Errorf("a stream that ends after %d of %d bytes was read", cut, len(small))
		}
	}
}

func TestBulkReaderRefuses(t *testing.T) {
	long := framed(t, dataOf(make([]byte, 300)))
	more := append(bytes.Clone(long), 0)
	binary.BigEndian.PutUint32(more[1:], uint32(len(more)-framing))
	for name, stream := range map[string][]byte{
		"another field": framed(t, &agentv1.UploadRequest{Message: &agentv1.UploadRequest_Start{Start: &agentv1.UploadStart{Path: "x"}}}),
		"flags":         append([]byte{1}, long[1:]...),
		"too long":      {0, 0xff, 0xff, 0xff, 0xff, 0x12},
		"more behind":   more,
		"only a tag":    {0, 0, 0, 0, 1, 0x12},
		"endless tag":   append([]byte{0, 0, 0, 0, 99}, bytes.Repeat([]byte{0xff}, 99)...),
	} {
		if got, err := io.ReadAll(newBulkReader(&bulkCall{in: bytes.NewReader(stream)}, 2)); err == nil {
			t.Errorf("%s: read %d bytes", name, len(got))
		}
	}
}

func TestBulkWriter(t *testing.T) {
	for _, n := range []int{0, 1, 127, 128, 256 << 10, 600_000} {
		p := bytes.Repeat([]byte("abc"), n/3+1)[:n]
		to := httptest.NewRecorder()
		if m, err := (bulkWriter{to, 1}).Write(p); m != n || err != nil {
			t.Fatalf("wrote %d of %d, %v", m, n, err)
		}
		if n > 0 && n <= 256<<10 && !bytes.Equal(to.Body.Bytes(), framed(t, &agentv1.DownloadResponse{Data: p})) {
			t.Errorf("%d bytes are framed unlike Connect's", n)
		}
		got, err := io.ReadAll(newBulkReader(&bulkCall{in: to.Body}, 1))
		if err != nil || !bytes.Equal(got, p) {
			t.Errorf("read %d of %d bytes back, %v", len(got), n, err)
		}
	}
}
