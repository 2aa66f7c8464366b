package hold_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/holdpoint/holdpoint/internal/daemon/hold"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

func TestClosedGateHoldsEffects(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gates := hold.New()
		running, err := gates.Admit(t.Context(), hold.Request{Machine: "m", Door: hold.Exec, What: "exec sleep"})
		if err != nil {
			t.Fatal(err)
		}
		active, open, err := gates.Close("m", "checkpoint create runs")
		if err != nil || !slices.Equal(active, []hold.Effect{{Door: hold.Exec, What: "exec sleep"}}) {
			t.Fatalf("Close: %v, %v", active, err)
		}
		if _, _, err := gates.Close("m", "restore"); !errdefs.Is(err, errdefs.MachineBusy) {
			t.Errorf("second Close: %v, want MACHINE_BUSY", err)
		}
		var why string
		admitted := make(chan error, 2)
		go func() {
			_, err := gates.Admit(t.Context(), hold.Request{Machine: "m", Door: hold.Exec, What: "exec true", Waiting: func(w string) { why = w }})
			admitted <- err
		}()
		go func() { admitted <- running.Pass(t.Context()) }()
		synctest.Wait()
		if len(admitted) != 0 || why != "checkpoint create runs" {
			t.Fatalf("admitted %d through a closed gate, told %q", len(admitted), why)
		}
		if _, err := gates.Admit(t.Context(), hold.Request{Machine: "other", Door: hold.Exec, What: "exec true"}); err != nil {
			t.Errorf("another machine is held too: %v", err)
		}
		open()
		open()
		synctest.Wait()
		if err := errors.Join(<-admitted, <-admitted); err != nil {
			t.Errorf("after opening: %v", err)
		}
	})
}

func TestHeldEffectCanBeCancelled(t *testing.T) {
	gates := hold.New()
	_, open, err := gates.Close("m", "checkpoint create runs")
	if err != nil {
		t.Fatal(err)
	}
	defer open()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := gates.Admit(ctx, hold.Request{Machine: "m", Door: hold.Exec, What: "exec true"}); !errors.Is(err, context.Canceled) {
		t.Errorf("Admit with a cancelled context: %v", err)
	}
}

func TestRestoreExpelsOldGenerations(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gates := hold.New()
		gates.SetGeneration("m", 1)
		old, err := gates.Admit(t.Context(), hold.Request{Machine: "m", Generation: 1, Door: hold.Exec, What: "shell"})
		if err != nil {
			t.Fatal(err)
		}
		_, open, err := gates.Close("m", "restore runs")
		if err != nil {
			t.Fatal(err)
		}
		waiting := make(chan error, 1)
		go func() {
			_, err := gates.Admit(t.Context(), hold.Request{Machine: "m", Door: hold.Exec, What: "exec true"})
			waiting <- err
		}()
		synctest.Wait()
		gates.SetGeneration("m", 2)
		open()
		select {
		case <-old.Expelled():
		default:
			t.Error("an effect of generation 1 was not expelled")
		}
		if err := <-waiting; !errdefs.Is(err, errdefs.Conflict) {
			t.Errorf("an effect that waited through a restore: %v, want CONFLICT", err)
		}
		if err := old.Pass(t.Context()); !errdefs.Is(err, errdefs.Conflict) {
			t.Errorf("input of an old shell: %v, want CONFLICT", err)
		}
		if _, err := gates.Admit(t.Context(), hold.Request{Machine: "m", Door: hold.Exec, What: "exec true"}); err != nil {
			t.Errorf("a new effect after the restore: %v", err)
		}
	})
}

// An effect that has ended while more of it waited stays ended.
func TestEndedEffectStaysEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gates := hold.New()
		ended, err := gates.Admit(t.Context(), hold.Request{Machine: "m", Door: hold.Console, What: "console"})
		if err != nil {
			t.Fatal(err)
		}
		_, open, err := gates.Close("m", "checkpoint create runs")
		if err != nil {
			t.Fatal(err)
		}
		passed := make(chan error, 1)
		go func() { passed <- ended.Pass(t.Context()) }()
		synctest.Wait()
		ended.Done()
		open()
		if err := <-passed; err != nil {
			t.Error(err)
		}
		if active, _ := gates.Activity("m"); active != 0 {
			t.Errorf("%d effects are at work", active)
		}
	})
}
