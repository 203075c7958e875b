package translate

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"
)

// The rules by which istiod accepts a resource, written down a second time and
// by other means than the package's own.
var (
	dnsLabelRE   = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`)
	subdomainRE  = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)
	labelValueRE = regexp.MustCompile(`^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$`)
	digitsRE     = regexp.MustCompile(`^[0-9]+$`)
	knownRE      = regexp.MustCompile(`(?i)^(tcp|udp|grpc|grpc-web|http|http_proxy|http2|https|tls|mongo|redis|mysql)$`)
)

func okLabel(s string) bool     { return len(s) <= 63 && dnsLabelRE.MatchString(s) }
func okSubdomain(s string) bool { return len(s) <= 253 && subdomainRE.MatchString(s) }
func okValue(s string) bool     { return len(s) <= 63 && labelValueRE.MatchString(s) }

func okKey(s string) bool {
	if i := strings.LastIndex(s, "/"); i >= 0 {
		return okSubdomain(s[:i]) && okValue(s[i+1:])
	}
	return okValue(s)
}

func okHost(s string) bool {
	labels := strings.Split(s, ".")
	return len(s) <= 255 && !slices.ContainsFunc(labels, func(l string) bool { return !okLabel(l) }) &&
		!digitsRE.MatchString(labels[len(labels)-1])
}

// decodeResult checks everything that can be said of a result whatever the
// input was, and returns its resources.
func decodeResult(t testing.TB, r *Result) (*networking.ServiceEntry, []*networking.WorkloadEntry) {
	t.Helper()
	for _, list := range [][]Problem{r.Problems, r.LeftOut} {
		for i, p := range list {
			if p.ID == "" || p.Reason == "" || !utf8.ValidString(p.ID) || !utf8.ValidString(p.Reason) {
				t.Errorf("problem %q: %q: empty or not UTF-8", p.ID, p.Reason)
			}
			if i > 0 && list[i-1].ID >= p.ID {
				t.Errorf("problems are not sorted by unique IDs: %q before %q", list[i-1].ID, p.ID)
			}
		}
		if len(list) > 201 {
			t.Errorf("%d problems: not bounded", len(list))
		}
	}
	if r.Entry == nil {
		if len(r.Endpoints) > 0 {
			t.Errorf("%d endpoints without a ServiceEntry", len(r.Endpoints))
		}
		return nil, nil
	}
	entry := &networking.ServiceEntry{}
	decodeEncoded(t, *r.Entry, entry)
	if err := validEntry(entry); err != nil {
		t.Errorf("ServiceEntry %s: %v", r.Entry.Name, err)
	}
	if r.Rule != nil {
		if m := decodeEncoded(t, *r.Rule, &networking.DestinationRule{}); m.Name != r.Entry.Name {
			t.Errorf("the DestinationRule of %s is called %s", r.Entry.Name, m.Name)
		}
	}
	namespace, name, _ := strings.Cut(r.Entry.Name, "/")
	var workloads []*networking.WorkloadEntry
	for i, e := range r.Endpoints {
		if i > 0 && r.Endpoints[i-1].Name >= e.Name {
			t.Errorf("endpoints are not sorted by unique names: %q before %q", r.Endpoints[i-1].Name, e.Name)
		}
		if ns, n, _ := strings.Cut(e.Name, "/"); ns != namespace || !strings.HasPrefix(n, name+"-") {
			t.Errorf("endpoint %q is not named after %q", e.Name, r.Entry.Name)
		}
		w := &networking.WorkloadEntry{}
		decodeEncoded(t, e, w)
		if err := validWorkload(w, entry); err != nil {
			t.Errorf("WorkloadEntry %s: %v", e.Name, err)
		}
		if got := w.Labels[SelectorLabel]; got != SelectorValue(r.Entry.Name) || got != SelectorValue(name) {
			t.Errorf("WorkloadEntry %s: selector label %q, want %q", e.Name, got, SelectorValue(name))
		}
		workloads = append(workloads, w)
	}
	return entry, workloads
}

// decodeEncoded decodes e into body and checks the metadata, and that package
// proto would have written the same bytes.
func decodeEncoded(t testing.TB, e Encoded, body proto.Message) *mcp.Metadata {
	t.Helper()
	res := &mcp.Resource{}
	if err := proto.Unmarshal(e.Resource, res); err != nil {
		t.Fatalf("%s: %v", e.Name, err)
	}
	if err := res.Body.UnmarshalTo(body); err != nil {
		t.Fatalf("%s: %v", e.Name, err)
	}
	m := res.Metadata
	namespace, name, ok := strings.Cut(m.Name, "/")
	if m.Name != e.Name || !ok || !okLabel(namespace) || !okSubdomain(name) {
		t.Errorf("%s: metadata.name is %q", e.Name, m.Name)
	}
	if !m.CreateTime.AsTime().Equal(CreateTime) || m.Version != "" {
		t.Errorf("%s: create_time %v, version %q", e.Name, m.CreateTime.AsTime(), m.Version)
	}
	for k, v := range m.Labels {
		if !okKey(k) || !okValue(v) {
			t.Errorf("%s: label %q=%q", e.Name, k, v)
		}
	}
	again, err := deterministic.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Value = again
	if again, err = deterministic.Marshal(res); err != nil {
		t.Fatal(err)
	}
	if string(again) != string(e.Resource) {
		t.Errorf("%s: not the bytes that package proto writes", e.Name)
	}
	return m
}

func validEntry(e *networking.ServiceEntry) error {
	if len(e.Hosts) == 0 || slices.ContainsFunc(e.Hosts, func(h string) bool { return !okHost(lower(h)) }) {
		return fmt.Errorf("hosts %q", e.Hosts)
	}
	if len(e.Hosts) > 1 {
		for _, p := range e.Ports {
			if p.Protocol != "HTTP" && p.Protocol != "HTTP2" && p.Protocol != "HTTP_PROXY" && p.Protocol != "GRPC" && p.Protocol != "GRPC-WEB" && p.Protocol != "HTTPS" && p.Protocol != "TLS" {
				return fmt.Errorf("several hosts %q and port %v", e.Hosts, p)
			}
		}
	}
	if len(e.Endpoints) > 0 || e.WorkloadSelector != nil {
		return fmt.Errorf("endpoints or selector are set")
	}
	if len(e.Ports) == 0 {
		return fmt.Errorf("no ports")
	}
	names, numbers := map[string]bool{}, map[uint32]bool{}
	for _, p := range e.Ports {
		if !okLabel(p.Name) || names[p.Name] || numbers[p.Number] || p.Number < 1 || p.Number > 65535 || !knownRE.MatchString(p.Protocol) {
			return fmt.Errorf("port %v", p)
		}
		names[p.Name], numbers[p.Number] = true, true
	}
	for _, x := range e.ExportTo {
		if x != "." && x != "*" && x != "~" && !okLabel(x) {
			return fmt.Errorf("exportTo %q", x)
		}
	}
	return nil
}

func validWorkload(w *networking.WorkloadEntry, e *networking.ServiceEntry) error {
	if _, err := netip.ParseAddr(w.Address); err != nil && (e.Resolution != networking.ServiceEntry_DNS || !okHost(w.Address)) {
		return fmt.Errorf("address %q", w.Address)
	}
	if len(w.Ports) == 0 {
		return fmt.Errorf("no ports")
	}
	for name, number := range w.Ports {
		if number < 1 || number > 65535 || !slices.ContainsFunc(e.Ports, func(p *networking.ServicePort) bool { return p.Name == name }) {
			return fmt.Errorf("port %q: %d", name, number)
		}
	}
	for k, v := range w.Labels {
		if !okKey(k) || !okValue(v) || k == "istio.io/rev" {
			return fmt.Errorf("label %q=%q", k, v)
		}
	}
	if w.Weight == 1 || w.Weight > maxWeight {
		return fmt.Errorf("weight %d", w.Weight)
	}
	if parts := strings.Split(w.Locality, "/"); len(parts) > 3 || w.Locality != "" && slices.Contains(parts, "") || !utf8.ValidString(w.Locality) {
		return fmt.Errorf("locality %q", w.Locality)
	}
	return nil
}
