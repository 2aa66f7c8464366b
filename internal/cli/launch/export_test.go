package launch

import "io"

// DigestOf is what tells executables apart.
func DigestOf(f io.ReadSeeker) (string, error) { return digestOf(f) }

// ReadAnnouncement reads what an Announcer said.
func ReadAnnouncement(r io.Reader, log string) error { return readAnnouncement(r, log) }
