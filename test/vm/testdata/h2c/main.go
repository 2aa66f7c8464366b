// Command h2c is a server of HTTP/2 without TLS on port 8080 of the loopback. It
// echoes, and counts in a trailer what it was told.
package main

import (
	"io"
	"log"
	"net/http"
	"strconv"
)

func main() {
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	server := &http.Server{Addr: "127.0.0.1:8080", Protocols: protocols, Handler: http.HandlerFunc(echo)}
	log.Fatal(server.ListenAndServe())
}

func echo(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Trailer", "X-Count")
	w.Header().Set("X-Spoken", r.Proto)
	w.WriteHeader(http.StatusOK)
	out := http.NewResponseController(w)
	_ = out.Flush() // the client may be gone
	count, buffer := 0, make([]byte, 4096)
	for {
		n, err := r.Body.Read(buffer)
		count += n
		_, _ = w.Write(buffer[:n])
		_ = out.Flush()
		if err == io.EOF {
			break
		}
		if err != nil {
			return
		}
	}
	w.Header().Set("X-Count", strconv.Itoa(count))
}
