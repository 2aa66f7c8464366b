package view

import (
	"fmt"
	"io"
	"strings"
	"time"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
)

// RestoreTitle is what a restore of the kind is called where people read it.
func RestoreTitle(kind string) string {
	if kind == "full" {
		return "Restore machine"
	}
	return "Restore disk"
}

// Asked is what a restore was asked for.
type Asked struct {
	// Kind is disk or full, Routes "", keep or restore.
	Kind, Routes string
	// Safety says that the present state is kept.
	Safety bool
	// Starts is the state the machine will be started from, stopped or
	// suspended; "" when it runs.
	Starts string
}

// PrintPlan tells people what a restore would do, with a warning for each URL
// that would be broken.
func PrintPlan(w io.Writer, plan *holdpointv1.RestorePlan, o Asked) error {
	p := plan.GetCheckpoint()
	var b strings.Builder
	id := ""
	if p.GetName() != "" {
		id = Short(p.GetId()) + ", "
	}
	fmt.Fprintf(&b, "%s of %s to %s (%s%s, %s)\n", RestoreTitle(o.Kind), plan.GetMachine(),
		Line(NameOf(p)), id, KindOf(p), Age(TimeOf(p.GetCreatedAt()), time.Now()))
	if o.Safety {
		b.WriteString("The present state is kept as a checkpoint first.\n")
	} else {
		b.WriteString("The present state is lost (--no-safety).\n")
	}
	if o.Kind == "disk" && p.GetKind() == "full" {
		b.WriteString("The disk of a full checkpoint is as after a power cut: what programs had not yet synced is missing.\n")
	}
	if o.Starts != "" {
		fmt.Fprintf(&b, "The machine is %s; it will be started.\n", Line(o.Starts))
	}
	outside := "the disk"
	if o.Kind == "full" {
		outside = "the machine"
		b.WriteString("What ran at the checkpoint runs on; its connections to the outside are closed.\n")
	}
	if n := len(plan.GetNewer()); n > 0 {
		fmt.Fprintf(&b, "%s made since then: kept.\n", Count(n, "checkpoint"))
	}
	if plan.GetCommandsUnknown() {
		b.WriteString("What runs in it is not known: the guest does not answer.\n")
	}
	if commands := plan.GetCommands(); len(commands) > 0 {
		b.WriteString("These running commands end:\n")
		for _, c := range commands {
			fmt.Fprintf(&b, "  %s\n", Line(c))
		}
	}
	if effects := plan.GetEffects(); len(effects) > 0 {
		fmt.Fprintf(&b, "Outside %s since then, and not undone:\n", outside)
		for _, e := range effects {
			fmt.Fprintf(&b, "  %s: %s (%s)\n", e.GetKind(), Line(e.GetWhat()), Age(TimeOf(e.GetAt()), time.Now()))
		}
	}
	if len(plan.GetRoutes()) > 0 {
		b.WriteString("\n")
		rows := make([][]string, 0, len(plan.GetRoutes()))
		for _, r := range plan.GetRoutes() {
			rows = append(rows, []string{r.GetHost(), change(r), port(r.GetThen()), port(r.GetNow()), r.GetListening()})
		}
		if err := Table(&b, []string{"ROUTE", "CHANGE", "THEN", "NOW", "LISTENING AFTER"}, rows); err != nil {
			return err
		}
	}
	for _, warning := range RestoreWarnings(plan, o) {
		fmt.Fprintf(&b, "Warning: %s\n", warning)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func change(r *holdpointv1.RouteChange) string {
	if r.GetChange() == "foreign" && r.GetOwner() != "" {
		return "foreign (of " + r.GetOwner() + ")"
	}
	return r.GetChange()
}

func port(p uint32) string {
	if p == 0 {
		return "-"
	}
	return fmt.Sprint(p)
}

// RouteDiffers reports whether restoring the route would make a difference.
func RouteDiffers(r *holdpointv1.RouteChange) bool {
	switch r.GetChange() {
	case "changed", "removed", "added":
		return true
	}
	return false
}

// RestoreWarnings says in plain words that the checkpoint may be broken, and
// which URLs will not do what they do now, or did then.
func RestoreWarnings(plan *holdpointv1.RestorePlan, o Asked) []string {
	var warnings []string
	if text := FailedWarning(plan.GetCheckpoint()); text != "" {
		warnings = append(warnings, text)
	}
	on := "on the restored disk"
	if o.Kind == "full" {
		on = "in the restored machine"
	}
	for _, r := range plan.GetRoutes() {
		if text := routeWarning(r, o.Routes == "restore", on); text != "" {
			warnings = append(warnings, Line(text))
		}
	}
	return warnings
}

func routeWarning(r *holdpointv1.RouteChange, back bool, on string) string {
	host, now, then := r.GetHost(), r.GetNow(), r.GetThen()
	listens := r.GetListening()
	switch change := r.GetChange(); {
	case change == "foreign":
		return fmt.Sprintf("%s now belongs to machine %s and stays there", host, Dash(r.GetOwner()))
	case back && change == "added":
		return fmt.Sprintf("%s was published since then and will be withdrawn", host)
	case back:
		return ""
	case change == "changed" && listens != "yes":
		return fmt.Sprintf("the URL of %s will be broken: the route leads to port %d, and %s the service is back on port %d; --routes=restore puts the route back too, --routes=keep leaves it",
			host, now, on, then)
	case change == "removed":
		return fmt.Sprintf("%s was published then (port %d) and stays withdrawn; --routes=restore publishes it again", host, then)
	case listens == "no":
		return fmt.Sprintf("the URL of %s will be broken: nothing will listen on port %d", host, now)
	case change == "added" && listens != "yes":
		return fmt.Sprintf("%s was published since then; it is not known whether something will listen on port %d", host, now)
	}
	return ""
}
