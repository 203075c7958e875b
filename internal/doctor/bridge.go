package doctor

import (
	"context"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"
)

// Sink is a sink of a bridge, as its admin API describes it.
type Sink struct {
	Address       string         `json:"address"`
	Node          string         `json:"node"`
	Protocol      string         `json:"protocol"`
	Profile       string         `json:"profile"`
	Subscriptions []Subscription `json:"subscriptions"`
}

// Subscription is one type that a sink asked for.
type Subscription struct {
	TypeURL    string `json:"type_url"`
	Collection string `json:"collection"`
	State      string `json:"state"`
	Sent       uint64 `json:"sent"`
	Nacks      uint64 `json:"nacks"`
	LastNack   string `json:"last_nack"`
	Bytes      int    `json:"bytes"`
	Oversize   bool   `json:"oversize"`
}

// name is the sink for display.
func (s *Sink) name() string {
	if s.Node == "" {
		return "sink " + s.Address
	}
	return "sink " + s.Node + " at " + s.Address
}

// istiod reports whether the sink is an istiod or a Pilot and no tool.
func (s *Sink) istiod() bool {
	return strings.HasPrefix(s.Profile, "istio-") || strings.HasPrefix(s.Profile, "pilot-")
}

// States of a subscription.
const (
	stateSent = "sent"
	stateHeld = "held"
)

// ReadSinks reads the sinks of a bridge.
func ReadSinks(ctx context.Context, get Getter) ([]Sink, error) {
	return pages[Sink](ctx, get, "sinks")
}

// pages reads all pages of a list.
func pages[T any](ctx context.Context, get Getter, list string) (all []T, err error) {
	for after := ""; ; {
		path := "/api/v1/" + list + "?limit=1000"
		if list == "sinks" {
			path = "/api/v1/sinks"
		}
		if after != "" {
			path += "&after=" + url.QueryEscape(after)
		}
		var page struct {
			Items []T    `json:"items"`
			Next  string `json:"next"`
		}
		if err := read(ctx, get, path, &page); err != nil {
			return nil, err
		}
		all = append(all, page.Items...)
		if after = page.Next; after == "" {
			return all, nil
		}
	}
}

// maxOld is the size of the largest response that an istiod before 1.12 or a
// Pilot receives, in bytes.
const maxOld = 4 << 20

// oldProfiles are those of istiods with that limit.
var oldProfiles = []string{"istio-1.9", "istio-1.10"}

// CheckSinks returns what is wrong with the sinks of a bridge. Later is a
// second reading, after a time in which a sink that works acknowledges what it
// was sent.
func CheckSinks(before, later []Sink, after time.Duration) []Finding {
	var found []Finding
	if !slices.ContainsFunc(later, func(s Sink) bool { return s.istiod() }) {
		found = append(found, Finding{
			Check: "sink-none", Severity: Failure, Subject: "sinks",
			Problem: "no istiod is connected to the bridge; the log of an istiod that starts says whether it cannot connect, and the bridge's whom it refused",
			Change:  "configSources of the mesh configuration, as isthmus meshconfig prints them; istiod reads them at its start",
		})
	}
	for i := range later {
		s := &later[i]
		var earlier *Sink
		if i := slices.IndexFunc(before, func(b Sink) bool { return b.Address == s.Address && b.Node == s.Node }); i >= 0 {
			earlier = &before[i]
		}
		found = append(found, checkSink(s, earlier, after)...)
	}
	return found
}

func checkSink(s, earlier *Sink, after time.Duration) (found []Finding) {
	add := func(check string, severity Severity, problem, change string) {
		found = append(found, Finding{Check: check, Severity: severity, Subject: s.name(), Problem: problem, Change: change})
	}
	for _, sub := range s.Subscriptions {
		stuck := earlier != nil && slices.ContainsFunc(earlier.Subscriptions, func(e Subscription) bool {
			return e.TypeURL == sub.TypeURL && e.State == stateSent && e.Sent == sub.Sent
		})
		old := slices.Contains(oldProfiles, s.Profile) && sub.Bytes > maxOld || sub.Oversize
		switch {
		case old:
			add("sink-size", Failure, fmt.Sprintf("a response of %s has %d bytes, and it receives at most %d: it ends the stream and comes back for the same, again and again", sub.TypeURL, sub.Bytes, maxOld),
				"upgrade it to 1.12 or later, or give it several bridges with some of the registries each (for Pilot: --mcpMaxMsgSize)")
		case sub.State == stateSent && stuck:
			add("sink-ack", Failure, fmt.Sprintf("it has not acknowledged %s within %s: it hangs, or cannot be reached any more", sub.TypeURL, after), "")
		case sub.State == stateHeld:
			add("sink-held", Failure, fmt.Sprintf("%s is held, as a registry has not completed its first listing; istiod is not ready before it is answered", sub.TypeURL),
				"what /readyz of the bridge names, or required: false for that registry")
		}
		if sub.LastNack != "" {
			add("sink-nack", Failure, fmt.Sprintf("it refused %s %d times, last: %s", sub.TypeURL, sub.Nacks, sub.LastNack), "")
		}
	}
	return found
}

