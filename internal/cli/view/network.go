package view

import (
	"io"
	"strconv"
	"time"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
)

// Refusal is one destination that was refused.
type Refusal struct {
	Protocol string `json:"protocol" doc:"tcp, udp, icmp or dns"`
	To       string `json:"to" doc:"ADDRESS:PORT, an address (icmp) or a name (dns)"`
	Reason   string `json:"reason"`
	Count    uint64 `json:"count"`
	Last     string `json:"last"`
}

// RefusalOf makes the view of a refusal.
func RefusalOf(r *holdpointv1.NetworkRefusal) Refusal {
	return Refusal{Protocol: r.GetProtocol(), To: r.GetTo(), Reason: r.GetReason(), Count: r.GetCount(), Last: timeOf(r.GetLast())}
}

// Refusals prints them as a table.
func Refusals(w io.Writer, n *holdpointv1.MachineNetwork) error {
	var rows [][]string
	for _, r := range n.GetRefusals() {
		rows = append(rows, []string{
			r.GetProtocol(), r.GetTo(), r.GetReason(), strconv.FormatUint(r.GetCount(), 10), Age(TimeOf(r.GetLast()), time.Now()),
		})
	}
	return Table(w, []string{"REFUSED", "TO", "WHY", "TIMES", "LAST"}, rows)
}
