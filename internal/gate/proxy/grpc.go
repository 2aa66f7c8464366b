package proxy

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
)

// The status codes of gRPC that the proxy itself answers
// (github.com/grpc/grpc, doc/statuscodes.md).
const (
	grpcUnimplemented = 12
	grpcUnavailable   = 14
)

// isGRPC reports whether the client of r understands answers of gRPC only.
func isGRPC(r *http.Request) bool {
	rest, ok := strings.CutPrefix(r.Header.Get("Content-Type"), "application/grpc")
	return ok && r.ProtoMajor == 2 && (rest == "" || rest[0] == '+' || rest[0] == ';')
}

// writeGRPC answers a call with a status and nothing else ("Trailers-Only" in
// gRPC over HTTP/2). A host name that is not published will not be served by
// trying again; all else may.
func writeGRPC(w http.ResponseWriter, pr problem) {
	code := grpcUnavailable
	if pr.Status == http.StatusNotFound {
		code = grpcUnimplemented
	}
	h := w.Header()
	h.Del("Retry-After")
	h.Set("Content-Type", "application/grpc")
	h.Set("Grpc-Status", strconv.Itoa(code))
	h.Set("Grpc-Message", percentEncode(strings.TrimSuffix(pr.line(), "\n")))
	w.WriteHeader(http.StatusOK)
}

// percentEncode is the encoding of Grpc-Message.
func percentEncode(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if c := s[i]; c >= ' ' && c <= '~' && c != '%' {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	return b.String()
}
