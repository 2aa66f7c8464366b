package catalog_test

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/durable"
	"github.com/holdpoint/holdpoint/internal/durable/durabletest"
	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

var update = flag.Bool("update", false, "write golden files anew")

// closed is the file of a catalog that was filled and closed.
func closed(t *testing.T) *fixture {
	f := open(t)
	f.image("build1", "debian")
	m := f.machine("m1", "web")
	for i := range 40 { // some pages
		f.publish(m, id(i), "")
	}
	f.ok(f.Close())
	return f
}

// rawDB opens a file behind the catalog's back.
func rawDB(t *testing.T, path string) *sql.DB {
	db, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	return db
}

func sqlExec(t *testing.T, path string, stmts ...string) {
	t.Helper()
	db := rawDB(t, path)
	for _, s := range stmts {
		if _, err := db.Exec(s); err != nil {
			t.Fatal(err)
		}
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestDamagedFileIsRefusedAndLeftAlone(t *testing.T) {
	for name, damage := range map[string]func(t *testing.T, path string, b []byte) []byte{
		"empty":     func(*testing.T, string, []byte) []byte { return nil },
		"one byte":  func(*testing.T, string, []byte) []byte { return []byte("S") },
		"garbage":   func(*testing.T, string, []byte) []byte { return bytes.Repeat([]byte("garbage "), 4096) },
		"zeros":     func(_ *testing.T, _ string, b []byte) []byte { return make([]byte, len(b)) },
		"half":      func(_ *testing.T, _ string, b []byte) []byte { return b[:len(b)/8192*4096] },
		"torn page": func(_ *testing.T, _ string, b []byte) []byte { return b[:len(b)-1000] },
		"a page gone bad": func(_ *testing.T, _ string, b []byte) []byte {
			copy(b[len(b)/8192*4096:], bytes.Repeat([]byte{0xa5}, 4096))
			return b
		},
		"another program's": func(t *testing.T, path string, _ []byte) []byte {
			sqlExec(t, path+".other", `CREATE TABLE t (x)`)
			b, err := os.ReadFile(path + ".other")
			if err != nil {
				t.Fatal(err)
			}
			return b
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := closed(t)
			b, err := os.ReadFile(f.path())
			f.ok(err)
			b = damage(t, f.path(), b)
			f.ok(os.WriteFile(f.path(), b, 0o600))
			for range 2 { // a daemon that is started again finds the same
				_, err = catalog.Open(f.ctx, catalog.Config{Path: f.path()})
				f.fails(err, errdefs.Storage, f.path(), "damaged", "backup")
			}
			after, err := os.ReadFile(f.path())
			f.ok(err)
			if !bytes.Equal(b, after) {
				t.Error("the damaged file was changed")
			}
			f.ok(os.Remove(f.path()))
			f.reopenFresh()
		})
	}
}

// reopenFresh lets the fixture's clean-up close a good catalog.
func (f *fixture) reopenFresh() {
	f.t.Helper()
	c, err := catalog.Open(f.ctx, catalog.Config{Path: f.path(), Now: f.clock.Now})
	f.ok(err)
	f.Catalog = c
}

func TestMissingFileWithALogIsDamage(t *testing.T) {
	path := filepath.Join(t.TempDir(), "catalog.db")
	if err := os.WriteFile(path+"-wal", []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := catalog.Open(context.Background(), catalog.Config{Path: path})
	if !errdefs.Is(err, errdefs.Storage) || !strings.Contains(err.Error(), "-wal") {
		t.Errorf("error %v", err)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a catalog was made over the log: %v", err)
	}
}

func TestSymlinkIsRefused(t *testing.T) {
	f := closed(t)
	link := filepath.Join(f.dir, "link.db")
	f.ok(os.Symlink(f.path(), link))
	_, err := catalog.Open(f.ctx, catalog.Config{Path: link})
	f.fails(err, errdefs.Storage, "not a regular file")
	f.reopenFresh()
}

func TestNewerSchemaIsRefusedUnharmed(t *testing.T) {
	f := closed(t)
	sqlExec(t, f.path(), `PRAGMA user_version = 99`)
	before, err := os.ReadFile(f.path())
	f.ok(err)
	_, err = catalog.Open(f.ctx, catalog.Config{Path: f.path()})
	f.fails(err, errdefs.Incompatible, f.path(), "version 99", "up to 6")
	after, err := os.ReadFile(f.path())
	f.ok(err)
	if !bytes.Equal(before, after) {
		t.Error("the file was changed")
	}
	sqlExec(t, f.path(), `PRAGMA user_version = 6`)
	f.reopenFresh()
	list, err := f.ListCheckpoints(f.ctx, "m1")
	f.ok(err)
	if len(list) != 40 {
		t.Errorf("%d checkpoints left", len(list))
	}
}

// TestVersion1StaysOpenable: testdata/v1.sql is a catalog as the first release
// wrote it, and never changes.
func TestVersion1StaysOpenable(t *testing.T) {
	script, err := os.ReadFile("testdata/v1.sql")
	if err != nil {
		t.Fatal(err)
	}
	f := &fixture{t: t, ctx: context.Background(), dir: t.TempDir(), clock: &clock{}}
	sqlExec(t, f.path(), string(script))
	f.reopenFresh()
	defer func() { f.ok(f.Close()) }()
	m, err := f.ResolveMachine(f.ctx, "web")
	f.ok(err)
	list, err := f.ListCheckpoints(f.ctx, m.ID)
	f.ok(err)
	if len(list) != 1 || list[0].Name != "before-agent" || m.Head != list[0].ID || len(list[0].Layers) != 1 || m.Spec.OnBoot != "nginx" {
		t.Errorf("machine %+v, checkpoints %+v", m, list)
	}
	f.publish(m, "0000000000000c02", "after")
	if err := f.RecordEffect(f.ctx, catalog.Effect{MachineID: "none", Kind: catalog.CopiedOut}); err == nil {
		t.Error("after the migration, a row may refer to one that is not there")
	}

	// The schema it has now is the schema of a new catalog.
	fresh := open(t)
	if diff := cmp.Diff(schema(t, fresh.path()), schema(t, f.path())); diff != "" {
		t.Error(diff)
	}
}

// TestVersion3KeepsWhatWasVerified: it was recorded of full checkpoints only.
func TestVersion3KeepsWhatWasVerified(t *testing.T) {
	f := &fixture{t: t, ctx: context.Background(), dir: t.TempDir(), clock: &clock{}}
	for _, name := range []string{"testdata/v1.sql", "migrations/002_effects.sql", "migrations/003_full.sql"} {
		script, err := os.ReadFile(name)
		f.ok(err)
		sqlExec(t, f.path(), string(script))
	}
	full := func(id, verification, problem string) string {
		return `INSERT INTO checkpoints SELECT NULL, '` + id + `', machine_id, '` + id + `', 'full', 'crash', NULL, '', 0, spec, image_build_id,
			0, '', '', '', '', 0, 0 FROM checkpoints WHERE name = 'before-agent';
			INSERT INTO checkpoint_full SELECT '` + id + `', min(id), 0, '', '{}', '', 0, '` + verification + `', '` + problem + `' FROM layers`
	}
	sqlExec(t, f.path(), full("c1", "verified", ""), full("c2", "failed", "layer gone"), full("c3", "unverified", ""), `PRAGMA user_version = 3`)
	f.reopenFresh()
	defer func() { f.ok(f.Close()) }()
	for name, want := range map[string][2]string{
		"c1": {"verified", ""}, "c2": {"failed", "layer gone"}, "c3": {"unverified", ""}, "before-agent": {"unverified", ""},
	} {
		k, err := f.ResolveCheckpoint(f.ctx, "", name)
		f.ok(err)
		if got := [2]string{string(k.Verification), k.Problem}; got != want {
			t.Errorf("checkpoint %s: %q, want %q", name, got, want)
		}
	}
}

// TestMigrationRefusesWhatDoesNotHang: a row that refers to nothing is damage,
// and the file stays at its version.
func TestMigrationRefusesWhatDoesNotHang(t *testing.T) {
	script, err := os.ReadFile("testdata/v1.sql")
	if err != nil {
		t.Fatal(err)
	}
	f := &fixture{t: t, ctx: context.Background(), dir: t.TempDir(), clock: &clock{}}
	sqlExec(t, f.path(), string(script), `PRAGMA foreign_keys = OFF; DELETE FROM layers WHERE id = '000000000000a001-0'`)
	for range 2 {
		_, err = catalog.Open(f.ctx, catalog.Config{Path: f.path()})
		f.fails(err, errdefs.Storage, f.path(), "chains")
	}
}

func schema(t *testing.T, path string) []string {
	t.Helper()
	db := rawDB(t, path)
	defer db.Close()
	rows, err := db.Query(`SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY type, name`)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	var list []string
	for rows.Next() {
		var s string
		if err := rows.Scan(&s); err != nil {
			t.Fatal(err)
		}
		var lines []string
		for _, line := range strings.Split(s, "\n") { // comments may be reworded
			line, _, _ = strings.Cut(line, "--")
			lines = append(lines, strings.Join(strings.Fields(line), " "))
		}
		list = append(list, strings.Join(lines, " "))
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return list
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Error(diff)
	}
}

func TestTranscripts(t *testing.T) {
	f := open(t)
	rec := durabletest.Record(f.fs, f.dir)
	f.image("build1", "debian")
	m := f.machine("m1", "web")
	rec.Reset()
	story(f, m)
	golden(t, "story.golden", rec.String())
}

// story is a checkpoint and a restore, then a full checkpoint, a suspension, a
// resumption and a fork, as their operations write them.
func story(f *fixture, m catalog.Machine) {
	f.admit("op1", "checkpoint create", catalog.Claim{Kind: catalog.MachineResource, ID: m.ID, Exclusive: true})
	f.ok(f.UpdatePhase(f.ctx, "op1", "sealing", nil))
	f.publish(m, "c1", "one")
	f.ok(f.Finish(f.ctx, "op1", catalog.Outcome{State: catalog.OperationDone}))
	f.admit("op2", "restore", catalog.Claim{Kind: catalog.MachineResource, ID: m.ID, Exclusive: true})
	f.ok(f.AddLayer(f.ctx, "op2", layer("dest", m.ID)))
	_, err := f.ReplaceChain(f.ctx, catalog.ReplaceChain{MachineID: m.ID, OperationID: "op2", CheckpointID: "c1", Top: layer("dest", m.ID), RunID: "run2"})
	f.ok(err)
	f.ok(f.Finish(f.ctx, "op2", catalog.Outcome{State: catalog.OperationDone}))
	f.ok(f.ForgetCheckpoint(f.ctx, "c1", ""))
	f.full(m.ID, "c2", "two")
	f.admit("op3", "suspend", catalog.Claim{Kind: catalog.MachineResource, ID: m.ID, Exclusive: true})
	f.ok(f.EndRun(f.ctx, m.ID, "run2", machine.Suspended, "suspended"))
	f.ok(f.Finish(f.ctx, "op3", catalog.Outcome{State: catalog.OperationDone}))
	f.admit("op4", "resume", catalog.Claim{Kind: catalog.MachineResource, ID: m.ID, Exclusive: true})
	f.ok(f.BeginIncoming(f.ctx, m.ID, "run3"))
	f.ok(f.SetMachineState(f.ctx, m.ID, machine.Running))
	f.ok(f.Finish(f.ctx, "op4", catalog.Outcome{State: catalog.OperationDone}))
	f.admit("op5", "fork", catalog.Claim{Kind: catalog.CheckpointResource, ID: "c2"})
	f.ok(f.AddLayer(f.ctx, "op5", layer("fork", "m9")))
	f.ok(f.CreateFork(f.ctx, catalog.Machine{ID: "m9", Name: "try-1", Spec: m.Spec}, "c2", layer("fork", "m9")))
	f.ok(f.BeginIncoming(f.ctx, "m9", "run4"))
	f.ok(f.Finish(f.ctx, "op5", catalog.Outcome{State: catalog.OperationDone}))
}

func TestOpenAfterACrashAtAnyStep(t *testing.T) {
	for k := 0; ; k++ {
		f := &fixture{t: t, ctx: context.Background(), dir: t.TempDir(), clock: &clock{}}
		first := f.openCrashing(k)
		if first == nil { // k is past the last step
			if k < 5 {
				t.Errorf("only %d steps", k)
			}
			f.ok(f.Close())
			return
		}
		if !errors.Is(first, durabletest.ErrCrashed) {
			t.Fatalf("after %d steps: %v", k, first)
		}
		f.reopenFresh()
		f.image("build1", "debian")
		f.machine("m1", "web")
		f.ok(f.Close())
	}
}

func (f *fixture) openCrashing(k int) error {
	var fs durable.FS
	durabletest.CrashAfter(&fs, k)
	c, err := catalog.Open(f.ctx, catalog.Config{Path: f.path(), FS: &fs})
	if err == nil {
		f.Catalog = c
	}
	return err
}

// TestPublishAfterACrashAtAnyStep: whichever commit of a capture is the last,
// the catalog opens, the checkpoint is whole or absent, and the chain boots.
func TestPublishAfterACrashAtAnyStep(t *testing.T) {
	for k := 0; ; k++ {
		f := open(t)
		f.image("build1", "debian")
		m := f.machine("m1", "web")
		fs := f.fs
		crashed := durabletest.CrashAfter(fs, k)
		steps := []func() error{
			func() error { return f.AddOverlay(f.ctx, m.ID, layer("top", m.ID)) },
			func() error { return f.PublishCheckpoint(f.ctx, onBase(m), []string{"m1-0"}) },
			func() error { return f.BeginRun(f.ctx, m.ID, "run2") },
		}
		done := 0
		for _, step := range steps {
			if err := step(); err != nil {
				if !errors.Is(err, durabletest.ErrCrashed) {
					t.Fatal(err)
				}
				break
			}
			done++
		}
		fs.Before = nil
		f.reopen()
		list, err := f.ListCheckpoints(f.ctx, m.ID)
		f.ok(err)
		if want := min(done, 2) / 2; len(list) != want || done != k && crashed() {
			t.Fatalf("after %d of %d steps: checkpoints %+v", done, k, list)
		}
		if done > 0 {
			f.chainIs(m.ID, "m1-0 top")
		}
		f.ok(f.BeginRun(f.ctx, m.ID, "run3"))
		f.unreferencedAre("")
		if !crashed() {
			return
		}
	}
}

func onBase(m catalog.Machine) checkpoint.Checkpoint {
	return checkpoint.Checkpoint{
		ID: "c1", Kind: checkpoint.Disk, Consistency: checkpoint.Stopped, MachineID: m.ID,
		Spec: []byte(`{}`), ImageBuildID: "build1", Layers: []string{"m1-0"},
	}
}
