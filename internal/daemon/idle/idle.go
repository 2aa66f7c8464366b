//go:build linux

// Package idle gives memory back to the host when nobody asks for anything. It
// frees nothing itself: the runtime does.
package idle

import (
	"net/http"
	"runtime/debug"
	"sync"
	"time"
)

// after is how long nothing must be asked before memory is given back.
const after = 5 * time.Second

// Handler gives the memory that calls needed back to the host when they are
// over: a copy of gigabytes leaves tens of megabytes of buffers, and the
// runtime alone keeps those for minutes.
func Handler(next http.Handler) http.Handler {
	var (
		mu     sync.Mutex
		active int
		timer  *time.Timer
	)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		active++
		if timer != nil {
			timer.Stop()
		}
		mu.Unlock()
		defer func() {
			mu.Lock()
			defer mu.Unlock()
			if active--; active == 0 {
				timer = time.AfterFunc(after, debug.FreeOSMemory)
			}
		}()
		next.ServeHTTP(w, r)
	})
}
