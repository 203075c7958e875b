package testconsul

import (
	"fmt"
	"net"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
)

// Cluster is a datacenter of several servers.
type Cluster struct {
	Servers []*Server
	// Gates are those through which servers reach each one, and it itself. A
	// server behind one that is shut, or that delays all for long, hears
	// nothing of the leader, and answers clients.
	Gates []*testenv.Gate
}

// StartCluster starts n servers, on Linux, where there are more loopback
// addresses than one, and waits until they have elected a leader. Of cfg,
// ExtraHCL counts.
func StartCluster(t testing.TB, n int, cfg Config) *Cluster {
	t.Helper()
	c := &Cluster{}
	var joins []string
	for range n {
		s := newServer(t, fmt.Sprintf("consul-%d", len(c.Servers)+1), cfg)
		s.choosePorts(t)
		joins = append(joins, fmt.Sprintf("%s:%d", outside, s.ports.serf))
		gate := testenv.NewGate(t, testenv.Loopback(s.ports.server))
		gate.Addr = fmt.Sprintf("%s:%d", outside, s.ports.server)
		gate.Open(t)
		c.Servers, c.Gates = append(c.Servers, s), append(c.Gates, gate)
	}
	for _, s := range c.Servers {
		s.joins = joins
		s.Launch(t)
	}
	for _, s := range c.Servers {
		s.WaitReady(t)
	}
	return c
}

// Leader returns which server is the leader, by the word of server n.
func (c *Cluster) Leader(t testing.TB, n int) (leader int) {
	t.Helper()
	testenv.Eventually(t, testenv.Patience, "a leader", func() (string, bool) {
		address, err := c.Servers[n].Client.Status().Leader()
		for i, s := range c.Servers {
			if address == net.JoinHostPort(outside, fmt.Sprint(s.ports.server)) {
				leader = i
				return "", true
			}
		}
		return fmt.Sprintf("leader %q, %v", address, err), false
	})
	return leader
}
