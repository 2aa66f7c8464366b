package machine_test

import (
	"strings"
	"testing"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/machine"
)

// A refusal says that what was wanted is so already, or names a verb that the
// machine's state allows and that leads on.
func TestAllowSaysWhatToDo(t *testing.T) {
	running, paused, stopped, suspended := machine.Running, machine.Paused, machine.Stopped, machine.Suspended
	verbs := map[string][]machine.State{
		"start":   {stopped},
		"stop":    {running},
		"pause":   {running},
		"resume":  {paused, suspended},
		"suspend": {running, paused},
		"exec":    {running},
	}
	const (
		start, resume = "; run holdpoint start web", "; run holdpoint resume web"
		inspect       = "; end it with holdpoint stop --force web, or look into holdpoint inspect web"
	)
	want := map[string]map[machine.State]string{
		"start":   {running: " already", paused: resume, suspended: resume},
		"stop":    {stopped: " already", paused: resume + " first, or end it as a power cut would with holdpoint stop --force web", suspended: resume + " first, or remove it with holdpoint rm --force web"},
		"pause":   {paused: " already", stopped: start, suspended: resume},
		"resume":  {running: " already", stopped: start},
		"suspend": {suspended: " already", stopped: start},
		"exec":    {stopped: start, paused: resume, suspended: resume},
	}
	for verb, allowed := range verbs {
		for _, state := range []machine.State{running, paused, stopped, suspended, machine.Unknown, machine.Creating} {
			err := machine.Allow(verb, "web", state, allowed...)
			says, refused := want[verb][state]
			switch state {
			case machine.Unknown:
				says, refused = inspect, true
			case machine.Creating:
				says, refused = "; wait for it: holdpoint operation ls", true
			}
			if !refused {
				if err != nil {
					t.Errorf("%s of a machine that is %s: %v", verb, state, err)
				}
				continue
			}
			if text := verb + ": machine web is " + string(state) + says; !errdefs.Is(err, errdefs.WrongState) || err.Error() != text {
				t.Errorf("%s of a machine that is %s: %v, want %q", verb, state, err, text)
			}
			if strings.HasSuffix(says, "holdpoint "+verb+" web") {
				t.Errorf("%s of a machine that is %s is told to be tried: %v", verb, state, err)
			}
		}
	}
}

// A raw disk is known by its name, and has nothing that is kept of a running
// machine; the default format leaves no trace in what is recorded.
func TestDiskFormat(t *testing.T) {
	plain, raw := machine.Spec{DiskFormat: machine.QcowDisk}, machine.Spec{DiskFormat: machine.RawDisk}
	for _, s := range []*machine.Spec{&plain, &raw} {
		if err := s.Complete(); err != nil {
			t.Fatal(err)
		}
	}
	if plain.DiskFormat != "" || plain.Raw() || plain.CheckLive("suspend", "web") != nil {
		t.Errorf("plain: %+v, %v", plain, plain.CheckLive("suspend", "web"))
	}
	err := raw.CheckLive("suspend", "web")
	if !raw.Raw() || !errdefs.Is(err, errdefs.Unsupported) || !strings.HasSuffix(err.Error(), "use: holdpoint checkpoint create web --kind disk --mode stopped") {
		t.Errorf("raw: %+v, %v", raw, err)
	}
	for kind, s := range map[errdefs.Kind]machine.Spec{
		errdefs.Invalid:     {DiskFormat: "vmdk"},
		errdefs.Unsupported: {DiskFormat: machine.RawDisk, SuspendAfterMillis: 60_000},
	} {
		if err := s.Complete(); !errdefs.Is(err, kind) {
			t.Errorf("%+v: %v, want %s", s, err, kind)
		}
	}
}
