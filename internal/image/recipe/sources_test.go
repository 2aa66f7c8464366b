package recipe

import (
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
)

const debianSources = `Types: deb
# a comment within
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates bookworm-backports
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb deb-src
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main
Signed-By:
 /usr/share/keyrings/debian-archive-keyring.gpg
Check-Valid-Until: no

Types: deb
URIs: http://off.example/debian
Suites: bookworm
Components: main
Enabled: no

Types: deb
URIs: https://other.example/debian
Suites: bookworm
Components: main
Signed-By: /usr/share/keyrings/other-archive-keyring.gpg

Types: deb
URIs: https://inline.example/debian
Suites: bookworm
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 abc
`

func TestHostSources(t *testing.T) {
	key := "[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] "
	for _, c := range []struct {
		name, codename string
		etc            fstest.MapFS
		want           []string
	}{
		{
			"deb822", "bookworm",
			fstest.MapFS{"apt/sources.list.d/debian.sources": {Data: []byte(debianSources)}},
			[]string{
				"deb [check-valid-until=no signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://mirror.example/debian-security bookworm-security main",
				"deb " + key + "http://mirror.example/debian bookworm main contrib",
				"deb " + key + "http://mirror.example/debian bookworm-updates main contrib",
			},
		},
		{
			"one line each", "bookworm",
			fstest.MapFS{"apt/sources.list": {Data: []byte(`
# deb http://commented.example/debian bookworm main
deb cdrom:[Debian GNU/Linux 12]/ bookworm main
deb-src http://mirror.example/debian bookworm main
deb   http://mirror.example/debian   bookworm main non-free-firmware # here
deb [arch=amd64 trusted=yes] https://cache.example:3142/debian bookworm-updates main
deb http://broken.example
`)}, "apt/sources.list.d/docker.list": {Data: []byte("deb [signed-by=/etc/apt/keyrings/docker.asc] https://docker.example/linux/debian bookworm stable\n")}},
			[]string{
				"deb [trusted=yes] https://cache.example:3142/debian bookworm-updates main",
				"deb http://mirror.example/debian bookworm main non-free-firmware",
			},
		},
		{
			"a later release", "trixie",
			fstest.MapFS{"apt/sources.list.d/a.list": {Data: []byte("deb http://m.example/debian trixie main\ndeb http://m.example/debian-security trixie-security main\n")}},
			[]string{"deb http://m.example/debian bookworm main", "deb http://m.example/debian-security bookworm-security main"},
		},
		{
			"Ubuntu", "",
			fstest.MapFS{"apt/sources.list.d/ubuntu.sources": {Data: []byte("Types: deb\nURIs: http://u.example/ubuntu\nSuites: noble noble-updates\nComponents: main universe\nSigned-By: /usr/share/keyrings/ubuntu-archive-keyring.gpg\n")}},
			nil,
		},
		{"nothing", "", fstest.MapFS{}, nil},
		{"another file name", "bookworm", fstest.MapFS{"apt/sources.list.d/a.list.save": {Data: []byte("deb http://m.example/debian bookworm main\n")}}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := hostSources(c.etc, "bookworm", c.codename)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func FuzzSources(f *testing.F) {
	f.Add(debianSources)
	f.Add("deb [signed-by=/x] http://m/ s main\n")
	f.Add(" : \n\n\tx\n:")
	f.Fuzz(func(_ *testing.T, data string) {
		for _, s := range append(parseLines(data), parseStanzas(data)...) {
			_ = s.line()
		}
	})
}

func TestHostOptions(t *testing.T) {
	dump := `Acquire "";
Acquire::http "";
Acquire::http::Proxy "http://proxy.example:3142/";
Acquire::https::CaInfo "/etc/ca.pem";
Acquire::Check-Valid-Until "false";
Acquire::Languages "none";
APT::Install-Recommends "false";
DPkg::Post-Invoke:: "rm -rf /";
Acquire::http::Proxy "";
`
	want := []string{`Acquire::http::Proxy "http://proxy.example:3142/";`, `Acquire::https::CaInfo "/etc/ca.pem";`, `Acquire::Check-Valid-Until "false";`}
	if diff := cmp.Diff(want, hostOptions(dump)); diff != "" {
		t.Error(diff)
	}
}

func TestHostCodename(t *testing.T) {
	for release, want := range map[string]string{
		"ID=debian\nVERSION_CODENAME=trixie\n":              "trixie",
		"VERSION_CODENAME=noble\nID=ubuntu\nID_LIKE=debian": "",
		"ID=\"debian\"\n": "",
		"":                "",
	} {
		if got := hostCodename(release); got != want {
			t.Errorf("%q: %q, want %q", release, got, want)
		}
	}
}
