package suite

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/plugin/wire"
	"github.com/isthmus-mesh/isthmus/server/encode"
)

// World is the state received on a stream, as a bridge would hold it.
type World struct {
	// Synced reports the end of the first full listing.
	Synced bool
	// Degraded is why the registry cannot be followed, or "".
	Degraded string
	// Problems are the listed problems: reasons by id.
	Problems map[string]string
	// LeftOut is what is not meant to be served: reasons by id.
	LeftOut map[string]string
	// Upserts and Removals count those received.
	Upserts, Removals int

	collections map[string]bool
	resources   map[id]entry
	kept        map[id]bool
	metrics     map[string]float64 // values by name
}

var metricName = regexp.MustCompile(wire.MetricName)

type id struct{ collection, name string }

type entry struct {
	resource *mcp.Resource
	raw      []byte // as sent
	service  string
}

func newWorld(collections []string) *World {
	w := &World{Problems: map[string]string{}, LeftOut: map[string]string{}, collections: map[string]bool{}, resources: map[id]entry{}, kept: map[id]bool{}, metrics: map[string]float64{}}
	for _, c := range collections {
		w.collections[c] = true
	}
	return w
}

// WantInstances returns an error unless the service with the host has so many
// instances.
func (w *World) WantInstances(host string, want int) error {
	name := w.serviceOf(host)
	if name == "" {
		return fmt.Errorf("no host %s among %q", host, w.Names(collection.ServiceEntry))
	}
	if n := len(w.WorkloadEntries(name)); n != want {
		return fmt.Errorf("%s has %d instances, want %d", name, n, want)
	}
	return nil
}

// serviceOf returns the name of the ServiceEntry with a host, or "".
func (w *World) serviceOf(host string) string {
	for _, name := range w.Names(collection.ServiceEntry) {
		if slices.Contains(w.ServiceEntry(name).GetHosts(), host) {
			return name
		}
	}
	return ""
}

// instancesOf returns the names of the instances of a host, sorted.
func (w *World) instancesOf(host string) []string {
	return slices.Sorted(maps.Keys(w.WorkloadEntries(w.serviceOf(host))))
}

// Names returns the names of a collection's resources, sorted.
func (w *World) Names(coll string) []string {
	var out []string
	for i := range w.resources {
		if i.collection == coll {
			out = append(out, i.name)
		}
	}
	slices.Sort(out)
	return out
}

// Resource returns a resource, or nil.
func (w *World) Resource(collection, name string) *mcp.Resource {
	return w.resources[id{collection, name}].resource
}

// Metric returns the value of one of the adapter's own metrics, and whether it
// was told.
func (w *World) Metric(name string) (value float64, ok bool) {
	value, ok = w.metrics[name]
	return value, ok
}

// Keeps reports whether the stream told the bridge to retain a resource that
// the plugin cannot send.
func (w *World) Keeps(collection, name string) bool { return w.kept[id{collection, name}] }

// ServiceEntry returns the ServiceEntry of a name, or nil.
func (w *World) ServiceEntry(name string) *networking.ServiceEntry {
	var se networking.ServiceEntry
	if r := w.Resource(collection.ServiceEntry, name); r == nil || proto.Unmarshal(r.GetBody().GetValue(), &se) != nil {
		return nil
	}
	return &se
}

// WorkloadEntries returns the instances of a ServiceEntry, by name.
func (w *World) WorkloadEntries(service string) map[string]*networking.WorkloadEntry {
	out := make(map[string]*networking.WorkloadEntry)
	for i, e := range w.resources {
		var we networking.WorkloadEntry
		if e.service == service && i.collection == collection.WorkloadEntry && proto.Unmarshal(e.resource.GetBody().GetValue(), &we) == nil {
			out[i.name] = &we
		}
	}
	return out
}

