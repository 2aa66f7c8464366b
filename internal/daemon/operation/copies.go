package operation

import "sync"

// Copies adds up how far several copies of one disk are.
type Copies struct {
	// Count is how many there are.
	Count int
	// Show is told of all together, in bytes.
	Show func(done, total int64)

	mu   sync.Mutex
	done int64
}

// Next is told how far one more copy is.
func (c *Copies) Next() func(done, total int64) {
	var last int64
	return func(done, total int64) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.done, last = c.done+done-last, done
		c.Show(c.done, total*int64(c.Count))
	}
}
