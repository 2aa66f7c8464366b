package view

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
)

// Tree draws the checkpoints of machines: below each those that were made from
// it, oldest first. A line of descent goes straight down; the one that ends in
// the machine's present comes last, the others branch off before it.
type Tree struct {
	Now time.Time
	// Bold emphasizes text on a terminal.
	Bold func(string) string
}

// Draw prints one tree for each machine, and one for what is kept of machines
// that are gone. checkpoints are those of all machines, newest first.
func (t Tree) Draw(w io.Writer, machines []*holdpointv1.Machine, checkpoints []*holdpointv1.Checkpoint) error {
	g := newGraph(machines, checkpoints)
	for i, machine := range g.order {
		if i > 0 {
			fmt.Fprintln(w)
		}
		p := &painter{tree: t, graph: g, machine: machine}
		p.paint()
		if _, err := io.WriteString(w, p.out.String()); err != nil {
			return err
		}
	}
	return nil
}

// graph is the forest of checkpoints with its machines.
type graph struct {
	machines map[string]*holdpointv1.Machine
	byID     map[string]*holdpointv1.Checkpoint
	// children are oldest first, within one machine.
	children map[string][]*holdpointv1.Checkpoint
	// roots begin a machine's trees, by machine id, oldest first.
	roots map[string][]*holdpointv1.Checkpoint
	// names of machines that are gone, by id.
	names map[string]string
	order []string
}

func newGraph(machines []*holdpointv1.Machine, checkpoints []*holdpointv1.Checkpoint) *graph {
	g := &graph{
		machines: map[string]*holdpointv1.Machine{},
		byID:     map[string]*holdpointv1.Checkpoint{},
		children: map[string][]*holdpointv1.Checkpoint{},
		roots:    map[string][]*holdpointv1.Checkpoint{},
		names:    map[string]string{},
	}
	for _, m := range machines {
		g.machines[m.GetId()] = m
		g.names[m.GetId()] = m.GetName()
		g.order = append(g.order, m.GetId())
	}
	for _, c := range checkpoints {
		g.byID[c.GetId()] = c
	}
	for _, c := range slices.Backward(checkpoints) {
		id := c.GetMachineId()
		if _, known := g.names[id]; !known {
			g.names[id] = c.GetMachine()
			g.order = append(g.order, id)
		}
		if parent := g.byID[c.GetParent()]; parent != nil && parent.GetMachineId() == id && parent != c {
			g.children[parent.GetId()] = append(g.children[parent.GetId()], c)
		} else {
			g.roots[id] = append(g.roots[id], c)
		}
	}
	return g
}

// painter draws one machine.
type painter struct {
	tree    Tree
	graph   *graph
	machine string
	out     strings.Builder
}

func (p *painter) paint() {
	m, roots := p.graph.machines[p.machine], p.graph.roots[p.machine]
	if m == nil {
		fmt.Fprintf(&p.out, "%s  (gone; its checkpoints are kept)\n", p.bold(p.graph.names[p.machine]))
	} else {
		fmt.Fprintf(&p.out, "%s  %s, image %s%s\n", p.bold(m.GetName()), m.GetState(), Dash(Line(m.GetImage())), p.forkOf(m))
	}
	// Roots hang side by side from the image, or from what the machine was forked
	// from; the one of the present is last. A present that comes of none of them
	// hangs from there, too.
	head := p.head()
	for i, root := range p.presentLast(roots) {
		last := i == len(roots)-1 && (m == nil || p.leads(root, head))
		p.branch(root, "", last)
	}
	if at := p.graph.byID[head]; m != nil && (at == nil || at.GetMachineId() != p.machine) {
		p.out.WriteString("● now\n")
	}
}

// forkOf says what checkpoint the machine was forked from; "" for none.
func (p *painter) forkOf(m *holdpointv1.Machine) string {
	id := m.GetForkedFrom()
	if id == "" {
		return ""
	}
	if c := p.graph.byID[id]; c != nil {
		return fmt.Sprintf(", fork of %s %s", Line(c.GetMachine()), Line(NameOf(c)))
	}
	return ", fork of " + Short(id)
}

