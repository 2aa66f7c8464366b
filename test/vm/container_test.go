package vm_test

import (
	"archive/tar"
	"os"
	"path/filepath"
	"testing"

	"github.com/holdpoint/holdpoint/internal/oci/ocitest"
)

// containers writes two images as docker save does: lone.tar has one static
// program and nothing else, app.tar a shell with a few tools of the prepared
// image, in two layers, and a user of its own.
func containers(t testing.TB, dir string) error {
	program, err := os.ReadFile(os.Getenv(binaryVariable))
	if err != nil {
		return err
	}
	lone := ocitest.New(t, ocitest.Object{"Entrypoint": []string{"./holdpoint"}, "Cmd": []string{"version"}}, ocitest.Gzip,
		ocitest.Layer(t, executable("holdpoint", string(program)))).WriteTar(t)
	if err := os.Rename(lone, filepath.Join(dir, "lone.tar")); err != nil {
		return err
	}
	entries := []ocitest.Entry{
		ocitest.File("etc/passwd", "root:x:0:0::/root:/bin/sh\napp:x:1234:5678::/home/app:/bin/sh\n"), ocitest.File("etc/group", "more:x:77:app\n"),
		ocitest.File("etc/old", "old"), ocitest.File("etc/hostname", "builder\n"), executable("usr/local/bin/serve", "#!/bin/sh\necho wrong\n"),
	}
	for name, from := range map[string]string{
		"bin/sh": "bin/dash", "bin/cat": "bin/cat", "bin/id": "bin/id", "bin/sleep": "bin/sleep", "bin/hostname": "bin/hostname",
		"lib64/ld-linux-x86-64.so.2":           "lib/x86_64-linux-gnu/ld-linux-x86-64.so.2",
		"lib/x86_64-linux-gnu/libc.so.6":       "lib/x86_64-linux-gnu/libc.so.6",
		"lib/x86_64-linux-gnu/libselinux.so.1": "lib/x86_64-linux-gnu/libselinux.so.1",
		"lib/x86_64-linux-gnu/libpcre2-8.so.0": "lib/x86_64-linux-gnu/libpcre2-8.so.0.11.2",
	} {
		content, err := ofRoot(t, "/usr/"+from)
		if err != nil {
			return err
		}
		entries = append(entries, executable(name, content))
	}
	folder := ocitest.Dir("var/lib/app")
	folder.Uid, folder.Gid = 1234, 5678
	said := ocitest.Object{
		"User": "app", "Env": []string{"PATH=/usr/local/bin:/bin", "GREETING=hello there"}, "WorkingDir": "/var/lib/app",
		"Entrypoint": []string{"serve"}, "Cmd": []string{"two words"},
	}
	app := ocitest.Legacy(t, "app:1", said, ocitest.Layer(t, entries...), ocitest.Layer(t, folder, ocitest.File("etc/.wh.old", ""),
		executable("usr/local/bin/serve", "#!/bin/sh\necho $GREETING, $1 >served\nexec sleep 1000\n"))).WriteTar(t)
	return os.Rename(app, filepath.Join(dir, "app.tar"))
}

func executable(name, content string) ocitest.Entry {
	return ocitest.Entry{Header: tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o755}, Content: content}
}

// ofRoot is the content of a file of the prepared image.
func ofRoot(t testing.TB, name string) (string, error) {
	out := filepath.Join(t.TempDir(), "file")
	root := filepath.Join(os.Getenv(imageVariable), "root.img")
	if err := tool("debugfs", "-R", "dump "+name+" "+out, root); err != nil {
		return "", err
	}
	content, err := os.ReadFile(out)
	return string(content), err
}
