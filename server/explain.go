package server

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/isthmus-mesh/isthmus/internal/conf"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/plugin/shard"
	"github.com/isthmus-mesh/isthmus/server/admin"
	"github.com/isthmus-mesh/isthmus/server/encode"
	mcpserver "github.com/isthmus-mesh/isthmus/server/mcp"
	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/state/status"
	"github.com/isthmus-mesh/isthmus/server/stream"
	"github.com/isthmus-mesh/isthmus/server/supervisor"
	"github.com/isthmus-mesh/isthmus/server/view"
)

// maxSimilar is the number of hosts suggested for one that nobody has.
const maxSimilar = 5

// maxBody bounds the body of an explained resource, in bytes.
const maxBody = 4 << 20

// Explain implements admin.Source. It asks the plugins, all at the same time.
func (a source) Explain(ctx context.Context, host string) admin.Explanation {
	s := a.s
	e := admin.Explanation{Host: host, Registries: []admin.ExplainedRegistry{}, Resources: []admin.ExplainedResource{}, Sinks: []admin.ExplainedSink{}}
	claims := s.db.Explain(host)
	all := s.db.Registries()
	e.Registries = make([]admin.ExplainedRegistry, len(all))
	var wg sync.WaitGroup
	for i, st := range all {
		sup := s.supervisor(st.Registry)
		e.Registries[i] = admin.ExplainedRegistry{
			Registry: st.Registry, Adapter: sup.Adapter, Phase: sup.Phase.String(), Error: cmp.Or(st.Down, st.Error), Listed: st.Listed(),
			Claims: slices.DeleteFunc(slices.Clone(claims), func(c status.Claim) bool { return c.Registry != st.Registry }),
		}
		if m := s.running(st.Registry); m != nil {
			// Owned by this call, which waits; ends with the answer's limit.
			wg.Go(func() { askPlugin(ctx, m, host, &e.Registries[i]) })
		}
	}
	wg.Wait()
	found := false
	for i := range e.Registries {
		r := &e.Registries[i]
		// A host that only a name leads to: show what is served under it, too.
		for _, svc := range r.Services {
			if svc.Entry != "" && len(r.Claims) == 0 {
				r.Claims = slices.DeleteFunc(s.db.Explain(svc.Entry), func(c status.Claim) bool { return c.Registry != r.Registry })
				claims = append(claims, r.Claims...)
			}
		}
		found = found || len(r.Services)+len(r.Claims) > 0
	}
	if !found {
		e.Similar = similar(s.db.Hosts(), host, maxSimilar)
		if own := s.options.Shards; !own.All() && !own.Has(host) {
			e.Shard, e.OwnShards = fmt.Sprintf("%d/%d", shard.Of(host, own.Of), own.Of), own.String()
		}
	}
	e.Resources = s.explainedResources(claims)
	if len(claims) > 0 {
		for _, st := range s.streams.Status() {
			e.Sinks = append(e.Sinks, explainSink(&st, claims))
		}
		var entries []string
		for i := range claims {
			if claims[i].Outcome != "shadowed" {
				entries = append(entries, claims[i].Name)
			}
		}
		for _, c := range s.ofConsumers() {
			e.Consumers = append(e.Consumers, c.Explain(entries)...)
		}
	}
	return e
}

// similar returns up to n of all hosts that resemble a name, the most similar
// first.
func similar(all []string, host string, n int) []string {
	type candidate struct {
		host     string
		distance int
	}
	most := max(2, len(host)/4)
	first, _, _ := strings.Cut(host, ".")
	var found []candidate
	for _, h := range all {
		label, _, _ := strings.Cut(h, ".")
		distance := most + 1
		switch {
		case first == "":
		case label == first:
			distance = 0
		case strings.Contains(label, first), len(label) > 2 && strings.Contains(first, label):
			distance = 1
		default:
			distance = conf.Distance(h, host, most)
		}
		if d := conf.Distance(label, first, 2); d <= 2 && d < len(first) {
			distance = min(distance, d+1)
		}
		if distance <= most {
			found = append(found, candidate{h, distance})
		}
	}
	slices.SortFunc(found, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(a.distance, b.distance), strings.Compare(a.host, b.host))
	})
	out := make([]string, 0, n)
	for _, c := range found[:min(n, len(found))] {
		out = append(out, c.host)
	}
	return out
}

// running returns the supervisor of a registry, nil if there is none.
func (s *Server) running(registry string) *supervisor.Supervisor {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, m := range s.members {
		if m.registry.Name == registry {
			return m.sup
		}
	}
	return nil
}

func askPlugin(ctx context.Context, sup *supervisor.Supervisor, host string, r *admin.ExplainedRegistry) {
	services, err := sup.Explain(ctx, host)
	if err != nil {
		r.Unknown = err.Error()
		return
	}
	for _, s := range services {
		r.Services = append(r.Services, explainedService(s))
	}
}

