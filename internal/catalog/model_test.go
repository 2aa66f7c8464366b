package catalog_test

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// model is what the catalog should hold, kept in plain maps.
type model struct {
	c   *catalog.Catalog
	ctx context.Context
	n   int // names made so far

	layers    map[string]catalog.LayerState
	machines  map[string]*modelMachine
	ckpts     map[string]*modelCheckpoint
	order     []string // checkpoints, oldest first
	ops       map[string]bool
	displaced map[string]modelDisplaced
	leased    map[lease]bool
	standbys  map[string]modelStandby
}

type modelMachine struct {
	chain []string
	head  string
	gen   uint64
	run   string
	ended bool // why is recorded
	state machine.State
	modelMemory
}

// modelMemory is what a machine's run continues.
type modelMemory struct {
	memory           []string
	memoryHead, file string
}

type modelCheckpoint struct {
	machine, parent string
	layers          []string
	memory          []string
	devices         string
}

type modelDisplaced struct {
	machine, head, run string
	chain              []string
	memory             modelMemory
	suspended          bool
}

type lease struct{ layer, op string }

type modelStandby struct{ checkpoint, layer string }

func (m *model) name(prefix string) string {
	m.n++
	return fmt.Sprintf("%s%04d", prefix, m.n)
}

// reachable is what must never be collected.
func (m *model) reachable() map[string]bool {
	set := map[string]bool{}
	add := func(ids []string) {
		for _, id := range ids {
			set[id] = true
		}
	}
	for _, x := range m.machines {
		add(x.chain)
		add(x.memory)
	}
	for _, k := range m.ckpts {
		add(k.layers)
		add(k.memory)
		if k.devices != "" {
			add([]string{k.devices})
		}
	}
	for _, d := range m.displaced {
		add(d.chain)
		add(d.memory.memory)
	}
	for _, s := range m.standbys {
		add([]string{s.layer})
	}
	for l := range m.leased {
		add([]string{l.layer})
	}
	return set
}

func pick[V any](t *rapid.T, from map[string]V, what string) string {
	if len(from) == 0 {
		t.Skip("no " + what)
	}
	return rapid.SampledFrom(slices.Sorted(maps.Keys(from))).Draw(t, what)
}

