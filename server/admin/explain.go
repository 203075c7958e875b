package admin

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-mesh/isthmus/server/conditions"
	"github.com/isthmus-mesh/isthmus/server/kubernetes"
	"github.com/isthmus-mesh/isthmus/server/state/status"
)

// Explanation is the way of one host from the registries to the sinks.
type Explanation struct {
	Host string `json:"host"`
	// Summary is what matters most, in sentences, with the remedy.
	Summary []string `json:"summary"`
	// Registries are all of them, in the order of the configuration.
	Registries []ExplainedRegistry `json:"registries"`
	// Resources are what is served.
	Resources []ExplainedResource `json:"resources"`
	Sinks     []ExplainedSink     `json:"sinks"`
	// Consumers are all of the configuration, if something is served.
	Consumers []ExplainedConsumer `json:"consumers,omitempty"`
	// Similar are other hosts, if no registry has this one.
	Similar []string `json:"similar,omitempty"`
	// Shard is the shard of the host, and OwnShards are those of this process;
	// empty unless the process has some only and not the host's.
	Shard     string `json:"shard,omitempty"`
	OwnShards string `json:"own_shards,omitempty"`
	// Conditions are what is wrong with the bridge, its sinks, and the
	// registries of the host: all of them if no registry has it.
	Conditions []conditions.Condition `json:"conditions"`
}

// ExplainedRegistry is what one registry has of a host.
type ExplainedRegistry struct {
	Registry string `json:"registry"`
	Adapter  string `json:"adapter"`
	Phase    string `json:"phase"`
	// Error is why the registry may be stale; empty while it is followed.
	Error string `json:"error,omitempty"`
	// Unknown is why Services may be incomplete.
	Unknown string `json:"unknown,omitempty"`
	// Listed reports whether a complete state of the registry is served.
	Listed bool `json:"listed"`
	// Services are those of the registry, as its plugin knows them.
	Services []ExplainedService `json:"services,omitempty"`
	// Claims are the ServiceEntries that the bridge has of the registry.
	Claims []status.Claim `json:"claims,omitempty"`
}

// ExplainedService is a service in the words of the registry.
type ExplainedService struct {
	Key   string `json:"key"`
	Host  string `json:"host,omitempty"`
	Entry string `json:"entry,omitempty"` // name of the ServiceEntry; empty if it is left out
	// Original reports that the instances are as the registry states them.
	// Otherwise they are as they were translated.
	Original  bool                `json:"original"`
	Steps     []ExplainedStep     `json:"steps,omitempty"`
	Instances []ExplainedInstance `json:"instances"`
	More      uint64              `json:"more,omitempty"` // instances beyond those
}

// ExplainedStep is one rule that decided something.
type ExplainedStep struct {
	Rule    string `json:"rule"`
	Subject string `json:"subject,omitempty"`
	Text    string `json:"text"`
}

// ExplainedInstance is an instance in the words of the registry.
type ExplainedInstance struct {
	ID       string            `json:"id"`
	Address  string            `json:"address,omitempty"`
	Ports    []string          `json:"ports,omitempty"`
	Health   string            `json:"health,omitempty"`
	Disabled bool              `json:"disabled,omitempty"`
	Weight   string            `json:"weight,omitempty"`
	Meta     map[string]string `json:"meta,omitempty"`
	Tags     []string          `json:"tags,omitempty"`
	Node     string            `json:"node,omitempty"`
	Locality string            `json:"locality,omitempty"`
	Resource string            `json:"resource,omitempty"` // its WorkloadEntry; empty if it is left out
	Steps    []ExplainedStep   `json:"steps,omitempty"`
}

// ExplainedResource is a served resource.
type ExplainedResource struct {
	Registry   string          `json:"registry"`
	Collection string          `json:"collection"`
	Name       string          `json:"name"`
	Version    string          `json:"version"`
	Body       json.RawMessage `json:"body,omitempty"`
}

// ExplainedSink says whether a sink has what is served.
type ExplainedSink struct {
	Node     string `json:"node,omitempty"`
	Address  string `json:"address"`
	Protocol string `json:"protocol"`
	Profile  string `json:"profile"`
	Shape    string `json:"shape"`
	// Collection is the one of the host's resources that the sink was sent
	// last; empty if it has asked for none.
	Collection string `json:"collection,omitempty"`
	// State is waiting, not sent, sent, acknowledged, refused, too large, by
	// name, not asked or not in its view.
	State        string    `json:"state"`
	SentVersion  string    `json:"sent_version,omitempty"`
	SentAt       time.Time `json:"sent_at,omitzero"`
	AckedVersion string    `json:"acked_version,omitempty"`
	AckedAt      time.Time `json:"acked_at,omitzero"`
	LastNack     string    `json:"last_nack,omitempty"`
}