func explainedService(s *pluginv1.ExplainedService) admin.ExplainedService {
	out := admin.ExplainedService{
		Key: s.GetKey(), Host: s.GetHost(), Entry: s.GetEntry(), Original: s.GetOriginal(), Steps: explainedSteps(s.GetSteps()),
		Instances: make([]admin.ExplainedInstance, 0, len(s.GetInstances())), More: s.GetMore(),
	}
	for _, i := range s.GetInstances() {
		out.Instances = append(out.Instances, admin.ExplainedInstance{
			ID: i.GetId(), Address: i.GetAddress(), Ports: i.GetPorts(), Health: i.GetHealth(), Disabled: i.GetDisabled(), Weight: i.GetWeight(),
			Meta: i.GetMeta(), Tags: i.GetTags(), Node: i.GetNode(), Locality: i.GetLocality(), Resource: i.GetResource(), Steps: explainedSteps(i.GetSteps()),
		})
	}
	return out
}

func explainedSteps(steps []*pluginv1.ExplainedStep) []admin.ExplainedStep {
	out := make([]admin.ExplainedStep, 0, len(steps))
	for _, s := range steps {
		out = append(out, admin.ExplainedStep{Rule: s.GetRule(), Subject: s.GetSubject(), Text: s.GetText()})
	}
	return out
}

// explainedResources returns what is served of the claims, with endpoints
// inline.
func (s *Server) explainedResources(claims []status.Claim) []admin.ExplainedResource {
	out := []admin.ExplainedResource{}
	l := encode.NewLayout(encode.Form{})
	seen := make(map[string]bool)
	for _, c := range claims {
		if c.Outcome == "shadowed" || c.Outcome == "merged" || seen[c.Name] {
			continue
		}
		seen[c.Name] = true
		for _, coll := range []string{collection.ServiceEntry, collection.DestinationRule} {
			r, ok := s.db.Get(state.Kind{Collection: coll, Shape: encode.Inline}, c.Name)
			if !ok {
				continue
			}
			e := admin.ExplainedResource{Registry: r.Registry(), Collection: coll, Name: c.Name, Version: r.Encode(l).Version.String()}
			if res, err := decode(r, l); err == nil {
				if body, err := protojson.Marshal(res); err == nil && len(body) <= maxBody {
					e.Body = body
				}
			}
			out = append(out, e)
		}
	}
	return out
}

// explainSink says whether a sink has the newest revision of the claims.
func explainSink(st *stream.Status, claims []status.Claim) admin.ExplainedSink {
	out := admin.ExplainedSink{Node: st.Node, Address: st.Address, Protocol: st.Protocol, Profile: st.Profile, Shape: st.Shape, State: "not asked"}
	var newest state.Revision
	for _, c := range claims {
		at := c.Inline
		if st.Shape == encode.Workload.String() {
			at = c.Workload
		}
		newest = max(newest, at)
	}
	if st.Shows != nil {
		kind := state.Kind{Collection: collection.ServiceEntry, Shape: encode.Inline}
		if st.Shape == encode.Workload.String() {
			kind.Shape = encode.Workload
		}
		if !slices.ContainsFunc(claims, func(c status.Claim) bool { return c.Outcome != "shadowed" && st.Shows(kind, c.Name) }) {
			out.State = "not in its view"
			return out
		}
		newest = ^state.Revision(0) // its revisions are others: only a lag of 0 shows that it has everything
	}
	worst := -1
	for _, sub := range st.Subscriptions {
		if sub.Collection != collection.ServiceEntry && (sub.Collection != collection.WorkloadEntry || st.Shape != encode.Workload.String()) {
			continue
		}
		rank, text := sinkState(&sub, newest)
		if rank <= worst {
			continue
		}
		worst = rank
		out.State, out.Collection = text, sub.Collection
		out.SentVersion, out.SentAt, out.AckedVersion, out.AckedAt, out.LastNack = sub.SentVersion, sub.SentAt, sub.AckedVersion, sub.AckedAt, sub.LastNack
	}
	return out
}

// sinkState returns the state of a subscription with regard to a revision; the
// higher the rank, the more it is worth telling.
func sinkState(sub *stream.SubscriptionStatus, newest state.Revision) (rank int, text string) {
	switch {
	case sub.Names > 0:
		return 0, "by name"
	case sub.Waiting == mcpserver.WaitingPenalty, sub.Oversize && sub.State == view.Sent.String():
		return 6, "too large"
	case sub.State == view.Waiting.String():
		return 4, "waiting"
	case sub.State == view.Current.String() && sub.AckedRevision < sub.SentRevision:
		return 5, "refused"
	case sub.AckedRevision >= newest || sub.State == view.Current.String() && sub.Lag == 0:
		return 1, "acknowledged"
	case sub.SentRevision >= newest, sub.State == view.Sent.String() && newest == ^state.Revision(0):
		return 2, "sent"
	default:
		return 3, "not sent"
	}
}
