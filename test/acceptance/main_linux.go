// Command acceptance is a guest program that has something to lose: it counts
// on every CPU, appends to an open file, passes numbers through pipes to
// another process, runs a timer, keeps changing 64 MiB of memory whose digest
// it knows, and reads its disk past the cache and through it. Asked over a unix
// socket it tells all of that with its own verdict: whether anything was lost,
// and whether anything went backwards since an earlier report. It is for tests
// only, and it needs nothing in the guest but a kernel.
//
//	acceptance run DIR            does all of that, for ever
//	acceptance hold DIR           only keeps what it is told to write
//	acceptance ask DIR COMMAND    gives the answer of the one in DIR, see serve
package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "acceptance:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 1 && args[0] == "echo":
		return echo(os.Stdin, os.Stdout)
	case len(args) == 2 && args[0] == "run":
		return live(args[1])
	case len(args) == 2 && args[0] == "hold":
		return hold(args[1])
	case len(args) >= 3 && args[0] == "ask":
		return ask(args[1], strings.Join(args[2:], " "))
	}
	return errors.New("usage: acceptance run|hold DIR, acceptance ask DIR COMMAND")
}

func socket(dir string) string { return filepath.Join(dir, "sock") }

// ask sends one line and prints the answer.
func ask(dir, command string) error {
	conn, err := net.Dial("unix", socket(dir))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	if _, err := fmt.Fprintln(conn, command); err != nil {
		return err
	}
	answer, err := io.ReadAll(conn)
	if err != nil {
		return err
	}
	text, bad := strings.CutPrefix(string(answer), "error: ")
	if bad {
		return errors.New(strings.TrimSpace(text))
	}
	_, err = fmt.Println(strings.TrimSpace(text))
	return err
}

// serve answers one command a connection, one after the other, for ever.
func serve(dir string, answer func(command, argument string) (string, error)) error {
	_ = os.Remove(socket(dir))
	l, err := net.Listen("unix", socket(dir))
	if err != nil {
		return err
	}
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		line, err := bufio.NewReader(conn).ReadString('\n')
		if err == nil {
			command, argument, _ := strings.Cut(strings.TrimSpace(line), " ")
			text, wrong := answer(command, argument)
			if wrong != nil {
				text = "error: " + wrong.Error()
			}
			_, err = fmt.Fprintln(conn, text)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "acceptance: answer:", err)
		}
		_ = conn.Close()
	}
}
