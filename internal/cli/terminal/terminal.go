// Package terminal is the command line's manners: what is shown on a terminal
// only, questions, the raw mode of an interactive command. It knows nothing of
// machines.
package terminal

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/term"
)

// Is reports whether the stream is a terminal.
func Is(stream any) bool {
	f, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// Styled reports whether output to w may be emphasized: a terminal that is not
// dumb, and no NO_COLOR (https://no-color.org).
func Styled(w io.Writer) bool {
	return Is(w) && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
}

// Bold emphasizes s with the terminal's own bold.
func Bold(s string) string { return "\x1b[1m" + s + "\x1b[0m" }

// Ask puts the question to the person at in and reads one line of answer. No
// answer at all is "".
func Ask(in io.Reader, out io.Writer, question string) (string, error) {
	if _, err := fmt.Fprint(out, question+" "); err != nil {
		return "", err
	}
	// One byte at a time: what follows the line is not ours.
	line, err := bufio.NewReader(oneByte{in}).ReadString('\n')
	if err != nil && err != io.EOF {
		return "", err
	}
	if err == io.EOF {
		fmt.Fprintln(out)
	}
	return strings.ToLower(strings.TrimSpace(line)), nil
}

type oneByte struct{ r io.Reader }

func (o oneByte) Read(p []byte) (int, error) {
	if len(p) > 1 {
		p = p[:1]
	}
	return o.r.Read(p)
}

// Raw puts the terminal f into raw mode; restore puts it back.
func Raw(f *os.File) (restore func(), err error) {
	state, err := term.MakeRaw(int(f.Fd()))
	if err != nil {
		return nil, fmt.Errorf("make terminal raw: %w", err)
	}
	return func() { _ = term.Restore(int(f.Fd()), state) }, nil
}

// Size is the terminal's; zeros where it is unknown.
func Size(f *os.File) (rows, cols int) {
	cols, rows, err := term.GetSize(int(f.Fd()))
	if err != nil {
		return 0, 0
	}
	return rows, cols
}
