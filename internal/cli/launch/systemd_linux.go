package launch

import "github.com/coreos/go-systemd/v22/daemon"

// NotifySystemd tells the service manager that the daemon listens, if one
// started it; complain gets a failure to.
func NotifySystemd(complain func(error)) {
	if _, err := daemon.SdNotify(false, daemon.SdNotifyReady); err != nil {
		complain(err)
	}
}
