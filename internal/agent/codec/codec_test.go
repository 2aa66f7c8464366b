//go:build linux

package codec

import (
	"bytes"
	"testing"

	"google.golang.org/protobuf/proto"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
)

// TestCodec compares with protobuf's own form, for small and bulk messages.
func TestCodec(t *testing.T) {
	for _, n := range []int{0, 1, bulk - 1, bulk, 3*bulk + 5, 256 << 10} {
		p := bytes.Repeat([]byte("0123456789a"), n/11+1)[:n]
		for _, m := range []proto.Message{
			&agentv1.DownloadResponse{Data: p},
			&agentv1.DialResponse{Message: &agentv1.DialResponse_Data{Data: p}},
			&agentv1.DialResponse{Message: &agentv1.DialResponse_Connected{Connected: &agentv1.DialEnd{}}},
			&agentv1.ExecResponse{Message: &agentv1.ExecResponse_Stdout{Stdout: p}},
			&agentv1.ExecResponse{Message: &agentv1.ExecResponse_Stderr{Stderr: p}},
			&agentv1.ExecResponse{Message: &agentv1.ExecResponse_Exit{Exit: &agentv1.ExecExit{Code: 3, Error: string(p)}}},
			&agentv1.UploadRequest{Message: &agentv1.UploadRequest_Data{Data: p}},
			&agentv1.UploadRequest{Message: &agentv1.UploadRequest_Start{Start: &agentv1.UploadStart{Path: string(p)}}},
			&agentv1.DialRequest{Message: &agentv1.DialRequest_Data{Data: p}},
			&agentv1.ExecRequest{Message: &agentv1.ExecRequest_Stdin{Stdin: p}},
			&agentv1.ExecRequest{Message: &agentv1.ExecRequest_Start{Start: &agentv1.ExecStart{Argv: []string{string(p)}}}},
		} {
			want, err := proto.Marshal(m)
			if err != nil {
				t.Fatal(err)
			}
			got, err := Codec{}.MarshalAppend([]byte("before"), m)
			if err != nil || !bytes.Equal(got, append([]byte("before"), want...)) {
				t.Errorf("%T of %d bytes is written differently, %v", m, n, err)
			}
			back := m.ProtoReflect().New().Interface()
			if err := (Codec{}).Unmarshal(want, back); err != nil || !proto.Equal(back, m) {
				t.Errorf("%T of %d bytes is read differently, %v", m, n, err)
			}
		}
	}
	if err := (Codec{}).Unmarshal(bytes.Repeat([]byte{0xff}, 2*bulk), &agentv1.UploadRequest{}); err == nil {
		t.Error("rubbish was read")
	}
}