// apply applies a message as a bridge does, and returns all violations of the
// contract in it.
func (w *World) apply(resp *pluginv1.WatchResponse) error {
	var all []error
	bad := func(format string, args ...any) {
		if len(all) < 20 {
			all = append(all, fmt.Errorf(format, args...))
		}
	}
	if n := proto.Size(resp); n > wire.MaxMessage {
		bad("a message of %d bytes; at most %d are accepted", n, wire.MaxMessage)
	}
	named := make(map[id]bool)
	once := func(i id) {
		if named[i] && i.collection != "" && i.name != "" {
			bad("%s %q is in one message twice; a message names a resource once: set, removed or kept", i.collection, i.name)
		}
		named[i] = true
	}
	for _, r := range resp.GetRemovals() {
		w.Removals++
		i := id{r.GetCollection(), r.GetName()}
		once(i)
		if !w.collections[i.collection] {
			bad("removal of %q from collection %q, which Describe does not name", i.name, i.collection)
		}
		delete(w.resources, i)
		delete(w.kept, i)
	}
	for _, u := range resp.GetUpserts() {
		w.Upserts++
		part, err := encode.Parse(u.GetResource(), nil)
		if err != nil {
			bad("upsert: %w", err)
			continue
		}
		i := id{part.Collection, part.Name}
		once(i)
		var res mcp.Resource
		if err := proto.Unmarshal(u.GetResource(), &res); err != nil {
			bad("upsert of %s %q: %w", i.collection, i.name, err)
			continue
		}
		if !w.collections[i.collection] {
			bad("upsert of %q in collection %q, which Describe does not name", i.name, i.collection)
		}
		if err := checkResource(&res, i, u.GetService()); err != nil {
			bad("upsert of %s %q: %w", i.collection, i.name, err)
		}
		if old, ok := w.resources[i]; ok && !proto.Equal(old.resource.GetMetadata().GetCreateTime(), res.GetMetadata().GetCreateTime()) {
			bad("upsert of %s %q: create_time changed from %v to %v", i.collection, i.name,
				old.resource.GetMetadata().GetCreateTime(), res.GetMetadata().GetCreateTime())
		}
		w.resources[i] = entry{&res, u.GetResource(), u.GetService()}
		delete(w.kept, i)
	}
	for _, u := range resp.GetUpserts() {
		if s := u.GetService(); s != "" && w.resources[id{collection.ServiceEntry, s}].service != s {
			bad("an instance belongs to ServiceEntry %q, which was not sent before or in the same message with its own name as its service", s)
		}
	}
	for _, name := range resp.GetRelisted() {
		if name == "" || w.resources[id{collection.ServiceEntry, name}].service != name {
			bad("ServiceEntry %q is relisted, which was not sent before or in the same message with its own name as its service", name)
		}
	}
	for _, k := range resp.GetKept() {
		i := id{k.GetCollection(), k.GetName()}
		once(i)
		if i.collection != "" && !w.collections[i.collection] {
			bad("%q is kept in collection %q, which Describe does not name", i.name, i.collection)
		}
		w.kept[i] = true
	}
	for _, m := range resp.GetMetrics() {
		name, counter := m.GetName(), m.GetKind() == pluginv1.MetricKind_METRIC_KIND_COUNTER
		switch was, known := w.metrics[name]; {
		case !metricName.MatchString(name):
			bad("the metric %q must match %s", name, wire.MetricName)
		case !counter && m.GetKind() != pluginv1.MetricKind_METRIC_KIND_GAUGE:
			bad("the metric %q is neither a counter nor a gauge", name)
		case counter != strings.HasSuffix(name, "_total"):
			bad("the metric %q: counters, and they alone, end in _total", name)
		case math.IsNaN(m.GetValue()) || math.IsInf(m.GetValue(), 0) || counter && m.GetValue() < was:
			bad("the metric %q is %v, and was %v", name, m.GetValue(), was)
		case !known && len(w.metrics) >= wire.MaxMetrics:
			bad("there are more than %d metrics", wire.MaxMetrics)
		default:
			w.metrics[name] = m.GetValue()
		}
	}
	note := func(list map[string]string, problems []*pluginv1.Problem) {
		for _, p := range problems {
			switch {
			case p.GetId() == "":
				bad("a problem without an id: %q", p.GetReason())
			case p.GetReason() == "":
				delete(list, p.GetId())
			default:
				list[p.GetId()] = p.GetReason()
			}
		}
	}
	note(w.Problems, resp.GetProblems())
	note(w.LeftOut, resp.GetLeftOut())
	if resp.GetSynced() {
		if w.Synced {
			bad("synced was sent twice on one stream")
		}
		w.Synced = true
	}
	if s := resp.GetStatus(); s != nil {
		w.Degraded = s.GetError()
	}
	return errors.Join(all...)
}