// ExplainedConsumer says what a consumer has written of what is served.
type ExplainedConsumer struct {
	Consumer string `json:"consumer"`
	// State is that of an object, or: standby, if another process writes;
	// waiting, while registries have not completed a first listing; stopped, if
	// nothing is written; not in its view.
	State string `json:"state"`
	// Reason is why it is not written, in the API server's words if it refuses
	// it; for standby, which process writes.
	Reason string    `json:"reason,omitempty"`
	Object string    `json:"object,omitempty"` // namespace/name
	Since  time.Time `json:"since,omitzero"`
}

// Explain says what became of ServiceEntries at the consumer.
func (c *Consumer) Explain(entries []string) (out []ExplainedConsumer) {
	one := func(state, reason string) []ExplainedConsumer {
		return []ExplainedConsumer{{Consumer: c.Name, State: state, Reason: reason, Since: c.Since}}
	}
	switch {
	case c.Error != "" && !c.Writer:
		return one("stopped", c.Error)
	case !c.Writer:
		return one("standby", c.Holder)
	case c.Waiting:
		return one("waiting", "")
	}
	for o := range c.All() {
		if slices.Contains(entries, o.Entry) {
			out = append(out, ExplainedConsumer{Consumer: c.Name, State: string(o.State), Reason: cmp.Or(o.Reason, stoppedBy(&o, c.Error)), Object: o.Name, Since: o.Since})
		}
	}
	if out == nil {
		return one("not in its view", "")
	}
	slices.SortFunc(out, func(a, b ExplainedConsumer) int { return strings.Compare(a.Object, b.Object) })
	return out
}

// stoppedBy returns the error of a consumer if it is why an object is pending.
func stoppedBy(o *kubernetes.Object, err string) string {
	if o.State == kubernetes.Pending {
		return err
	}
	return ""
}

// Class returns the class of the state.
func (c *ExplainedConsumer) Class() string {
	switch c.State {
	case "standby", "not in its view":
		return "faint"
	case "stopped":
		return "bad"
	}
	return objectClass(kubernetes.State(c.State))
}

// explain says what somebody has to know of a consumer, "" if there is nothing.
func (c *ExplainedConsumer) explain() string {
	switch c.State {
	case string(kubernetes.Written), "standby", "not in its view":
		return ""
	case "stopped":
		return fmt.Sprintf("Consumer %s writes nothing: %s.", c.Consumer, strings.TrimSuffix(c.Reason, "."))
	case "waiting":
		return fmt.Sprintf("Consumer %s writes nothing until every required registry has completed its first listing.", c.Consumer)
	case string(kubernetes.Without):
		return fmt.Sprintf("Consumer %s writes nothing for it: %s.", c.Consumer, strings.TrimSuffix(c.Reason, "."))
	case string(kubernetes.Pending):
		text := fmt.Sprintf("Consumer %s is still to write %s", c.Consumer, c.Object)
		if c.Reason != "" {
			text += ": " + strings.TrimSuffix(c.Reason, ".")
		}
		return text + "."
	}
	return fmt.Sprintf("Consumer %s cannot write %s (%s): %s.", c.Consumer, c.Object, c.State, strings.TrimSuffix(c.Reason, "."))
}

