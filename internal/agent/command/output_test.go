//go:build linux

package command

import "testing"

func TestOutputBeforeTheFirstReaderIsKept(t *testing.T) {
	o := newOutput(false)
	o.write(false, []byte("early"))
	r := o.attach(true)
	p, _, err := r.Next(t.Context())
	if string(p) != "early" || err != nil || o.lost() != 0 {
		t.Errorf("read %q, %v, lost %d", p, err, o.lost())
	}
	r.Close()
	o.write(false, []byte("nobody reads it"))
	if o.lost() == 0 || o.size() != 0 {
		t.Errorf("lost %d, kept %d", o.lost(), o.size())
	}
}
