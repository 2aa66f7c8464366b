package recipe

import (
	"os/user"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

func TestMissingIsOneLine(t *testing.T) {
	need := func(name, packages string) Requirement {
		return Requirement{Name: name, packages: strings.Fields(packages)}
	}
	for _, c := range []struct {
		name string
		all  []Requirement
		want string
	}{
		{"nothing", []Requirement{{Name: "tar", OK: true}}, ""},
		{"one", []Requirement{need("fakeroot", "fakeroot")}, "fakeroot is missing; run: sudo apt-get install fakeroot"},
		{
			"two and ids",
			[]Requirement{need("mmdebstrap", "mmdebstrap"), need("newuidmap", "uidmap"), {Name: "ids", Fix: "x"}},
			"mmdebstrap, newuidmap are missing; run: sudo apt-get install mmdebstrap uidmap",
		},
		{"no package helps", []Requirement{{Name: "subordinate ids", Detail: "too few", Fix: "run: usermod"}}, "subordinate ids: too few; run: usermod"},
	} {
		err := Missing(c.all)
		if c.want == "" {
			if err != nil {
				t.Errorf("%s: %v", c.name, err)
			}
			continue
		}
		if !errdefs.Is(err, errdefs.Unsupported) || err.Error() != c.want {
			t.Errorf("%s: %v, want UNSUPPORTED %q", c.name, err, c.want)
		}
	}
}

// What is found is told of every program that a requirement names.
func TestToolsNamesEach(t *testing.T) {
	if r := tools("shells", "x", "sh", "cat"); !r.OK || !strings.Contains(r.Detail, "/sh, ") || !strings.HasSuffix(r.Detail, "/cat") {
		t.Errorf("%+v", r)
	}
	if r := tools("shells", "x", "sh", "no-such-program"); r.OK || r.Detail != "no-such-program is missing" {
		t.Errorf("%+v", r)
	}
}

func TestSubordinateIDs(t *testing.T) {
	me, err := user.Current()
	if err != nil {
		t.Fatal(err)
	}
	host := func(uids, gids string) fstest.MapFS {
		return fstest.MapFS{"etc/subuid": {Data: []byte(uids)}, "etc/subgid": {Data: []byte(gids)}}
	}
	mine := me.Username + ":231072:65536\n"
	for _, c := range []struct {
		name string
		etc  fstest.MapFS
		ok   bool
		fix  string
	}{
		{"enough", host("a:100000:65536\n"+mine, mine), true, ""},
		{"by number", host(me.Uid+":100000:65536\n", mine), true, ""},
		{"none", fstest.MapFS{}, false, "--add-subuids 100000-165535 --add-subgids 100000-165535"},
		{"others only", host("a:100000:65536\nb:165536:65536\n", "a:100000:65536\n"), false, "--add-subuids 231072-296607"},
		{"groups missing", host(mine, ""), false, "--add-subgids 296608-362143"},
		{"too small", host(me.Username+":100000:1000\n", mine), false, "usermod"},
		{"damaged", host("x\n"+me.Username+":z:65536\n\n", mine), false, "usermod"},
	} {
		r := subordinate(c.etc)
		if r.OK != c.ok || !strings.Contains(r.Fix, c.fix) || (c.ok && r.Fix != "") {
			t.Errorf("%s: %+v", c.name, r)
		}
	}
}

func TestKeyring(t *testing.T) {
	if r := keyring(fstest.MapFS{"usr/share/keyrings/debian-archive-keyring.pgp": {}}); !r.OK {
		t.Errorf("with a keyring: %+v", r)
	}
	r := keyring(fstest.MapFS{"usr/share/keyrings/ubuntu-archive-keyring.gpg": {}})
	if err := Missing([]Requirement{r}); err == nil || !strings.Contains(err.Error(), "apt-get install debian-archive-keyring") {
		t.Errorf("without: %v", err)
	}
}

func TestArchitecture(t *testing.T) {
	err := Missing([]Requirement{architecture("arm64")})
	if !errdefs.Is(err, errdefs.Unsupported) || !strings.Contains(err.Error(), "arm64") || !strings.Contains(err.Error(), "x86_64") {
		t.Errorf("%v", err)
	}
}

func TestToolsMissing(t *testing.T) {
	if r := tools("sh", "dash", "sh"); !r.OK {
		t.Errorf("sh: %+v", r)
	}
	if r := tools("x", "pkg", "sh", "no-such-tool-anywhere"); r.OK || r.Fix != "run: sudo apt-get install pkg" {
		t.Errorf("missing: %+v", r)
	}
}
