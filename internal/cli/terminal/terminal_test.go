//go:build linux

package terminal_test

import (
	"bytes"
	"io"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/holdpoint/holdpoint/internal/cli/terminal"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Stop ends a Read that nobody feeds, and leaves what comes later to others.
func TestInputStops(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	in := terminal.NewInput(r)
	if _, err := w.WriteString("one"); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 16)
	if n, err := in.Read(buf); string(buf[:n]) != "one" || err != nil {
		t.Fatalf("read %q, %v", buf[:n], err)
	}
	ended := make(chan error)
	go func() {
		_, err := in.Read(buf)
		ended <- err
	}()
	in.Stop()
	in.Stop()
	if err := <-ended; err != io.EOF {
		t.Errorf("a stopped read: %v", err)
	}
	if _, err := w.WriteString("two"); err != nil {
		t.Fatal(err)
	}
	if n, err := in.Read(buf); n != 0 || err != io.EOF {
		t.Errorf("a read after Stop: %q, %v", buf[:n], err)
	}
	if n, err := r.Read(buf); string(buf[:n]) != "two" || err != nil {
		t.Errorf("what was left: %q, %v", buf[:n], err)
	}
}

func TestInputEnds(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	in := terminal.NewInput(r)
	defer in.Stop()
	w.Close()
	if n, err := in.Read(make([]byte, 16)); n != 0 || err != io.EOF {
		t.Errorf("read %d, %v", n, err)
	}
}

func TestAsk(t *testing.T) {
	in := strings.NewReader("  Yes \nrest")
	var out bytes.Buffer
	if answer, err := terminal.Ask(in, &out, "Sure?"); answer != "yes" || err != nil || out.String() != "Sure? " {
		t.Errorf("%q, %v, %q", answer, err, out.String())
	}
	if rest, _ := io.ReadAll(in); string(rest) != "rest" {
		t.Errorf("what follows the answer is %q", rest)
	}
	if answer, err := terminal.Ask(strings.NewReader(""), &out, "Sure?"); answer != "" || err != nil {
		t.Errorf("no answer: %q, %v", answer, err)
	}
}

func TestProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		p := terminal.StartProgress(&out)
		p.Show("stopping")
		p.Show("stopping")
		time.Sleep(2500 * time.Millisecond)
		p.Print("a note")
		p.Show("booting")
		p.Stop()
		const clear = "\r\x1b[K"
		want := clear + "stopping" + clear + "stopping  1s" + clear + "stopping  2s" +
			clear + "a note\n" + clear + "stopping  2s" + clear + "booting  2s" + clear
		if out.String() != want {
			t.Errorf("%q", out.String())
		}
	})
}
