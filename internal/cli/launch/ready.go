package launch

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/holdpoint/holdpoint/client"
	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// readyVar names the environment variable with the descriptor that a daemon
// announces itself on.
const readyVar = "HOLDPOINT_READY_FD"

// readyWord is what a daemon says once it listens. A failure is said as
// "KIND message" instead.
const readyWord = "READY"

// Announcer tells the process that waits for a daemon's start how it went.
type Announcer struct{ pipe *os.File }

// NewAnnouncer takes the descriptor over that spawn left in the environment;
// without one its methods do nothing.
func NewAnnouncer() *Announcer {
	fd, err := strconv.Atoi(os.Getenv(readyVar))
	if err != nil || fd < 3 {
		return &Announcer{}
	}
	// Not for the daemon's own children.
	_ = os.Unsetenv(readyVar) // fails for bad names only
	closeOnExec(fd)
	return &Announcer{pipe: os.NewFile(uintptr(fd), "ready")}
}

// Ready says that the daemon listens.
func (a *Announcer) Ready() { a.say(readyWord) }

// Failed says why it does not; after Ready it says nothing.
func (a *Announcer) Failed(err error) {
	a.say(fmt.Sprintf("%s %s", client.KindOf(err), strings.ReplaceAll(err.Error(), "\n", " ")))
}

// Waited reports whether somebody waits for the announcement.
func (a *Announcer) Waited() bool { return a.pipe != nil }

func (a *Announcer) say(line string) {
	if a.pipe == nil {
		return
	}
	// Who waited may be gone by now; that is no trouble of the daemon's.
	_, _ = fmt.Fprintln(a.pipe, line)
	_ = a.pipe.Close()
	a.pipe = nil
}

// readAnnouncement reads what a daemon's Announcer says. log is where to look
// when it says nothing.
func readAnnouncement(r io.Reader, log string) error {
	line, err := bufio.NewReader(io.LimitReader(r, 64<<10)).ReadString('\n')
	line = strings.TrimSpace(line)
	switch {
	case line == readyWord:
		return nil
	case line == "" && os.IsTimeout(err):
		return errdefs.New(errdefs.Deadline, "start the daemon: it does not listen in time; look into %s", log)
	case line == "":
		return errdefs.New(errdefs.Internal, "start the daemon: it ended at once; look into %s", log)
	}
	kind, message, _ := strings.Cut(line, " ")
	return errdefs.New(errdefs.Kind(kind), "start the daemon: %s", message)
}
