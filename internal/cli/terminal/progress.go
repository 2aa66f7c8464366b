package terminal

import (
	"fmt"
	"io"
	"sync"
	"time"
)

// Progress is one line on a terminal that says what goes on and since when. It
// is begun by StartProgress, updated by Show, and gone after Stop.
type Progress struct {
	w     io.Writer
	begun time.Time
	quit  chan struct{}
	done  sync.WaitGroup

	mu    sync.Mutex
	text  string
	shown bool
}

// StartProgress begins a line on w; the caller must Stop it.
func StartProgress(w io.Writer) *Progress {
	p := &Progress{w: w, begun: time.Now(), quit: make(chan struct{})}
	p.done.Go(p.tick)
	return p
}

// Show replaces what the line says.
func (p *Progress) Show(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if text == p.text {
		return
	}
	p.text = text
	p.draw()
}

// Print puts a whole line above the progress.
func (p *Progress) Print(line string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.clear()
	fmt.Fprintln(p.w, line)
	p.draw()
}

// Stop takes the line away.
func (p *Progress) Stop() {
	close(p.quit)
	p.done.Wait()
	p.clear()
}

// tick moves the clock on.
func (p *Progress) tick() {
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for {
		select {
		case <-p.quit:
			return
		case <-ticker.C:
			p.mu.Lock()
			p.draw()
			p.mu.Unlock()
		}
	}
}

func (p *Progress) draw() {
	if p.text == "" {
		return
	}
	text := p.text
	if elapsed := time.Since(p.begun); elapsed >= time.Second {
		text += fmt.Sprintf("  %s", elapsed.Truncate(time.Second))
	}
	fmt.Fprintf(p.w, "\r\x1b[K%s", text)
	p.shown = true
}

func (p *Progress) clear() {
	if p.shown {
		fmt.Fprint(p.w, "\r\x1b[K")
		p.shown = false
	}
}
