package restore_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/holdpoint/holdpoint/internal/checkpoint"
	"github.com/holdpoint/holdpoint/internal/restore"
)

func TestCompareRoutes(t *testing.T) {
	then := []checkpoint.Route{
		{Host: "app", Port: 8080, Listening: true},
		{Host: "gone", Port: 81},
		{Host: "kept", Port: 8080, Listening: true},
		{Host: "taken", Port: 82, Listening: true},
	}
	now := []checkpoint.Route{{Host: "app", Port: 9090}, {Host: "kept", Port: 8080}, {Host: "new", Port: 83}}
	owners := map[string]string{"taken": "other"}
	keep := []restore.RouteChange{
		{Host: "app", Change: restore.Changed, Then: 8080, Now: 9090, Listening: restore.Unknown},
		{Host: "gone", Change: restore.Removed, Then: 81, Listening: restore.No},
		{Host: "kept", Change: restore.Same, Then: 8080, Now: 8080, Listening: restore.Yes},
		{Host: "new", Change: restore.Added, Now: 83, Listening: restore.Unknown},
		{Host: "taken", Change: restore.Foreign, Then: 82, Listening: restore.No, Owner: "other"},
	}
	if diff := cmp.Diff(keep, restore.CompareRoutes(then, now, owners, false)); diff != "" {
		t.Errorf("keeping routes (-want +got):\n%s", diff)
	}
	back := map[string]string{"app": restore.Yes, "gone": restore.Unknown, "kept": restore.Yes, "new": restore.No, "taken": restore.No}
	for _, c := range restore.CompareRoutes(then, now, owners, true) {
		if c.Listening != back[c.Host] {
			t.Errorf("putting routes back: listening on %s is %s, want %s", c.Host, c.Listening, back[c.Host])
		}
	}
}

func TestStartedByBoot(t *testing.T) {
	tests := []struct {
		onBoot, process string
		want            bool
	}{
		{"nginx", "nginx", true},
		{"/usr/sbin/nginx -g 'daemon on;'", "nginx", true},
		{"cd /srv && python3 -m http.server", "python3", true},
		{"(sleep 1; redis-server)&", "redis-server", true},
		{"nginx-debug", "nginx", false},
		{"", "nginx", false},
		{"nginx", "", false},
	}
	for _, test := range tests {
		if got := restore.StartedByBoot(test.onBoot, test.process); got != test.want {
			t.Errorf("StartedByBoot(%q, %q) = %v", test.onBoot, test.process, got)
		}
	}
}
