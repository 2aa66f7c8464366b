package names

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/holdpoint/holdpoint/internal/network/policy"
)

// headerBytes is the length of a message's header; its id is in the first two.
const headerBytes = 12

// ask gives the answer of the host's first name server that has one. It is
// asked with an id of ours, which the guest cannot choose.
func (s *Server) ask(ctx context.Context, query []byte, protocol string) ([]byte, error) {
	err := errors.New("the host has no name server")
	for _, server := range s.cfg.Host.Nameservers() {
		var answer []byte
		if answer, err = s.askOne(ctx, server, query, protocol); err == nil {
			copy(answer, query[:2])
			return answer, nil
		}
	}
	return nil, err
}

func (s *Server) askOne(ctx context.Context, server netip.AddrPort, query []byte, protocol string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	conn, err := s.cfg.Host.Dial(ctx, protocol, server)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	query = bytes.Clone(query)
	if _, err := rand.Read(query[:2]); err != nil {
		return nil, err
	}
	if protocol == policy.TCP {
		if err := writeMessage(conn, query); err != nil {
			return nil, err
		}
		answer, err := readMessage(conn)
		if err == nil && !answers(answer, query) {
			err = fmt.Errorf("name server %s answered something else", server)
		}
		return answer, err
	}
	if _, err := conn.Write(query); err != nil {
		return nil, err
	}
	return readAnswer(conn, query)
}

// readAnswer waits for the datagram that answers the query.
func readAnswer(conn net.Conn, query []byte) ([]byte, error) {
	buf := make([]byte, maxMessage)
	for {
		n, err := conn.Read(buf)
		if err != nil {
			return nil, err
		}
		if answers(buf[:n], query) {
			return bytes.Clone(buf[:n]), nil
		}
	}
}

// answers reports whether the message is a response to the query: the same id
// and a question that is the same but for the case of letters.
func answers(m, query []byte) bool {
	if len(m) < headerBytes || len(query) < headerBytes || !bytes.Equal(m[:2], query[:2]) || m[2]&0x80 == 0 {
		return false
	}
	end := headerBytes
	for end < len(query) && query[end] != 0 {
		end += int(query[end]) + 1
	}
	end += 5 // the root label, type and class
	return end <= len(query) && end <= len(m) && bytes.EqualFold(m[headerBytes:end], query[headerBytes:end])
}
