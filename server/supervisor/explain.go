package supervisor

import (
	"context"
	"errors"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
)

// explainWithin bounds an answer to Explain.
const explainWithin = 5 * time.Second

var (
	errNotRunning = errors.New("its plugin does not run")
	errBusy       = errors.New("its plugin is explaining other hosts; ask again")
	errSilent     = errors.New("its plugin does not explain what it holds; build it with a newer SDK")
)

func (s *Supervisor) setLive(c *client) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.live = c
}

// Explain asks the plugin what the registry holds of a host. The error is for
// display.
func (s *Supervisor) Explain(ctx context.Context, host string) ([]*pluginv1.ExplainedService, error) {
	s.mu.Lock()
	c := s.live
	s.mu.Unlock()
	if c == nil {
		return nil, errNotRunning
	}
	call, cancel := context.WithTimeout(ctx, explainWithin)
	defer cancel()
	select {
	case s.explaining <- struct{}{}:
		defer func() { <-s.explaining }()
	case <-call.Done():
		return nil, errBusy
	}
	resp, err := c.api.Explain(call, &pluginv1.ExplainRequest{Host: host})
	switch {
	case err == nil:
		return resp.GetServices(), nil
	case status.Code(err) == codes.Unimplemented:
		return nil, errSilent
	default:
		return nil, plain(err, explainWithin)
	}
}
