package view

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf8"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// Size says bytes as people read them, in powers of 1024.
func Size(bytes int64) string {
	const unit = 1024
	if bytes < unit {
		return fmt.Sprintf("%d B", bytes)
	}
	value, name := float64(bytes), ""
	for _, name = range []string{"KiB", "MiB", "GiB", "TiB", "PiB"} {
		value /= unit
		if value < unit-0.05 {
			break
		}
	}
	return strings.TrimSuffix(fmt.Sprintf("%.1f", value), ".0") + " " + name
}

// ParseSize reads a size as people write it: 512M, 8G, 1.5GiB, 4096. All
// units are powers of 1024.
func ParseSize(s string) (int64, error) {
	number := strings.ToUpper(strings.TrimSpace(s))
	number = strings.TrimSuffix(strings.TrimSuffix(number, "B"), "I")
	shift := 0
	if i := strings.IndexByte("KMGTP", lastByte(number)); i >= 0 {
		shift = 10 * (i + 1)
		number = number[:len(number)-1]
	}
	value, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
	// Below 2^53 a float counts bytes exactly.
	if bytes := value * float64(int64(1)<<shift); err == nil && bytes >= 1 && bytes < 1<<53 {
		return int64(bytes), nil
	}
	return 0, errdefs.New(errdefs.Invalid, "size %q: write a number above 0 with K, M, G or T, such as 512M", s)
}

func lastByte(s string) byte {
	if s == "" {
		return 0
	}
	return s[len(s)-1]
}

// Age says how long ago t was; "-" for no time.
func Age(t, now time.Time) string {
	if t.IsZero() {
		return "-"
	}
	d := now.Sub(t)
	switch {
	case d < time.Second:
		return "now"
	case d < time.Minute:
		return fmt.Sprintf("%d s ago", d/time.Second)
	case d < time.Hour:
		return fmt.Sprintf("%d min ago", d/time.Minute)
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h ago", d/time.Hour)
	}
	return fmt.Sprintf("%d d ago", d/(24*time.Hour))
}

// Millis says a duration given in milliseconds.
func Millis(ms float64) string {
	switch {
	case ms < 10:
		return fmt.Sprintf("%.1f ms", ms)
	case ms < 1000:
		return fmt.Sprintf("%.0f ms", ms)
	}
	return fmt.Sprintf("%.1f s", ms/1000)
}

// Short is the beginning of an id that a person types.
func Short(id string) string {
	const length = 12
	if len(id) > length {
		return id[:length]
	}
	return id
}

// Count says a number of things: "1 machine", "2 machines".
func Count(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %ss", n, thing)
}

// Table prints rows in aligned columns below their heads. Text from guests and
// people is made harmless for the terminal.
func Table(w io.Writer, heads []string, rows [][]string) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	write := func(cells []string) {
		for i, cell := range cells {
			cells[i] = Line(cell)
		}
		fmt.Fprintln(t, strings.TrimRight(strings.Join(cells, "\t"), "\t"))
	}
	write(heads)
	for _, row := range rows {
		write(row)
	}
	return t.Flush()
}

// Fields prints names and values in two columns; empty values are left out.
func Fields(w io.Writer, fields [][2]string) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, f := range fields {
		if f[1] != "" {
			fmt.Fprintf(t, "%s:\t%s\n", f[0], Line(f[1]))
		}
	}
	return t.Flush()
}

// Line makes text one harmless line: control characters, which could move the
// cursor, recolor the terminal or turn the order of what is read around, become
// spaces or "?".
func Line(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\n' || r == '\t' || r == '\r':
			return ' '
		case controls(r):
			return '?'
		}
		return r
	}, s)
}

// controls reports whether the character tells a terminal something instead of
// being shown, in either direction of writing.
func controls(r rune) bool { return unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r) }

// Brief is the beginning of a text as one line of at most limit characters.
func Brief(s string, limit int) string {
	text := []rune(Line(s))
	if len(text) <= limit {
		return string(text)
	}
	return strings.TrimRight(string(text[:limit-1]), " ") + "…"
}

// messageWidth is how much of a checkpoint's message lists have.
const messageWidth = 60

// Message is a checkpoint's message for lists.
func Message(c *holdpointv1.Checkpoint) string { return Brief(c.GetMessage(), messageWidth) }

// Dash is s, or "-" for nothing, so that columns stay.
func Dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// Harmless makes a console's bytes harmless for a terminal: only text, tabs
// and ends of lines go through to w. A character may come in parts.
func Harmless(w io.Writer) io.Writer { return &harmless{w: w} }

type harmless struct {
	w io.Writer
	// part is the beginning of a character whose rest has not come.
	part []byte
}

func (h *harmless) Write(p []byte) (int, error) {
	text := append(h.part, p...)
	kept := make([]byte, 0, len(text))
	for utf8.FullRune(text) {
		r, size := utf8.DecodeRune(text)
		// What is no UTF-8 is shown as such.
		if r == '\n' || r == '\t' || !controls(r) {
			kept = utf8.AppendRune(kept, r)
		}
		text = text[size:]
	}
	h.part = append([]byte(nil), text...)
	if _, err := h.w.Write(kept); err != nil {
		return 0, err
	}
	return len(p), nil
}

// idle says after what time an idle machine is suspended; "" for never.
func idle(ms int64) string {
	if ms == 0 {
		return ""
	}
	text := (time.Duration(ms) * time.Millisecond).String()
	return strings.NewReplacer("h0m0s", "h", "m0s", "m").Replace(text) + " without use"
}

// diskText says how large a disk is, and its format where that is a special one.
func diskText(s *holdpointv1.Spec) string {
	if s.GetDiskFormat() == machine.RawDisk {
		return Size(s.GetDiskBytes()) + ", raw"
	}
	return Size(s.GetDiskBytes())
}

// limits says what the machine's process is held to; "" for nothing.
func limits(s *holdpointv1.Spec) string {
	var parts []string
	if n := s.GetCpuLimitMillis(); n > 0 {
		parts = append(parts, fmt.Sprintf("%g CPUs", float64(n)/1000))
	}
	if n := s.GetMemoryLimitBytes(); n > 0 {
		parts = append(parts, Size(n)+" of memory")
	}
	return strings.Join(parts, ", ")
}

// SpecFields are the fields of a spec, for Fields.
func SpecFields(s *holdpointv1.Spec) [][2]string {
	return [][2]string{
		{"memory", Size(s.GetMemoryBytes())},
		{"CPUs", fmt.Sprint(s.GetCpus())},
		{"disk", diskText(s)},
		{"init", s.GetInit()},
		{"on boot", s.GetOnBoot()},
		{"in memory only", strings.Join(s.GetTmpfs(), " ")},
		{"network", s.GetNetwork()},
		{"allowed", strings.Join(s.GetNetworkAllow(), " ")},
		{"allowed of the host", strings.Trim(fmt.Sprint(s.GetNetworkAllowHost()), "[]")},
		{"suspended after", idle(s.GetSuspendAfterMillis())},
		{"limits", limits(s)},
		{"restarted", strings.TrimPrefix(s.GetRestart(), "no")},
	}
}