// explain writes the summary.
func (e *Explanation) explain() {
	var out []string
	say := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	found, serving := false, 0
	for i := range e.Registries {
		r := &e.Registries[i]
		found = found || len(r.Services)+len(r.Claims) > 0
		for _, s := range r.Services {
			shadowed := slices.ContainsFunc(r.Claims, func(c status.Claim) bool { return c.Name == s.Entry && c.Outcome == "shadowed" })
			if s.Host != "" && s.Entry != "" && s.Host != e.Host && s.Key != e.Host {
				say("Its host is %s.", s.Host)
			}
			out = append(out, s.explain(r.Registry, shadowed)...)
		}
		for _, c := range r.Claims {
			if c.Outcome != "shadowed" {
				serving++
			}
			switch {
			case c.Outcome == "shadowed" && c.Owner == r.Registry:
				say("%s of registry %s is not served: %s.", c.Name, r.Registry, strings.TrimSuffix(c.Reason, "."))
			case c.Outcome == "shadowed":
				say("Registry %s is not served for this host: %s.", r.Registry, strings.TrimSuffix(c.Reason, "."))
			case c.Reason != "":
				say("Registry %s: %s.", r.Registry, strings.TrimSuffix(c.Reason, "."))
			}
			if c.Rejected != "" {
				say("Registry %s: the newest version of %s is not served: %s.", r.Registry, c.Name, c.Rejected)
			}
			if len(c.Removals) > 0 {
				k := c.Removals[0]
				until := "until somebody allows its removal"
				if !k.Until.IsZero() {
					until = "until " + k.Until.UTC().Format("15:04:05 UTC")
				}
				say("Registry %s no longer has %s of %s, which is still served (%s), %s: isthmus removals allow %s removes it now, isthmus removals keep %s keeps it.",
					r.Registry, countOf(c.RemovalCount, "resource", "resources"), c.Name, k.Reason, until, r.Registry, r.Registry)
			}
		}
		if r.Error != "" && len(r.Services)+len(r.Claims) > 0 {
			say("Registry %s cannot be followed, so this may be old: %s.", r.Registry, r.Error)
		}
	}
	if !found {
		for _, r := range e.Registries {
			switch {
			case !r.Listed:
				say("Registry %s has not completed its first listing, so it may yet have the host: %s.", r.Registry, cmp.Or(r.Error, "it is "+r.Phase))
			case r.Error != "":
				say("Registry %s cannot be followed, so it may have the host by now: %s.", r.Registry, r.Error)
			}
		}
		none := fmt.Sprintf("No registry has %s", e.Host)
		switch {
		case e.Shard != "":
			none = fmt.Sprintf("%s is not one of this process's hosts: it would be in shard %s, and this process follows %s (--shards); ask the one that has it", e.Host, e.Shard, e.OwnShards)
		case len(e.Registries) == 0:
			none = "The configuration has no registry; add one under registries"
		case len(e.Similar) > 0:
			none += fmt.Sprintf(": did you mean %s? A host is what translate.host makes of the service's name", strings.Join(e.Similar, ", "))
		default:
			none += ": register the service, or see translate.host for the hosts that its name becomes, and the registry's config for what is followed"
		}
		e.Summary = append([]string{none + "."}, out...)
		return
	}
	if serving > 0 {
		out = append(out, e.explainSinks())
		for i := range e.Consumers {
			if text := e.Consumers[i].explain(); text != "" {
				out = append(out, text)
			}
		}
	}
	e.Summary = out
}

func countOf(n int, one, more string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, more)
}

func isOrAre(n int) string {
	if n == 1 {
		return "1 is"
	}
	return fmt.Sprintf("%d are", n)
}