// Resource is a resource that a bridge serves.
type Resource struct {
	Registry   string `json:"registry"`
	Collection string `json:"collection"`
	Name       string `json:"name"`
}

// ReadResources reads what a bridge serves, without contents.
func ReadResources(ctx context.Context, get Getter) ([]Resource, error) {
	return pages[Resource](ctx, get, "resources")
}

// CheckRejected returns what a bridge serves and istiod does not have.
// WorkloadEntries are left out, as istiod has them in their ServiceEntries.
// Istiod acknowledges what its validation rejects, so this is the only sign.
func (i *Istiod) CheckRejected(served []Resource) []Finding {
	have := make(map[string]bool, len(i.configs))
	for _, c := range i.configs {
		have[c.Kind+" "+c.Metadata.Namespace+"/"+c.Metadata.Name] = true
	}
	missing := make(map[string][]string) // by registry
	var order []string
	for _, r := range served {
		kind := r.Collection[strings.LastIndexByte(r.Collection, '/')+1:]
		if kind == "WorkloadEntry" || have[kind+" "+r.Name] {
			continue
		}
		if missing[r.Registry] == nil {
			order = append(order, r.Registry)
		}
		missing[r.Registry] = append(missing[r.Registry], kind+" "+r.Name)
	}
	var found []Finding
	for _, registry := range order {
		list := missing[registry]
		found = append(found, Finding{
			Check: "istiod-rejected", Severity: Failure, Subject: "istiod " + i.name,
			Problem: fmt.Sprintf("it does not have %d resources of registry %s that it was sent: its validation rejects them, which it acknowledges all the same: %s", len(list), registry, some(list)),
			Change:  "istiod's log says why (\"Error adding a new resource to the store\", \"Error updating an existing resource in the store\"); mend them in the registry",
		})
	}
	return found
}

// Unsettled reports whether a response that was under way before still is.
func Unsettled(before, later []Sink) bool {
	for i := range later {
		for _, f := range CheckSinks(before, later[i:i+1], 0) {
			if f.Check == "sink-ack" {
				return true
			}
		}
	}
	return false
}

// Registry is a registry of a bridge, as its admin API describes it.
type Registry struct {
	Name       string `json:"name"`
	Phase      string `json:"phase"`
	Error      string `json:"error"`
	Protection *struct {
		Pending   bool      `json:"pending"`
		Services  int       `json:"services"`
		Of        int       `json:"of"`
		Endpoints int       `json:"endpoints"`
		Until     time.Time `json:"until"`
	} `json:"protection"`
}

// ReadRegistries reads the registries of a bridge.
func ReadRegistries(ctx context.Context, get Getter) ([]Registry, error) {
	var list struct {
		Items []Registry `json:"items"`
	}
	err := read(ctx, get, "/api/v1/registries", &list)
	return list.Items, err
}

// CheckRegistries returns what is wrong with the registries of a bridge.
func CheckRegistries(registries []Registry) (found []Finding) {
	for _, r := range registries {
		add := func(check, problem, change string) {
			found = append(found, Finding{Check: check, Severity: Failure, Subject: "registry " + r.Name + " of the bridge", Problem: problem, Change: change})
		}
		if r.Error != "" {
			add("bridge-stale", fmt.Sprintf("it is %s, and what is served of it may be old: %s", r.Phase, r.Error), "")
		}
		if p := r.Protection; p != nil && p.Pending {
			add("bridge-protected", fmt.Sprintf("a removal looks like an accident and is held back until %s: %d of %d services, %d endpoints", p.Until.UTC().Format(time.RFC3339), p.Services, p.Of, p.Endpoints),
				fmt.Sprintf("isthmus accept %s if the registry is right, isthmus refuse %s if it is not", r.Name, r.Name))
		}
	}
	return found
}