// head is the checkpoint the machine's disk continues from, "" for the image.
func (p *painter) head() string {
	if m := p.graph.machines[p.machine]; m != nil {
		return m.GetHead()
	}
	return ""
}

// branch draws a line of descent: c, and what came of it. straight continues
// the column it stands in, else it is set off to the right.
func (p *painter) branch(c *holdpointv1.Checkpoint, indent string, straight bool) {
	first, rest := indent, indent
	if !straight {
		first, rest = indent+"├─", indent+"│ "
	}
	for c != nil {
		fmt.Fprintf(&p.out, "%s○ %s\n", first, p.label(c))
		first = rest
		children := p.presentLast(p.graph.children[c.GetId()])
		now := c.GetId() == p.head()
		c = nil
		for i, child := range children {
			if i == len(children)-1 && !now {
				c = child
				break
			}
			p.branch(child, rest, false)
		}
		if now {
			fmt.Fprintf(&p.out, "%s● %s\n", rest, p.bold("now"))
		}
	}
}

// presentLast puts the line that leads to the present last.
func (p *painter) presentLast(siblings []*holdpointv1.Checkpoint) []*holdpointv1.Checkpoint {
	sorted := slices.Clone(siblings)
	slices.SortStableFunc(sorted, func(a, b *holdpointv1.Checkpoint) int {
		return rank(p.leads(a, p.head())) - rank(p.leads(b, p.head()))
	})
	return sorted
}

func rank(leads bool) int {
	if leads {
		return 1
	}
	return 0
}

// leads reports whether id is c or comes of it.
func (p *painter) leads(c *holdpointv1.Checkpoint, id string) bool {
	// A broken record must not make a circle of us.
	for range p.graph.byID {
		at := p.graph.byID[id]
		if at == nil {
			return false
		}
		if at == c {
			return true
		}
		id = at.GetParent()
	}
	return false
}

func (p *painter) label(c *holdpointv1.Checkpoint) string {
	words := []string{Short(c.GetId())}
	if c.GetName() != "" {
		words = append(words, p.bold(Line(c.GetName())))
	}
	words = append(words, KindOf(c), Age(TimeOf(c.GetCreatedAt()), p.tree.Now))
	if c.GetAutomatic() {
		words = append(words, "("+madeBy(c)+")")
	}
	if parent := p.graph.byID[c.GetParent()]; parent != nil && parent.GetMachineId() != p.machine {
		words = append(words, fmt.Sprintf("(fork of %s %s)", parent.GetMachine(), NameOf(parent)))
	}
	if c.GetMessage() != "" {
		words = append(words, "“"+Message(c)+"”")
	}
	if Failed(c) {
		words = append(words, p.bold(Line("FAILED verification: "+Dash(c.GetProblem()))))
	}
	return strings.Join(words, "  ")
}

// madeBy says why holdpoint made a checkpoint by itself; its message says it in
// the other cases.
func madeBy(c *holdpointv1.Checkpoint) string {
	if c.GetMessage() == "" || strings.HasPrefix(c.GetMessage(), "before restore") {
		return "kept before a restore"
	}
	return "automatic"
}

func (p *painter) bold(s string) string {
	if p.tree.Bold == nil {
		return s
	}
	return p.tree.Bold(s)
}

// KindOf says a checkpoint's kind with its consistency: "full", "disk stopped".
func KindOf(c *holdpointv1.Checkpoint) string {
	if c.GetConsistency() == "" {
		return c.GetKind()
	}
	return c.GetKind() + " " + c.GetConsistency()
}

// NameOf is what a person calls a checkpoint: its name, else its short id.
func NameOf(c *holdpointv1.Checkpoint) string {
	if c.GetName() != "" {
		return c.GetName()
	}
	return Short(c.GetId())
}