// explain says how many instances take traffic, and why the others do not.
func (s *ExplainedService) explain(registry string, shadowed bool) (out []string) {
	served := 0
	reasons := make(map[string][]string)
	var local []string
	for _, i := range s.Instances {
		if i.Resource != "" {
			if ip, err := netip.ParseAddr(i.Address); err == nil && ip.IsLoopback() {
				local = append(local, i.ID)
			}
			served++
			continue
		}
		reason := "it is left out with its service"
		if len(i.Steps) > 0 {
			if reason = i.Steps[0].Text; !strings.Contains(reason, i.Steps[0].Rule) {
				reason += " (" + i.Steps[0].Rule + ")"
			}
		}
		reasons[reason] = append(reasons[reason], i.ID)
	}
	if s.Entry == "" {
		why := ""
		for _, step := range s.Steps {
			if strings.Contains(step.Text, "left out") || strings.Contains(step.Text, "not served") {
				why = step.Text
			}
		}
		for _, i := range s.Instances { // which may be why the service is not
			if why == "" && len(i.Steps) > 0 {
				why = fmt.Sprintf("instance %s %s (%s)", i.ID, i.Steps[0].Text, i.Steps[0].Rule)
			}
		}
		why = cmp.Or(why, "no reason is known")
		return []string{fmt.Sprintf("Registry %s has the service %s, which is not served: %s.", registry, s.Key, strings.TrimSuffix(why, "."))}
	}
	out = append(out, fmt.Sprintf("Registry %s has the service %s with %s, of which %s fit for traffic.",
		registry, s.Key, countOf(len(s.Instances)+int(s.More), "instance", "instances"), isOrAre(served))) //nolint:gosec // a service has no 2^31 instances
	if s.More > 0 {
		out[0] = fmt.Sprintf("Registry %s has the service %s with %d instances; of the first %d, %s fit for traffic.",
			registry, s.Key, uint64(len(s.Instances))+s.More, len(s.Instances), isOrAre(served))
	}
	if shadowed {
		return []string{strings.TrimSuffix(out[0], ".") + "; it is shadowed."}
	}
	if len(local) > 0 {
		out = append(out, fmt.Sprintf("Instance %s is served with an address of the machine itself, at which each client reaches itself: register it with an address that others reach.", strings.Join(local[:min(len(local), 3)], ", ")))
	}
	list := make([]string, 0, len(reasons))
	for reason := range reasons {
		list = append(list, reason)
	}
	slices.SortFunc(list, func(a, b string) int {
		return cmp.Or(cmp.Compare(len(reasons[b]), len(reasons[a])), strings.Compare(a, b))
	})
	for _, reason := range list {
		if ids := reasons[reason]; len(ids) > 3 {
			out = append(out, fmt.Sprintf("%d instances, %s among them: each %s.", len(ids), ids[0], reason))
		} else {
			out = append(out, fmt.Sprintf("Instance %s %s.", strings.Join(ids, ", "), reason))
		}
	}
	return out
}

// explainSinks says how many sinks have what is served.
func (e *Explanation) explainSinks() string {
	if len(e.Sinks) == 0 {
		return "No sink is connected, so nobody receives it: name this bridge's xDS address in configSources of istiod's mesh configuration."
	}
	acked, of := 0, 0
	var lacking []string
	for _, s := range e.Sinks {
		if s.State == "not in its view" {
			continue
		}
		of++
		if s.State == "acknowledged" {
			acked++
			continue
		}
		what := s.State
		switch {
		case s.LastNack != "" && s.State == "refused":
			what += ": " + s.LastNack
		case s.State == "too large":
			what = "the response is larger than it receives, so it ends the stream and comes back for the same; isthmus doctor says what to change"
		}
		lacking = append(lacking, fmt.Sprintf("%s (%s)", cmp.Or(s.Node, s.Address), what))
	}
	if of == 0 {
		return "No connected sink has it in its view: see the views of the listeners and rules in the configuration."
	}
	text := fmt.Sprintf("%d of %s acknowledged it", acked, countOf(of, "sink has", "sinks have"))
	if len(lacking) > 0 {
		text += "; the rest: " + strings.Join(lacking[:min(len(lacking), 5)], ", ")
	}
	return text + "."
}

// explain answers /api/v1/explain.
func (s *Server) explain(w http.ResponseWriter, r *http.Request) {
	host := r.URL.Query().Get("host")
	_, err := parseQuery(r.URL.Query(), "host")
	if err == nil && (host == "" || len(host) > maxHostQuery) {
		err = fmt.Errorf("host is missing, or longer than %d: ask for /api/v1/explain?host=web.example.org", maxHostQuery)
	}
	if err != nil {
		writeError(w, http.StatusBadRequest, err.Error())
		return
	}
	e := s.explanation(r, host)
	writeJSON(w, http.StatusOK, e)
}

// maxHostQuery bounds a host that is asked for.
const maxHostQuery = 512

// explanation asks the source and writes the summary.
func (s *Server) explanation(r *http.Request, host string) Explanation {
	e := s.source.Explain(r.Context(), strings.TrimSuffix(strings.ToLower(strings.TrimSpace(host)), "."))
	e.Conditions = e.concerning(s.source.Conditions())
	e.explain()
	return e
}

// concerning returns the conditions that may be why the host is not as it
// should be.
func (e *Explanation) concerning(all []conditions.Condition) []conditions.Condition {
	out, found := []conditions.Condition{}, false
	without := make(map[string]bool) // registries that do not have it
	for i := range e.Registries {
		r := &e.Registries[i]
		has := len(r.Services)+len(r.Claims) > 0
		without["registry "+r.Registry], found = !has, found || has
	}
	for _, c := range all {
		if !found || !without[c.Subject] {
			out = append(out, c)
		}
	}
	return out
}
