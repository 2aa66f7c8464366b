//go:build !linux

package launch

// NotifySystemd does nothing: there is no systemd.
func NotifySystemd(func(error)) {}
