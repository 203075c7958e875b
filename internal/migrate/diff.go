package migrate

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strings"

	networking "istio.io/api/networking/v1alpha3"
)

// Difference is one fact in which two sources differ.
type Difference struct {
	Host string `json:"host"`
	// What is the kind of fact, with its subject: host, port, protocol,
	// resolution, location, endpoint, weight, label, locality or service
	// account.
	What string `json:"what"`
	Old  string `json:"old,omitempty"`
	New  string `json:"new,omitempty"`
	// Why is the rule that caused the difference, "" if unknown.
	Why string `json:"why,omitempty"`
	// Field is the configuration field that controls the rule.
	Field string `json:"field,omitempty"`
}

// String returns a line for display.
func (d Difference) String() string {
	text := fmt.Sprintf("%s: %s: old %s, new %s", d.Host, d.What, cmp.Or(d.Old, "-"), cmp.Or(d.New, "-"))
	if d.Why != "" {
		text += ": " + d.Why
	}
	if d.Field != "" {
		text += " (" + d.Field + ")"
	}
	return text
}

// Report is the outcome of a comparison.
type Report struct {
	Differences []Difference `json:"differences"`
	// Services is the number of hosts in either source, Facts that of all
	// compared facts.
	Services int `json:"services"`
	Facts    int `json:"facts"`
	// Explained is the number of differences with a known rule.
	Explained int `json:"explained"`
}

// Equal returns the share of equal facts, in percent.
func (r *Report) Equal() float64 {
	if r.Facts == 0 {
		return 100
	}
	return 100 * float64(r.Facts-len(r.Differences)) / float64(r.Facts)
}

// String returns the summary.
func (r *Report) String() string {
	explained := 100.0
	if n := len(r.Differences); n > 0 {
		explained = 100 * float64(r.Explained) / float64(n)
	}
	return fmt.Sprintf("%d services, %d facts: %.4g %% equal, %d differences, %.4g %% of them explained", r.Services, r.Facts, r.Equal(), len(r.Differences), explained)
}

// service is a host in one source.
type service struct {
	host                 string
	resolution, location string
	ports                map[uint32]port
	endpoints            map[string]endpoint // by address and ports
}

type port struct{ name, protocol string }

type endpoint struct {
	weight                   uint32
	labels                   map[string]string
	locality, serviceAccount string
}

// Compare compares two sources by meaning: what clients of the mesh observe of
// each host. It ignores the case of hosts, the names of resources, the order of
// endpoints, the scale of weights, and labels that this program adds.
func Compare(older, newer *Source) *Report {
	a, _ := older.snapshot()
	b, _ := newer.snapshot()
	return compare(services(a), services(b))
}

func compare(older, newer map[string]*service) *Report {
	r := &Report{Differences: []Difference{}}
	hosts := map[string]bool{}
	for h := range older {
		hosts[h] = true
	}
	for h := range newer {
		hosts[h] = true
	}
	r.Services = len(hosts)
	for _, host := range slices.Sorted(maps.Keys(hosts)) {
		c := comparison{r: r, host: host, old: older[host], new: newer[host]}
		c.run()
	}
	for _, d := range r.Differences {
		if d.Why != "" {
			r.Explained++
		}
	}
	return r
}

// comparison is the comparison of one host.
type comparison struct {
	r        *Report
	host     string
	old, new *service
}

func (c *comparison) fact(what, older, newer string, equal bool, why, field string) {
	c.r.Facts++
	if !equal {
		c.r.Differences = append(c.r.Differences, Difference{c.host, what, older, newer, why, field})
	}
}