// checkResource checks what encode.Parse does not check.
func checkResource(res *mcp.Resource, i id, service string) error {
	var all []error
	meta := res.GetMetadata()
	if err := meta.GetCreateTime().CheckValid(); err != nil || proto.Equal(meta.GetCreateTime(), &timestamppb.Timestamp{}) {
		all = append(all, errors.New("metadata.create_time must be a time after 1970"))
	}
	if meta.GetVersion() != "" {
		all = append(all, errors.New("metadata.version must be empty: the bridge hashes the content itself"))
	}
	if _, ok := meta.GetAnnotations()["proxy.istio.io/health-checks-enabled"]; ok {
		all = append(all, errors.New("the annotation proxy.istio.io/health-checks-enabled must not be sent"))
	}
	if service != "" && i.collection != collection.WorkloadEntry && i != (id{collection.ServiceEntry, service}) {
		all = append(all, fmt.Errorf("it states the service %q; only that ServiceEntry itself may, and its WorkloadEntries", service))
	}
	switch i.collection {
	case collection.ServiceEntry:
		var se networking.ServiceEntry
		if err := proto.Unmarshal(res.GetBody().GetValue(), &se); err != nil {
			return err
		}
		all = append(all, checkServiceEntry(&se))
		if service != "" && (len(se.GetEndpoints()) > 0 || se.GetWorkloadSelector() != nil) {
			all = append(all, errors.New("a ServiceEntry that states its service must have neither endpoints nor workloadSelector: the bridge adds them"))
		}
	case collection.WorkloadEntry:
		var we networking.WorkloadEntry
		if err := proto.Unmarshal(res.GetBody().GetValue(), &we); err != nil {
			return err
		}
		if we.GetAddress() == "" {
			all = append(all, errors.New("address is empty"))
		}
		for name, port := range we.GetPorts() {
			if !isLabel(name) || port < 1 || port > 65535 {
				all = append(all, fmt.Errorf("ports: %q: %d: must be a DNS label and 1-65535", name, port))
			}
		}
	}
	return errors.Join(all...)
}

var protocols = strings.Fields("tcp udp grpc grpc-web http http_proxy http2 https tls mongo mysql redis")

