//go:build linux

// Package machines serves MachineService: what is done with whole machines.
// How a run is begun and ended, a checkpoint taken and a restore made is said
// elsewhere; what goes on inside machines, too.
package machines

import (
	"context"

	"github.com/holdpoint/holdpoint/internal/catalog"
	"github.com/holdpoint/holdpoint/internal/daemon/admission"
	"github.com/holdpoint/holdpoint/internal/daemon/firstboot"
	"github.com/holdpoint/holdpoint/internal/daemon/standby"
	"github.com/holdpoint/holdpoint/internal/restore"
)

// Config is what a Service works with.
type Config struct {
	*admission.Desk
	Restorer *restore.Restorer
	Boots    *firstboot.Boots
	Pools    *standby.Pools
	// Rest is that of revive.Watch.
	Rest func(ctx context.Context, m catalog.Machine) (bool, error)
}

// Service serves MachineService.
type Service struct {
	Config
}

// New returns a Service.
func New(cfg Config) *Service { return &Service{Config: cfg} }

// Detail is what the journal keeps of verbs on one machine that need no more
// to be settled.
type Detail struct {
	MachineID string `json:"machine_id"`
}
