package e2e

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testconsul"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/watch"
	"github.com/isthmus-mesh/isthmus/verify"
)

const (
	entryURL  = "networking.istio.io/v1/ServiceEntry"
	entries   = "networking.istio.io/ServiceEntry"
	workloads = "networking.istio.io/WorkloadEntry"
)

// judged is what the validator hears of a bridge: what its registries have, as
// the test says, and what a sink of each kind receives.
type judged struct {
	t *testing.T

	mu       sync.Mutex // guards the fields below
	judge    *verify.Judge
	revision uint64
	want     map[string]bool            // endpoints, by service and address
	have     map[string]map[string]bool // the same of each sink, by protocol, once its stream has a response
}

// newJudged returns one whose bridge has not started yet.
func newJudged(t *testing.T) *judged {
	j := &judged{t: t, judge: verify.New(), want: map[string]bool{}, have: map[string]map[string]bool{}}
	j.judge.PutsBack = true
	return j
}

func (j *judged) addLocked(e *verify.Event) {
	e.Time = time.Now()
	for _, v := range j.judge.Add(e) {
		j.t.Error(v)
	}
}

// tell says what a registry has from now on, or no longer has. The registry is
// the one that the service belongs to.
func (j *judged) tell(registry string, there bool, instances ...testconsul.Instance) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, i := range instances {
		service, address := registry+"/"+i.Service, fmt.Sprintf("%s:%d", i.Address, i.Port)
		if j.revision++; there {
			j.addLocked(&verify.Event{Kind: verify.Truth, Collection: entries, Name: service, Revision: j.revision})
			j.revision++
		}
		j.addLocked(&verify.Event{
			Kind: verify.Truth, Collection: workloads, Name: registry + "/" + i.ID, Service: service, Address: address, Revision: j.revision, Absent: !there,
		})
		if delete(j.want, service+" "+address); there {
			j.want[service+" "+address] = true
		}
	}
}

// gone says that a registry no longer has services, nor any instance of them.
func (j *judged) gone(registry string, instances ...testconsul.Instance) {
	j.tell(registry, false, instances...)
	j.mu.Lock()
	defer j.mu.Unlock()
	told := map[string]bool{}
	for _, i := range instances {
		if name := registry + "/" + i.Service; !told[name] {
			told[name] = true
			j.revision++
			j.addLocked(&verify.Event{Kind: verify.Truth, Collection: entries, Name: name, Revision: j.revision, Absent: true})
		}
	}
}

// start says that a bridge starts, with what it saved at a time; the zero time
// is without any.
func (j *judged) start(since time.Time) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.addLocked(&verify.Event{Kind: verify.Start, Since: since})
	clear(j.have) // the sinks have to connect again
}

// follow connects the sinks.
func (j *judged) follow(bridge *testisthmus.Server) {
	ctx, cancel := context.WithCancel(j.t.Context())
	var group sync.WaitGroup
	j.t.Cleanup(func() {
		cancel()
		group.Wait()
	})
	for n, protocol := range []string{"delta", "sotw"} {
		o := watch.Options{Address: bridge.XDS, Protocol: protocol, Shape: "inline", Types: []string{entryURL}}
		have := map[string][]verify.Endpoint{}
		o.Record = events(func(e *verify.Event) error {
			j.mu.Lock()
			defer j.mu.Unlock()
			e.Stream = 2*e.Stream + n
			j.addLocked(e)
			switch e.Kind {
			case verify.Open:
				delete(j.have, protocol)
			case verify.Response:
				j.have[protocol] = endpointsAfter(have, e)
			}
			return nil
		})
		group.Go(func() { // ends with cancel
			if err := watch.Run(ctx, o, io.Discard); err != nil {
				j.t.Error(err)
			}
		})
	}
}

// endpointsAfter applies a response to what a sink has.
func endpointsAfter(have map[string][]verify.Endpoint, e *verify.Event) map[string]bool {
	if !e.Incremental {
		clear(have)
	}
	for _, r := range e.Resources {
		have[r.Name] = r.Endpoints
	}
	for _, name := range e.Removed {
		delete(have, name)
	}
	out := map[string]bool{}
	for name, endpoints := range have {
		for _, p := range endpoints {
			out[name+" "+p.Address] = true
		}
	}
	return out
}

// settle waits until the sinks have what was told, and judges that they do.
func (j *judged) settle() {
	j.t.Helper()
	testenv.Eventually(j.t, testenv.Patience, "the sinks to have what the registries have", func() (string, bool) {
		j.mu.Lock()
		defer j.mu.Unlock()
		for _, protocol := range []string{"delta", "sotw"} {
			if diff := cmp.Diff(j.want, j.have[protocol]); diff != "" {
				return protocol + " (-want +got):\n" + diff, false
			}
		}
		j.addLocked(&verify.Event{Kind: verify.Settled})
		return "", true
	})
}

// events passes on the events of a recording.
type events func(*verify.Event) error

// Write implements io.Writer for whole lines.
func (f events) Write(line []byte) (int, error) {
	return len(line), verify.Read(bytes.NewReader(line), func(_ int, e *verify.Event) error { return f(e) })
}