// checkServiceEntry checks what istiod would reject silently.
func checkServiceEntry(se *networking.ServiceEntry) error {
	var all []error
	if len(se.GetHosts()) == 0 {
		all = append(all, errors.New("hosts is empty"))
	}
	for _, h := range se.GetHosts() {
		labels := strings.Split(strings.TrimPrefix(h, "*."), ".")
		if len(h) > 255 || slices.ContainsFunc(labels, func(l string) bool { return !isLabel(l) }) ||
			strings.Trim(labels[len(labels)-1], "0123456789") == "" {
			all = append(all, fmt.Errorf("hosts: %q is no host", h))
		}
	}
	if len(se.GetPorts()) == 0 {
		all = append(all, errors.New("ports is empty"))
	}
	names, numbers := map[string]bool{}, map[uint32]bool{}
	for _, p := range se.GetPorts() {
		switch {
		case !isLabel(p.GetName()):
			all = append(all, fmt.Errorf("ports: the name %q is not a DNS label", p.GetName()))
		case names[p.GetName()] || numbers[p.GetNumber()]:
			all = append(all, fmt.Errorf("ports: the name %q or number %d is there twice", p.GetName(), p.GetNumber()))
		case p.GetNumber() < 1 || p.GetNumber() > 65535:
			all = append(all, fmt.Errorf("ports: the number %d of %q is not a port", p.GetNumber(), p.GetName()))
		case !slices.Contains(protocols, strings.ToLower(p.GetProtocol())):
			all = append(all, fmt.Errorf("ports: the protocol %q of %q must be one of %s", p.GetProtocol(), p.GetName(), strings.Join(protocols, ", ")))
		}
		names[p.GetName()], numbers[p.GetNumber()] = true, true
	}
	if len(se.GetEndpoints()) > 0 && se.GetWorkloadSelector() != nil {
		all = append(all, errors.New("it has both endpoints and workloadSelector"))
	}
	return errors.Join(all...)
}

func isLabel(s string) bool {
	if s == "" || len(s) > 63 || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	return strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789-") == ""
}

// withoutEndpoints returns an error if instances belong to no service and all
// services lack them, and a [*Warning] about single ones.
func (w *World) withoutEndpoints() error {
	has := make(map[string]int)
	stray := ""
	for i, e := range w.resources {
		switch {
		case i.collection != collection.WorkloadEntry:
		case e.service != "":
			has[e.service]++
		case stray == "" || i.name < stray:
			stray = i.name
		}
	}
	var empty []string
	services := 0
	for _, name := range w.Names(collection.ServiceEntry) {
		se := w.ServiceEntry(name)
		if se == nil || se.GetWorkloadSelector() != nil || len(se.GetEndpoints()) > 0 || se.GetResolution() != networking.ServiceEntry_STATIC {
			continue
		}
		if services++; has[name] == 0 {
			empty = append(empty, name)
		}
	}
	switch {
	case len(empty) == 0:
		return nil
	case len(empty) == services && stray != "":
		return fmt.Errorf("no service has an endpoint, and the WorkloadEntry %q belongs to none: state the name of its ServiceEntry as the service of the upsert, and that of the ServiceEntry itself as its own", stray)
	}
	return &Warning{fmt.Sprintf("%d of %d services have no endpoint, %q among them", len(empty), services, empty[0])}
}

// differs returns what another process sends differently.
func (w *World) differs(other *World) error {
	a, b := w.keys(), other.keys()
	if !slices.Equal(a, b) {
		return fmt.Errorf("one process sends %d resources, another one others or more or fewer: %d", len(a), len(b))
	}
	for _, i := range slices.SortedFunc(maps.Keys(w.resources), func(a, b id) int { return strings.Compare(a.collection+" "+a.name, b.collection+" "+b.name) }) {
		was, is := w.resources[i].resource, other.resources[i].resource
		if from, to := was.GetMetadata().GetCreateTime(), is.GetMetadata().GetCreateTime(); !proto.Equal(from, to) {
			return fmt.Errorf("create_time of %s %q was %s in one process and %s in another", i.collection, i.name, from.AsTime(), to.AsTime())
		}
		if !bytes.Equal(w.resources[i].raw, other.resources[i].raw) {
			return fmt.Errorf("the bytes of %s %q differ between two processes", i.collection, i.name)
		}
	}
	return nil
}

// createTimes returns the create_time of every resource.
func (w *World) createTimes() map[id]string {
	out := make(map[id]string, len(w.resources))
	for i, e := range w.resources {
		out[i] = e.resource.GetMetadata().GetCreateTime().String()
	}
	return out
}

// keys returns the names of all resources, for messages.
func (w *World) keys() []string {
	var out []string
	for i := range maps.Keys(w.resources) {
		out = append(out, i.collection+" "+i.name)
	}
	slices.Sort(out)
	return out
}
