// Package undo is a stack of the steps that take back what was built so far.
// It is not a transaction: it runs what it was given, newest first, and no more.
package undo

// Stack collects undo steps while something is built in steps. Its life:
// declared empty; Add after each step that leaves something; `defer
// stack.Run()` right at the start; Release on the last line, when all that was
// built is to stay.
type Stack struct {
	steps []func()
}

// Add puts a step on the stack.
func (s *Stack) Add(step func()) { s.steps = append(s.steps, step) }

// Run runs the steps, newest first, and empties the stack.
func (s *Stack) Run() {
	for len(s.steps) > 0 {
		last := len(s.steps) - 1
		step := s.steps[last]
		s.steps = s.steps[:last]
		step()
	}
}

// Release empties the stack without running anything.
func (s *Stack) Release() { s.steps = nil }
