package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"
)

// Peer is a server that the bridge is compared with.
type Peer struct {
	Name string
	// Command is its command line, to which the numbers of services and
	// instances are added, as the flags that Services and Instances name.
	Command             []string
	Services, Instances string
	// Protocol is that of its sinks.
	Protocol string
}

// Peers returns the peers: those of a program made of go-control-plane and
// bare grpc-go, and the one of a program made of Istio 1.8's library.
func Peers(xds, legacy string) (all []Peer) {
	if xds != "" {
		for _, kind := range []string{"linear", "snapshot", "bare"} {
			all = append(all, Peer{
				Name:    map[string]string{"linear": "LinearCache", "snapshot": "SnapshotCache", "bare": "bare grpc-go"}[kind],
				Command: []string{xds, "-kind", kind}, Services: "-services", Instances: "-instances", Protocol: delta,
			})
		}
	}
	if legacy != "" {
		all = append(all, Peer{
			Name: "Istio 1.8 source", Command: []string{legacy, "source", "-incremental"}, Services: "-entries", Instances: "-endpoints", Protocol: mcpIncremental,
		})
	}
	return all
}

// Comparison is the result of the bridge or of a peer.
type Comparison struct {
	Name     string   `json:"name"`
	Protocol string   `json:"protocol"`
	Median   Result   `json:"median"`
	Runs     []Result `json:"runs"`
}

// Compare measures the bridge and peers, each in turns with the others.
func Compare(ctx context.Context, program string, peers []Peer, o Options, progress io.Writer) ([]Comparison, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	all := []Comparison{{Name: "isthmus", Protocol: delta}}
	with := []*Peer{nil}
	for i, p := range peers {
		if p.Protocol == mcpIncremental {
			all, with = append(all, Comparison{Name: "isthmus", Protocol: mcpIncremental}), append(with, nil)
		}
		all, with = append(all, Comparison{Name: p.Name, Protocol: p.Protocol}), append(with, &peers[i])
	}
	for i := range o.Runs {
		for n := range all {
			c := &all[n]
			o.peer, o.Protocol = with[n], c.Protocol
			r, err := run(ctx, program, o)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", c.Name, err)
			}
			tell(progress, c.Name+", "+c.Protocol+", run", i, o.Runs, r)
			c.Runs = append(c.Runs, r)
		}
	}
	for n := range all {
		all[n].Median = Median(all[n].Runs)
	}
	return all, nil
}

// peer is a running peer.
type peer struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	at  string
}

func startPeer(ctx context.Context, p Peer, o Options) (*peer, error) {
	args := append(p.Command[1:len(p.Command):len(p.Command)], p.Services, fmt.Sprint(o.Services), p.Instances, fmt.Sprint(o.Instances))
	cmd := exec.CommandContext(ctx, p.Command[0], args...)
	cmd.Stderr = os.Stderr
	cmd.WaitDelay = 20 * time.Second
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	started := &peer{cmd: cmd, in: in}
	line, err := bufio.NewReader(out).ReadBytes('\n')
	var ready struct{ Address string }
	if err = errors.Join(err, json.Unmarshal(line, &ready)); err != nil {
		started.stop()
		return nil, fmt.Errorf("%s did not start: %w", p.Name, err)
	}
	started.at = ready.Address
	return started, nil
}

func (p *peer) address(Options, int) string { return p.at }

func (p *peer) change(_ context.Context, o Options) error {
	_, err := fmt.Fprintf(p.in, "run %g %d\n", o.Rate, o.total())
	return err
}

func (p *peer) pids() map[string]int { return map[string]int{"peer": p.cmd.Process.Pid} }

var errNoProfile = errors.New("only the bridge has profiles")

func (p *peer) profile(context.Context, string, string, string) error { return errNoProfile }

func (p *peer) stop() {
	_ = p.in.Close()
	_ = p.cmd.Wait()
}
