//go:build linux

package daemon

import (
	"net/http"
	"runtime/debug"
	"sync"
	"time"
)

// idleAfter is how long nothing must be asked before memory is given back.
const idleAfter = 5 * time.Second

// idling gives the memory that calls needed back to the host when they are
// over: a copy of gigabytes leaves tens of megabytes of buffers, and the
// runtime alone keeps those for minutes.
func idling(next http.Handler) http.Handler {
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
				timer = time.AfterFunc(idleAfter, debug.FreeOSMemory)
			}
		}()
		next.ServeHTTP(w, r)
	})
}
