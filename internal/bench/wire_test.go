package bench

import (
	"slices"
	"testing"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	resource "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"

	legacy "github.com/isthmus-mesh/isthmus/server/mcp/proto/isthmus/mcp/v1"
)

func encoded(t *testing.T, m proto.Message) []byte {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// A response of each protocol is taken apart like its message, with the times
// of the changes in it.
func TestParse(t *testing.T) {
	body, err := anypb.New(&networking.WorkloadEntry{Address: "10.0.0.1", Labels: map[string]string{"changed-at": "1700000000000000001", "app": "web"}})
	if err != nil {
		t.Fatal(err)
	}
	full := &resource.Resource{Metadata: &resource.Metadata{Name: "ns/web-1"}, Body: body}
	of := encoded(t, full)
	wrapped, err := anypb.New(full)
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		protocol string
		message  proto.Message
		removed  int
		whole    bool
	}{
		{delta, &discovery.DeltaDiscoveryResponse{
			TypeUrl: "t", Nonce: "n", SystemVersionInfo: "v", RemovedResources: []string{"ns/gone"},
			Resources: []*discovery.Resource{{Name: "ns/web-1", Version: "1", Resource: wrapped}},
		}, 1, false},
		{sotw, &discovery.DiscoveryResponse{TypeUrl: "t", Nonce: "n", VersionInfo: "v", Resources: []*anypb.Any{wrapped}}, 0, true},
		{mcp, &legacy.Resources{
			Collection: "t", Nonce: "n", SystemVersionInfo: "v",
			Resources: [][]byte{of},
		}, 0, true},
		{mcpIncremental, &legacy.Resources{
			Collection: "t", Nonce: "n", SystemVersionInfo: "v", Incremental: true, RemovedResources: []string{"ns/gone"},
			Resources: [][]byte{of},
		}, 1, false},
	} {
		t.Run(test.protocol, func(t *testing.T) {
			p := protocolOf(test.protocol)
			r, err := p.parse(encoded(t, test.message))
			if err != nil {
				t.Fatal(err)
			}
			if r.typ != "t" || r.nonce != "n" || r.version != "v" || r.whole != test.whole || len(r.removed) != test.removed {
				t.Errorf("parse = %+v", r)
			}
			if len(r.resources) != 1 || p.nameOf(r.resources[0]) != "ns/web-1" {
				t.Fatalf("resources %q", r.resources)
			}
			if got := stamps(nil, r.resources[0]); !slices.Equal(got, []int64{1700000000000000001}) {
				t.Errorf("stamps = %v", got)
			}
		})
	}
	for _, broken := range []string{"\x0a", "\x0a\xff", "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", "\x12\x05ab"} {
		if _, err := protocolOf(delta).parse([]byte(broken)); err == nil {
			t.Errorf("parse(%q) has no error", broken)
		}
	}
}

func TestStampsOfCutMessages(t *testing.T) {
	whole := append(slices.Clone(stampPrefix), "1700000000000000001"...)
	for n := range whole {
		if got := stamps(nil, whole[:n]); len(got) > 0 {
			t.Errorf("stamps(%q) = %v", whole[:n], got)
		}
	}
	if got := stamps(nil, append(slices.Clone(whole), whole...)); len(got) != 2 {
		t.Errorf("stamps = %v, want two", got)
	}
	if got := stamps(nil, append(slices.Clone(stampPrefix), "17000000000000000xx"...)); len(got) > 0 {
		t.Errorf("stamps = %v of no number", got)
	}
}

func TestMedian(t *testing.T) {
	r := func(p50 float64, differences int) Result {
		return Result{Latency: Percentiles{P50: p50}, Differences: differences, Processes: []Process{{Name: "bridge", CPU: p50 * 10}}}
	}
	m := Median([]Result{r(3, 0), r(1, 2), r(2, 0)})
	if m.Latency.P50 != 2 || m.Processes[0].CPU != 20 || m.Differences != 2 {
		t.Errorf("Median = %+v", m)
	}
	if m := Median([]Result{r(3, 0), r(1, 0)}); m.Latency.P50 != 2 {
		t.Errorf("Median of two = %+v", m)
	}
}
