//go:build linux

// Package table is the table that the benchmark prints, and the arithmetic of its
// numbers. It measures nothing.
package table

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// Row is one line of the table.
type Row struct {
	What, Measured, Against string
	// Ratio of Measured to Against; 0 where there is nothing to compare with.
	Ratio float64
	// Target in words, and whether it is met.
	Target string
	Met    bool
	Phases string
}

// Table is the result of one run.
type Table struct {
	// Stamp says what was measured, where.
	Stamp []string
	rows  []Row
	// Log is told each row as it comes.
	Log io.Writer
}

// Add takes the next row.
func (t *Table) Add(r Row) {
	t.rows = append(t.rows, r)
	fmt.Fprintf(t.Log, "  %s: %s %s\n", r.What, r.Measured, r.Phases)
}

// Write prints the table as Markdown.
func (t *Table) Write(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n\n", strings.Join(t.Stamp, " · "))
	b.WriteString("| what | measured | compared with | ratio | target | met | phases |\n|---|---|---|---|---|---|---|\n")
	for _, r := range t.rows {
		ratio := "–"
		if r.Ratio > 0 {
			ratio = fmt.Sprintf("%.2f", r.Ratio)
		}
		met := "yes"
		switch {
		case r.Target == "":
			met = "–"
		case !r.Met:
			met = "**no**"
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s | %s |\n", r.What, r.Measured,
			cmp.Or(r.Against, "–"), ratio, cmp.Or(r.Target, "–"), met, cmp.Or(r.Phases, "–"))
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// Median is that of at least one value.
func Median[T cmp.Ordered](values []T) T {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[len(sorted)/2]
}

// Percentile is the smallest value that p of a hundred are not above.
func Percentile(values []float64, p int) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[max(0, (len(sorted)*p+99)/100-1)]
}

// InTurns measures a and b alternately, n times each, after one of each that
// does not count, and returns the medians.
func InTurns(n int, a, b func() (time.Duration, error)) (time.Duration, time.Duration, error) {
	var as, bs []time.Duration
	for i := range n + 1 {
		da, err := a()
		if err != nil {
			return 0, 0, err
		}
		db, err := b()
		if err != nil {
			return 0, 0, err
		}
		if i > 0 {
			as, bs = append(as, da), append(bs, db)
		}
	}
	return Median(as), Median(bs), nil
}

// MS is a time in milliseconds, as text.
func MS(d time.Duration) string {
	return fmt.Sprintf("%.1f ms", float64(d)/float64(time.Millisecond))
}

// Ratio is a to b.
func Ratio(a, b time.Duration) float64 { return float64(a) / float64(b) }

// Rate is bytes per second as text.
func Rate(bytes int64, d time.Duration) string {
	return fmt.Sprintf("%.1f MB/s", float64(bytes)/1e6/d.Seconds())
}