func (c *comparison) run() {
	switch {
	case c.old == nil:
		why := ""
		if len(c.new.endpoints) == 0 {
			why = "a service none of whose instances takes traffic is served without endpoints, so that clients get an error at once"
		}
		c.fact("host", "", c.new.host, false, why, "translate.host")
		return
	case c.new == nil:
		why := ""
		if len(c.old.endpoints) == 0 {
			why = "a service without instances is nothing"
		}
		c.fact("host", c.old.host, "", false, why, "translate.host")
		return
	}
	why := ""
	if !legalHost.MatchString(strings.ToLower(c.old.host)) {
		why = "istiod rejects the old one; it is made legal"
	}
	field := "translate.host"
	if strings.EqualFold(c.old.host, c.new.host) {
		why, field = "policies apply to a host with the same letters only", "translate.host_case"
	}
	c.fact("host", c.old.host, c.new.host, c.old.host == c.new.host, why, field)
	c.fact("resolution", c.old.resolution, c.new.resolution, c.old.resolution == c.new.resolution, "", "translate.resolution")
	c.fact("location", c.old.location, c.new.location, c.old.location == c.new.location, "", "translate.location")
	c.ports()
	c.endpoints()
}

var (
	legalHost  = regexp.MustCompile(`^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\.)*[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)
	legalLabel = regexp.MustCompile(`^([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$`)
	legalValue = regexp.MustCompile(`^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$`)
	illegal    = regexp.MustCompile(`[^a-z0-9.]+`)
	known      = regexp.MustCompile(`(?i)^(tcp|udp|grpc|grpc-web|http|http_proxy|http2|https|tls|mongo|redis|mysql)?$`)
)

func (c *comparison) ports() {
	numbers := map[uint32]bool{}
	for n := range c.old.ports {
		numbers[n] = true
	}
	for n := range c.new.ports {
		numbers[n] = true
	}
	for _, n := range slices.Sorted(maps.Keys(numbers)) {
		was, had := c.old.ports[n]
		is, has := c.new.ports[n]
		what := fmt.Sprintf("port %d", n)
		switch {
		case !has:
			why := ""
			if len(c.old.ports) == len(c.new.ports) {
				why = "the number of a service port is that of more than half of the instances"
			}
			c.fact(what, was.protocol, "", false, why, "translate.port_policy")
		case !had:
			why := ""
			if len(c.old.ports) == len(c.new.ports) {
				why = "the number of a service port is that of more than half of the instances"
			}
			c.fact(what, "", is.protocol, false, why, "translate.port_policy")
		default:
			why := ""
			if !known.MatchString(was.protocol) {
				why = "Istio does not know the old protocol, and routes it as a plain connection"
			}
			c.fact(what, was.protocol, is.protocol, strings.EqualFold(was.protocol, is.protocol), why, "translate.protocol")
		}
	}
}

func (c *comparison) endpoints() {
	ratio := c.ratio()
	keys := map[string]bool{}
	for k := range c.old.endpoints {
		keys[k] = true
	}
	for k := range c.new.endpoints {
		keys[k] = true
	}
	for _, k := range slices.Sorted(maps.Keys(keys)) {
		was, had := c.old.endpoints[k]
		is, has := c.new.endpoints[k]
		what := "endpoint " + k
		c.fact(what, presence(had), presence(has), had == has, "", "translate.health")
		if !had || !has {
			continue
		}
		x, y := max(was.weight, 1), max(is.weight, 1)
		c.fact("weight of "+k, fmt.Sprint(x), fmt.Sprint(y), math.Abs(float64(y)/float64(x)/ratio-1) < 1e-9, "", "translate.weights")
		c.fact("locality of "+k, was.locality, is.locality, was.locality == is.locality, "", "translate.locality")
		c.fact("service account of "+k, was.serviceAccount, is.serviceAccount, was.serviceAccount == is.serviceAccount, "", "translate.service_account")
		c.labels(k, was.labels, is.labels)
	}
}

func presence(there bool) string {
	if there {
		return "there"
	}
	return ""
}

// ratio returns the most frequent ratio of new to old weights.
func (c *comparison) ratio() float64 {
	count := map[float64]int{}
	best := 1.0
	for _, k := range slices.Sorted(maps.Keys(c.old.endpoints)) {
		if is, ok := c.new.endpoints[k]; ok {
			r := float64(max(is.weight, 1)) / float64(max(c.old.endpoints[k].weight, 1))
			if count[r]++; count[r] > count[best] {
				best = r
			}
		}
	}
	return best
}

func (c *comparison) labels(k string, was, is map[string]string) {
	keys := map[string]bool{}
	for l := range was {
		keys[l] = true
	}
	for l := range is {
		keys[l] = true
	}
	for _, l := range slices.Sorted(maps.Keys(keys)) {
		if strings.HasPrefix(l, "isthmus.io/") {
			continue // added by this program to identify endpoints
		}
		why := ""
		x, old := was[l]
		switch {
		case old && (!legalLabel.MatchString(l) || !legalValue.MatchString(x)):
			why = "istiod rejects the old one; it is made legal"
		case !old && slices.ContainsFunc(slices.Collect(maps.Keys(was)), func(o string) bool { return o != l && foldLabel(o) == foldLabel(l) }):
			why = "it stands for an old label whose key is not legal"
		case old && x == "":
			why = "an empty value says nothing"
		}
		c.fact("label "+l+" of "+k, x, is[l], x == is[l], why, "translate.labels")
	}
}

func foldLabel(s string) string { return illegal.ReplaceAllString(strings.ToLower(s), "-") }

// services returns the services of a source by normalized host.
func services(resources map[string]resource) map[string]*service {
	out, all := map[string]*service{}, workloads(resources)
	for _, key := range slices.Sorted(maps.Keys(resources)) {
		r := resources[key]
		if r.entry == nil {
			continue
		}
		endpoints := r.entry.GetEndpoints()
		if sel := r.entry.GetWorkloadSelector().GetLabels(); len(sel) > 0 {
			namespace, _, _ := strings.Cut(r.name, "/")
			endpoints = selected(all, namespace, sel)
		}
		for _, host := range r.entry.GetHosts() {
			id := strings.Trim(illegal.ReplaceAllString(strings.ToLower(host), "-"), "-.")
			s := out[id]
			if s == nil {
				s = &service{host: host, ports: map[uint32]port{}, endpoints: map[string]endpoint{}}
				out[id] = s
			}
			s.resolution, s.location = r.entry.GetResolution().String(), r.entry.GetLocation().String()
			for _, p := range r.entry.GetPorts() {
				s.ports[p.GetNumber()] = port{p.GetName(), strings.ToUpper(p.GetProtocol())}
			}
			for _, e := range endpoints {
				s.endpoints[endpointKey(e, r.entry)] = endpoint{e.GetWeight(), e.GetLabels(), e.GetLocality(), e.GetServiceAccount()}
			}
		}
	}
	return out
}

// labelled is a label of the WorkloadEntries of a namespace.
type labelled struct{ namespace, key, value string }

// workloads returns the WorkloadEntries that have each label.
func workloads(resources map[string]resource) map[labelled][]*networking.WorkloadEntry {
	out := map[labelled][]*networking.WorkloadEntry{}
	for _, key := range slices.Sorted(maps.Keys(resources)) {
		r := resources[key]
		namespace, _, _ := strings.Cut(r.name, "/")
		for k, v := range r.work.GetLabels() {
			out[labelled{namespace, k, v}] = append(out[labelled{namespace, k, v}], r.work)
		}
	}
	return out
}

// selected returns the WorkloadEntries of a namespace that match the labels.
func selected(all map[labelled][]*networking.WorkloadEntry, namespace string, sel map[string]string) (out []*networking.WorkloadEntry) {
	var fewest []*networking.WorkloadEntry
	for k, v := range sel {
		if with := all[labelled{namespace, k, v}]; fewest == nil || len(with) < len(fewest) {
			fewest = with
		}
	}
	for _, w := range fewest {
		if !slices.ContainsFunc(slices.Collect(maps.Keys(sel)), func(k string) bool { return w.GetLabels()[k] != sel[k] }) {
			out = append(out, w)
		}
	}
	return out
}

// endpointKey returns an endpoint's address and ports, which default to those
// of the service.
func endpointKey(e *networking.WorkloadEntry, entry *networking.ServiceEntry) string {
	numbers := slices.Sorted(maps.Values(e.GetPorts()))
	if len(numbers) == 0 {
		for _, p := range entry.GetPorts() {
			numbers = append(numbers, cmp.Or(p.GetTargetPort(), p.GetNumber()))
		}
		slices.Sort(numbers)
	}
	var text []string
	for _, n := range slices.Compact(numbers) {
		text = append(text, fmt.Sprint(n))
	}
	return e.GetAddress() + ":" + strings.Join(text, ",")
}
