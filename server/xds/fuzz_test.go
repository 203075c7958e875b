package xds

import (
	"fmt"
	"log/slog"
	"maps"
	"testing"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/servertest"
	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/stream"
)

var fuzzTypes = []string{
	meshConfigURL, entriesV1, entriesV1A3, workloadsV1, "telemetry.istio.io/v1/Telemetry", "extensions.istio.io/v1alpha1/TrafficExtension",
	"networking.istio.io/v1beta1/ProxyConfig", "networking.istio.io/v1/WorkloadGroup", "x", "", "networking.istio.io/v1/ServiceEntry#workload", "//", "\x00/é",
}

// Whatever a sink sends, in whatever order: nothing panics, no request ends the
// stream, every type is answered, and a sink that asked for everything and
// acknowledges ends with what the store has.
func FuzzRequests(f *testing.F) {
	f.Add(false, []byte{0, 0, 0, 1, 0, 0, 5, 0, 0, 1, 1, 0})
	f.Add(true, []byte{1, 0, 0, 1, 1, 1, 1, 2, 3, 0x81, 4, 5, 0x82, 6, 7, 0x83, 8, 9})
	f.Add(true, []byte{3, 0, 16, 0x80, 0, 0, 3, 1, 0, 0x91, 0, 0, 3, 1, 32, 0xa0, 1, 1})
	f.Add(true, []byte{0x80, 1, 0, 0x82, 1, 0, 1, 3, 0, 3, 3, 0, 0x80, 4, 0, 8, 33, 0, 1, 1, 0, 3, 1, 0})
	f.Add(false, []byte{1, 2, 4, 0x82, 0, 0, 1, 1, 0, 1, 1, 8, 0, 0, 0, 2, 0, 0, 0x84, 3, 3})
	f.Add(false, []byte{0x80, 1, 0, 0, 1, 0, 4, 1, 0, 2, 1, 0}) // a profile that leaves the versions out
	f.Fuzz(func(t *testing.T, delta bool, script []byte) {
		if len(script) > 600 {
			script = script[:600]
		}
		w := servertest.New(t, state.Options{})
		m := newMetrics(prometheus.NewRegistry())
		now := time.Unix(0, 0)
		services := map[string]bool{}
		s := newSession(w.View, delta, nil, m, slog.New(slog.DiscardHandler))
		defer s.Close(now, nil)
		asked := map[string]bool{}
		answered := map[string]bool{}
		nonces := map[string]string{}
		have := map[string]map[string]bool{}
		everything := map[string]bool{} // the types in which the sink wants all
		pump := func() {
			for {
				msg, wait, err := s.Next(now)
				if err != nil {
					t.Fatal(err)
				}
				if msg == nil {
					if wait < 0 {
						t.Fatalf("wait %v", wait)
					}
					return
				}
				url, nonce := decodeMessage(t, delta, msg, have)
				if nonces[url] == nonce {
					t.Fatalf("%q: nonce %s twice", url, nonce)
				}
				answered[url], nonces[url] = true, nonce
			}
		}
		for len(script) >= 3 {
			a, b, c := script[0], script[1], script[2]
			script = script[3:]
			name := fmt.Sprintf("ns/s%d", c%5)
			switch {
			case a&0x80 == 0:
				url := fuzzTypes[int(a)%len(fuzzTypes)]
				if b&1 == 0 && answered[url] {
					continue // in doubt the sink says nothing
				}
				first := url != "" && !asked[url]
				if url != "" {
					asked[url] = true
				}
				var detail *status.Status
				if b&8 != 0 {
					detail = &status.Status{Message: name}
				}
				node := &core.Node{Id: name}
				if b&32 != 0 {
					node.Metadata = &structpb.Struct{Fields: map[string]*structpb.Value{shapeKey: structpb.NewStringValue([]string{"inline", "workload", "?"}[c%3])}}
				}
				if b&2 != 0 {
					node = nil // it may come later, and change the shape
				}
				nonce := nonces[url]
				if b&4 != 0 {
					nonce = "2026-11-21 02:01:37.5 +0000 UTC m=+0.12"
				}
				var names []string
				if b&16 != 0 {
					names = []string{name, "ns/none"}
				}
				var req proto.Message = &discovery.DiscoveryRequest{TypeUrl: url, ResponseNonce: nonce, ErrorDetail: detail, Node: node, ResourceNames: names}
				if delta {
					d := &discovery.DeltaDiscoveryRequest{TypeUrl: url, ResponseNonce: nonce, ErrorDetail: detail, Node: node, ResourceNamesSubscribe: names}
					if b&64 != 0 {
						d.ResourceNamesUnsubscribe = []string{name, "*"}
						clear(have[url]) // the sink forgets what it is no longer interested in
					}
					if b&128 != 0 {
						d.ResourceNamesSubscribe = append(d.ResourceNamesSubscribe, "*")
					}
					// Without names at first, or with "*"; what is dropped goes
					// before what is added.
					wild := everything[url] || first && len(d.GetResourceNamesSubscribe()) == 0
					everything[url] = wild && b&64 == 0 || b&128 != 0
					req = d
				} else {
					// A sink that ever named something may lose its interest by
					// naming nothing.
					everything[url] = (everything[url] || first) && len(names) == 0
				}
				if err := s.take(req, now); err != nil {
					t.Fatal(err)
				}
			case a&7 < 2:
				services[name] = true
				w.Entry(name, fmt.Sprintf("h%d.example.org", b))
			case a&7 < 4 && services[name]:
				w.Instance(name, fmt.Sprintf("%s-%d", name, b%4), fmt.Sprintf("10.0.0.%d", b), 1)
			case a&7 == 4 && services[name]:
				delete(services, name)
				w.Remove(name)
			case a&7 == 5:
				now = now.Add(time.Duration(b) * time.Millisecond)
			}
			pump()
		}
		// The sink acknowledges what comes until nothing does.
		for range 4 {
			now = now.Add(time.Minute)
			pump()
			for url := range asked {
				var req proto.Message = &discovery.DiscoveryRequest{TypeUrl: url, ResponseNonce: nonces[url], ResourceNames: []string{"ns/more"}}
				if everything[url] {
					req = &discovery.DiscoveryRequest{TypeUrl: url, ResponseNonce: nonces[url]}
				}
				if delta {
					req = &discovery.DeltaDiscoveryRequest{TypeUrl: url, ResponseNonce: nonces[url]}
				}
				if err := s.take(req, now); err != nil {
					t.Fatal(err)
				}
			}
			pump()
		}
		for url := range asked {
			if !answered[url] {
				t.Errorf("%q was not answered", url)
			}
			sub := s.Of[url]
			if !everything[url] || !sub.Profiled {
				continue
			}
			want := map[string]bool{}
			for _, res := range w.Resources(collection.OfTypeURL(url), s.formLocked()) {
				version := res.GetMetadata().GetVersion()
				if delta && s.formLocked().OmitVersion { // the frame has it all the same
					record, _ := w.DB.Get(state.Kind{Collection: collection.OfTypeURL(url), Shape: s.formLocked().Shape}, res.GetMetadata().GetName())
					version = record.Encode(encode.NewLayout(s.formLocked())).Version.String()
				}
				want[res.GetMetadata().GetName()+" "+version] = true
			}
			if !maps.Equal(want, have[url]) {
				t.Errorf("%q (%s): the store has %v, the sink %v", url, s.formLocked(), want, have[url])
			}
		}
		s.Status(new(stream.Status))
	})
}