func must(t *rapid.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantKind(t *rapid.T, err error, kind errdefs.Kind) {
	t.Helper()
	if errdefs.KindOf(err) != kind {
		t.Fatalf("error %v of kind %s, want %s", err, errdefs.KindOf(err), kind)
	}
}

func (m *model) createMachine(t *rapid.T) {
	id, l := m.name("m"), m.name("l")
	must(t, m.c.CreateMachine(m.ctx, catalog.Machine{ID: id, Name: id, ImageBuildID: "build1", State: "creating"}, layer(l, id)))
	m.machines[id] = &modelMachine{chain: []string{l}, state: machine.Creating}
	m.layers[l] = catalog.LayerCreated
}

func (m *model) addOverlay(t *rapid.T) {
	id, l := pick(t, m.machines, "machine"), m.name("l")
	must(t, m.c.AddOverlay(m.ctx, id, layer(l, id)))
	m.machines[id].chain = append(m.machines[id].chain, l)
	m.layers[l] = catalog.LayerCreated
}

func (m *model) dropTop(t *rapid.T) {
	id := pick(t, m.machines, "machine")
	x := m.machines[id]
	top := x.chain[len(x.chain)-1]
	err := m.c.DropTop(m.ctx, id, top)
	if len(x.chain) == 1 || m.layers[top] != catalog.LayerCreated {
		wantKind(t, err, errdefs.WrongState)
		return
	}
	must(t, err)
	x.chain = x.chain[:len(x.chain)-1]
}

func (m *model) wake(x *modelMachine) bool {
	top := len(x.chain) - 1
	if m.layers[x.chain[top]] == catalog.LayerSealed {
		return false
	}
	for i, l := range x.chain {
		m.layers[l] = catalog.LayerSealed
		if i == top {
			m.layers[l] = catalog.LayerLive
		}
	}
	return true
}

func (m *model) beginRun(t *rapid.T) {
	id, run := pick(t, m.machines, "machine"), m.name("r")
	x := m.machines[id]
	err := m.c.BeginRun(m.ctx, id, run)
	if !m.wake(x) {
		wantKind(t, err, errdefs.WrongState)
		return
	}
	must(t, err)
	x.run, x.ended, x.modelMemory = run, false, modelMemory{}
	m.runs(t, id)
}

// runs records that the machine runs.
func (m *model) runs(t *rapid.T, id string) {
	must(t, m.c.SetMachineState(m.ctx, id, machine.Running))
	m.machines[id].state = machine.Running
}

func (m *model) beginIncoming(t *rapid.T) {
	id, run := pick(t, m.machines, "machine"), m.name("r")
	x := m.machines[id]
	err := m.c.BeginIncoming(m.ctx, id, run)
	if x.state != machine.Suspended && x.state != machine.Creating || len(x.memory) == 0 || !m.wake(x) {
		wantKind(t, err, errdefs.WrongState)
		return
	}
	must(t, err)
	x.run, x.ended, x.file = run, false, x.memory[len(x.memory)-1]
	m.runs(t, id)
}

func (m *model) endRun(t *rapid.T) {
	id := pick(t, m.machines, "machine")
	x := m.machines[id]
	state := rapid.SampledFrom([]machine.State{machine.Stopped, machine.Suspended, machine.Unknown}).Draw(t, "state")
	err := m.c.EndRun(m.ctx, id, x.run, state, "ended")
	head := m.ckpts[x.head]
	switch {
	case state == machine.Suspended && (head == nil || head.devices == ""),
		state == machine.Stopped && x.state == machine.Suspended && x.ended:
		wantKind(t, err, errdefs.WrongState)
		return
	case state == machine.Suspended:
		x.modelMemory = head.asMemory(x.head)
		x.file = ""
	case state == machine.Stopped:
		x.modelMemory = modelMemory{}
	}
	must(t, err)
	x.state, x.ended = state, true
}

func (m *model) publishFull(t *rapid.T) {
	id, op := pick(t, m.machines, "machine"), pick(t, m.ops, "operation")
	x, ck, mem, dev := m.machines[id], m.name("c"), m.name("l"), m.name("l")
	must(t, m.c.AddLayers(m.ctx, op, part(mem, id, "memory"), part(dev, id, "devices")))
	m.leased[lease{mem, op}], m.leased[lease{dev, op}] = true, true
	m.layers[mem], m.layers[dev] = catalog.LayerCreated, catalog.LayerCreated
	k := &modelCheckpoint{machine: id, parent: x.head, devices: dev, memory: []string{mem}}
	if rapid.Bool().Draw(t, "tracked") {
		k.memory = append(slices.Clone(x.memory), mem)
	}
	k.layers = slices.Clone(x.chain[:len(x.chain)-1])
	err := m.c.PublishCheckpoint(m.ctx, checkpoint.Checkpoint{
		ID: ck, Kind: checkpoint.Full, MachineID: id, Parent: k.parent, Spec: []byte(`{}`), ImageBuildID: "build1", Layers: k.layers,
		Full: &checkpoint.FullState{Memory: k.memory, Devices: dev},
	}, k.layers)
	if len(k.layers) == 0 || m.layers[x.chain[len(x.chain)-1]] == catalog.LayerSealed {
		if err == nil {
			t.Fatal("published without a top that is written")
		}
		return
	}
	must(t, err)
	m.wake(x)
	m.layers[mem], m.layers[dev] = catalog.LayerSealed, catalog.LayerSealed
	x.head, m.ckpts[ck] = ck, k
	x.memory, x.memoryHead = k.memory, ck
	m.order = append(m.order, ck)
}

func (m *model) fork(t *rapid.T) {
	ck, id, l := pick(t, m.ckpts, "checkpoint"), m.name("m"), m.name("l")
	k := m.ckpts[ck]
	must(t, m.c.CreateFork(m.ctx, catalog.Machine{ID: id, Name: id}, ck, layer(l, id)))
	x := &modelMachine{chain: append(slices.Clone(k.layers), l), head: ck, state: machine.Creating}
	if k.devices != "" {
		x.modelMemory = k.asMemory(ck)
	}
	m.machines[id], m.layers[l] = x, catalog.LayerCreated
}

// asMemory is what a machine has that continues from the checkpoint.
func (k *modelCheckpoint) asMemory(ck string) modelMemory {
	return modelMemory{memory: k.memory, memoryHead: ck, file: k.memory[len(k.memory)-1]}
}

func (m *model) addStandby(t *rapid.T) {
	ck, op, run, l := pick(t, m.ckpts, "checkpoint"), pick(t, m.ops, "operation"), m.name("r"), m.name("l")
	must(t, m.c.AddLayer(m.ctx, op, layer(l, "")))
	m.layers[l], m.leased[lease{l, op}] = catalog.LayerCreated, true
	err := m.c.AddStandby(m.ctx, catalog.Standby{RunID: run, CheckpointID: ck, LayerID: l})
	if m.ckpts[ck].devices == "" {
		wantKind(t, err, errdefs.KindMismatch)
		return
	}
	must(t, err)
	m.standbys[run] = modelStandby{ck, l}
}

func (m *model) takeStandby(t *rapid.T) {
	ck, op := pick(t, m.ckpts, "checkpoint"), pick(t, m.ops, "operation")
	s, found, err := m.c.TakeStandby(m.ctx, op, ck)
	must(t, err)
	if found != m.hasStandbys(func(k string) bool { return k == ck }) {
		t.Fatalf("standby of %s found: %v", ck, found)
	}
	if !found {
		return
	}
	if m.standbys[s.RunID] != (modelStandby{ck, s.LayerID}) {
		t.Fatalf("took %+v", s)
	}
	delete(m.standbys, s.RunID)
	m.leased[lease{s.LayerID, op}] = true
}

func (m *model) dropStandby(t *rapid.T) {
	run := pick(t, m.standbys, "standby")
	must(t, m.c.DropStandby(m.ctx, run))
	delete(m.standbys, run)
}

func (m *model) hasStandbys(of func(ck string) bool) bool {
	for _, s := range m.standbys {
		if of(s.checkpoint) {
			return true
		}
	}
	return false
}

func (m *model) publish(t *rapid.T) {
	id := pick(t, m.machines, "machine")
	x := m.machines[id]
	depth := rapid.IntRange(1, len(x.chain)).Draw(t, "depth")
	k := &modelCheckpoint{machine: id, parent: x.head, layers: slices.Clone(x.chain[:depth])}
	ck := m.name("c")
	must(t, m.c.PublishCheckpoint(m.ctx, checkpoint.Checkpoint{
		ID: ck, Kind: checkpoint.Disk, Consistency: checkpoint.Stopped, MachineID: id, Parent: k.parent,
		Spec: []byte(`{}`), ImageBuildID: "build1", Layers: k.layers,
	}, k.layers))
	for _, l := range k.layers {
		m.layers[l] = catalog.LayerSealed
	}
	x.head, m.ckpts[ck] = ck, k
	m.order = append(m.order, ck)
}

func (m *model) admit(t *rapid.T) {
	op := m.name("o")
	_, _, err := m.c.Admit(m.ctx, catalog.Operation{ID: op, RequestID: op, Verb: "restore"}, time.Minute)
	must(t, err)
	m.ops[op] = true
}

func (m *model) stage(t *rapid.T) {
	op, l := pick(t, m.ops, "operation"), m.name("l")
	must(t, m.c.AddLayer(m.ctx, op, layer(l, "any")))
	m.layers[l], m.leased[lease{l, op}] = catalog.LayerCreated, true
}

func (m *model) replace(t *rapid.T) {
	op, ck := pick(t, m.ops, "operation"), pick(t, m.ckpts, "checkpoint")
	k := m.ckpts[ck]
	x := m.machines[k.machine]
	r := catalog.ReplaceChain{MachineID: k.machine, OperationID: op, CheckpointID: ck, Top: layer(m.name("l"), k.machine)}
	if rapid.Bool().Draw(t, "answers") {
		r.RunID = m.name("r")
	}
	r.Full = rapid.Bool().Draw(t, "full")
	gen, err := m.c.ReplaceChain(m.ctx, r)
	if _, again := m.displaced[op]; again {
		wantKind(t, err, errdefs.WrongState)
		return
	}
	if r.Full && k.devices == "" {
		wantKind(t, err, errdefs.KindMismatch)
		return
	}
	must(t, err)
	m.displaced[op] = modelDisplaced{
		machine: k.machine, head: x.head, run: x.run, chain: x.chain, memory: x.modelMemory, suspended: x.state == machine.Suspended,
	}
	x.modelMemory = modelMemory{}
	if r.Full {
		x.modelMemory = k.asMemory(ck)
	}
	m.layers[r.Top.ID] = catalog.LayerCreated
	x.chain, x.head, x.gen = append(slices.Clone(k.layers), r.Top.ID), ck, x.gen+1
	if r.RunID != "" {
		m.wake(x)
		x.run, x.ended, x.state = r.RunID, false, machine.Running
	}
	if gen != x.gen {
		t.Fatalf("generation %d, want %d", gen, x.gen)
	}
}

func (m *model) undo(t *rapid.T) {
	op := pick(t, m.ops, "operation")
	gen, err := m.c.UndoReplace(m.ctx, op)
	d, ok := m.displaced[op]
	if !ok {
		wantKind(t, err, errdefs.NotFound)
		return
	}
	must(t, err)
	x := m.machines[d.machine]
	x.chain, x.head, x.run, x.modelMemory, x.gen = d.chain, d.head, d.run, d.memory, x.gen+1
	if d.suspended {
		x.state = machine.Suspended
	}
	delete(m.displaced, op)
	if gen != x.gen {
		t.Fatalf("generation %d, want %d", gen, x.gen)
	}
}

func (m *model) finish(t *rapid.T) {
	op := pick(t, m.ops, "operation")
	must(t, m.c.Finish(m.ctx, op, catalog.Outcome{State: catalog.OperationDone}))
	delete(m.ops, op)
	delete(m.displaced, op)
	maps.DeleteFunc(m.leased, func(l lease, _ bool) bool { return l.op == op })
}

func (m *model) forget(t *rapid.T) {
	ck := pick(t, m.ckpts, "checkpoint")
	err := m.c.ForgetCheckpoint(m.ctx, ck, "")
	needed := m.hasStandbys(func(k string) bool { return k == ck })
	for _, x := range m.machines {
		needed = needed || x.state == machine.Suspended && x.head == ck
	}
	for _, d := range m.displaced {
		needed = needed || d.suspended && d.head == ck
	}
	if needed {
		wantKind(t, err, errdefs.Referenced)
		return
	}
	must(t, err)
	m.dropCheckpoint(ck)
}

func (m *model) dropCheckpoint(ck string) {
	parent := m.ckpts[ck].parent
	delete(m.ckpts, ck)
	m.order = slices.DeleteFunc(m.order, func(s string) bool { return s == ck })
	for _, x := range m.machines {
		if x.head == ck {
			x.head = parent
		}
	}
	for _, k := range m.ckpts {
		if k.parent == ck {
			k.parent = parent
		}
	}
	for op, d := range m.displaced {
		if d.head == ck {
			d.head = parent
			m.displaced[op] = d
		}
	}
}

func (m *model) removeMachine(t *rapid.T) {
	id := pick(t, m.machines, "machine")
	its := func(ck string) bool { k := m.ckpts[ck]; return k != nil && k.machine == id }
	err := m.c.RemoveMachine(m.ctx, id, "")
	if m.hasStandbys(its) {
		wantKind(t, err, errdefs.Referenced)
		return
	}
	must(t, err)
	delete(m.machines, id)
	maps.DeleteFunc(m.displaced, func(_ string, d modelDisplaced) bool { return d.machine == id })
	for _, x := range m.machines { // forks of it
		if its(x.head) {
			x.head = ""
		}
	}
	for op, d := range m.displaced {
		if its(d.head) {
			d.head = ""
			m.displaced[op] = d
		}
	}
	for _, k := range m.ckpts {
		if its(k.parent) {
			k.parent = ""
		}
	}
	m.order = slices.DeleteFunc(m.order, its)
	maps.DeleteFunc(m.ckpts, func(_ string, k *modelCheckpoint) bool { return k.machine == id })
}

func (m *model) collect(t *rapid.T) {
	list, err := m.c.UnreferencedLayers(m.ctx)
	must(t, err)
	for _, l := range list {
		delete(m.layers, l.ID)
		must(t, m.c.DeleteLayers(m.ctx, l.ID))
	}
}

func (m *model) deleteLayer(t *rapid.T) {
	l := pick(t, m.layers, "layer")
	err := m.c.DeleteLayers(m.ctx, l)
	if m.reachable()[l] {
		wantKind(t, err, errdefs.Referenced)
		return
	}
	must(t, err)
	delete(m.layers, l)
}

// check compares the whole catalog with the model.
func (m *model) check(t *rapid.T) {
	reachable := m.reachable()
	unreferenced, err := m.c.UnreferencedLayers(m.ctx)
	must(t, err)
	for _, l := range unreferenced {
		if reachable[l.ID] {
			t.Fatalf("reachable layer %s is listed as unreferenced", l.ID)
		}
	}
	layers, err := m.c.ListLayers(m.ctx)
	must(t, err)
	got := map[string]catalog.LayerState{}
	for _, l := range layers {
		got[l.ID] = l.State
	}
	if diff := cmp.Diff(m.layers, got); diff != "" {
		t.Fatal(diff)
	}
	if len(unreferenced) != len(m.layers)-len(reachable) {
		t.Fatalf("%d of %d layers are unreferenced, %d reachable", len(unreferenced), len(m.layers), len(reachable))
	}
	machines, err := m.c.ListMachines(m.ctx)
	must(t, err)
	if len(machines) != len(m.machines) {
		t.Fatalf("%d machines, want %d", len(machines), len(m.machines))
	}
	for _, x := range machines {
		chain, err := m.c.Chain(m.ctx, x.ID)
		must(t, err)
		want := m.machines[x.ID]
		if got := layerIDs(chain); got != strings.Join(want.chain, " ") || x.Head != want.head || x.Generation != want.gen {
			t.Fatalf("machine %s: chain %s, head %s, generation %d; want %+v", x.ID, got, x.Head, x.Generation, want)
		}
		memory, err := m.c.MemoryChain(m.ctx, x.ID)
		must(t, err)
		if got := layerIDs(memory); got != strings.Join(want.memory, " ") || x.MemoryHead != want.memoryHead || x.MemoryFile != want.file || x.State != want.state {
			t.Fatalf("machine %s: %s, memory %s, its head %s, file %s; want %+v", x.ID, x.State, got, x.MemoryHead, x.MemoryFile, want)
		}
	}
	m.checkCheckpoints(t)
}

func (m *model) checkCheckpoints(t *rapid.T) {
	list, err := m.c.ListCheckpoints(m.ctx, "")
	must(t, err)
	slices.Reverse(list)
	if len(list) != len(m.order) {
		t.Fatalf("%d checkpoints, want %v", len(list), m.order)
	}
	for i, k := range list {
		want := m.ckpts[m.order[i]]
		var memory []string
		if k.Full != nil {
			memory = append(slices.Clone(k.Full.Memory), k.Full.Devices)
		}
		if want.devices != "" && !slices.Equal(memory, append(slices.Clone(want.memory), want.devices)) || want.devices == "" && k.Full != nil {
			t.Fatalf("checkpoint %s: memory and devices %v, want %+v", k.ID, memory, want)
		}
		if k.ID != m.order[i] || k.Parent != want.parent || k.MachineID != want.machine || cmp.Diff(want.layers, k.Layers) != "" {
			t.Fatalf("checkpoint %+v, want %s %+v", k, m.order[i], want)
		}
	}
}

func TestModel(t *testing.T) {
	dir, n := fastDir(t), 0
	rapid.Check(t, func(t *rapid.T) {
		n++
		path := filepath.Join(dir, fmt.Sprintf("catalog%d.db", n))
		ctx := context.Background()
		c, err := catalog.Open(ctx, catalog.Config{Path: path})
		must(t, err)
		defer func() { must(t, c.Close()) }()
		must(t, c.PutImage(ctx, catalog.Image{BuildID: "build1", Name: "debian"}))
		m := &model{
			c: c, ctx: ctx,
			layers: map[string]catalog.LayerState{}, machines: map[string]*modelMachine{}, ckpts: map[string]*modelCheckpoint{},
			ops: map[string]bool{}, displaced: map[string]modelDisplaced{}, leased: map[lease]bool{}, standbys: map[string]modelStandby{},
		}
		m.createMachine(t)
		t.Repeat(map[string]func(*rapid.T){
			"createMachine": m.createMachine, "addOverlay": m.addOverlay, "dropTop": m.dropTop, "beginRun": m.beginRun,
			"publish": m.publish, "admit": m.admit, "stage": m.stage, "replace": m.replace, "undo": m.undo, "finish": m.finish,
			"beginIncoming": m.beginIncoming, "endRun": m.endRun, "publishFull": m.publishFull, "fork": m.fork,
			"addStandby": m.addStandby, "takeStandby": m.takeStandby, "dropStandby": m.dropStandby,
			"forget": m.forget, "removeMachine": m.removeMachine, "collect": m.collect, "deleteLayer": m.deleteLayer, "": m.check,
		})
	})
}

// fastDir is in memory where that is possible: the model needs no disk.
func fastDir(t *testing.T) string {
	dir, err := os.MkdirTemp("/dev/shm", "holdpoint-catalog-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}
