//go:build linux

package monitor

// Owner is the machine whose run is in dir, as its record says, or its config
// before there is one; empty when neither can be read.
func Owner(dir string) string {
	if rec, err := ReadRecord(dir); err == nil {
		return rec.MachineID
	}
	cfg, err := ReadConfig(dir)
	if err != nil {
		return ""
	}
	return cfg.Run.MachineID
}
