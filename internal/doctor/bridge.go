package doctor

import (
	"context"
	"fmt"
	"maps"
	"net/url"
	"regexp"
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
	Acked      uint64 `json:"acked_revision"`
	Lag        uint64 `json:"lag"`
	Bytes      int    `json:"bytes"`
	Oversize   bool   `json:"oversize"`
	Waiting    string `json:"waiting"`
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
	stateCurrent = "current"
	stateSent    = "sent"
	stateWaiting = "waiting"
	stateHeld    = "held" // the same of a bridge before this release
)

// waitingPenalty is what a subscription waits for whose sink disconnected over
// a large response.
const waitingPenalty = "penalty"

// ReadSinks reads the sinks of a bridge.
func ReadSinks(ctx context.Context, get Getter) ([]Sink, error) {
	var list struct {
		Items []Sink `json:"items"`
	}
	err := read(ctx, get, "/api/v1/sinks", &list)
	return list.Items, err
}

// readResources reads what sinks of a profile receive, in pages.
func readResources(ctx context.Context, get Getter, profile string) (all []Resource, err error) {
	values := url.Values{"limit": {"1000"}, "profile": {profile}}
	for {
		var page struct {
			Items []Resource `json:"items"`
			Next  string     `json:"next"`
		}
		if err := read(ctx, get, "/api/v1/resources?"+values.Encode(), &page); err != nil {
			return nil, err
		}
		all = append(all, page.Items...)
		if page.Next == "" {
			return all, nil
		}
		values.Set("after", page.Next)
	}
}

// maxOld is the size of the largest response that an istiod before 1.12 or a
// Pilot receives, in bytes.
const maxOld = 4 << 20

// oldProfiles are those of istiods with that limit.
var oldProfiles = []string{"istio-1.9", "istio-1.10"}

// ReadOversize reads how many responses of a bridge were larger than sinks
// receive, by metric.
func ReadOversize(ctx context.Context, get Getter) (map[string]string, error) {
	text, err := get(ctx, "/metrics")
	if err != nil {
		return nil, fmt.Errorf("/metrics: %w", err)
	}
	counts := make(map[string]string)
	for line := range strings.Lines(string(text)) {
		name, value, ok := strings.Cut(strings.TrimSpace(line), " ")
		if metric, _, _ := strings.Cut(name, "{"); ok && strings.HasSuffix(metric, "_oversize_total") {
			counts[name] = value
		}
	}
	return counts, nil
}

// Sinks is a reading of the sinks of a bridge.
type Sinks struct {
	List     []Sink
	Oversize map[string]string // see [ReadOversize]
}

// Connected reports whether an istiod or a Pilot is among sinks.
func Connected(sinks []Sink) bool {
	return slices.ContainsFunc(sinks, func(s Sink) bool { return s.istiod() })
}

// splitSinks is the cure for responses that are too large.
const splitSinks = "upgrade it to 1.12 or later, or give it several bridges with some of the registries each (for Pilot: --mcpMaxMsgSize)"

