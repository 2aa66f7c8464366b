package app

import (
	"context"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/client"
)

// completionLimit is how long a shell waits for candidates; people notice
// more.
const completionLimit = 500 * time.Millisecond

// Candidates lists what could be typed.
type Candidates func(ctx context.Context) []string

// First completes the first argument only.
func First(list Candidates) func(context.Context, []string) []string {
	return func(ctx context.Context, args []string) []string {
		if len(args) > 0 {
			return nil
		}
		return list(ctx)
	}
}

// Words are fixed candidates.
func Words(list ...string) Candidates {
	return func(context.Context) []string { return list }
}

// CompleteFlag completes a flag's value.
func (a *App) CompleteFlag(cmd *cobra.Command, flag string, list Candidates) {
	err := cmd.RegisterFlagCompletionFunc(flag, func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
		return list(cmd.Context()), cobra.ShellCompDirectiveNoFileComp
	})
	if err != nil {
		panic(err) // the flag is not defined: our own mistake
	}
}

// candidates asks a daemon that runs; where none does there are none.
func (a *App) candidates(ctx context.Context, ask func(context.Context, *client.Client) ([]string, error)) []string {
	if ctx == nil {
		ctx = context.Background()
	}
	ctx, cancel := context.WithTimeout(ctx, completionLimit)
	defer cancel()
	h, err := a.OpenHome()
	if err != nil {
		return nil
	}
	c, err := client.Dial(ctx, client.Options{Socket: h.Socket()})
	if err != nil {
		return nil
	}
	defer c.Close()
	names, err := ask(ctx, c)
	if err != nil {
		return nil
	}
	return names
}

// MachineNames completes names of machines.
func (a *App) MachineNames(ctx context.Context) []string {
	return a.candidates(ctx, func(ctx context.Context, c *client.Client) ([]string, error) {
		res, err := c.Machines.List(ctx, connect.NewRequest(&holdpointv1.ListMachinesRequest{}))
		if err != nil {
			return nil, err
		}
		return namesOf(res.Msg.GetMachines(), (*holdpointv1.Machine).GetName), nil
	})
}

// ImageNames completes names of images.
func (a *App) ImageNames(ctx context.Context) []string {
	return a.candidates(ctx, func(ctx context.Context, c *client.Client) ([]string, error) {
		res, err := c.Images.List(ctx, connect.NewRequest(&holdpointv1.ListImagesRequest{}))
		if err != nil {
			return nil, err
		}
		return namesOf(res.Msg.GetImages(), func(i *holdpointv1.Image) string {
			if i.GetName() == "" {
				return i.GetBuildId()
			}
			return i.GetName()
		}), nil
	})
}

// CheckpointNames completes names and ids of checkpoints.
func (a *App) CheckpointNames(ctx context.Context) []string { return a.checkpointNamesOf(ctx, "") }

func (a *App) checkpointNamesOf(ctx context.Context, machine string) []string {
	return a.candidates(ctx, func(ctx context.Context, c *client.Client) ([]string, error) {
		res, err := c.Checkpoints.List(ctx, connect.NewRequest(&holdpointv1.ListCheckpointsRequest{Machine: machine}))
		if err != nil {
			return nil, err
		}
		return namesOf(res.Msg.GetCheckpoints(), func(p *holdpointv1.Checkpoint) string {
			if p.GetName() == "" {
				return p.GetId()
			}
			return p.GetName()
		}), nil
	})
}

// HostNames completes published host names.
func (a *App) HostNames(ctx context.Context) []string {
	return a.candidates(ctx, func(ctx context.Context, c *client.Client) ([]string, error) {
		res, err := c.Routes.List(ctx, connect.NewRequest(&holdpointv1.ListRoutesRequest{}))
		if err != nil {
			return nil, err
		}
		return namesOf(res.Msg.GetRoutes(), (*holdpointv1.Route).GetHost), nil
	})
}

// OperationIDs completes ids of running operations.
func (a *App) OperationIDs(ctx context.Context) []string { return a.operationIDsOf(ctx, false) }

// AllOperationIDs completes ids of operations, ended ones too.
func (a *App) AllOperationIDs(ctx context.Context) []string { return a.operationIDsOf(ctx, true) }

func (a *App) operationIDsOf(ctx context.Context, all bool) []string {
	return a.candidates(ctx, func(ctx context.Context, c *client.Client) ([]string, error) {
		res, err := c.Operations.List(ctx, connect.NewRequest(&holdpointv1.ListOperationsRequest{All: all}))
		if err != nil {
			return nil, err
		}
		return namesOf(res.Msg.GetOperations(), (*client.Operation).GetId), nil
	})
}

// CompleteRestore completes a machine, then one of its checkpoints.
func (a *App) CompleteRestore(ctx context.Context, args []string) []string {
	switch len(args) {
	case 0:
		return a.MachineNames(ctx)
	case 1:
		return a.checkpointNamesOf(ctx, args[0])
	}
	return nil
}

// CompleteCommand completes a machine, then one of its detached commands.
func (a *App) CompleteCommand(ctx context.Context, args []string) []string {
	switch len(args) {
	case 0:
		return a.MachineNames(ctx)
	case 1:
		return a.candidates(ctx, func(ctx context.Context, c *client.Client) ([]string, error) {
			return detachedIDs(ctx, c, args[0])
		})
	}
	return nil
}

func detachedIDs(ctx context.Context, c *client.Client, machine string) ([]string, error) {
	res, err := c.Guest.ListCommands(ctx, connect.NewRequest(&holdpointv1.ListGuestCommandsRequest{Machine: machine}))
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, command := range res.Msg.GetCommands() {
		if command.GetDetached() {
			ids = append(ids, command.GetId())
		}
	}
	return ids, nil
}

func namesOf[T any](list []T, name func(T) string) []string {
	names := make([]string, 0, len(list))
	for _, item := range list {
		names = append(names, name(item))
	}
	return names
}

// GetMachine asks for one machine.
func GetMachine(ctx context.Context, c *client.Client, machine string) (*holdpointv1.Machine, error) {
	res, err := c.Machines.Get(ctx, connect.NewRequest(&holdpointv1.GetMachineRequest{Machine: machine}))
	if err != nil {
		return nil, err
	}
	return res.Msg, nil
}
