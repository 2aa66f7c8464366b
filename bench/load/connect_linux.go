package main

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"time"
)

// What pull and push send first, before the number of bytes in eight, big-endian.
const (
	letterPull = 'd'
	letterPush = 'u'
)

// connectLimit bounds a transfer that is never to end.
const connectLimit = 2 * time.Minute

// transfer gets bytes from a server outside, or sends it as many; the server
// acknowledges those with one byte.
func transfer(letter byte, bytes int64, address string) (time.Duration, error) {
	buffer := make([]byte, 256<<10)
	conn, err := net.DialTimeout("tcp", address, connectLimit)
	if err != nil {
		return 0, err
	}
	defer func() { _ = conn.Close() }()
	if err := conn.SetDeadline(time.Now().Add(connectLimit)); err != nil {
		return 0, err
	}
	begin := time.Now()
	if _, err := conn.Write(binary.BigEndian.AppendUint64([]byte{letter}, uint64(bytes))); err != nil {
		return 0, err
	}
	back := bytes
	if letter == letterPush {
		back = 1
		for left := bytes; left > 0; {
			n, err := conn.Write(buffer[:min(left, int64(len(buffer)))])
			if err != nil {
				return 0, err
			}
			left -= int64(n)
		}
	}
	var got int64
	for got < back && err == nil {
		var n int
		n, err = conn.Read(buffer)
		got += int64(n)
	}
	took := time.Since(begin)
	if got != back {
		return 0, fmt.Errorf("%d bytes of %d came from %s: %w", got, back, address, io.ErrUnexpectedEOF)
	}
	return took, nil
}