// CheckSinks returns what is wrong with the sinks of a bridge. Later is a
// second reading, after a time in which a sink that works acknowledges what it
// was sent.
func CheckSinks(before, later Sinks, after time.Duration) []Finding {
	var found []Finding
	for i := range later.List {
		s := &later.List[i]
		var earlier *Sink
		if i := slices.IndexFunc(before.List, func(b Sink) bool { return b.Address == s.Address && b.Node == s.Node }); i >= 0 {
			earlier = &before.List[i]
		}
		found = append(found, checkSink(s, earlier, after)...)
	}
	tooLarge := slices.ContainsFunc(found, func(f Finding) bool { return f.Check == "sink-size" })
	for _, metric := range slices.Sorted(maps.Keys(later.Oversize)) {
		// Such a sink is hardly ever seen, as it is connected for moments.
		if was, ok := before.Oversize[metric]; ok && was != later.Oversize[metric] && !tooLarge {
			tooLarge = true
			found = append(found, Finding{
				Check: "sink-size", Severity: Failure, Subject: "sinks",
				Problem: fmt.Sprintf("a response is larger than the %d bytes that a sink accepts (%s grows): it ends the stream and asks for the same again, over and over", maxOld, metric),
				Change:  splitSinks,
			})
		}
	}
	if !tooLarge && !Connected(later.List) {
		found = append(found, Finding{
			Check: "sink-none", Severity: Failure, Subject: "sinks",
			Problem: "no istiod is connected to the bridge; the log of an istiod that starts says whether it cannot connect, and the bridge's whom it refused",
			Change:  "configSources of the mesh configuration, as isthmus meshconfig prints them; istiod reads them at its start",
		})
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
		// One that was acknowledged was received: it is told to receive more.
		old := sub.State == stateSent && (slices.Contains(oldProfiles, s.Profile) && sub.Bytes > maxOld || sub.Oversize)
		switch {
		case old:
			add("sink-size", Failure, fmt.Sprintf("a response of %s has %d bytes, and it accepts at most %d: it ends the stream and asks for the same again, over and over", sub.TypeURL, sub.Bytes, maxOld), splitSinks)
		case sub.Waiting == waitingPenalty:
			add("sink-size", Failure, fmt.Sprintf("it ended the stream over a response of %s that is larger than the %d bytes that it accepts, and asks for the same again, over and over", sub.TypeURL, maxOld), splitSinks)
		case sub.State == stateSent && stuck:
			add("sink-ack", Failure, fmt.Sprintf("it has not acknowledged %s within %s: it hangs, or cannot be reached any more", sub.TypeURL, after), "")
		case (sub.State == stateWaiting || sub.State == stateHeld) && sub.Waiting == "":
			add("sink-held", Failure, fmt.Sprintf("%s waits, as a registry has not completed its first listing; istiod does not become ready before it is answered", sub.TypeURL),
				"what /readyz of the bridge names, or required: false for that registry")
		}
		if sub.LastNack != "" {
			add("sink-nack", Failure, fmt.Sprintf("it refused %s %s, last: %s", sub.TypeURL, Count(int(sub.Nacks), "time", "times"), sub.LastNack), "")
		}
	}
	return found
}

// Resource is a resource that a bridge serves.
type Resource struct {
	Registry   string `json:"registry"`
	Collection string `json:"collection"`
	Name       string `json:"name"`
	Version    string `json:"version"`
}

// key names a resource for people.
func (r *Resource) key() string {
	return r.Collection[strings.LastIndexByte(r.Collection, '/')+1:] + " " + r.Name
}

// Served is what a bridge serves to the istiods that are connected to it.
type Served struct {
	// Revision is that of the bridge before it was read.
	Revision uint64

	resources []Resource
	versions  map[string][]string // of each resource, by profile of these istiods
}

// ReadServed reads what a bridge serves, without contents.
func ReadServed(ctx context.Context, get Getter, sinks []Sink) (*Served, error) {
	var status struct {
		Revision uint64 `json:"revision"`
	}
	if err := read(ctx, get, "/api/v1/status", &status); err != nil {
		return nil, err
	}
	var profiles []string
	for i := range sinks {
		if strings.HasPrefix(sinks[i].Profile, "istio-") && !slices.Contains(profiles, sinks[i].Profile) {
			profiles = append(profiles, sinks[i].Profile)
		}
	}
	s := &Served{Revision: status.Revision, versions: make(map[string][]string)}
	for _, p := range profiles {
		list, err := readResources(ctx, get, p)
		if err != nil {
			return nil, err
		}
		s.resources = list
		for i := range list {
			s.versions[list[i].key()] = append(s.versions[list[i].key()], list[i].Version)
		}
	}
	return s, nil
}

// Acknowledged reports whether there are istiods, and each has acknowledged
// what was served at a revision.
func Acknowledged(sinks []Sink, revision uint64) bool {
	there := false
	for i := range sinks {
		if !sinks[i].istiod() {
			continue
		}
		there = true
		for _, sub := range sinks[i].Subscriptions {
			if sub.Acked < revision && (sub.State != stateCurrent || sub.Lag > 0) {
				return false
			}
		}
	}
	return there
}

// Rejected is a resource that istiod does not have as it is served.
type Rejected struct {
	registry, key string
	has           string // the version that it has, "" if it has none
}

// version matches the versions of Isthmus.
var version = regexp.MustCompile(`^[0-9a-f]{16}$`)

