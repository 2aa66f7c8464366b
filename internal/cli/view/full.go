package view

import (
	"encoding/json"
	"fmt"
	"strings"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
)

// Verification says in one word what is known of a checkpoint: FAILED is loud,
// "" is for a disk checkpoint that nobody asked to verify.
func Verification(c *holdpointv1.Checkpoint) string {
	if Failed(c) {
		return "FAILED"
	}
	return c.GetVerification()
}

// Failed reports whether the checkpoint was found not to be restorable.
func Failed(c *holdpointv1.Checkpoint) bool { return c.GetVerification() == "failed" }

// FailedWarning tells people of a checkpoint that failed verification; "" of
// any other.
func FailedWarning(c *holdpointv1.Checkpoint) string {
	if !Failed(c) {
		return ""
	}
	text := fmt.Sprintf("checkpoint %s of %s FAILED verification and may not be restorable", NameOf(c), c.GetMachine())
	if c.GetProblem() != "" {
		text += ": " + c.GetProblem()
	}
	return Line(text + "; make another one")
}

// Standbys says how many are ready of those wanted; "" where none is wanted.
func Standbys(c *holdpointv1.Checkpoint) string {
	if c.GetPool() == 0 && c.GetStandbys() == 0 {
		return ""
	}
	return fmt.Sprintf("%d of %d ready", c.GetStandbys(), c.GetPool())
}

// FullFields are the fields that only a full checkpoint has, for Fields.
func FullFields(c *holdpointv1.Checkpoint) [][2]string {
	return [][2]string{
		{"verification", strings.TrimSuffix(Verification(c)+": "+c.GetProblem(), ": ")},
		{"memory layers", strings.Join(c.GetMemoryLayers(), " ")},
		{"memory tracked", c.GetTracking()},
		{"standbys", Standbys(c)},
		{"rests on", platform(c.GetPlatform())},
	}
}

// platform says what a full checkpoint rests on in a few words, with the CPU's
// features counted only; the JSON output has all of it.
func platform(text string) string {
	var p struct {
		Hypervisor  string `json:"hypervisor"`
		MachineType string `json:"machine_type"`
		CPU         string `json:"cpu"`
		Accelerator string `json:"accelerator"`
	}
	if json.Unmarshal([]byte(text), &p) != nil {
		return ""
	}
	model, features, some := strings.Cut(p.CPU, ",")
	if some {
		model += " with " + Count(strings.Count(features, ",")+1, "feature")
	}
	var words []string
	for _, word := range []string{p.Accelerator, p.MachineType, model} {
		if word != "" {
			words = append(words, word)
		}
	}
	if p.Hypervisor != "" {
		words = append(words, "QEMU "+p.Hypervisor)
	}
	return strings.Join(words, ", ")
}

// FullDowntime says how long a full checkpoint stopped the machine, and what
// for.
func FullDowntime(r *holdpointv1.CheckpointResult) string {
	text := Millis(r.GetDowntimeMs())
	if r.GetWindowStopMs()+r.GetWindowDevicesMs()+r.GetWindowSwitchMs()+r.GetWindowResumeMs() == 0 {
		return text
	}
	return fmt.Sprintf("%s (stop %s, devices %s, disk switch %s, resume %s; beside them %s of memory, %s)", text,
		Millis(r.GetWindowStopMs()), Millis(r.GetWindowDevicesMs()), Millis(r.GetWindowSwitchMs()), Millis(r.GetWindowResumeMs()),
		Size(r.GetWindowBytes()), Millis(r.GetWindowPagesMs()))
}

// Precopied says what of the memory was copied while the machine ran on; "" for
// nothing.
func Precopied(r *holdpointv1.CheckpointResult) string {
	if r.GetPrecopyRounds() == 0 {
		return ""
	}
	return fmt.Sprintf("%s of memory in %s, %s", Size(r.GetPrecopiedBytes()),
		Count(int(r.GetPrecopyRounds()), "round"), Millis(r.GetPrecopyMs()))
}
