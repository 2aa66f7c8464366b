//go:build linux

package stage

import (
	"context"

	"connectrpc.com/connect"

	agentv1 "github.com/holdpoint/holdpoint/api/agent/v1"
	holdpointv1 "github.com/holdpoint/holdpoint/api/holdpoint/v1"
	"github.com/holdpoint/holdpoint/bench/talk"
)

// Guest is a machine's guest, to talk to through the API.
func (s *Stage) Guest(ctx context.Context, machine string) talk.Guest { return guest{ctx, s, machine} }

type guest struct {
	ctx     context.Context
	stage   *Stage
	machine string
}

func (g guest) Exec(start *agentv1.ExecStart, stdin []byte) (string, error) {
	return talk.Exec(&execStream{g.stage.Client.Guest.Exec(g.ctx), g.machine}, start, stdin)
}

func (g guest) Dial(port uint32) (*talk.Conn, error) {
	return talk.Connect(&dialStream{g.stage.Client.Guest.Dial(g.ctx), g.machine}, port)
}

// execStream names the machine in the first message.
type execStream struct {
	*connect.BidiStreamForClient[holdpointv1.GuestExecRequest, holdpointv1.GuestExecResponse]
	machine string
}

func (s *execStream) Send(m *agentv1.ExecRequest) error {
	machine := s.machine
	s.machine = ""
	return s.BidiStreamForClient.Send(&holdpointv1.GuestExecRequest{Machine: machine, Message: m})
}

func (s *execStream) Receive() (*agentv1.ExecResponse, error) {
	msg, err := s.BidiStreamForClient.Receive()
	return msg.GetMessage(), err
}

type dialStream struct {
	*connect.BidiStreamForClient[holdpointv1.GuestDialRequest, holdpointv1.GuestDialResponse]
	machine string
}

func (s *dialStream) Send(m *agentv1.DialRequest) error {
	machine := s.machine
	s.machine = ""
	return s.BidiStreamForClient.Send(&holdpointv1.GuestDialRequest{Machine: machine, Message: m})
}

func (s *dialStream) Receive() (*agentv1.DialResponse, error) {
	msg, err := s.BidiStreamForClient.Receive()
	return msg.GetMessage(), err
}