// Rejected returns what a bridge serves and istiod does not have, or not in the
// version that is served. WorkloadEntries are left out, as istiod has them in
// their ServiceEntries. What is under way is in it too, see [Still].
func (i *Istiod) Rejected(served *Served) (out []Rejected) {
	have := make(map[string]string, len(i.configs))
	for _, c := range i.configs {
		have[c.Kind+" "+c.Metadata.Namespace+"/"+c.Metadata.Name] = c.Metadata.ResourceVersion
	}
	for _, r := range served.resources {
		key := r.key()
		has, there := have[key]
		switch {
		case strings.HasPrefix(key, "WorkloadEntry "):
		case !there:
			out = append(out, Rejected{r.Registry, key, ""})
		// Before 1.12 the version is not kept, or not sent.
		case version.MatchString(has) && !slices.Contains(served.versions[key], has):
			out = append(out, Rejected{r.Registry, key, has})
		}
	}
	return out
}

// Still returns what was rejected before, and is later, with the same version
// in istiod. If everything served before was acknowledged in between, nothing
// of it is under way.
func Still(before, later []Rejected) []Rejected {
	return slices.DeleteFunc(slices.Clone(later), func(r Rejected) bool { return !slices.Contains(before, r) })
}

// ReportRejected returns the findings for resources that istiod rejected. It
// acknowledges what its validation rejects, so what it has is the only sign.
func (i *Istiod) ReportRejected(rejected []Rejected) (found []Finding) {
	type group struct {
		registry string
		old      bool
	}
	lists := make(map[group][]string)
	var order []group
	for _, r := range rejected {
		g := group{r.registry, r.has != ""}
		if lists[g] == nil {
			order = append(order, g)
		}
		lists[g] = append(lists[g], r.key)
	}
	for _, g := range order {
		list := lists[g]
		resources := Count(len(list), "resource", "resources")
		problem := fmt.Sprintf("it does not have %s of registry %s that it was sent", resources, g.registry)
		if g.old {
			problem = fmt.Sprintf("it has %s of registry %s in an old version, and not as last sent", resources, g.registry)
		}
		found = append(found, Finding{
			Check: "istiod-rejected", Severity: Failure, Subject: "istiod " + i.name,
			Problem: problem + ": its validation rejects that, which it acknowledges all the same: " + some(list),
			Change:  "istiod's log says why (\"Error adding a new resource to the store\", \"Error updating an existing resource in the store\"); correct what it names in the registry",
		})
	}
	return found
}

// Unsettled reports whether a response that was under way before still is.
func Unsettled(before, later []Sink) bool {
	for i := range later {
		for _, f := range CheckSinks(Sinks{List: before}, Sinks{List: later[i : i+1]}, 0) {
			if f.Check == "sink-ack" {
				return true
			}
		}
	}
	return false
}

// Condition is something that is wrong with a running bridge, as its admin API
// describes it.
type Condition struct {
	Kind     string    `json:"condition"`
	Severity string    `json:"severity"`
	Subject  string    `json:"subject"`
	Since    time.Time `json:"since"`
	Problem  string    `json:"problem"`
	Affects  string    `json:"affects"`
	Cure     string    `json:"cure"`
	Link     string    `json:"link"`
}

// ReadConditions reads what is wrong with a bridge.
func ReadConditions(ctx context.Context, get Getter) ([]Condition, error) {
	var list struct {
		Items []Condition `json:"items"`
	}
	err := read(ctx, get, "/api/v1/conditions", &list)
	return list.Items, err
}

// CheckConditions returns what is wrong with a bridge, but for its sinks, which
// [CheckSinks] looks at more closely.
func CheckConditions(conditions []Condition) (found []Finding) {
	for _, c := range conditions {
		if strings.HasPrefix(c.Subject, "sink") || c.Kind == "no-sinks" {
			continue
		}
		severity := map[string]Severity{"critical": Failure, "warning": Warning}[c.Severity]
		if severity == "" {
			severity = Note
		}
		found = append(found, Finding{
			Check: c.Kind, Severity: severity, Subject: c.Subject + " of the bridge",
			Problem: fmt.Sprintf("%s, since %s. %s", strings.TrimSuffix(c.Problem, "."), c.Since.UTC().Format(time.RFC3339), c.Affects),
			Change:  strings.TrimSpace(c.Cure + "\n" + c.Link),
		})
	}
	return found
}
