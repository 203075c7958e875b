package xds

import (
	"bytes"
	"strings"
	"testing"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	mcp "istio.io/api/mcp/v1alpha1"

	"github.com/isthmus-mesh/isthmus/server/stream"
)

// decodeMessage applies a message to what a sink has, "name version" by type
// URL. Versions are those of the resources' own metadata, or for delta of the
// envelope.
func decodeMessage(t testing.TB, delta bool, m *stream.Message, have map[string]map[string]bool) (url, nonce string) {
	t.Helper()
	header, segments := m.Parts()
	raw := append(bytes.Clone(header), bytes.Join(segments, nil)...)
	name := func(a *anypb.Any) *mcp.Metadata {
		var res mcp.Resource
		if err := a.UnmarshalTo(&res); err != nil {
			t.Fatal(err)
		}
		return res.GetMetadata()
	}
	if !delta {
		var r discovery.DiscoveryResponse
		if err := proto.Unmarshal(raw, &r); err != nil {
			t.Fatal(err)
		}
		have[r.GetTypeUrl()] = map[string]bool{}
		for _, a := range r.GetResources() {
			meta := name(a)
			have[r.GetTypeUrl()][meta.GetName()+" "+meta.GetVersion()] = true
		}
		return r.GetTypeUrl(), r.GetNonce()
	}
	var r discovery.DeltaDiscoveryResponse
	if err := proto.Unmarshal(raw, &r); err != nil {
		t.Fatal(err)
	}
	set := have[r.GetTypeUrl()]
	if set == nil {
		set = map[string]bool{}
		have[r.GetTypeUrl()] = set
	}
	forget := func(name string) {
		for k := range set {
			if strings.HasPrefix(k, name+" ") {
				delete(set, k)
			}
		}
	}
	seen := map[string]bool{}
	for _, d := range r.GetResources() {
		if seen[d.GetName()] {
			t.Fatalf("%s is there twice", d.GetName())
		}
		seen[d.GetName()] = true
		forget(d.GetName())
		set[d.GetName()+" "+d.GetVersion()] = true
		if got := name(d.GetResource()).GetName(); got != d.GetName() {
			t.Fatalf("%s holds %s", d.GetName(), got)
		}
	}
	for _, n := range r.GetRemovedResources() {
		if seen[n] {
			t.Fatalf("%s is there and removed", n)
		}
		seen[n] = true
		forget(n)
	}
	return r.GetTypeUrl(), r.GetNonce()
}
